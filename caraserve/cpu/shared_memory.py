"""One region of memory that the server and its CPU workers map: words, activations, deltas, the arena.

A memfd has no name: it is not in /dev/shm, no container limit on that applies, and it is gone with the last process
that maps it, also after `kill -9`. Pages take no room until they are written. Positions inside are given as offsets,
for every process maps the region at an address of its own.
"""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from caraserve.util.units import align_up

PAGE_BYTES = 4096


class SharedRegion:
    """`num_bytes` of zeroed shared memory, cut from the front by `carve`."""

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        """Makes a region, or maps the one behind `fd`."""
        self.fd = os.memfd_create("caraserve") if fd is None else fd
        self.num_bytes = align_up(num_bytes, PAGE_BYTES)
        if fd is None:
            os.ftruncate(self.fd, self.num_bytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, self.num_bytes), np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self._carved = 0

    def carve(self, num_bytes: int) -> NDArray[np.uint8]:
        """The next `num_bytes`, on a page of their own."""
        start = self._carved
        self._carved = align_up(start + num_bytes, PAGE_BYTES)
        if self._carved > self.num_bytes:
            raise AssertionError("the shared region was sized too small")
        return self.bytes[start : start + num_bytes]

    def offset(self, address: int) -> int:
        """Where an address of this process lies in the region."""
        if not self.base <= address < self.base + self.num_bytes:
            raise AssertionError("not an address in the shared region")
        return address - self.base

    def close(self) -> None:
        """Gives the descriptor back; the memory goes when the last array over it does."""
        os.close(self.fd)
