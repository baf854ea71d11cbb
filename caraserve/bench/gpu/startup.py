"""Stage `startup`: time and device memory of a start, with CUDA's modules loaded eagerly and lazily."""

import time
from dataclasses import dataclass

import msgspec

from caraserve.bench.gpu.processes import StageProcess
from caraserve.bench.gpu.results import Lines, Outcome, StageResult
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.bench.gpu.start_once import StartFigures
from caraserve.errors import BackendFailed
from caraserve.util.units import human_bytes

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
    """Starts a backend in a process for each way of loading. Raises BackendFailed when one does not start."""
    lines, starts = Lines(), dict[str, Start]()
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
    return StageResult(StartupFigures(starts), lines.all)
