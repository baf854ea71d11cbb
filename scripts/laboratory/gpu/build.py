"""Stage `build`: compiles all kernels in parallel and loads them; later stages read them from disk."""

import time
from dataclasses import dataclass, replace

import msgspec

from caraserve.bench.synthetic import shape_plan
from caraserve.gpu.builder import GpuSizes
from caraserve.gpu.kernels.cuda_kernels import CudaKernels
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.backends import DTYPE, cuda_backend
from scripts.laboratory.gpu.compile_ahead import CompiledFigures
from scripts.laboratory.gpu.processes import StageProcess
from scripts.laboratory.gpu.results import Lines, Outcome, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

_LAYERS = 1  # all layers use the same kernels
_CONTEXT = 512
_COMPILE_SHARE = 0.6  # of the stage's time, after which what is not compiled yet is left to later stages


@dataclass(frozen=True, slots=True)
class RawKernels:
    """The raw kernels for one dtype of activations: time to load them, and registers per thread, by kernel."""

    s: float
    registers: dict[str, int]


@dataclass(frozen=True, slots=True)
class BuildFigures:
    """`ahead` is None if the processes that compile did not end well: later stages compile then."""

    ahead: CompiledFigures | None
    ahead_s: float
    raw: dict[str, RawKernels]  # by dtype
    warm_up_s: float  # of a one-layer model


def build(setup: CheckSetup) -> StageResult[BuildFigures]:
    """Compiles in parallel, then loads the raw kernels for each dtype, and Triton's by warming up a one-layer model of
    full width."""
    lines = Lines()
    started_s = time.monotonic()
    ahead = _compile_ahead(setup, lines)
    ahead_s = time.monotonic() - started_s
    raw = {dtype.name.lower(): _load(setup, dtype) for dtype in Dtype}
    lines.add("raw kernels loaded, three types, no spills", f"{sum(each.s for each in raw.values()):.1f} s")
    started_s = time.monotonic()
    plan = shape_plan(replace(setup.effort.shape, layers=_LAYERS), 2 * _CONTEXT)
    sizes = GpuSizes(
        num_slots=2,
        adapter_slots=2,
        max_step_tokens=16,
        max_context=_CONTEXT,
        memory_utilization=0.85,
        host_bytes=1 << 20,
        pool_bytes=64 << 20,
        graph_bytes=setup.effort.graph_bytes,
    )
    with cuda_backend(setup, plan, DTYPE, sizes):
        warm_up_s = time.monotonic() - started_s
    lines.add("a layer of a large model, warmed up", f"{warm_up_s:.1f} s")
    return StageResult(BuildFigures(ahead, ahead_s, raw, warm_up_s), lines.all)


def _compile_ahead(setup: CheckSetup, lines: Lines) -> CompiledFigures | None:
    budget_s = _COMPILE_SHARE * setup.budget_s
    report = setup.run_part(StageProcess("compile_ahead", setup.folder / "compile_ahead", budget_s, is_part=True))
    if report.outcome is not Outcome.DONE:
        lines.add("compiled in parallel", f"{report.outcome}: {report.error}", "all", met=False)
        return None
    figures = msgspec.convert(report.figures, CompiledFigures)
    for line in report.lines:
        lines.add(line.what, line.value)
    for kernel, error in figures.errors.items():
        lines.add(f"{kernel} cannot be compiled", error, "compiled", met=False)
    return figures


def _load(setup: CheckSetup, dtype: Dtype) -> RawKernels:
    started_s = time.monotonic()
    device, _ = setup.open(dtype)
    registers = device.kernels.registers if isinstance(device.kernels, CudaKernels) else {}
    return RawKernels(time.monotonic() - started_s, registers)
