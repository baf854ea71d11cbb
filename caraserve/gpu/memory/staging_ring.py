"""Pinned host memory through which small arrays reach the device: batches, table entries, token histories.

The host writes, and a copy on some lane reads later; the bytes are free after that lane's next mark. The host waits for
a copy only when the whole ring is in use.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from caraserve.gpu.driver.api import Driver
from caraserve.gpu.driver.streams import Lane, Timelines
from caraserve.util.units import align_up

_ALIGN_BYTES = 64


class StagingRing:
    """A ring over `memory`, uint8 [bytes], at device address `address`. Used by the launching thread only."""

    def __init__(self, driver: Driver, timelines: Timelines, memory: NDArray[np.uint8], address: int) -> None:
        self._driver, self._timelines = driver, timelines
        self._memory, self._address = memory, address
        self._head = self._tail = 0  # total bytes taken and reclaimed; includes skipped bytes at the ring's end
        self._in_use: deque[tuple[int, Lane, int]] = deque()  # (head after it, lane, its mark)

    def send(self, target: int, data: NDArray[np.generic], lane: Lane) -> None:
        """Copies an array to device address `target`, in the order of a lane."""
        if data.nbytes:
            source = self._keep(data, lane)
            self._driver.copy_to_device(target, source, data.nbytes, self._timelines.streams[lane])

    def send_column(self, target: int, pitch: int, data: NDArray[np.generic], lane: Lane) -> None:
        """Copies the items of a flat array to device addresses `pitch` bytes apart."""
        source, width = self._keep(data, lane), data.itemsize
        stream = self._timelines.streams[lane]
        self._driver.copy_rows_to_device(target, pitch, source, width, width, data.size, stream)

    def _keep(self, data: NDArray[np.generic], lane: Lane) -> int:
        start = self._take(align_up(data.nbytes, _ALIGN_BYTES), lane)
        self._memory[start : start + data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return self._address + start

    def _take(self, num_bytes: int, lane: Lane) -> int:
        size = len(self._memory)
        if num_bytes > size:
            raise AssertionError(f"{num_bytes} bytes at once are more than the ring's {size}")
        start = self._head % size
        skipped = size - start if start + num_bytes > size else 0
        while self._in_use and self._head + skipped + num_bytes - self._tail > size:
            self._reclaim()
        if not self._in_use:
            self._head = self._tail = skipped = 0
        self._head += skipped + num_bytes
        number = self._timelines.next(lane)[lane]
        self._in_use.append((self._head, lane, number))
        return (self._head - num_bytes) % size

    def _reclaim(self) -> None:
        """Reclaims the oldest bytes; waits until they have been read."""
        end, lane, number = self._in_use[0]
        if self._timelines.passed()[lane] < number:
            self._timelines.settle(lane)
        self._in_use.popleft()
        self._tail = end
