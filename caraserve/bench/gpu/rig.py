"""What every stage is given."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from caraserve.bench.gpu.accelerator import Accelerator, CudaStopwatch, Stopwatch
from caraserve.bench.gpu.effort import FULL, Effort
from caraserve.bench.gpu.modes_process import run_bench_modes
from caraserve.bench.gpu.outcome import Figures
from caraserve.gpu.driver.info import DeviceFacts, device_facts
from caraserve.gpu.driver.libcuda import Cuda
from caraserve.gpu.forward.builder import GpuDevice
from caraserve.model.dtype import Dtype

Opened = tuple[GpuDevice, Stopwatch]


@dataclass(frozen=True, slots=True)
class Rig:
    """`known`: the figures of earlier stages, by stage; `folder`: for whatever a stage writes."""

    open: Callable[[Dtype], Opened]
    facts: DeviceFacts
    effort: Effort
    folder: Path
    budget_s: float = 60.0
    known: Mapping[str, Figures] = field(default_factory=dict)
    server_arguments: tuple[str, ...] = ()  # of `caraserve bench modes`, besides the stage's own
    bench_modes: Callable[[Sequence[str], float], None] = run_bench_modes
    started_s: float = field(default_factory=time.monotonic)

    def accelerator(self, dtype: Dtype) -> Accelerator:
        """The device, with a stream for this thread; its torch works there from now on."""
        device, stopwatch = self.open(dtype)
        made = Accelerator(device, dtype, stopwatch, device.driver.create_stream(0), self.facts.l2_bytes)
        made.enter()
        return made

    @property
    def left_s(self) -> float:
        """Of the stage's time; points that find none are left out."""
        return self.budget_s - (time.monotonic() - self.started_s)

    def cores(self, most: int) -> tuple[int, ...]:
        """For CPU LoRA workers: all but the first, which the launching thread keeps."""
        usable = sorted(os.sched_getaffinity(0))
        return tuple((usable[1:] or usable)[:most])


def real_rig(folder: Path, budget_s: float, known: Mapping[str, Figures], server_arguments: tuple[str, ...]) -> Rig:
    """This machine's GPU. Raises OSError or DriverError when there is none."""

    def open_(dtype: Dtype) -> Opened:
        from caraserve.gpu.driver.open import open_device  # needs CuPy

        return open_device(dtype), CudaStopwatch()

    return Rig(open_, device_facts(Cuda()), FULL, folder, budget_s, known, server_arguments)
