"""Rooms for adapters in the host tier: contiguous extents of one shared region.

Residency takes an extent before it reads an adapter and gives it back when the adapter leaves the host tier. The table
of extents is this process's alone and nothing about it lies in the shared bytes, so a worker that dies half-way can
leave nothing to repair, and when the server dies, the region goes with the last process that maps it.
"""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import ALIGN_BYTES
from caraserve.util.units import align_up


class Arena:
    """Hands out aligned extents of `memory`, uint8 [bytes]. Not thread-safe: the event loop's alone."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.num_bytes = memory.nbytes // ALIGN_BYTES * ALIGN_BYTES
        self._taken: dict[int, int] = {}  # first byte → bytes
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)] if self.num_bytes else []  # [start, end), in order

    @property
    def used_bytes(self) -> int:
        return sum(self._taken.values())

    def take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """The smallest free extent that fits, cut to size; None when none does."""
        num_bytes = max(num_bytes, 1)  # an empty array does not know where it lies
        size = align_up(num_bytes, ALIGN_BYTES)
        fitting = [(end - start, start) for start, end in self._free if end - start >= size]
        if not fitting:
            return None
        length, start = min(fitting)
        at = self._free.index((start, start + length))
        self._free[at : at + 1] = [(start + size, start + length)] if length > size else []
        self._taken[start] = size
        return self._memory[start : start + num_bytes]

    def give_back(self, extent: NDArray[np.uint8]) -> None:
        """Frees an extent, or the beginning of one that `take` returned."""
        start = int(extent.ctypes.data) - int(self._memory.ctypes.data)
        end = start + self._taken.pop(start)
        at = bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
            at -= 1
        self._free.insert(at, (start, end))

    def check(self) -> None:
        """Raises AssertionError unless every byte is either free or taken, once."""
        pieces = sorted([*self._free, *((start, start + size) for start, size in self._taken.items())])
        place = 0
        for start, end in pieces:
            assert start == place, f"bytes [{place}, {start}) have no owner, or two"
            place = end
        assert place == self.num_bytes, "the arena's end has no owner"
        ends = {end for _, end in self._free}
        assert not any(start in ends for start, _ in self._free), "free neighbours were not joined"
