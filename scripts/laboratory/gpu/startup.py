"""Stage `startup`: time and device memory of a start, with CUDA's modules loaded eagerly and lazily."""

import shutil
import time
from dataclasses import dataclass

import msgspec

from caraserve.bench.synthetic import write_repeating_weights
from caraserve.errors import BackendFailed
from caraserve.gpu.memory.weight_transfer import TransferFigures
from caraserve.util.units import human_bytes
from scripts.laboratory.gpu.processes import StageProcess
from scripts.laboratory.gpu.results import Lines, Outcome, StageResult
from scripts.laboratory.gpu.setup import CheckSetup
from scripts.laboratory.gpu.start_once import CHECKPOINT, StartFigures, model_spec

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
    write_repeating_weights(checkpoint, model_spec(setup), "bfloat16")
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
