"""Memory that the server and its CPU LoRA workers share, and the allocator of adapter images in it.

The region holds the words of hand-offs, activations, the workers' results and the host cache. It is a memfd, which has
no name: it is not in /dev/shm, no container limit on that applies, and the kernel frees it with the last process that
maps it, also after `kill -9`. Pages take no memory until they are written. Positions are offsets into the region,
because each process maps it at an address of its own.
"""

import mmap
import os
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import ALIGN_BYTES
from caraserve.errors import ConfigError
from caraserve.util.memory import memory_file
from caraserve.util.units import align_up, human_bytes

PAGE_BYTES = mmap.PAGESIZE  # 4 KiB on x86-64, up to 64 KiB on aarch64


class SharedRegion:
    """`num_bytes` of zeroed shared memory; `carve` allocates from its front."""

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        """Creates a region, or maps the one behind the descriptor `fd`. Raises ConfigError if it cannot be created."""
        self.num_bytes = align_up(num_bytes, PAGE_BYTES)
        try:
            self.fd = memory_file("caraserve", self.num_bytes) if fd is None else fd
        except OSError as error:
            raise ConfigError(f"{human_bytes(self.num_bytes)} of shared memory: {error.strerror}") from None
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, self.num_bytes), np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self._carved = 0

    def carve(self, num_bytes: int) -> NDArray[np.uint8]:
        """Returns the next `num_bytes`, uint8, from the start of a page."""
        start = self._carved
        self._carved = align_up(start + num_bytes, PAGE_BYTES)
        if self._carved > self.num_bytes:
            raise AssertionError("the shared region was sized too small")
        return self.bytes[start : start + num_bytes]

    def offset(self, address: int) -> int:
        """Converts an address of this process to an offset into the region."""
        if not self.base <= address < self.base + self.num_bytes:
            raise AssertionError("not an address in the shared region")
        return address - self.base

    def close(self) -> None:
        """Closes the descriptor. The memory is freed with the last array over it."""
        os.close(self.fd)


class Arena:
    """Allocates aligned extents of `memory`, uint8 [bytes], for adapter images of the host cache.

    The table of extents is this process's alone; nothing of it lies in the shared bytes, so a worker that dies can
    leave nothing to repair. Not thread-safe: for the event loop's thread.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.num_bytes = memory.nbytes // ALIGN_BYTES * ALIGN_BYTES
        self._allocated: dict[int, int] = {}  # first byte → bytes
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)] if self.num_bytes else []  # [start, end), in order

    @property
    def used_bytes(self) -> int:
        return sum(self._allocated.values())

    def allocate(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Returns the start of the smallest free extent that fits, `num_bytes` long, or None."""
        num_bytes = max(num_bytes, 1)  # an empty array has no address
        size = align_up(num_bytes, ALIGN_BYTES)
        fitting = [(end - start, start) for start, end in self._free if end - start >= size]
        if not fitting:
            return None
        length, start = min(fitting)
        at = self._free.index((start, start + length))
        self._free[at : at + 1] = [(start + size, start + length)] if length > size else []
        self._allocated[start] = size
        return self._memory[start : start + num_bytes]

    def free(self, extent: NDArray[np.uint8]) -> None:
        """Frees an extent, or the beginning of one that `allocate` returned."""
        start = int(extent.ctypes.data) - int(self._memory.ctypes.data)
        end = start + self._allocated.pop(start)
        at = bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
            at -= 1
        self._free.insert(at, (start, end))

    def check(self) -> None:
        """Raises AssertionError unless every byte lies in exactly one free or allocated extent."""
        pieces = sorted([*self._free, *((start, start + size) for start, size in self._allocated.items())])
        place = 0
        for start, end in pieces:
            assert start == place, f"bytes [{place}, {start}) have no owner, or two"
            place = end
        assert place == self.num_bytes, "the arena's end has no owner"
        ends = {end for _, end in self._free}
        assert not any(start in ends for start, _ in self._free), "free neighbours were not joined"
