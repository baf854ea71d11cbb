"""The device under the backend: its driver, its raw kernels, and torch's name for it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from caraserve.gpu.driver.api import Driver
from caraserve.gpu.driver.launch import Kernels


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A device. `kernels/cuda_kernels.py` opens a real one; tests emulate one on the host."""

    driver: Driver
    kernels: Kernels
    device: torch.device
    name: str
    enter_thread: Callable[[], None] = lambda: None  # makes the device current on a new thread
    synchronize: Callable[[], None] = lambda: None  # waits for all streams including torch's; before serving only
