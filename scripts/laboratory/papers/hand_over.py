"""The figure of hand-offs to CPU LoRA workers without synchronisation and with explicit synchronisation, on a GPU.

Stage `handover` of `scripts/gpu_check` measures it, in a process of its own.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from caraserve.errors import BackendFailed, ConfigError
from caraserve.gpu.driver.detect import look
from scripts.laboratory.papers.command import PaperOptions
from scripts.laboratory.papers.result import FigureData, Panel, Series, Value

if TYPE_CHECKING:
    from scripts.laboratory.gpu.handover import HandOverFigures

_BUDGET_S = 120.0  # several times that of gpu_check: kernels may have to be compiled first


def hand_overs(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Measures prefills on this machine's GPU. Raises ConfigError where there is none, BackendFailed when the stage
    fails."""
    gpu, problem = look()
    if gpu is None:
        raise ConfigError(f"this figure needs a GPU: {problem or 'there is no NVIDIA driver on this machine'}")
    # Here, because these need torch, which an installation for CPUs may lack.
    from scripts.laboratory.gpu.handover import HandOverFigures
    from scripts.laboratory.gpu.processes import StageProcess, run_process
    from scripts.laboratory.gpu.results import Outcome

    with tempfile.TemporaryDirectory(prefix="caraserve-hand-over-") as folder:
        report = run_process(StageProcess("handover", Path(folder) / "stage", _BUDGET_S))
    if report.outcome is not Outcome.DONE:
        raise BackendFailed(f"stage handover was not done but {report.outcome}: {report.error}")
    return figure_data(msgspec.convert(report.figures, HandOverFigures), gpu.name)


def figure_data(found: "HandOverFigures", device: str) -> FigureData:
    """Returns the figure of what the stage has measured on a device."""
    values = []
    for point in found.points:
        name = f"{point.tokens} tokens"
        values.append(Value(f"{name}: sync-free", point.sync_free_ms, "ms"))
        values.append(Value(f"{name}: explicit", point.explicit_ms, "ms"))
        values.append(Value(f"{name}: explicit ÷ sync-free", point.ratio))
    bars = (
        Series("sync-free", tuple(point.sync_free_ms for point in found.points)),
        Series("explicit synchronisation", tuple(point.explicit_ms for point in found.points)),
    )
    panel = Panel("Prefill with CPU LoRA", "ms", bars, "tokens", tuple(str(point.tokens) for point in found.points))
    setting = (
        f"Llama-2-7B's shape with random weights in bf16 on one {device}; an adapter of q, k and v of rank "
        f"{found.rank}, whose weights do not arrive.",
        f"{found.workers} CPU LoRA workers with up to {found.slice_tokens} tokens each of a chunk of up to "
        f"{found.chunk_tokens}; medians of prompts with both ways in turn, all kernels launched one by one.",
    )
    return FigureData("measured", setting, tuple(values), (panel,))
