"""Tables and the figure of `caraserve bench lora`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from caraserve.bench.lora.handoff import RoundTripPoint, ThreadsPoint
from caraserve.bench.lora.kernels import GpuPoint, KernelPoint
from caraserve.bench.report.plots import INK, line_style, new_figure, render, style
from caraserve.bench.report.tables import NONE, TextTable, to_rich
from caraserve.util.units import ceil_div

_COLUMNS = 3  # of panels in the figure


def tables(
    kernels: Sequence[KernelPoint],
    round_trips: Sequence[RoundTripPoint],
    threads: Sequence[ThreadsPoint],
    gpu: Sequence[GpuPoint] = (),
) -> Iterator[Table]:
    """Yields a table for each part that was measured."""
    heads: Sequence[str] = ("dtype", "rank", "tokens", "GFLOP/s", "of the core's peak", "× torch", "× NumPy")
    rows: list[Sequence[str]] = [
        (
            *(one.dtype, str(one.rank), str(one.tokens), f"{one.ours:.0f}", f"{one.share_of_peak:.0%}"),
            *(f"{one.ours / one.torch:.1f}", NONE if one.numpy is None else f"{one.ours / one.numpy:.1f}"),
        )
        for one in kernels
    ]
    yield from _table("q, k and v of one layer on one core", heads, rows)
    heads = ("workers", "tokens", "through", "µs", "beyond computing, µs", "p99")
    rows = [
        (
            *(str(trip.workers), str(trip.tokens), trip.transport),
            *(f"{trip.total_us:,.0f}", f"{trip.beyond_us:,.1f}", f"{trip.beyond_p99_us:,.0f}"),
        )
        for trip in round_trips
    ]
    yield from _table("one hand-off of q, k and v", heads, rows)
    rows = [
        (str(at.cores), str(at.rank), *(f"{x:.2f}" for x in (at.workers_ms, at.torch_ms, at.torch_ms / at.workers_ms)))
        for at in threads
    ]
    heads = ("cores", "rank", "workers, ms", "torch, ms", "torch ÷ workers")
    yield from _table("256 tokens, fp32: CPU LoRA workers beside torch's threads", heads, rows)
    heads = ("rows", "rank", "µs", "MB", "of the memory's bandwidth", "× torch.bmm")
    rows = [
        (
            *(str(at.rows), "+".join(map(str, at.ranks)), f"{at.us:.1f}", f"{at.mbytes:.1f}"),
            *(f"{at.share_of_floor:.0%}", NONE if at.torch_us is None else f"{at.torch_us / at.us:.1f}"),
        )
        for at in gpu
    ]
    yield from _table("q, k and v of one layer on the GPU, every row another adapter, bf16", heads, rows)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    if rows:
        yield to_rich(TextTable(title, heads, rows))


def draw(
    kernels: Sequence[KernelPoint], round_trips: Sequence[RoundTripPoint], threads: Sequence[ThreadsPoint]
) -> bytes:
    """Draws the measured parts. Needs matplotlib."""
    drawings: list[Callable[[Any], None]] = [
        partial(_draw_kernels, dtype, [point for point in kernels if point.dtype == dtype])
        for dtype in dict.fromkeys(point.dtype for point in kernels)
    ]
    if round_trips:
        drawings.append(partial(_draw_round_trips, round_trips))
    if threads:
        drawings.append(partial(_draw_threads, threads))
    columns, rows = max(1, min(len(drawings), _COLUMNS)), max(1, ceil_div(len(drawings), _COLUMNS))
    figure = new_figure(4.2 * columns, 3.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, drawing in zip(panels, drawings, strict=False):
        drawing(axes)
        axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)  # in the room above the data
    for spare in panels[len(drawings) :]:
        spare.set_axis_off()
    return render(figure)


def _draw_kernels(dtype: str, points: Sequence[KernelPoint], axes: Any) -> None:
    """Plots speed over tokens, a line per rank: CaraServe with dots, torch dashed with crosses."""
    peak = max(point.peak for point in points)
    highest = 1.35 * max(peak, *(max(point.ours, point.torch) for point in points))
    for place, rank in enumerate(sorted({point.rank for point in points})):
        at, how = [point for point in points if point.rank == rank], line_style(place)
        tokens = [point.tokens for point in at]
        axes.plot(tokens, [point.ours for point in at], marker="o", ms=3, label=f"rank {rank}", **how)
        axes.plot(tokens, [point.torch for point in at], marker="x", ms=4, **how | {"ls": "--", "lw": 0.9})
    axes.axhline(peak, color=INK, lw=0.9)
    axes.annotate("fp32 peak", (min(point.tokens for point in points), peak), va="bottom", fontsize=8, color=INK)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    title = f"{dtype}: CaraServe (dots), torch (crosses)"
    style(axes, xlabel="tokens", ylabel="GFLOP/s, one core", title=title, ylim=(0, highest))


def _draw_round_trips(points: Sequence[RoundTripPoint], axes: Any) -> None:
    """Plots the time beyond computing, with a bar for each transport."""
    kinds = list(dict.fromkeys((point.workers, point.tokens) for point in points))
    for place, transport in enumerate(dict.fromkeys(point.transport for point in points)):
        mine = [point for point in points if point.transport == transport]
        at = [kinds.index((point.workers, point.tokens)) + 0.4 * place for point in mine]
        colour = line_style(place)["color"]
        bars = axes.bar(at, [point.beyond_us for point in mine], width=0.4, label=transport, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    highest = 10 * max(1.0, *(point.beyond_us for point in points))
    names = [f"{tokens} tokens\n{workers} worker{'s' * (workers > 1)}" for workers, tokens in kinds]
    axes.set_xticks([index + 0.2 for index in range(len(kinds))], names)
    style(axes, ylabel="time beyond computing, µs", title="hand-off of q, k and v", yscale="log", ylim=(1, highest))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(False, axis="x")


def _draw_threads(points: Sequence[ThreadsPoint], axes: Any) -> None:
    """Plots milliseconds over rank, two lines per number of cores: workers solid, torch dashed."""
    highest = 1.3 * max(max(point.workers_ms, point.torch_ms) for point in points)
    for place, cores in enumerate(sorted({point.cores for point in points})):
        at, how = [point for point in points if point.cores == cores], line_style(place)
        ranks, label = [point.rank for point in at], f"{cores} core{'s' * (cores > 1)}"
        axes.plot(ranks, [point.workers_ms for point in at], marker="o", ms=3, label=f"workers, {label}", **how)
        axes.plot(ranks, [point.torch_ms for point in at], label=f"torch, {label}", **how | {"ls": "--"})
    style(
        axes,
        xlabel="rank",
        ylabel="time for 256 tokens in fp32, ms",
        title="workers and torch's threads",
        ylim=(0, highest),
    )
