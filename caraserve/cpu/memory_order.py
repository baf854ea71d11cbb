"""Orders accesses of plain Python to memory that other processes, or a device, read and write too.

x86 performs loads in their order and stores in theirs. Other CPUs do not, and Python has no accesses that acquire or
release.
"""

import platform
from collections.abc import Callable

_KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64")


def compiled_fence() -> Callable[[], None]:
    """Compiles a function that orders all accesses before it before all after it."""
    from caraserve.cpu.jit import entry
    from caraserve.cpu.simd import fence

    @entry
    def order() -> None:
        fence()

    fenced: Callable[[], None] = order
    return fenced


# Called between a load and what it allows, and between what was written and the store that tells of it.
keep_order: Callable[[], None] = (lambda: None) if _KEEPS_ORDER else compiled_fence()
