"""Runs the stages of `scripts/gpu_check` on a device emulated on the host, at sizes that take seconds: all in this
process, which saves their imports.

Triton's interpreter must have been selected before this module is imported.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from caraserve.bench.cli import bench_parser
from caraserve.bench.records import RequestRecord, Run
from caraserve.bench.report.files import document
from caraserve.bench.report.summary import summarize
from caraserve.bench.synthetic import Shape
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Launch
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.__main__ import run_stage
from scripts.laboratory.gpu.accelerator import Mark
from scripts.laboratory.gpu.device_facts import DeviceFacts
from scripts.laboratory.gpu.processes import Known, StageProcess
from scripts.laboratory.gpu.results import StageReport
from scripts.laboratory.gpu.run import ResultsFile, check
from scripts.laboratory.gpu.setup import CheckEffort, CheckSetup, DeviceLimits, ExpertShape, Opened, known_limits
from scripts.laboratory.gpu.stages import STAGES, Stage, find_stage
from tests.gpu.fast_interpreter import speed_up
from tests.gpu.honest_dots import use_honest_dots
from tests.gpu.host_device import host_device
from tests.gpu.host_driver import HostDriver

FACTS = DeviceFacts(
    name="a device on the host",
    capability=90,
    multiprocessors=2,
    l2_bytes=1 << 12,
    memory_bytes=1 << 30,
    free_bytes=1 << 30,
    driver_version=13000,
    has_stream_memory_operations=True,
    uses_host_pointers=True,
    pci_bus_id="0000:00:00.0",
    numa_node=None,
    lockable_bytes=None,
)
SMALL = CheckEffort(
    shape=Shape(hidden=64, layers=1, intermediate=96, vocab=160, heads=4, kv_heads=2),
    cases=1,
    vocab=160,
    context=270,
    tiny_lengths=(3, 9),
    tiny_new=3,
    dtypes=(Dtype.F32,),
    rounds=8,
    rounds_at_once=4,
    kills=1,
    memory_bytes=1 << 18,
    copy_bytes=1 << 17,
    gemm=16,
    replays=1,
    empty_kernels=3,
    lora_pool_bytes=1 << 20,
    lora_rows=(1, 2),
    lora_ranks=(8, 16),
    few_adapters=(9, 1),
    batches=(1, 2),
    contexts=(16,),
    prompts=(8,),
    decodes=1,
    cold_ranks=(8,),
    cold_prompts=(8,),
    cold_repeats=1,
    handover_prompts=(8,),
    handover_rounds=1,
    graph_bytes=1 << 21,  # some of all graphs
    model_pool_bytes=48 << 20,
    bystanders=2,
    arrivals=1,
    host_bytes=8 << 20,
    compiled=(),
    gqa_shape=Shape(hidden=64, layers=1, intermediate=96, vocab=160, heads=4, kv_heads=1),
    gqa_contexts=(16,),
    long_context=17,
    added_adapters=2,
    long_batches=(1, 2),
    warm_shape=Shape(hidden=64, layers=1, intermediate=96, vocab=160, heads=4, kv_heads=2),
    warm_batches=(1,),
    warm_prompts=(3,),
    warm_adapter_slots=5,
    sampled_rows=(2,),
    product_rows=(1, 70),
    experts=ExpertShape(hidden=48, inner=32, experts=4, top_k=2),
    expert_rows=(1, 3),
    demo_prompts=1,
    demo_tokens=3,
    demo_streams=3,
    demo_servers=(("float32", "ondemand"),),
    fleet_shape=Shape(hidden=64, layers=1, intermediate=96, vocab=512, heads=4, kv_heads=2),
    fleet_dtype="float32",
    fleet_adapters=2,
    fleet_streams=(1, 3),
    fleet_tokens=4,
    server=("--num-prompts", "4", "--modes", "cached,auto"),
    modes=("--num-prompts", "4", "--modes", "cached,auto"),
    serve=("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "128"),
)


class HostStopwatch:
    """A stopwatch that reads the host's clock when the device reaches it."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver

    def mark(self, stream: Stream) -> Mark:
        passed: list[float] = []
        self._driver.run(stream, lambda: passed.append(time.perf_counter()))
        return Mark(passed)

    def between_us(self, start: Mark, end: Mark) -> float:
        first: Any = start
        last: Any = end
        return max(1e6 * (last[0] - first[0]), 1e-3)


class Kernels:
    """Raw kernels, one of which is not launched."""

    def __init__(self, real: Any, missing: str) -> None:
        self._real, self._missing, self.multiprocessors = real, missing, real.multiprocessors

    def launch(self, launch: Launch, stream: Stream) -> None:
        if launch.kernel != self._missing:
            self._real.launch(launch, stream)


def opener(missing: str = "") -> Callable[[Dtype], Opened]:
    """Returns an opener that makes one device for each dtype."""
    opened: dict[Dtype, Opened] = {}

    def open_(dtype: Dtype) -> Opened:
        if dtype not in opened:
            device, driver = host_device(dtype, seed=dtype.value)
            used: GpuDevice = replace(device, kernels=Kernels(device.kernels, missing))
            opened[dtype] = used, HostStopwatch(driver)
        return opened[dtype]

    return open_


def report_modes(argv: Sequence[str], timeout_s: float) -> None:
    """Stands in for `caraserve bench modes`: takes its arguments and writes a report like its own."""
    assert timeout_s > 0
    args = bench_parser().parse_args(["modes", *argv[: argv.index("--")]])
    runs = [
        Run(mode, tuple(answered(index, gap_s) for index in range(4)), wall_s=1.0)
        for mode, gap_s in zip(args.modes, (0.010, 0.011), strict=True)
    ]
    summaries = [summarize(run, None, (50.0, 99.0)) for run in runs]
    args.save.mkdir(parents=True)
    (args.save / "modes.json").write_text(json.dumps(document("modes", summaries, {}, [])), encoding="utf-8")


def answered(index: int, gap_s: float) -> RequestRecord:
    sent_s = 0.1 * index
    times_s = tuple(sent_s + gap_s * token for token in (1, 2, 3))
    return RequestRecord(index, "base", None, sent_s, sent_s, times_s[-1], 5, 3, token_s=times_s)


def divide_as_on_a_gpu() -> None:
    """Makes torch divide by a number as it does on a GPU: it multiplies with the reciprocal, which may differ from the
    quotient in the last bit."""
    divide = torch.Tensor.__truediv__

    def divided(x: torch.Tensor, by: Any) -> torch.Tensor:
        is_number = isinstance(by, int | float) and x.is_floating_point()
        return x * divide(torch.ones((), dtype=x.dtype), by) if is_number else divide(x, by)

    torch.Tensor.__truediv__ = divided  # type: ignore[method-assign]


def main() -> int:
    """Runs all stages or some in this process; returns the exit code of `scripts/gpu_check`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(stage.name for stage in STAGES))
    parser.add_argument("--without", default="", help="a raw kernel that is not launched")
    args = parser.parse_args()
    prepare_interpreter()
    open_ = opener(args.without)

    def run(stage: Stage, known: Known) -> StageReport:
        return run_here(StageProcess(stage.name, args.folder / stage.name, 120.0, known=known))

    def run_here(process: StageProcess) -> StageReport:
        process.folder.mkdir(parents=True)
        setup = emulated_setup(process.folder, process.budget_s, known_limits(process.known), (), open_, run_here)
        return run_stage(find_stage(process.name), lambda: setup)

    chosen = [find_stage(name) for name in args.only.split(",")]
    return check(chosen, run, ResultsFile(args.folder / "result.json", {}), 1000.0)


def prepare_interpreter() -> None:
    """Makes Triton's interpreter faster, its products the same for all shapes, and divides as on a GPU."""
    torch.set_num_threads(1)
    speed_up()
    use_honest_dots()
    divide_as_on_a_gpu()


def emulated_setup(
    folder: Path,
    budget_s: float,
    limits: DeviceLimits | None,
    server_arguments: tuple[str, ...],
    open_: Callable[[Dtype], Opened],
    run_part: Callable[[StageProcess], StageReport],
) -> CheckSetup:
    """Returns the setup of a stage on an emulated device. `bench modes` is not run: its servers would take minutes."""
    return CheckSetup(
        open_,
        FACTS,
        SMALL,
        folder,
        budget_s,
        limits,
        server_arguments,
        bench_modes=report_modes,
        run_part=run_part,
        caraserve=(sys.executable, "-m", "tests.gpu.serve_emulated"),
    )


if __name__ == "__main__":
    sys.exit(main())
