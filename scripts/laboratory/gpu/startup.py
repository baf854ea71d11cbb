"""Stage `startup`: time and device memory of a start, with CUDA's modules loaded eagerly and lazily."""

import shutil
import time
from dataclasses import dataclass, replace

import msgspec

from caraserve.bench.synthetic import shape_plan, write_repeating_weights
from caraserve.errors import BackendFailed
from caraserve.gpu.builder import GpuSizes
from caraserve.gpu.memory.weight_transfer import TransferFigures
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import human_bytes
from scripts.laboratory.gpu.backends import DTYPE, cuda_backend, load_folder
from scripts.laboratory.gpu.processes import StageProcess
from scripts.laboratory.gpu.results import Lines, Outcome, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

CHECKPOINT = "checkpoint"
_LAYERS = 2
_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class StartFigures:
    """One start with compiled kernels on disk. The model has few layers, so all but the weights is the part of a start
    that does not depend on a model's size."""

    open_s: float  # device and raw kernels
    weights: TransferFigures  # of the weights' way from the page cache to the device
    warm_up_s: float  # backend, Triton's kernels, graphs
    device_bytes: int  # in use on the device at the end, by this and all other processes


def start_once(setup: CheckSetup) -> StageResult[StartFigures]:
    """Starts and warms up a backend once, with the weights in folder CHECKPOINT beside the setup's."""
    started_s = time.monotonic()
    device = setup.open(DTYPE)[0]
    opened_s = time.monotonic()
    plan = model_plan(setup)
    sizes = GpuSizes(
        num_slots=max(setup.effort.batches),
        adapter_slots=4,
        max_step_tokens=max(setup.effort.prompts),
        max_context=_CONTEXT,
        memory_utilization=0.85,
        host_bytes=1 << 20,
        pool_bytes=64 << 20,
        graph_bytes=setup.effort.graph_bytes,
    )
    device.enter_thread()
    weights, transfer = load_folder(setup.folder.with_name(CHECKPOINT), plan, DTYPE, sizes, device)
    loaded_s = time.monotonic()
    with cuda_backend(setup, plan, DTYPE, sizes, weights=weights, device=device):
        ready_s = time.monotonic()
        used = device.driver.total_bytes() - device.driver.free_bytes()
    return StageResult(StartFigures(opened_s - started_s, transfer, ready_s - loaded_s, used), Lines().all)


def model_plan(setup: CheckSetup) -> DecoderPlan:
    """Returns the model that is started."""
    return shape_plan(replace(setup.effort.shape, layers=_LAYERS), 2 * _CONTEXT)


_LOADINGS = ("EAGER", "LAZY")  # values of CUDA_MODULE_LOADING


@dataclass(frozen=True, slots=True)
class Start:
    """A start, and the seconds of its whole process, imports included."""

    process_s: float
    parts: StartFigures


@dataclass(frozen=True, slots=True)
class StartupFigures:
    """The starts, by module loading."""

    starts: dict[str, Start]


def startup(setup: CheckSetup) -> StageResult[StartupFigures]:
    """Starts a backend in a process for each way of loading, with weights from the page cache. Raises BackendFailed
    when one does not start."""
    lines, starts = Lines(), dict[str, Start]()
    checkpoint = setup.folder / CHECKPOINT
    write_repeating_weights(checkpoint, model_plan(setup), "bfloat16")
    for loading in _LOADINGS:
        started_s = time.monotonic()
        folder = setup.folder / loading
        report = setup.run_part(
            StageProcess("start_once", folder, setup.left_s / 2, is_part=True, module_loading=loading)
        )
        if report.outcome is not Outcome.DONE:
            raise BackendFailed(f"with module loading {loading} {report.error}")
        figures = msgspec.convert(report.figures, StartFigures)
        start = starts[loading] = Start(time.monotonic() - started_s, figures)
        value = f"{start.process_s:.1f} s, of which {figures.open_s:.1f} s device and {figures.warm_up_s:.1f} s warm-up"
        lines.add(f"a start, modules loaded {loading}", f"{value}; {human_bytes(figures.device_bytes)} on the device")
        lines.add("its weights", _weights(setup, figures.weights))
    shutil.rmtree(checkpoint)
    return StageResult(StartupFigures(starts), lines.all)


def _weights(setup: CheckSetup, figures: TransferFigures) -> str:
    """Returns the speed of a load, also beside the link's."""
    if setup.limits is None:
        return str(figures)
    return f"{figures}; {figures.bytes_per_s / setup.limits.link_bytes_per_s:.0%} of the link's speed"
