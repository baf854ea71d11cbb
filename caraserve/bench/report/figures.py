"""A report's figures: latency CDFs, bars over modes, time lines, sweeps over rates, bars over ranks.

Each function returns None where there is nothing to draw, or nothing to draw with. Repeats of a label are one line.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from caraserve.bench.records import Run
from caraserve.bench.report.canvas import (
    COLOURS,
    Picture,
    can_draw,
    ink,
    legend,
    line_style,
    new_figure,
    picture,
    plain_name,
    style,
    time_scale,
)
from caraserve.bench.report.columns import Columns, Floats
from caraserve.bench.report.ratios import RATIO_METRICS, beside, by_label
from caraserve.bench.report.slo import Slo
from caraserve.bench.report.summary import Group, Summary

_CDF_POINTS = 400  # of a line: more cannot be seen, and would fill the page
_WINDOWS = 60  # of a time line
_LONG_TAIL = 30  # 99th over 1st percentile from which on a linear axis would show the tail alone
SWEEP_MARK = " @ "  # between a mode and its rate in a run's label


def cdfs(runs: Sequence[Run], slo: Slo | None = None) -> Picture | None:
    """The share of answers within a latency, for TTFT, TPT and E2E; limits as vertical lines."""
    pooled = {label: columns for label, columns in _pooled(runs).items() if columns.ok.any()}
    if not pooled or not can_draw():
        return None
    figure = new_figure(10.5, 3.9)
    panels = figure.subplots(1, 3, sharey=True)
    limits = {} if slo is None else slo.limits()
    for axes, metric in zip(panels, RATIO_METRICS, strict=True):
        values = {label: _known(getattr(columns, f"{metric}_ms")[columns.ok]) for label, columns in pooled.items()}
        _cdf(axes, metric, values, limits.get(metric))
    panels[0].set_ylabel("share of answers, %")
    legend(figure, panels[0])
    return picture(figure, "cdfs", "How many answers come within a time: TTFT, TPT and E2E")


def _cdf(axes: Any, metric: str, values: Mapping[str, Floats], limit_ms: float | None) -> None:
    every = np.concatenate(list(values.values()))
    factor, unit = time_scale(every)
    for place, (label, known) in enumerate(values.items()):
        shares = np.linspace(0, 1, min(_CDF_POINTS, max(known.size, 2)))
        at = np.quantile(known, shares) * factor if known.size else shares[:0]
        axes.plot(at, 100 * shares[: at.size], label=plain_name(label), **line_style(place))
    style(axes, xlabel=f"{metric.upper()}, {unit}", ylim=(0, 101), title=metric.upper())
    if every.size:
        low, high = np.percentile(every, (1, 99))
        if low > 0 and high / low > _LONG_TAIL:
            axes.set_xscale("log")
        else:
            axes.set_xlim(0, None)
    if limit_ms is not None:
        axes.axvline(limit_ms * factor, color=ink(), lw=0.9, ls=(0, (1, 2)))
        axes.annotate("SLO", (limit_ms * factor, 3), (3, 0), textcoords="offset points", fontsize=8, color=ink())


def ratio_bars(summaries: Sequence[Summary]) -> Picture | None:
    """TTFT, TPT and E2E of each mode over the first one's, with their spread over repeats."""
    lines = beside(summaries)
    if len(lines) < 2 or not can_draw():
        return None
    figure = new_figure(10.5, 1.5 + 0.34 * len(lines))
    panels = figure.subplots(1, len(RATIO_METRICS), sharey=True)
    for axes, metric in zip(panels, RATIO_METRICS, strict=True):
        found = [(place, line.ratios[metric]) for place, line in enumerate(lines) if metric in line.ratios]
        for place, ratio in found:
            spread = ratio.spread or 0.0
            axes.barh(place, ratio.mean, height=0.66, color=COLOURS[place % len(COLOURS)])
            if spread:
                axes.errorbar(ratio.mean, place, xerr=spread, color=ink(), lw=1, capsize=3)
            at = (ratio.mean + spread, place)
            axes.annotate(
                f"{ratio.mean:.2f}", at, (4, 0), textcoords="offset points", va="center", fontsize=8, color=ink()
            )
        farthest = max((ratio.mean + (ratio.spread or 0.0) for _, ratio in found), default=1.0)
        style(axes, xlabel=f"{metric.upper()} ÷ that of the first", title=metric.upper(), xlim=(0, 1.16 * farthest))
        axes.axvline(1, color=ink(), lw=0.9)
        axes.grid(False, axis="y")
    panels[0].set_yticks(range(len(lines)), [plain_name(line.label) for line in lines])
    panels[0].invert_yaxis()
    return picture(figure, "ratios", f"Mean TTFT, TPT and E2E as ratios to {lines[0].label}")


def time_lines(runs: Sequence[Run]) -> Picture | None:
    """Requests in flight, median TTFT and output tokens a second over time; of each label its first repeat."""
    first = {run.label: run for run in reversed(runs) if run.records and run.wall_s > 0}
    shown = [first[label] for label in dict.fromkeys(run.label for run in runs) if label in first]
    if not shown or not can_draw():
        return None
    figure = new_figure(10.5, 6.2)
    flying, waiting, speed = figure.subplots(3, 1, sharex=True)
    end_s = max(run.wall_s for run in shown)
    edges_s = np.linspace(0, end_s, _WINDOWS + 1)
    medians = {run.label: _median_ttft(Columns.of(run.records), edges_s) for run in shown}
    factor, unit = time_scale(np.concatenate(list(medians.values())))
    middles_s = (edges_s[1:] + edges_s[:-1]) / 2
    for place, run in enumerate(shown):
        columns, how = Columns.of(run.records), {**line_style(place), "label": plain_name(run.label)}
        at_s, count = _in_flight(columns, end_s)
        flying.plot(at_s, count, drawstyle="steps-post", **how)
        medians_ms = medians[run.label]
        known = ~np.isnan(medians_ms)  # a window without a request is no gap in the line
        waiting.plot(middles_s[known], medians_ms[known] * factor, marker="o", ms=2.5, **how)
        tokens = np.histogram(columns.token_s, edges_s)[0]
        speed.plot(middles_s, tokens / np.diff(edges_s), **how)
    style(flying, ylabel="requests in flight", ylim=(0, None))
    style(waiting, ylabel=f"TTFT, {unit}", ylim=(0, None))
    style(speed, ylabel="output tokens/s", ylim=(0, None), xlabel="time since the start, s", xlim=(0, end_s))
    figure.align_ylabels([flying, waiting, speed])
    legend(figure, flying)
    what = f"Requests in flight, median TTFT by time of sending, and output tokens a second, in {_WINDOWS} windows"
    return picture(figure, "time", what)


def _in_flight(columns: Columns, end_s: float) -> tuple[Floats, Floats]:
    """Greatest number of requests under way in each of 10 parts of a window."""
    times = np.concatenate([columns.sent_s, columns.done_s])
    steps = np.concatenate([np.ones(columns.sent_s.size), -np.ones(columns.done_s.size)])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(steps[order])
    parts_s = np.linspace(0, end_s, 10 * _WINDOWS + 1)
    starts = np.searchsorted(times, parts_s)
    before = np.where(starts > 0, running[np.maximum(starts - 1, 0)], 0.0)
    # Within a part the count may have been higher than at its start.
    most = before.copy()
    for index, (start, stop) in enumerate(pairwise(starts)):
        if stop > start:
            most[index] = max(before[index], running[start:stop].max())
    return parts_s, most


def _median_ttft(columns: Columns, edges_s: Floats) -> Floats:
    """Of requests sent within each window; NaN where there is none."""
    known = ~np.isnan(columns.ttft_ms)
    window = np.digitize(columns.sent_s[known], edges_s[1:-1])
    values = columns.ttft_ms[known]
    return np.array(
        [np.median(values[window == index]) if (window == index).any() else np.nan for index in range(_WINDOWS)]
    )


def rate_sweep(summaries: Sequence[Summary]) -> Picture | None:
    """95th percentile of TTFT, and SLO attainment where there is one, over the rate offered.

    Runs of one line have labels that agree up to ` @ `, as in `cached @ 3/s`.
    """
    lines: dict[str, list[Summary]] = {}
    for summary in summaries:
        if SWEEP_MARK in summary.label and summary.offered_per_s is not None:
            lines.setdefault(summary.label.rsplit(SWEEP_MARK, 1)[0], []).append(summary)
    if not lines or not can_draw():
        return None
    judged = any(summary.attainment is not None for line in lines.values() for summary in line)
    figure = new_figure(10.5 if judged else 6.2, 4.0)
    panels = figure.subplots(1, 1 + judged, squeeze=False)[0]
    _sweep_panel(panels[0], {label: _p95_ttft(line) for label, line in lines.items()})
    if judged:
        kept = {label: [_attained(summary) for summary in line] for label, line in lines.items()}
        for place, (label, points) in enumerate(kept.items()):
            _sweep_line(panels[1], place, label, points)
        style(panels[1], xlabel="requests/s offered", ylabel="SLO attainment, %", ylim=(0, 103), xlim=(0, None))
    legend(figure, panels[0])
    return picture(figure, "sweep", "95th percentile of TTFT and SLO attainment over the rate offered")


def _sweep_panel(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    times_ms = [value for points in lines.values() for _, value in points]
    factor, unit = time_scale(times_ms)
    for place, (label, points) in enumerate(lines.items()):
        _sweep_line(axes, place, label, [(rate, value * factor) for rate, value in points])
    style(axes, xlabel="requests/s offered", ylabel=f"P95 TTFT, {unit}", xlim=(0, None))
    known = [value for value in times_ms if value > 0]
    if known and max(known) / min(known) > _LONG_TAIL:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, None)


def _sweep_line(axes: Any, place: int, label: str, points: Sequence[tuple[float, float]]) -> None:
    ordered = sorted(points)
    axes.plot(
        [rate for rate, _ in ordered],
        [value for _, value in ordered],
        marker="o",
        ms=4,
        label=plain_name(label),
        **line_style(place),
    )


def _p95_ttft(line: Sequence[Summary]) -> list[tuple[float, float]]:
    known = [(summary, summary.latency.ttft) for summary in line]
    return [
        (summary.offered_per_s or 0.0, found.percentiles_ms["p95"]) for summary, found in known if found is not None
    ]


def _attained(summary: Summary) -> tuple[float, float]:
    share = np.nan if summary.attainment is None else 100 * summary.attainment.share
    return summary.offered_per_s or 0.0, share


def rank_bars(summaries: Sequence[Summary]) -> Picture | None:
    """Mean TTFT, TPT and E2E by rank, a bar for each label; a mark at the 95th percentile of TTFT."""
    shown = {label: repeats[0] for label, repeats in by_label(summaries).items()}
    names = {group.name: group.rank or 0 for summary in shown.values() for group in summary.ranks}
    ranks = sorted(names, key=lambda name: names[name])
    if len(ranks) < 2 or not can_draw():
        return None
    figure = new_figure(10.5, 3.9)
    panels = figure.subplots(1, 3)
    for axes, metric in zip(panels, RATIO_METRICS, strict=True):
        _rank_panel(axes, metric, shown, ranks)
    legend(figure, panels[0])
    return picture(figure, "ranks", "Mean TTFT, TPT and E2E by rank; the mark above a bar of TTFT is its P95")


def _rank_panel(axes: Any, metric: str, shown: Mapping[str, Summary], ranks: Sequence[str]) -> None:
    means = {label: _by_rank(summary.ranks, f"{metric}_mean_ms", ranks) for label, summary in shown.items()}
    highs = {label: _by_rank(summary.ranks, "ttft_p95_ms", ranks) for label, summary in shown.items()}
    every = [*means.values(), *(highs.values() if metric == "ttft" else ())]
    factor, unit = time_scale(np.concatenate(every))
    width = 0.8 / len(shown)
    for place, (label, mean) in enumerate(means.items()):
        at = np.arange(len(ranks)) + width * (place - (len(shown) - 1) / 2)
        colour = COLOURS[place % len(COLOURS)]
        axes.bar(at, mean * factor, 0.9 * width, color=colour, label=plain_name(label))
        if metric == "ttft":
            axes.hlines(highs[label] * factor, at - 0.4 * width, at + 0.4 * width, color=colour, lw=1.6)
    style(axes, xlabel="rank", ylabel=f"mean {metric.upper()}, {unit}", title=metric.upper(), ylim=(0, None))
    axes.set_xticks(range(len(ranks)), ranks)
    axes.grid(False, axis="x")


def _by_rank(groups: Sequence[Group], field: str, ranks: Sequence[str]) -> Floats:
    found = {group.name: getattr(group, field) for group in groups}
    return np.array([found.get(rank) if found.get(rank) is not None else np.nan for rank in ranks], np.float64)


def _pooled(runs: Sequence[Run]) -> dict[str, Columns]:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.label, []).append(run)
    return {label: Columns.of([record for run in same for record in run.records]) for label, same in grouped.items()}


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def all_pictures(runs: Sequence[Run], summaries: Sequence[Summary]) -> tuple[Picture, ...]:
    """Those that these runs have something for; none without matplotlib."""
    slo = next((summary.attainment.slo for summary in summaries if summary.attainment is not None), None)
    drawn = (ratio_bars(summaries), rate_sweep(summaries), cdfs(runs, slo), time_lines(runs), rank_bars(summaries))
    return tuple(found for found in drawn if found is not None)
