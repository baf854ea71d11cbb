"""The barrier at which the members of a team meet between phases."""

from caraserve.cpu.jit import kernel
from caraserve.cpu.libc import sched_yield
from caraserve.cpu.simd import fetch_add, load_acquire, spin_pause, store_release

_SPINS = 500  # about 12 µs of pauses before a waiting thread yields its core


@kernel
def meet(barrier, team):  # type: ignore[no-untyped-def]
    """Waits until all members of the team have called. Spins, then yields: free cores may be fewer than members."""
    if team == 1:
        return
    generation = load_acquire(barrier + 64)
    if fetch_add(barrier, 1) == team - 1:
        store_release(barrier, 0)
        store_release(barrier + 64, generation + 1)
        return
    spins = 0
    while load_acquire(barrier + 64) == generation:
        spins += 1
        if spins < _SPINS:
            spin_pause()
        else:
            sched_yield()
