"""When the garbage collector runs: short collections of new objects always, those of all objects while nothing waits.

Nearly all objects are freed as soon as nothing refers to them; the collector only finds cycles. What the start has left
is in no later collection: it would take 80 ms. A collection of all other objects takes 1 ms in an idle server, up to 5
ms with 64 streams under way, 25 ms with 256 and 100 ms with 2,000.
"""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable

_MIDDLE_EVERY = 2  # young collections between middle ones, which took up to 15 ms with the default of 10
_NEVER = 1 << 30
_PAUSE_S = 1.0  # between two looks
_GROWN_BLOCKS = 200_000  # about 25 MB in small objects: worth a collection while the engine is idle
_MUCH_GROWN_BLOCKS = 10 * _GROWN_BLOCKS  # worth one even while requests run


class GarbageCollector:
    """Runs the interpreter's collector. Meant for one server per process."""

    def __init__(
        self,
        is_idle: Callable[[], bool],
        *,
        num_blocks: Callable[[], int] = sys.getallocatedblocks,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`is_idle`: whether no request is under way. `num_blocks`: how many blocks of memory the interpreter's objects
        have; 0.1 ms for 100 MB."""
        self._is_idle, self._num_blocks, self._sleep = is_idle, num_blocks, sleep
        self._blocks_before = 0  # after the last collection of all objects

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
        grown_blocks = self._num_blocks() - self._blocks_before
        if grown_blocks > (_GROWN_BLOCKS if self._is_idle() else _MUCH_GROWN_BLOCKS):
            self._collect_all()

    def _collect_all(self) -> None:
        gc.collect()
        self._blocks_before = self._num_blocks()
