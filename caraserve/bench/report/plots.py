"""Figures of a report as PNG: latency CDFs, ratios of modes, time lines, rate sweeps, latencies by rank, comparisons.

matplotlib is an optional dependency and is imported when a figure is drawn (`can_draw`). Repeats with the same label
are drawn as one line. A function returns None where the runs have nothing to show.
"""

import importlib.util
import io
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from caraserve.bench.records import Run
from caraserve.bench.report.compare import Comparison
from caraserve.bench.report.ratios import RATIO_METRICS, by_label, ratios_to_first
from caraserve.bench.report.summary import Columns, Floats, RequestGroup, SloLimits, Summary

# Okabe and Ito's colours, which colour-blind readers can tell apart, with grey and Tol's violet in place of yellow and
# black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C", "#8F6BD1")
_DASHES = ("-", "--", ":", "-.")
INK, _GRID = "#1f2328", "#d0d4d9"
_NAME_LENGTH = 34
_CDF_POINTS = 400  # per line: more make no visible difference
_WINDOWS = 60  # of a time line
_LONG_TAIL = 30  # 99th over 1st percentile above which an axis is logarithmic: a linear one would show only the tail
NO_FIGURES = "no figures: matplotlib, of the package's `plot` extra, is not installed"
SWEEP_MARK = " @ "  # between a name and its rate in a run's label


def can_draw() -> bool:
    """Returns True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of this size in inches; its parts are laid out when it is drawn."""
    # matplotlib is an optional dependency: only saved reports need it.
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def style(axes: Any, **settings: Any) -> None:
    """Sets labels and limits; draws two spines, a grid behind the data and small type."""
    axes.set(**settings)
    axes.set_axisbelow(True)
    axes.grid(True, color=_GRID, lw=0.6)
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(which="both", labelsize=8, color=INK, labelcolor=INK)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set(color=INK, fontsize=9)
    axes.title.set_fontweight("bold")


def line_style(place: int) -> dict[str, Any]:
    """Returns the colour and dashes of the run at `place`; dashes change after each round of colours."""
    return {"color": COLOURS[place % len(COLOURS)], "ls": _DASHES[place // len(COLOURS) % len(_DASHES)], "lw": 1.5}


def legend(figure: Any, axes: Any) -> None:
    """Adds a legend below all panels, unless there is only one line."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = min(len(handles), 4 if max(map(len, labels)) < 22 else 3)
        shown = figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
        for text in shown.get_texts():
            text.set_color(INK)


def plain_name(name: str) -> str:
    """Returns a label that matplotlib shows unchanged: no mathematics, no leading underscore (which would hide it), at
    most 34 characters."""
    kept = "".join(letter if letter.isprintable() else "?" for letter in name)
    if len(kept) > _NAME_LENGTH:
        half = (_NAME_LENGTH - 1) // 2
        kept = f"{kept[:half]}…{kept[-half:]}"
    kept = kept.replace("$", r"\$")
    return f" {kept}" if kept.startswith("_") else kept


def time_scale(values_ms: Sequence[float] | Floats) -> tuple[float, str]:
    """Returns a factor for milliseconds and the unit it gives: seconds if the largest value is above 10 s."""
    known = np.asarray(values_ms, np.float64)
    known = known[np.isfinite(known)]
    return (1e-3, "s") if known.size and known.max() > 10_000 else (1.0, "ms")


def render(figure: Any) -> bytes:
    """Returns a figure as PNG."""
    png = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in letters that the font lacks
        figure.savefig(png, format="png", dpi=140)
    return png.getvalue()


def latency_cdfs(runs: Sequence[Run], slo: SloLimits | None = None) -> bytes | None:
    """Draws the share of answers within a latency, for TTFT, TPT and E2E; SLO limits are vertical lines."""
    pooled = {label: columns for label, columns in _pooled(runs).items() if columns.ok.any()}
    if not pooled:
        return None
    figure = new_figure(10.5, 3.9)
    panels = figure.subplots(1, 3, sharey=True)
    limits = {} if slo is None else slo.limits()
    for axes, metric in zip(panels, RATIO_METRICS, strict=True):
        values = {label: getattr(columns, f"{metric}_ms")[columns.ok] for label, columns in pooled.items()}
        known = {label: each[~np.isnan(each)] for label, each in values.items()}
        _cdf(axes, metric, known, limits.get(metric))
    panels[0].set_ylabel("share of answers, %")
    legend(figure, panels[0])
    return render(figure)


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
        axes.axvline(limit_ms * factor, color=INK, lw=0.9, ls=(0, (1, 2)))
        axes.annotate("SLO", (limit_ms * factor, 3), (3, 0), textcoords="offset points", fontsize=8, color=INK)


def ratio_bars(summaries: Sequence[Summary]) -> bytes | None:
    """Draws mean TTFT, TPT and E2E of each label over the first label's, with the standard deviation over repeats."""
    lines = ratios_to_first(summaries)
    if len(lines) < 2:
        return None
    figure = new_figure(10.5, 1.5 + 0.34 * len(lines))
    panels = figure.subplots(1, len(RATIO_METRICS), sharey=True)
    for axes, metric in zip(panels, RATIO_METRICS, strict=True):
        found = [(place, line.ratios[metric]) for place, line in enumerate(lines) if metric in line.ratios]
        for place, ratio in found:
            spread = ratio.spread or 0.0
            axes.barh(place, ratio.median, height=0.66, color=COLOURS[place % len(COLOURS)])
            if spread:
                axes.errorbar(ratio.median, place, xerr=spread, color=INK, lw=1, capsize=3)
            at = (ratio.median + spread, place)
            axes.annotate(
                f"{ratio.median:.2f}", at, (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK
            )
        farthest = max((ratio.median + (ratio.spread or 0.0) for _, ratio in found), default=1.0)
        style(axes, xlabel=f"{metric.upper()} ÷ that of the first", title=metric.upper(), xlim=(0, 1.16 * farthest))
        axes.axvline(1, color=INK, lw=0.9)
        axes.grid(False, axis="y")
    panels[0].set_yticks(range(len(lines)), [plain_name(line.label) for line in lines])
    panels[0].invert_yaxis()
    return render(figure)


def time_lines(runs: Sequence[Run]) -> bytes | None:
    """Draws requests in flight, median TTFT by time of sending, and output tokens a second in 60 windows, for the first
    repeat of each label."""
    first = {run.label: run for run in reversed(runs) if run.records and run.wall_s > 0}
    shown = [first[label] for label in dict.fromkeys(run.label for run in runs) if label in first]
    if not shown:
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
    flying.yaxis.get_major_locator().set_params(integer=True)
    style(waiting, ylabel=f"median TTFT, {unit}", ylim=(0, None))
    style(speed, ylabel="output tokens/s", ylim=(0, None), xlabel="time since the start, s", xlim=(0, end_s))
    figure.align_ylabels([flying, waiting, speed])
    legend(figure, flying)
    return render(figure)


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
    for summary in summaries:
        if SWEEP_MARK in summary.label and summary.offered_per_s is not None:
            lines.setdefault(summary.label.rsplit(SWEEP_MARK, 1)[0], []).append(summary)
    if not lines:
        return None
    judged = any(summary.attainment is not None for line in lines.values() for summary in line)
    figure = new_figure(10.5 if judged else 6.2, 4.0)
    panels = figure.subplots(1, 1 + judged, squeeze=False)[0]
    times_ms = [found.percentiles_ms["p95"] for line in lines.values() for one in line if (found := one.latency.ttft)]
    factor, unit = time_scale(times_ms)
    for place, (label, line) in enumerate(lines.items()):
        ordered = sorted(line, key=lambda summary: summary.offered_per_s or 0.0)
        rates = [summary.offered_per_s for summary in ordered]
        how = {**line_style(place), "marker": "o", "ms": 4, "label": plain_name(label)}
        p95_ms = [one.latency.ttft.percentiles_ms["p95"] if one.latency.ttft else np.nan for one in ordered]
        panels[0].plot(rates, factor * np.array(p95_ms), **how)
        if judged:
            shares = [np.nan if one.attainment is None else 100 * one.attainment.share for one in ordered]
            panels[1].plot(rates, shares, **how)
    style(panels[0], xlabel="requests/s offered", ylabel=f"P95 TTFT, {unit}", xlim=(0, None))
    known = [value for value in times_ms if value > 0]
    if known and max(known) / min(known) > _LONG_TAIL:
        panels[0].set_yscale("log")
    else:
        panels[0].set_ylim(0, None)
    if judged:
        style(panels[1], xlabel="requests/s offered", ylabel="SLO attainment, %", ylim=(0, 103), xlim=(0, None))
    legend(figure, panels[0])
    return render(figure)


def rank_bars(summaries: Sequence[Summary]) -> bytes | None:
    """Draws mean TTFT, TPT and E2E by rank, a bar for each label; a mark shows the 95th percentile of TTFT."""
    shown = {label: repeats[0] for label, repeats in by_label(summaries).items()}
    names = {group.name: group.rank or 0 for summary in shown.values() for group in summary.ranks}
    ranks = sorted(names, key=lambda name: names[name])
    if len(ranks) < 2:
        return None
    figure = new_figure(10.5, 3.9)
    panels = figure.subplots(1, 3)
    for axes, metric in zip(panels, RATIO_METRICS, strict=True):
        _rank_panel(axes, metric, shown, ranks)
    legend(figure, panels[0])
    return render(figure)


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
    title = "TTFT (line: P95)" if metric == "ttft" else metric.upper()
    style(axes, xlabel="rank", ylabel=f"mean {metric.upper()}, {unit}", title=title, ylim=(0, None))
    axes.set_xticks(range(len(ranks)), ranks)
    axes.grid(False, axis="x")


def _by_rank(groups: Sequence[RequestGroup], field: str, ranks: Sequence[str]) -> Floats:
    found = {group.name: getattr(group, field) for group in groups}
    return np.array([found.get(rank) if found.get(rank) is not None else np.nan for rank in ranks], np.float64)


def _pooled(runs: Sequence[Run]) -> dict[str, Columns]:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.label, []).append(run)
    return {label: Columns.of([record for run in same for record in run.records]) for label, same in grouped.items()}


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


def comparison_plot(comparison: Comparison) -> bytes:
    """Draws every ratio B ÷ A as a bar, a panel for each label. Needs matplotlib."""
    panels = len(comparison.rows)
    most = max(len(rows) for rows in comparison.rows.values())
    figure = new_figure(3.4 + 3.4 * panels, 1.2 + 0.24 * most)
    axes_row = figure.subplots(1, panels, squeeze=False)[0]
    for axes, (label, rows) in zip(axes_row, comparison.rows.items(), strict=True):
        known = [(row.name, row.ratio) for row in rows if row.ratio is not None]
        colours = [COLOURS[1] if round(ratio, 3) > 1 else COLOURS[0] for _, ratio in known]
        axes.barh(range(len(known)), [ratio for _, ratio in known], color=colours)
        axes.axvline(1, color=INK, lw=0.9)
        style(axes, title=plain_name(label), xlabel="B ÷ A")
        axes.set_yticks(range(len(known)), [name.removesuffix(", ms") for name, _ in known])
        axes.margins(y=0.02)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
    return render(figure)
