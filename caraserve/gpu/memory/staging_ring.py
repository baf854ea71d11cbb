"""Pinned host memory through which small arrays reach the device: batches, table entries, token histories.

Arrays are collected, and all that were collected reach the device by one operation. The host writes them now, and an
operation of the lane reads them later; the bytes are free after that lane's next mark. The host waits for the device
only when the whole ring is in use.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from caraserve.gpu.driver.api import WORD_BYTES, Driver, Stream
from caraserve.gpu.driver.launch import Kernels
from caraserve.gpu.driver.streams import Lane, Timelines
from caraserve.gpu.kernels import cuda_launch
from caraserve.gpu.kernels.cuda_launch import BLOCK_COPY, BYTES_THREADS
from caraserve.util.units import align_up

_ALIGN_BYTES = 64
BLOCK_BYTES = 16 * BYTES_THREADS  # copied by one block


class _StagedArray(Struct, frozen=True):
    """An array in the ring. Each `width` bytes of it go to addresses `pitch` bytes apart."""

    target: int
    source: int
    num_bytes: int
    width: int
    pitch: int

    @property
    def is_whole(self) -> bool:
        """True if all bytes go to neighbouring addresses."""
        return self.width == self.pitch

    def block_copies(self) -> Iterator[int]:
        """Yields the numbers of `BLOCK_COPY` for each block that copies a part."""
        step = self.pitch * (BLOCK_BYTES // self.width)
        width = self.width // WORD_BYTES
        for block, start in enumerate(range(0, self.num_bytes, BLOCK_BYTES)):
            words = min(BLOCK_BYTES, self.num_bytes - start) // WORD_BYTES
            yield from (self.target + step * block, self.source + start, words, width, self.pitch, 0)


class StagingRing:
    """A ring of one lane over `memory`, uint8 [bytes], at device address `address`. Used by the launching thread
    only."""

    def __init__(
        self,
        driver: Driver,
        kernels: Kernels,
        timelines: Timelines,
        lane: Lane,
        memory: NDArray[np.uint8],
        address: int,
    ) -> None:
        self._driver, self._kernels, self._timelines, self._lane = driver, kernels, timelines, lane
        self._memory, self._address = memory, address
        self._head = self._tail = 0  # total bytes taken and reclaimed; includes skipped bytes at the ring's end
        self._in_use: deque[tuple[int, int]] = deque()  # (head after it, mark of the lane)
        self._staged: list[_StagedArray] = []  # collected
        self._collected = 0  # bytes of the ring
        self._collected_before = 0  # mark of the lane

    def send(self, target: int, data: NDArray[np.generic]) -> None:
        """Collects an array for device address `target`. Its bytes must be whole words; no two arrays of one `flush`
        may overlap."""
        if data.nbytes > self._most_collected:
            self.flush()
            self._driver.copy_to_device(target, self._keep(data), data.nbytes, self._stream)
        elif data.nbytes:
            self._collect(_StagedArray(target, self._room_for(data), data.nbytes, BLOCK_BYTES, BLOCK_BYTES))

    def send_column(self, target: int, pitch: int, data: NDArray[np.generic]) -> None:
        """Collects the items of a flat array for device addresses `pitch` bytes apart; see `send`."""
        if data.nbytes:
            self._collect(_StagedArray(target, self._room_for(data), data.nbytes, data.itemsize, pitch))

    def flush(self) -> None:
        """Issues what was collected on the lane. To be called before its next mark."""
        arrays, self._staged, self._collected = self._staged, [], 0
        if not arrays:
            return
        if self._collected_before != self._timelines.next_number(self._lane):
            raise AssertionError(f"a mark of {self._lane.name} was made before the arrays sent before it were issued")
        if len(arrays) == 1 and arrays[0].is_whole:
            self._driver.copy_to_device(arrays[0].target, arrays[0].source, arrays[0].num_bytes, self._stream)
            return
        table = np.array([number for array in arrays for number in array.block_copies()], np.int64)
        count = table.nbytes // BLOCK_COPY.itemsize
        self._kernels.launch(cuda_launch.scatter_words(self._keep(table), count), self._stream)

    @property
    def _stream(self) -> Stream:
        return self._timelines.streams[self._lane]

    @property
    def _most_collected(self) -> int:
        """Most bytes that are collected. They, their table and what both skip at the ring's end fit into the ring, so
        that nothing is reclaimed before it was issued."""
        return len(self._memory) // 4

    def _room_for(self, data: NDArray[np.generic]) -> int:
        """Copies an array that is to be collected into the ring, and returns its device address."""
        num_bytes = align_up(data.nbytes, _ALIGN_BYTES)
        if self._collected + num_bytes > self._most_collected:
            self.flush()
        self._collected += num_bytes
        return self._keep(data)

    def _collect(self, array: "_StagedArray") -> None:
        if array.num_bytes % WORD_BYTES or array.target % WORD_BYTES:
            raise AssertionError(f"{array.num_bytes} bytes for address {array.target} are not whole words")
        if not self._staged:
            self._collected_before = self._timelines.next_number(self._lane)
        self._staged.append(array)

    def _keep(self, data: NDArray[np.generic]) -> int:
        """Copies an array into the ring and returns its device address."""
        start = self._take(align_up(data.nbytes, _ALIGN_BYTES))
        self._memory[start : start + data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return self._address + start

    def _take(self, num_bytes: int) -> int:
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
        self._in_use.append((self._head, self._timelines.next_number(self._lane)))
        return (self._head - num_bytes) % size

    def _reclaim(self) -> None:
        """Reclaims the oldest bytes; waits until they have been read."""
        end, number = self._in_use[0]
        if self._timelines.passed()[self._lane] < number:
            self._timelines.settle(self._lane)
        self._in_use.popleft()
        self._tail = end


assert BLOCK_COPY.itemsize % 16 == 0, "the kernel reads a description by loads of 16 bytes"
