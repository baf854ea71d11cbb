"""The setup of a stage: device, problem sizes, time limit, and the limits that were measured."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from caraserve.bench.synthetic import SHAPES, Shape
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.libcuda import Cuda
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.accelerator import Accelerator, Stopwatch
from scripts.laboratory.gpu.device_facts import DeviceFacts, device_facts
from scripts.laboratory.gpu.processes import SAVED, StageProcess, find_sanitizer, run_bench_modes, run_process
from scripts.laboratory.gpu.results import StageReport


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


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of a layer's experts."""

    hidden: int
    inner: int  # of each expert
    experts: int
    top_k: int


Opened = tuple[GpuDevice, Stopwatch]
LLAMA3_8B = Shape(hidden=4096, layers=32, intermediate=14336, vocab=128256, heads=32, kv_heads=8)
QWEN3_30B = ExpertShape(hidden=2048, inner=768, experts=128, top_k=8)
TINY = Shape(hidden=64, layers=2, intermediate=96, vocab=512, heads=4, kv_heads=2)
DEMO = Shape(hidden=192, layers=4, intermediate=512, vocab=1536, heads=6, kv_heads=2)  # of the bundled demo
# As deep as a large model: the addresses of tables differ in alignment from layer to layer.
NARROW = Shape(hidden=512, layers=32, intermediate=1024, vocab=32000, heads=8, kv_heads=2)


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
    memory_bytes: int = 4 << 30  # read, and copied on the device, to time its memory
    copy_bytes: int = 256 << 20  # size of the largest copy over the link that is timed
    gemm: int = 8192  # side of the square matrices
    replays: int = 50  # of each CUDA graph
    empty_kernels: int = 100  # in the graph that shows what a launch costs
    lora_pool_bytes: int = 1 << 30  # memory for the adapters of stage `lora`
    lora_rows: tuple[int, ...] = (1, 4, 16, 64)
    lora_ranks: tuple[int, ...] = (8, 16, 32, 64, 128)
    few_adapters: tuple[int, int] = (64, 4)  # decoding rows, and the adapters among which they are divided
    batches: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (128, 512, 2048)
    prompts: tuple[int, ...] = (16, 64, 256, 1024, 2048)
    decodes: int = 24  # decode iterations in a row
    cold_ranks: tuple[int, ...] = (16, 64, 256)
    cold_prompts: tuple[int, ...] = (16, 128, 1024)
    cold_repeats: int = 3
    handover_prompts: tuple[int, ...] = (64, 256)
    handover_rounds: int = 10
    gqa_shape: Shape = LLAMA3_8B  # of the model whose query heads share keys and values
    gqa_contexts: tuple[int, ...] = (512, 2048)
    added_adapters: int = 32  # of a small rank on all modules
    long_context: int = 32 << 10
    long_batches: tuple[int, ...] = (1, 4)
    warm_shape: Shape = NARROW
    warm_batches: tuple[int, ...] = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64)
    warm_prompts: tuple[int, ...] = (2, 3, 15, 16, 17, 64, 65, 129)
    warm_adapter_slots: int = 1025  # as the server has; a row of their tables is no multiple of 16 bytes
    sampled_rows: tuple[int, ...] = (1, 64)
    product_rows: tuple[int, ...] = (1, 16, 64, 256, 2048)  # of products with quantised weights
    experts: ExpertShape = QWEN3_30B
    expert_rows: tuple[int, ...] = (1, 16, 64, 1024, 4096)
    graph_bytes: int = 1 << 30
    model_pool_bytes: int | None = None  # for KV blocks and adapters; None: all free device memory
    bystanders: int = 32  # requests that decode while others arrive
    arrivals: int = 12  # requests that arrive during these decodes
    host_bytes: int = 2 << 30  # host memory for adapters
    sanitizers: tuple[str, ...] = ("memcheck", "synccheck", "racecheck")  # tools of compute-sanitizer
    demo_prompts: int = 4  # for the base model and each adapter
    demo_tokens: int = 48  # of each answer
    demo_streams: int = 64  # at once
    demo_servers: tuple[tuple[str, str], ...] = (  # --dtype and --loading-mode
        ("float32", "auto"),
        ("bfloat16", "assisted"),
        ("bfloat16", "ondemand"),
    )
    fleet_shape: Shape = LLAMA3_8B
    fleet_dtype: str = "bfloat16"
    fleet_adapters: int = 32
    fleet_streams: tuple[int, ...] = (1, 16, 64, 128, 256)
    fleet_tokens: int = 128  # of each prompt and of each answer
    # Arguments of `caraserve bench modes` in stages `server` and `modes`, and of its servers. Every request is to find
    # its adapter gone, and running requests hold theirs: with fewer on the device requests would wait for one another.
    server: tuple[str, ...] = (
        *("--random-model=llama2-7b", "--adapters=32", "--resident=24", "--duration-s=15", "--modes=cached,auto"),
    )
    modes: tuple[str, ...] = (
        *("--random-model=llama2-7b", "--adapters=24", "--resident=16", "--duration-s=12"),
        "--modes=cached,auto,pipelined,ondemand,assisted",  # the most wanted first
    )
    # Host memory for all adapters and for those that a profile is measured with.
    serve: tuple[str, ...] = ("--max-num-seqs=64", "--max-num-batched-tokens=1024", "--max-host-adapters-bytes=12GiB")
    compiled: tuple[tuple[Shape, Dtype], ...] = (  # models whose kernels stage `build` compiles in parallel
        (SHAPES["llama2-7b"], Dtype.BF16),
        (LLAMA3_8B, Dtype.BF16),
        (TINY, Dtype.F32),
        (SHAPES["llama2-7b"], Dtype.F32),
        (SHAPES["llama2-7b"], Dtype.F16),
        (DEMO, Dtype.BF16),
        (DEMO, Dtype.F32),
    )


def smoke_effort() -> CheckEffort:
    """Returns sizes with which every stage takes seconds, in processes that share the device, and that need the kernels
    of the full sizes: widths are the same, and layers few."""
    seven, eight, ten = replace(SHAPES["llama2-7b"], layers=2), replace(LLAMA3_8B, layers=2), SHAPES["10M"]
    return CheckEffort(
        shape=seven, gqa_shape=eight, warm_shape=replace(NARROW, layers=4), dtypes=(Dtype.BF16, Dtype.F32),
        cases=2, context=600, tiny_new=8, rounds=2000, rounds_at_once=500, kills=1, replays=5, decodes=4,
        memory_bytes=1 << 30, copy_bytes=16 << 20, gemm=2048, graph_bytes=128 << 20, model_pool_bytes=2 << 30,
        host_bytes=512 << 20, lora_pool_bytes=256 << 20, lora_rows=(1, 16), lora_ranks=(8, 64),
        batches=(1, 4, 16), contexts=(128, 512), prompts=(16, 256, 1024), gqa_contexts=(512,), long_context=4096,
        long_batches=(1,), cold_ranks=(16, 64), cold_prompts=(16, 128), cold_repeats=1, bystanders=8, arrivals=3,
        handover_prompts=(64,), handover_rounds=2, warm_batches=(1, 4, 16, 33), warm_prompts=(2, 17, 65),
        sampled_rows=(1, 16), product_rows=(1, 70), expert_rows=(1, 1024), sanitizers=("memcheck",),
        server=("--random-model=10M", "--adapters=6", "--resident=4", "--modes=cached,auto", "--duration-s=3"),
        serve=("--max-num-seqs", "16", "--kv-cache-bytes", "1GiB"),
        compiled=(
            *((shape, Dtype.BF16) for shape in (seven, eight, ten, DEMO)),
            *((shape, Dtype.F32) for shape in (seven, TINY, DEMO)),
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckSetup:
    """What a stage needs. It may write to `folder`."""

    open: Callable[[Dtype], Opened]
    facts: DeviceFacts
    effort: CheckEffort
    folder: Path
    budget_s: float = 60.0
    limits: DeviceLimits | None = None  # None: stage `limits` has not measured them
    server_arguments: tuple[str, ...] = ()  # of `caraserve bench modes`, besides the stage's own
    bench_modes: Callable[[Sequence[str], float], None] = run_bench_modes
    run_part: Callable[[StageProcess], StageReport] = run_process
    sanitizer: str = ""  # path of compute-sanitizer; "" where it is not installed
    caraserve: tuple[str, ...] = (sys.executable, "-m", "caraserve")  # the command, for servers
    started_s: float = field(default_factory=time.monotonic)

    def accelerator(self, dtype: Dtype) -> Accelerator:
        """Opens the device with a new stream, which torch uses in this thread from now on."""
        device, stopwatch = self.open(dtype)
        made = Accelerator(device, dtype, stopwatch, device.driver.create_stream(0), self.facts.l2_bytes)
        made.enter()
        return made

    @property
    def saved(self) -> Path:
        """The folder of files that are kept beside the results; makes it."""
        made = self.folder / SAVED
        made.mkdir(exist_ok=True)
        return made

    @property
    def left_s(self) -> float:
        """Seconds left of the stage's budget; stages skip further points when it is used up."""
        return self.budget_s - (time.monotonic() - self.started_s)

    def cores(self, most: int) -> tuple[int, ...]:
        """Returns up to `most` cores for CPU LoRA workers: not the first, which the launching thread uses."""
        usable = sorted(os.sched_getaffinity(0))
        return tuple((usable[1:] or usable)[:most])


class MakeSetup(Protocol):
    """Makes the setup of a stage in its process, with small sizes if it `is_smoke`."""

    def __call__(
        self, folder: Path, budget_s: float, limits: DeviceLimits | None, more: tuple[str, ...], *, is_smoke: bool
    ) -> CheckSetup:
        """`more`: arguments of `caraserve bench modes`."""


def real_setup(
    folder: Path, budget_s: float, limits: DeviceLimits | None, more: tuple[str, ...], *, is_smoke: bool = False
) -> CheckSetup:
    """Returns a setup with this machine's GPU. Raises OSError or DriverError without one."""

    def open_(dtype: Dtype) -> Opened:
        from caraserve.gpu.kernels.cuda_kernels import open_device  # needs CuPy

        return open_device(dtype), Stopwatch()

    return CheckSetup(
        open_,
        device_facts(Cuda()),
        smoke_effort() if is_smoke else CheckEffort(),
        folder,
        budget_s,
        limits,
        more,
        run_part=lambda process: run_process(replace(process, is_smoke=is_smoke)),
        sanitizer=find_sanitizer(),
    )
