"""When the garbage collector runs: short collections of new objects always, those of all objects while nothing waits.

Nearly all objects are freed as soon as nothing refers to them; the collector only finds cycles. What the start has left
is in no later collection: it would take 80 ms. A collection of all other objects takes 1 ms in an idle server, up to 5
ms with 64 streams under way, 25 ms with 256 and 100 ms with 2,000.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable

_MIDDLE_EVERY = 2  # young collections between middle ones, which took up to 15 ms with the default of 10
_NEVER = 1 << 30
_PAUSE_S = 1.0  # between two looks
_GROWN_BLOCKS = 200_000  # about 25 MB in small objects: worth a collection while the engine is idle
_GROWN_BYTES = 128 << 20  # as is this, in objects that have no blocks: of over 512 bytes, such as bodies and arrays
_BUSY_FACTOR = 10  # growth that is worth a collection even while requests run
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _private_bytes() -> int:
    """Returns the resident memory that is only this process's: adapters and weights are in shared memory."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * _PAGE_BYTES


class GarbageCollector:
    """Runs the interpreter's collector. Meant for one server per process."""

    def __init__(
        self,
        is_idle: Callable[[], bool],
        *,
        num_blocks: Callable[[], int] = sys.getallocatedblocks,
        private_bytes: Callable[[], int] = _private_bytes,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`is_idle`: whether no request is under way. `num_blocks`: how many blocks of memory the interpreter's objects
        have; 0.1 ms for 100 MB. `private_bytes`: the resident memory of this process; 20 µs."""
        self._is_idle, self._num_blocks, self._private_bytes = is_idle, num_blocks, private_bytes
        self._sleep = sleep
        self._least_blocks = self._least_bytes = 0  # since the last collection of all objects

    def settle(self) -> None:
        """Collects what the start has left, excludes the rest of it from later collections, and makes those short."""
        gc.set_threshold(gc.get_threshold()[0], _MIDDLE_EVERY, _NEVER)
        self._collect_all()
        gc.freeze()

    async def run(self) -> None:
        """Looks every second, until cancelled. Call `settle` before."""
        while True:
            await self._sleep(_PAUSE_S)
            self.look()

    def look(self) -> None:
        """Collects all garbage if there may be much of it."""
        blocks, private_bytes = self._num_blocks(), self._private_bytes()
        # A collection at a peak must not hide garbage that comes after the peak.
        self._least_blocks = min(self._least_blocks, blocks)
        self._least_bytes = min(self._least_bytes, private_bytes)
        grown = max((blocks - self._least_blocks) / _GROWN_BLOCKS, (private_bytes - self._least_bytes) / _GROWN_BYTES)
        if grown > (1 if self._is_idle() else _BUSY_FACTOR):
            self._collect_all()

    def _collect_all(self) -> None:
        gc.collect()
        self._least_blocks, self._least_bytes = self._num_blocks(), self._private_bytes()
