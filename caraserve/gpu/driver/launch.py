"""Launches of raw CUDA kernels as values, and the interface of what issues them.

`kernels/cuda_kernels.py` passes a launch to the driver; tests run it on the host. A wrong width of an argument would
silently corrupt those after it, so `pointers` and `ints` make them, in the files that know a kernel's parameters.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from caraserve.gpu.driver.api import Stream

WARP = 32


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call."""

    source: str
    kernel: str
    grid: int
    block: int
    arguments: tuple[np.generic, ...]
    begins_early: bool = False  # may begin before the launch just before it on the stream has ended, for which it waits


class Kernels(Protocol):
    """Issues launches on a device, or runs them on the host in tests."""

    @property
    def multiprocessors(self) -> int:
        """Number of the device's multiprocessors."""

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Issues a kernel on a stream. Neither allocates nor waits, so that it may be captured."""


def pointers(*addresses: int) -> tuple[np.generic, ...]:
    """Returns addresses as arguments."""
    return tuple(np.uint64(address) for address in addresses)


def ints(*values: int) -> tuple[np.generic, ...]:
    """Returns numbers as arguments of type int."""
    return tuple(np.int32(value) for value in values)


def wait_word(address: int, value: int) -> Launch:
    """Returns the launch of one warp that waits until a word `has_reached` a value (driver/api.py)."""
    return Launch("words", "wait_word", 1, WARP, (*pointers(address), np.uint32(value)))
