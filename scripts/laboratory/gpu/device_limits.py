"""The figures of stage `limits`, which later stages use as bounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the device can do at most. Speeds of copies are by size in bytes."""

    read_bytes_per_s: float  # by a sum over memory that no cache holds
    copy_bytes_per_s: float  # read and written by a copy on the device
    product_bytes_per_s: float  # of weights, by cuBLAS's products of matrices and a vector
    to_device_bytes_per_s: dict[int, float]
    to_host_bytes_per_s: dict[int, float]
    both_ways_bytes_per_s: float  # of two copies of the largest size at once
    gemm_flop_per_s: float
    empty_kernel_us: float  # time that a kernel takes at least in a graph
    empty_launch_us: float  # and when it is launched alone, one after another

    @property
    def memory_bytes_per_s(self) -> float:
        """The highest speed at which the device has been seen to use its memory: the floor of everything that reads."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s, self.product_bytes_per_s)

    @property
    def link_bytes_per_s(self) -> float:
        """Speed from host to device, with copies of the best size."""
        return max(self.to_device_bytes_per_s.values())


def known_limits(figures: Mapping[str, dict[str, Any]]) -> DeviceLimits | None:
    """Returns the limits among the figures of earlier stages, JSON by stage; None if they were not measured."""
    found = figures.get("limits")
    return msgspec.convert(found, DeviceLimits, str_keys=True) if found else None
