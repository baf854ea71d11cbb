"""The setup of a stage: device, problem sizes, time limit, and the figures of earlier stages."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from caraserve.bench.gpu.accelerator import Accelerator, Stopwatch
from caraserve.bench.gpu.results import Figures
from caraserve.bench.synthetic import SHAPES, Shape
from caraserve.errors import BackendFailed
from caraserve.gpu.driver.detect import DeviceFacts, device_facts
from caraserve.gpu.driver.libcuda import Cuda
from caraserve.gpu.forward.builder import GpuDevice
from caraserve.model.dtype import Dtype

Opened = tuple[GpuDevice, Stopwatch]


@dataclass(frozen=True, slots=True)
class CheckEffort:
    """Problem sizes of all stages, by default those of `scripts/gpu_check`."""

    shape: Shape = SHAPES["llama2-7b"]  # of the model whose speed is measured
    cases: int = 24  # random test cases for each kernel
    vocab: int = 32000  # in the checks of sampling
    context: int = 2100  # longest context in the checks of attention
    tiny_lengths: tuple[int, ...] = (3, 40, 17, 61, 24, 1)  # prompt lengths for the tiny model
    tiny_new: int = 24  # new tokens for each of these prompts
    dtypes: tuple[Dtype, ...] = (Dtype.BF16, Dtype.F32, Dtype.F16)  # of activations, in the checks
    rounds: int = 100_000  # hand-offs to CPU workers
    rounds_at_once: int = 1000
    kills: int = 5  # workers that are killed during a hand-off
    copy_bytes: int = 256 << 20  # size of the largest copy that is timed
    gemm: int = 8192  # side of the square matrices
    replays: int = 50  # of each CUDA graph
    lora_pool_bytes: int = 1 << 30  # memory for the adapters of stage `lora`
    lora_rows: tuple[int, ...] = (1, 4, 16, 64)
    lora_ranks: tuple[int, ...] = (8, 16, 32, 64, 128)
    batches: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (128, 512, 2048)
    prompts: tuple[int, ...] = (16, 64, 256, 1024, 2048)
    decodes: int = 24  # decode iterations in a row
    cold_ranks: tuple[int, ...] = (16, 64, 256)
    cold_prompts: tuple[int, ...] = (16, 128, 1024)
    cold_repeats: int = 3
    graph_bytes: int = 1 << 30
    model_pool_bytes: int | None = None  # for KV blocks and adapters; None: all free device memory
    bystanders: int = 32  # requests that decode while others arrive
    arrivals: int = 12  # requests that arrive during these decodes
    host_bytes: int = 2 << 30  # host memory for adapters


def run_bench_modes(argv: Sequence[str], timeout_s: float) -> None:
    """Runs `caraserve bench modes` in a process.

    After `timeout_s` the process is terminated and still writes a report of the runs so far. Raises BackendFailed when
    it exits with an error before that.
    """
    command = [sys.executable, "-m", "caraserve", "bench", "modes", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: the process must stop its server and write its report
        process.communicate()
        return
    if process.returncode != 0:
        raise BackendFailed(f"bench modes ended with {process.returncode}:\n{said[-2000:]}")


@dataclass(frozen=True, slots=True)
class CheckSetup:
    """What a stage needs. `known` has the figures of earlier stages by name; a stage may write to `folder`."""

    open: Callable[[Dtype], Opened]
    facts: DeviceFacts
    effort: CheckEffort
    folder: Path
    budget_s: float = 60.0
    known: Mapping[str, Figures] = field(default_factory=dict)
    server_arguments: tuple[str, ...] = ()  # of `caraserve bench modes`, besides the stage's own
    bench_modes: Callable[[Sequence[str], float], None] = run_bench_modes
    started_s: float = field(default_factory=time.monotonic)

    def accelerator(self, dtype: Dtype) -> Accelerator:
        """Opens the device with a new stream, which torch uses in this thread from now on."""
        device, stopwatch = self.open(dtype)
        made = Accelerator(device, dtype, stopwatch, device.driver.create_stream(0), self.facts.l2_bytes)
        made.enter()
        return made

    @property
    def left_s(self) -> float:
        """Seconds left of the stage's budget; stages skip further points when it is used up."""
        return self.budget_s - (time.monotonic() - self.started_s)

    def cores(self, most: int) -> tuple[int, ...]:
        """Returns up to `most` cores for CPU LoRA workers: not the first, which the launching thread uses."""
        usable = sorted(os.sched_getaffinity(0))
        return tuple((usable[1:] or usable)[:most])


def real_setup(
    folder: Path, budget_s: float, known: Mapping[str, Figures], server_arguments: tuple[str, ...]
) -> CheckSetup:
    """Returns a setup with this machine's GPU and full problem sizes. Raises OSError or DriverError without a GPU."""

    def open_(dtype: Dtype) -> Opened:
        from caraserve.gpu.driver.modules import open_device  # needs CuPy

        return open_device(dtype), Stopwatch()

    return CheckSetup(open_, device_facts(Cuda()), CheckEffort(), folder, budget_s, known, server_arguments)
