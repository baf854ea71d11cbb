"""Figures of a report: latency CDFs, ratios of modes, time lines, rate sweeps, latencies by rank, comparisons.

Repeats with the same label are drawn as one line. A function returns None where the runs have nothing to show.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from caraserve.bench.records import Run
from caraserve.bench.report.files import Comparison
from caraserve.bench.report.plots import Look, Panel, Series, can_draw, draw_panels
from caraserve.bench.report.ratios import RATIO_METRICS, by_label, ratios_to_first
from caraserve.bench.report.summary import Columns, Floats, SloLimits, Summary

_CDF_POINTS = 400  # per line: more make no visible difference
_WINDOWS = 60  # of a time line
_LONG_TAIL = 30  # 99th over 1st percentile above which an axis is logarithmic: a linear one would show only the tail
SWEEP_MARK = " @ "  # between a name and its rate in a run's label


def run_plots(runs: Sequence[Run], summaries: Sequence[Summary]) -> dict[str, bytes]:
    """Draws every figure that these runs have data for: PNG by file name. Returns nothing without matplotlib."""
    if not can_draw():
        return {}
    slo = next((summary.attainment.slo for summary in summaries if summary.attainment is not None), None)
    drawn = {
        "ratios.png": ratio_bars(summaries),
        "sweep.png": rate_sweep(summaries),
        "cdfs.png": latency_cdfs(runs, slo),
        "time.png": time_lines(runs),
        "ranks.png": rank_bars(summaries),
    }
    return {name: png for name, png in drawn.items() if png is not None}


def latency_cdfs(runs: Sequence[Run], slo: SloLimits | None = None) -> bytes | None:
    """Draws the share of answers within a latency, for TTFT, TPT and E2E; SLO limits are vertical lines."""
    grouped = by_label(runs).items()
    columns = {label: Columns.of([record for run in same for record in run.records]) for label, same in grouped}
    pooled = {label: each for label, each in columns.items() if each.ok.any()}
    if not pooled:
        return None
    limits = {} if slo is None else slo.limits()
    panels, looks = [], []
    for metric in RATIO_METRICS:
        values = {label: getattr(each, f"{metric}_ms")[each.ok] for label, each in pooled.items()}
        every = np.concatenate(list(values.values()))
        factor, unit = _time_scale(every)
        series = tuple(_cdf(label, factor * each[~np.isnan(each)]) for label, each in values.items())
        panels.append(Panel(metric.upper(), "share of answers, %", series, f"{metric.upper()}, {unit}"))
        marks = {"SLO": factor * limits[metric]} if metric in limits else {}
        looks.append(Look("x" if _has_long_tail(every) else "", 101.0, marks))
    return draw_panels(panels, looks)


def _cdf(label: str, values: Floats) -> Series:
    shares = np.linspace(0, 1, min(_CDF_POINTS, max(values.size, 2)))
    at = np.quantile(values, shares) if values.size else shares[:0]
    return Series(label, tuple(100 * shares[: at.size]), tuple(at))


def ratio_bars(summaries: Sequence[Summary]) -> bytes | None:
    """Draws mean TTFT, TPT and E2E of each label over the first label's, with the standard deviation over repeats."""
    lines = ratios_to_first(summaries)
    if len(lines) < 2:
        return None
    panels, looks = [], []
    for metric in RATIO_METRICS:
        found = [(line.label, line.ratios[metric]) for line in lines if metric in line.ratios]
        series = Series(metric.upper(), tuple(ratio.median for _, ratio in found))
        names = tuple(label for label, _ in found)
        panels.append(Panel(metric.upper(), f"{metric.upper()} ÷ that of the first", (series,), categories=names))
        spreads = [ratio.spread or 0.0 for _, ratio in found]
        looks.append(Look(marks={"": 1.0}, horizontal=True, spreads=spreads, numbers="%.2f"))
    return draw_panels(panels, looks)


def time_lines(runs: Sequence[Run]) -> bytes | None:
    """Draws requests in flight, median TTFT by time of sending, and output tokens a second in 60 windows, for the first
    repeat of each label."""
    first = {label: repeats[0] for label, repeats in by_label(runs).items()}
    shown = {label: run for label, run in first.items() if run.records and run.wall_s > 0}
    if not shown:
        return None
    end_s = max(run.wall_s for run in shown.values())
    edges_s = np.linspace(0, end_s, _WINDOWS + 1)
    middles_s = (edges_s[1:] + edges_s[:-1]) / 2
    columns = {label: Columns.of(run.records) for label, run in shown.items()}
    medians_ms = {label: _median_ttft(each, edges_s) for label, each in columns.items()}
    factor, unit = _time_scale(np.concatenate(list(medians_ms.values())))
    flying, waiting, speed = [], [], []
    for label, each in columns.items():
        at_s, most = _in_flight(each, end_s)
        flying.append(Series(label, tuple(most), tuple(at_s)))
        known = ~np.isnan(medians_ms[label])  # a window without a request is no gap in the line
        waiting.append(Series(label, tuple(factor * medians_ms[label][known]), tuple(middles_s[known])))
        tokens = np.histogram(each.token_s, edges_s)[0] / np.diff(edges_s)
        speed.append(Series(label, tuple(tokens), tuple(middles_s)))
    axis = "time since the start, s"
    panels = (
        Panel("", "requests in flight", tuple(flying), axis),
        Panel("", f"median TTFT, {unit}", tuple(waiting), axis),
        Panel("", "output tokens/s", tuple(speed), axis),
    )
    return draw_panels(panels, columns=1, inches=(10.5, 2.2))


def _in_flight(columns: Columns, end_s: float) -> tuple[Floats, Floats]:
    """Returns the starts of 600 equal parts of the run in s, and the greatest number of requests in flight in each."""
    times = np.concatenate([columns.sent_s, columns.done_s])
    order = np.argsort(times, kind="stable")
    running = np.cumsum(np.repeat([1.0, -1.0], columns.sent_s.size)[order])
    parts_s = np.linspace(0, end_s, 10 * _WINDOWS + 1)
    starts = np.searchsorted(times[order], parts_s)
    most = np.where(starts > 0, running[np.maximum(starts - 1, 0)], 0.0)  # at the start of each part
    for index, (start, stop) in enumerate(pairwise(starts)):
        if stop > start:
            most[index] = max(most[index], running[start:stop].max())
    return parts_s, most


def _median_ttft(columns: Columns, edges_s: Floats) -> Floats:
    """Returns the median TTFT in ms of the requests sent in each window; NaN where none was sent."""
    known = ~np.isnan(columns.ttft_ms)
    window = np.digitize(columns.sent_s[known], edges_s[1:-1])
    values = columns.ttft_ms[known]
    return np.array(
        [np.median(values[window == index]) if (window == index).any() else np.nan for index in range(_WINDOWS)]
    )


def rate_sweep(summaries: Sequence[Summary]) -> bytes | None:
    """Draws the 95th percentile of TTFT, and SLO attainment if limits were set, over the offered rate.

    Runs whose labels agree up to ` @ ` are one line, as `cached @ 3/s` and `cached @ 6/s`.
    """
    lines: dict[str, list[Summary]] = {}
    for summary in sorted(summaries, key=lambda each: each.offered_per_s or 0.0):
        if SWEEP_MARK in summary.label and summary.offered_per_s is not None:
            lines.setdefault(summary.label.rsplit(SWEEP_MARK, 1)[0], []).append(summary)
    if not lines:
        return None
    times_ms = np.array(
        [found.percentiles_ms["p95"] for line in lines.values() for one in line if (found := one.latency.ttft)]
    )
    factor, unit = _time_scale(times_ms)
    tails, shares = [], []
    for label, line in lines.items():
        rates = tuple(one.offered_per_s or 0.0 for one in line)
        p95_ms = [one.latency.ttft.percentiles_ms["p95"] if one.latency.ttft else None for one in line]
        tails.append(Series(label, tuple(None if ms is None else factor * ms for ms in p95_ms), rates))
        kept = tuple(None if one.attainment is None else 100 * one.attainment.share for one in line)
        shares.append(Series(label, kept, rates))
    panels = [Panel("", f"P95 TTFT, {unit}", tuple(tails), "requests/s offered")]
    if any(share is not None for one in shares for share in one.y):
        panels.append(Panel("", "SLO attainment, %", tuple(shares), "requests/s offered"))
    return draw_panels(panels, (Look("y" if _has_long_tail(times_ms) else ""), Look(highest=103.0)))


def rank_bars(summaries: Sequence[Summary]) -> bytes | None:
    """Draws mean TTFT, TPT and E2E by rank, and the 95th percentile of TTFT, with a bar for each label."""
    shown = {label: repeats[0] for label, repeats in by_label(summaries).items()}
    names = {group.name: group.rank or 0 for summary in shown.values() for group in summary.ranks}
    ranks = tuple(sorted(names, key=lambda name: names[name]))
    if len(ranks) < 2:
        return None
    panels = []
    figures = {metric.upper(): f"{metric}_mean_ms" for metric in RATIO_METRICS} | {"TTFT p95": "ttft_p95_ms"}
    for title, field in figures.items():
        groups = {label: {group.name: group for group in summary.ranks} for label, summary in shown.items()}
        values = {
            label: [getattr(found[rank], field) if rank in found else None for rank in ranks]
            for label, found in groups.items()
        }
        factor, unit = _time_scale(np.array([ms for each in values.values() for ms in each if ms is not None]))
        series = tuple(
            Series(label, tuple(None if ms is None else factor * ms for ms in each)) for label, each in values.items()
        )
        panels.append(Panel(title, f"{'mean' if 'mean' in field else 'P95'}, {unit}", series, "rank", ranks))
    return draw_panels(panels, columns=2)


def comparison_plot(comparison: Comparison) -> bytes:
    """Draws every ratio B ÷ A as a bar, a panel for each label. Needs matplotlib."""
    panels = []
    for label, rows in comparison.rows.items():
        known = [(row.name.removesuffix(", ms"), row.ratio) for row in rows if row.ratio is not None]
        ratios = Series(label, tuple(ratio for _, ratio in known))
        panels.append(Panel(label, "B ÷ A", (ratios,), categories=tuple(name for name, _ in known)))
    return draw_panels(panels, [Look(marks={"": 1.0}, horizontal=True)] * len(panels))


def _time_scale(values_ms: Floats) -> tuple[float, str]:
    """Returns a factor for milliseconds and the unit it gives: seconds if the largest value is above 10 s."""
    known = values_ms[np.isfinite(values_ms)]
    return (1e-3, "s") if known.size and known.max() > 10_000 else (1.0, "ms")


def _has_long_tail(values_ms: Floats) -> bool:
    known = values_ms[np.isfinite(values_ms)]
    low, high = np.percentile(known, (1, 99)) if known.size else (0.0, 0.0)
    return bool(low > 0 and high / low > _LONG_TAIL)
