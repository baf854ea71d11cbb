"""Runs of one workload beside one another: each mean latency as a ratio to the first mode's. Pure.

Repeats of a mode share its label. The n-th repeat of a mode is set against the n-th of the first one, since the two
were measured one after the other: what the machine did meanwhile touches both alike.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caraserve.bench.report.summary import Summary

RATIO_METRICS = ("ttft", "tpt", "e2e")  # what the papers report


@dataclass(frozen=True, slots=True)
class Ratio:
    """To the first mode, over repeats."""

    mean: float
    spread: float | None  # standard deviation over repeats; None: one repeat says nothing of it


@dataclass(frozen=True, slots=True)
class Beside:
    """One mode beside the first."""

    label: str
    repeats: int
    valid: bool  # all of them
    mean_ms: dict[str, float]  # by metric, over repeats
    ratios: dict[str, Ratio]  # by metric; those that both have
    cold_start_share: float | None  # of the summaries, over repeats
    interrupted_share: float | None


def by_label(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Repeats together, in the order of their first."""
    grouped: dict[str, list[Summary]] = {}
    for summary in summaries:
        grouped.setdefault(summary.label, []).append(summary)
    return grouped


def beside(summaries: Sequence[Summary]) -> tuple[Beside, ...]:
    """A line for each label; the first one's ratios are 1."""
    grouped = by_label(summaries)
    if not grouped:
        return ()
    first = next(iter(grouped.values()))
    return tuple(
        Beside(
            label,
            len(repeats),
            all(summary.valid for summary in repeats),
            {name: value for name in RATIO_METRICS if (value := _mean(repeats, name)) is not None},
            {name: ratio for name in RATIO_METRICS if (ratio := _ratio(repeats, first, name)) is not None},
            _mean_of([summary.cold_start_share for summary in repeats]),
            _mean_of([summary.interrupted_share for summary in repeats]),
        )
        for label, repeats in grouped.items()
    )


def every_ratio(summaries: Sequence[Summary]) -> list[dict[str, object]]:
    """For the JSON document: each figure of each label over the first one's, with its spread over repeats."""
    grouped = by_label(summaries)
    if not grouped:
        return []
    first = next(iter(grouped.values()))
    return [
        {
            "label": label,
            "repeats": len(repeats),
            "ratios": {
                name: {"mean": ratio.mean, "spread": ratio.spread}
                for name, figure in _FIGURES.items()
                if (ratio := _ratio_of(repeats, first, figure)) is not None
            },
        }
        for label, repeats in grouped.items()
    ]


def _figure(metric: str, name: str) -> Callable[[Summary], float | None]:
    def value(summary: Summary) -> float | None:
        found = getattr(summary.latency, metric)
        if found is None:
            return None
        return float(found.mean_ms) if name == "mean" else found.percentiles_ms.get(name)

    return value


_FIGURES: dict[str, Callable[[Summary], float | None]] = {
    **{
        f"{metric}_{name}": _figure(metric, name)
        for metric in ("ttft", "tpot", "tpt", "itl", "e2e")
        for name in ("mean", "p50", "p95", "p99")
    },
    "requests_per_s": lambda summary: summary.requests_per_s,
    "output_tokens_per_s": lambda summary: summary.output_tokens_per_s,
    "goodput_per_s": lambda summary: None if summary.attainment is None else summary.attainment.goodput_per_s,
}


def _mean(repeats: Sequence[Summary], metric: str) -> float | None:
    return _mean_of([mean_ms(summary, metric) for summary in repeats])


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _ratio(repeats: Sequence[Summary], first: Sequence[Summary], metric: str) -> Ratio | None:
    return _ratio_of(repeats, first, _figure(metric, "mean"))


def _ratio_of(
    repeats: Sequence[Summary], first: Sequence[Summary], figure: Callable[[Summary], float | None]
) -> Ratio | None:
    # An interrupted benchmark may have one repeat more of the first mode than of the last.
    pairs = [(figure(mine), figure(base)) for mine, base in zip(repeats, first, strict=False)]
    ratios = [mine / base for mine, base in pairs if mine is not None and base]
    if not ratios:
        return None
    return Ratio(statistics.fmean(ratios), statistics.stdev(ratios) if len(ratios) > 1 else None)


def mean_ms(summary: Summary, metric: str) -> float | None:
    """The run's mean TTFT, TPT, …, where it has one."""
    found = getattr(summary.latency, metric)
    return None if found is None else float(found.mean_ms)
