"""Emulates a whole device on this machine's CPU: torch's CPU tensors, raw kernels compiled for the host, and the driver
of host_driver.py. Triton kernels run in its interpreter or are replaced by torch_kernels.py."""

import ctypes
import time

import torch

from caraserve.cpu import handoff
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.kernels.work_orders import work_order_bytes
from caraserve.model.dtype import Dtype
from tests.gpu import emulator
from tests.gpu.hand_offs import AWAITED, BY_WORKERS
from tests.gpu.host_driver import HostDriver, word


class HostKernels:
    """Runs raw kernels on the host, in stream order."""

    multiprocessors = 1

    def __init__(self, driver: HostDriver, activation: Dtype) -> None:
        self._driver, self._activation = driver, activation
        self._waits_s: dict[int, float] = {}  # start of a wait for weights, by its work order

    def launch(self, launch: Launch, stream: Stream) -> None:
        waits = launch.kernel == "handoff_wait"
        self._driver.issue_kernel(
            launch,
            stream,
            lambda: emulator.run(launch, self._activation),
            (lambda: self._ends_wait(*map(int, launch.arguments[:2]))) if waits else (lambda: True),
        )

    def _ends_wait(self, order: int, outcome: int) -> bool:
        """True if the wait of a hand-off would end now."""
        if ended := self._has_come(order, outcome):
            self._waits_s.pop(order, None)
        return ended

    def _has_passed(self, order: int, deadline_ns: int) -> bool:
        """True if a wait for weights has lasted for so long."""
        return 1e9 * (time.monotonic() - self._waits_s.setdefault(order, time.monotonic())) > deadline_ns

    def _has_come(self, order: int, outcome: int) -> bool:
        if word(outcome) not in (BY_WORKERS, AWAITED):
            return True
        tasks, _, _, deadline_ns, ready, wanted, status, generation = (ctypes.c_int64 * 8).from_address(order)
        if word(ready) == wanted or word(status) == generation:
            return True
        if word(outcome) == AWAITED:
            self._driver.check_issued(ready, wanted)
            return self._has_passed(order, deadline_ns)
        first, size = work_order_bytes(0), work_order_bytes(1) - work_order_bytes(0)
        asked = [(ctypes.c_int64 * 2).from_address(order + first + size * task) for task in range(tasks)]
        return all(ctypes.c_int64.from_address(block + handoff.DONE).value == number for block, number in asked)


def host_device(activation: Dtype = Dtype.F32, seed: int = 0, last: Lane | None = None) -> tuple[GpuDevice, HostDriver]:
    """Returns a new device and its driver."""
    driver = HostDriver(seed, last)
    return GpuDevice(driver, HostKernels(driver, activation), torch.device("cpu"), "a device on the host"), driver
