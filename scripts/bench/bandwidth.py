"""Measures how fast all cores of this machine read memory, which is the lower bound of a decode step's time."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit
from numpy.typing import NDArray

_BUFFER_BYTES = 1 << 30
_REPEATS = 3


@njit(nogil=True, cache=False)
def _sum(words):  # type: ignore[no-untyped-def]
    """Returns the sum of integers: the compiler can reorder it freely, so it is as fast as the loads."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class ReadBandwidth:
    """Measures streaming reads of 1 GiB, a slice per core. Create it once, and call it beside every measurement."""

    def __init__(self) -> None:
        self._words = np.ones(_BUFFER_BYTES // 8, np.uint64)  # written, so that pages are not all one page of zeros
        self._slices: Sequence[NDArray[np.uint64]] = np.array_split(self._words, cores())
        _sum(self._words[:8])

    def bytes_per_s(self) -> float:
        """Returns the bytes per second of the fastest of a few reads: other machines on the host slow some down."""
        times_s = []
        with ThreadPoolExecutor(len(self._slices)) as pool:
            for _ in range(_REPEATS):
                started_s = time.perf_counter()
                assert sum(int(part) for part in pool.map(_sum, self._slices)) == self._words.size
                times_s.append(time.perf_counter() - started_s)
        return self._words.nbytes / min(times_s)
