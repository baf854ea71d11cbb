"""Ratios of runs of one workload to the runs of the first label (mode): of their figures, and request by request.

Repeats of a mode share its label. The n-th repeat of a mode is compared with the n-th repeat of the first mode: the two
were measured one after the other, so drift of the machine's speed affects both alike.

A stall of the machine lengthens the few requests that meet it, and with them the mean of their run. The median of each
request's latency over that of the same request under the first label hardly changes, so that it shows differences of a
few hundredths where means show a tenth.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from caraserve.bench.records import Run
from caraserve.bench.report.summary import LATENCIES, Columns, Floats, Summary, known_mean

T = TypeVar("T", Run, Summary)

RATIO_METRICS = ("ttft", "tpt", "e2e")  # what the papers report
_HALF_WIDTH = 0.98  # of a 95 % interval of a median, in ranks over the root of the count: 1.96 / 2


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure over the first label's."""

    median: float  # over repeats: a stall of the machine in one of them does not change it
    spread: float | None  # standard deviation over repeats; None with one repeat


@dataclass(frozen=True, slots=True)
class LabelRatios:
    """The figures of one label, and their ratios to those of the first label."""

    label: str
    repeats: int
    valid: bool  # every repeat is
    mean_ms: dict[str, float]  # by metric, over repeats
    ratios: dict[str, Ratio]  # by metric; only metrics that both labels have
    cold_start_share: float | None  # of the summaries, over repeats
    interrupted_share: float | None


def by_label(repeats: Sequence[T]) -> dict[str, list[T]]:
    """Groups repeats, as runs or as their summaries, by label, in the order of each label's first."""
    grouped: dict[str, list[T]] = {}
    for repeat in repeats:
        grouped.setdefault(repeat.label, []).append(repeat)
    return grouped


def ratios_to_first(summaries: Sequence[Summary]) -> tuple[LabelRatios, ...]:
    """Returns one entry for each label; the first label's ratios are 1."""
    grouped = by_label(summaries)
    first = next(iter(grouped.values()), [])
    means = {metric: LATENCY_FIGURES[metric, "mean"] for metric in RATIO_METRICS}
    found = []
    for label, repeats in grouped.items():
        mean_ms = {metric: known_mean(map(figure, repeats)) for metric, figure in means.items()}
        found.append(
            LabelRatios(
                label,
                len(repeats),
                all(summary.valid for summary in repeats),
                {metric: value for metric, value in mean_ms.items() if value is not None},
                _ratios(repeats, first, means),
                known_mean(summary.cold_start_share for summary in repeats),
                known_mean(summary.interrupted_share for summary in repeats),
            )
        )
    return tuple(found)


def ratio_document(summaries: Sequence[Summary]) -> list[dict[str, object]]:
    """Returns the ratios of every figure of each label as JSON values."""
    grouped = by_label(summaries)
    first = next(iter(grouped.values()), [])
    return [
        {
            "label": label,
            "repeats": len(repeats),
            "ratios": {name: asdict(ratio) for name, ratio in _ratios(repeats, first, _FIGURES).items()},
        }
        for label, repeats in grouped.items()
    ]


Figure: TypeAlias = Callable[[Summary], float | None]


def _latency(metric: str, name: str) -> Figure:
    def value(summary: Summary) -> float | None:
        found = getattr(summary.latency, metric)
        if found is None:
            return None
        return float(found.mean_ms) if name == "mean" else found.percentiles_ms.get(name)

    return value


# In ms, by metric and statistic.
LATENCY_FIGURES = {
    (metric, name): _latency(metric, name) for metric in LATENCIES for name in ("mean", "p50", "p95", "p99")
}
_FIGURES: dict[str, Figure] = {
    **{f"{metric}_{name}": figure for (metric, name), figure in LATENCY_FIGURES.items()},
    "requests_per_s": lambda summary: summary.requests_per_s,
    "output_tokens_per_s": lambda summary: summary.output_tokens_per_s,
    "goodput_per_s": lambda summary: None if summary.attainment is None else summary.attainment.goodput_per_s,
}


def _ratios(repeats: Sequence[Summary], first: Sequence[Summary], figures: Mapping[str, Figure]) -> dict[str, Ratio]:
    found = {}
    for name, figure in figures.items():
        # An interrupted benchmark may have one repeat more of the first mode than of the last.
        pairs = [(figure(mine), figure(base)) for mine, base in zip(repeats, first, strict=False)]
        ratios = [mine / base for mine, base in pairs if mine is not None and base]
        if ratios:
            found[name] = Ratio(statistics.median(ratios), statistics.stdev(ratios) if len(ratios) > 1 else None)
    return found


# --- request by request ---


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
                metric: np.concatenate([_request_ratios(mine[1], base[1], metric) for mine, base in pairs])
                for metric in RATIO_METRICS
            }
            found[label] = {metric: with_interval(values) for metric, values in ratios.items() if values.size}
    return found


def _asked(repeat: tuple[Run, Columns]) -> list[tuple[float, str, int | None, int | None]]:
    """Returns what was requested when."""
    return [(each.due_s, each.model, each.asked_prompt_tokens, each.asked_output_tokens) for each in repeat[0].records]


def _request_ratios(mine: Columns, base: Columns, metric: str) -> Floats:
    both = mine.ok & base.ok
    values: Floats = getattr(mine, f"{metric}_ms")[both] / getattr(base, f"{metric}_ms")[both]
    return values[np.isfinite(values)]


def with_interval(values: Floats) -> PairedRatio:
    """Returns the median with the interval between order statistics, which assumes nothing of the distribution."""
    ordered = np.sort(values)
    below = max(0, math.floor(len(ordered) / 2 - _HALF_WIDTH * math.sqrt(len(ordered))))
    return PairedRatio(float(np.median(ordered)), float(ordered[below]), float(ordered[-1 - below]), len(ordered))


def paired_document(ratios: Mapping[str, Mapping[str, PairedRatio]]) -> dict[str, object]:
    """Returns the ratios as JSON values."""
    return {label: {metric: asdict(one) for metric, one in found.items()} for label, found in ratios.items()}
