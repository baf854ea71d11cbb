"""Tables, figures and JSON of simulated clusters."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from caraserve.bench.report.plots import INK, can_draw, legend, line_style, new_figure, render, style
from caraserve.bench.report.tables import NONE, TextTable, number, percent
from caraserve.bench.simulator.sweep import FleetResult, PolicyResult
from caraserve.util.units import human_bytes

_FIRST_COLUMNS = ("SLO attainment", "TPT", "to the first", "TTFT p95", "TPOT", "busy", "imbalance")
_LAST_COLUMNS = ("held", "at most", "fetches", "refused")
_MOST_LISTED = 16  # instances with rows of their own


def text_tables(fleet: FleetResult) -> Iterator[TextTable]:
    """Yields latencies and, if searched for, the sizes needed; what instances held and moved; and, of a small fleet,
    the tails of each instance."""
    found = fleet.policies
    first = found[0].at_size
    sized = any(one.tried for one in found)
    latencies, moved = [], []
    for policy in found:
        one = policy.at_size
        row = [one.routing, percent(one.attainment), number(one.tpt_mean_ms)]
        row += [f"{one.tpt_mean_ms / first.tpt_mean_ms - 1:+.0%}", number(one.ttft_p95_ms), number(one.tpot_mean_ms)]
        row += [percent(one.utilisation), f"{one.imbalance:.2f}"]
        latencies.append(row + ([NONE if policy.needed is None else str(policy.needed)] if sized else []))
        row = [one.routing, f"{one.adapters_held_mean:,.0f}"]
        row += [f"{one.adapters_held_max:,} in {human_bytes(one.bytes_held_max)}", f"{one.fetches:,}"]
        moved.append(
            [*row, f"{one.refusals:,}", human_bytes(one.fetched_bytes), f"{one.hops:,}", f"{one.migrations:,}"]
        )
    heads = ("routing", *_FIRST_COLUMNS, *(["instances needed"] if sized else []))
    note = "TPT: end to end ÷ tokens, mean, ms. Imbalance: tokens of the busiest instance over the mean."
    title = f"{first.instances} instances at {fleet.rate:g}/s: latencies in ms, SLO {first.slo_ms:.1f} ms a token"
    yield TextTable(title, heads, latencies, note=note)
    heads = ("routing", *_LAST_COLUMNS, "fetched", "hops", "moved")
    yield TextTable(f"{first.instances} instances at {fleet.rate:g}/s: adapters and requests", heads, moved)
    if first.instances <= _MOST_LISTED:
        yield _by_instance(fleet)


def _by_instance(fleet: FleetResult) -> TextTable:
    rows = [
        [
            policy.at_size.routing,
            str(place),
            f"{one.requests:,}",
            *map(number, (one.ttft_p95_ms, one.queued_p95_ms, one.prefill_p95_ms)),
            percent(one.utilisation),
            f"{one.adapters_held:,}",
            f"{one.adapters_most:,}",
        ]
        for policy in fleet.policies
        for place, one in enumerate(policy.at_size.by_instance)
    ]
    heads = ("routing", "instance", "requests", "TTFT p95", "queued p95", "prefill p95", "busy", "held", "at most")
    return TextTable(f"each instance at {fleet.rate:g}/s: latencies in ms, adapters", heads, rows)


def as_json(one: PolicyResult) -> dict[str, Any]:
    """Returns one policy's results as JSON values; equal for every run with the same seed."""
    tried = [
        {"instances": size.instances, "attainment": size.attainment, "ttft_p95_ms": size.ttft_p95_ms}
        for size in one.tried
    ]
    values = asdict(one.at_size) | {"needed": one.needed, "tried": tried}
    return {name: finite(value) for name, value in values.items()}


def finite(value: Any) -> Any:
    """Replaces infinite numbers and NaN, such as latencies of lost requests, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def plots(found: Sequence[PolicyResult]) -> dict[str, bytes]:
    """Draws the results: returns PNG images by file name, or none if matplotlib is not installed."""
    if not can_draw():
        return {}
    drawn = {"latencies.png": _latencies(found)}
    if any(len(one.tried) > 1 for one in found):
        drawn["sizes.png"] = _sizes(found)
    return drawn


def _latencies(found: Sequence[PolicyResult]) -> bytes:
    """Draws time per token of every policy as a CDF, and SLO attainment as bars."""
    figure = new_figure(10.5, 4.4)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    levels = [2 * index for index in range(51)]
    slo_ms = found[0].at_size.slo_ms
    for place, one in enumerate(found):
        curves.plot(one.at_size.tpt_curve_ms, levels, label=one.at_size.routing, **line_style(place))
    curves.axvline(slo_ms, color=INK, lw=0.9, ls=(0, (1, 2)))
    curves.annotate("SLO", (slo_ms, 3), (3, 0), textcoords="offset points", fontsize=8, color=INK)
    style(curves, xlabel="time per token, ms", ylabel="requests, %", xlim=(0, 2.5 * slo_ms), ylim=(0, 101))
    names = [one.at_size.routing for one in found]
    colours = [line_style(place)["color"] for place in range(len(found))]
    shown = bars.barh(range(len(found)), [100 * one.at_size.attainment for one in found], color=colours)
    bars.bar_label(shown, fmt="%.1f", fontsize=8, padding=2)
    style(bars, xlabel="SLO attainment, %", xlim=(0, 112))
    bars.set_yticks(range(len(found)), names)
    bars.invert_yaxis()
    bars.grid(False, axis="y")
    legend(figure, curves)
    return render(figure)


def _sizes(found: Sequence[PolicyResult]) -> bytes:
    """Draws SLO attainment over the number of instances."""
    figure = new_figure(8.5, 4.2)
    (axes,) = figure.subplots(1, 1, squeeze=False)[0]
    for place, one in enumerate(found):
        sizes = [size.instances for size in one.tried]
        shares = [100 * size.attainment for size in one.tried]
        axes.plot(sizes, shares, marker="o", ms=3, label=one.at_size.routing, **line_style(place))
    style(axes, xlabel="instances", ylabel="SLO attainment, %", ylim=(0, 103))
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend(figure, axes)
    return render(figure)
