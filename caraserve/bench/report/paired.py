"""Each request's latencies over those of the same request under the first label (mode).

A stall of the machine lengthens the few requests that meet it, and with them the mean of their run. The median of these
ratios hardly changes, so that it shows differences of a few hundredths where means show a tenth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from caraserve.bench.records import Run
from caraserve.bench.report.ratios import RATIO_METRICS, by_label
from caraserve.bench.report.summary import Columns, Floats
from caraserve.bench.report.tables import NONE, TextTable

_HALF_WIDTH = 0.98  # of a 95 % interval of a median, in ranks over the root of the count: 1.96 / 2


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The median over requests of a latency over that of the same request under the first label."""

    median: float
    low: float  # the ends of a 95 % interval of the median
    high: float
    requests: int


def paired_ratios(runs: Sequence[Run]) -> dict[str, dict[str, PairedRatio]]:
    """Returns the ratios by label and metric; empty where labels had different requests, such as other rates.

    The n-th repeat of a label is compared with the n-th of the first label. Only requests that both answered count.
    """
    grouped = {label: [(run, Columns.of(run.records)) for run in repeats] for label, repeats in by_label(runs).items()}
    first, *others = grouped.items() if grouped else [("", [])]
    found: dict[str, dict[str, PairedRatio]] = {}
    for label, repeats in others:
        pairs = [(mine, base) for mine, base in zip(repeats, first[1], strict=False) if _asked(mine) == _asked(base)]
        if pairs:
            ratios = {
                metric: np.concatenate([_ratios(mine[1], base[1], metric) for mine, base in pairs])
                for metric in RATIO_METRICS
            }
            found[label] = {metric: with_interval(values) for metric, values in ratios.items() if values.size}
    return found


def _asked(repeat: tuple[Run, Columns]) -> list[tuple[float, str, int | None, int | None]]:
    """Returns what was requested when."""
    return [(each.due_s, each.model, each.asked_prompt_tokens, each.asked_output_tokens) for each in repeat[0].records]


def _ratios(mine: Columns, base: Columns, metric: str) -> Floats:
    both = mine.ok & base.ok
    values: Floats = getattr(mine, f"{metric}_ms")[both] / getattr(base, f"{metric}_ms")[both]
    return values[np.isfinite(values)]


def with_interval(values: Floats) -> PairedRatio:
    """Returns the median with the interval between order statistics, which assumes nothing of the distribution."""
    ordered = np.sort(values)
    below = max(0, math.floor(len(ordered) / 2 - _HALF_WIDTH * math.sqrt(len(ordered))))
    return PairedRatio(float(np.median(ordered)), float(ordered[below]), float(ordered[-1 - below]), len(ordered))


def paired_table(ratios: Mapping[str, Mapping[str, PairedRatio]]) -> TextTable:
    """Returns a line for each label but the first."""
    rows = [
        (
            label,
            str(max(one.requests for one in found.values())),
            *(_shown(found.get(metric)) for metric in RATIO_METRICS),
        )
        for label, found in ratios.items()
    ]
    note = "Median over requests of the latency over that of the same request under the first mode, with its 95 % "
    note += "interval. A stall of the machine changes means, but hardly these."
    return TextTable("Request by request", ("mode", "requests", *map(str.upper, RATIO_METRICS)), rows, note=note)


def _shown(ratio: PairedRatio | None) -> str:
    return NONE if ratio is None else f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def paired_document(ratios: Mapping[str, Mapping[str, PairedRatio]]) -> dict[str, object]:
    """Returns the ratios as JSON values."""
    return {label: {metric: asdict(one) for metric, one in found.items()} for label, found in ratios.items()}
