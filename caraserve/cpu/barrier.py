"""The barrier at which the members of a team meet between phases.

Its words are int64, each on a cache line of its own: arrivals, the generation, and the members that sleep.
"""

import numpy as np

from caraserve.cpu.jit import kernel
from caraserve.cpu.libc import sleep_while, wake
from caraserve.cpu.simd import fence, fetch_add, load_acquire, spin_pause, store_release

BARRIER_BYTES = 192
_GENERATION, _ASLEEP = np.int64(64), np.int64(128)
_SPINS = 2000  # about 50 µs of pauses before a waiting thread sleeps: longer than most waits on free cores


@kernel
def meet(barrier, team):  # type: ignore[no-untyped-def]
    """Waits until all members of the team have called. Spins, then sleeps: free cores may be fewer than members. A
    thread that yields instead loses its whole slice to other programs since Linux 6.18: beside those, a team met 40
    times a second, and 2,000 times when its members sleep."""
    if team == 1:
        return
    generation = load_acquire(barrier + _GENERATION)
    if fetch_add(barrier, 1) == team - 1:
        store_release(barrier, 0)
        store_release(barrier + _GENERATION, generation + 1)
        fence()  # either this sees that a member sleeps, or that member sees the generation
        if load_acquire(barrier + _ASLEEP) != 0:
            wake(barrier + _GENERATION)
        return
    spins = 0
    while load_acquire(barrier + _GENERATION) == generation:
        spins += 1
        if spins < _SPINS:
            spin_pause()
        else:
            fetch_add(barrier + _ASLEEP, 1)
            sleep_while(barrier + _GENERATION, generation & np.int64(0xFFFFFFFF))
            fetch_add(barrier + _ASLEEP, -1)
