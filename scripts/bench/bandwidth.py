"""How fast this machine reads memory with all cores: the floor under every decode step."""

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
    """Integer sum: the compiler may reorder it freely, so it runs at the speed of the loads."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class ReadBandwidth:
    """Streaming reads of 1 GiB, one slice a core; made once, asked beside every measurement."""

    def __init__(self) -> None:
        self._words = np.ones(_BUFFER_BYTES // 8, np.uint64)  # written: not the kernel's one page of zeros
        self._slices: Sequence[NDArray[np.uint64]] = np.array_split(self._words, cores())
        _sum(self._words[:8])

    def bytes_per_s(self) -> float:
        """The best of a few reads: other machines on the same host take their share, and it comes and goes."""
        times_s = []
        with ThreadPoolExecutor(len(self._slices)) as pool:
            for _ in range(_REPEATS):
                started_s = time.perf_counter()
                assert sum(int(part) for part in pool.map(_sum, self._slices)) == self._words.size
                times_s.append(time.perf_counter() - started_s)
        return self._words.nbytes / min(times_s)
