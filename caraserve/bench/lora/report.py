"""Tables and the figure of `caraserve bench lora`."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from caraserve.bench.gpu.lora import LoraPoint
from caraserve.bench.lora.handoff import RoundTripPoint, ThreadsPoint
from caraserve.bench.lora.kernels import KernelPoint
from caraserve.util.units import ceil_div

_COLUMNS = 3  # of panels in the figure


def tables(
    kernels: Sequence[KernelPoint],
    round_trips: Sequence[RoundTripPoint],
    threads: Sequence[ThreadsPoint],
    gpu: Sequence[LoraPoint] = (),
) -> Iterator[Table]:
    """Yields a table for each part that was measured."""
    if kernels:
        yield _kernel_table(kernels)
    if round_trips:
        yield _round_trip_table(round_trips)
    if threads:
        yield _threads_table(threads)
    if gpu:
        yield _gpu_table(gpu)


def _kernel_table(points: Sequence[KernelPoint]) -> Table:
    table = Table(title="q, k and v of one layer on one core", title_justify="left")
    for head in ("dtype", "rank", "tokens", "GFLOP/s", "of the core's peak", "× torch", "× NumPy"):
        table.add_column(head, justify="right")
    for index, point in enumerate(points):
        following = points[index + 1] if index + 1 < len(points) else point
        table.add_row(
            point.dtype,
            str(point.rank),
            str(point.tokens),
            f"{point.ours:.0f}",
            f"{point.share_of_peak:.0%}",
            f"{point.ours / point.torch:.1f}",
            "–" if point.numpy is None else f"{point.ours / point.numpy:.1f}",
            end_section=(point.dtype, point.rank) != (following.dtype, following.rank),
        )
    return table


def _round_trip_table(points: Sequence[RoundTripPoint]) -> Table:
    table = Table(title="one hand-off of q, k and v", title_justify="left")
    for head in ("workers", "tokens", "through", "µs", "beyond computing, µs", "p99"):
        table.add_column(head, justify="right")
    for point in points:
        table.add_row(
            str(point.workers),
            str(point.tokens),
            point.transport,
            f"{point.total_us:,.0f}",
            f"{point.beyond_us:,.1f}",
            f"{point.beyond_p99_us:,.0f}",
        )
    return table


def _threads_table(points: Sequence[ThreadsPoint]) -> Table:
    table = Table(title="256 tokens, fp32: CPU LoRA workers beside torch's threads", title_justify="left")
    for head in ("cores", "rank", "workers, ms", "torch, ms", "torch ÷ workers"):
        table.add_column(head, justify="right")
    for point in points:
        ratio = point.torch_ms / point.workers_ms
        row = str(point.cores), str(point.rank), f"{point.workers_ms:.2f}", f"{point.torch_ms:.2f}", f"{ratio:.2f}"
        table.add_row(*row)
    return table


def _gpu_table(points: Sequence[LoraPoint]) -> Table:
    table = Table(title="q, k and v of one layer on the GPU, every row another adapter, bf16", title_justify="left")
    for head in ("rows", "rank", "µs", "MB", "of its copying bandwidth", "× torch.bmm"):
        table.add_column(head, justify="right")
    for point in points:
        table.add_row(
            str(point.rows),
            "+".join(map(str, point.ranks)),
            f"{point.us:.1f}",
            f"{point.mbytes:.1f}",
            f"{point.share_of_floor:.0%}",
            "–" if point.torch_us is None else f"{point.torch_us / point.us:.1f}",
        )
    return table


def draw(
    kernels: Sequence[KernelPoint],
    round_trips: Sequence[RoundTripPoint],
    threads: Sequence[ThreadsPoint],
    file: Path,
) -> bool:
    """Draws the measured parts to a PNG file. Returns False if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    # Imported here: matplotlib is an optional dependency, for saved reports only.
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    dtypes = list(dict.fromkeys(point.dtype for point in kernels))
    panels = max(1, len(dtypes) + bool(round_trips) + bool(threads))
    columns, rows = min(panels, _COLUMNS), ceil_div(panels, _COLUMNS)
    figure = Figure(figsize=(4.2 * columns, 3.8 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flat
    for spare in places[panels:]:
        spare.set_axis_off()
    axes = iter(places)
    for dtype in dtypes:
        _draw_kernels(next(axes), dtype, [point for point in kernels if point.dtype == dtype])
    if round_trips:
        _draw_round_trips(next(axes), round_trips)
    if threads:
        _draw_threads(next(axes), threads)
    figure.savefig(file, dpi=130)
    return True


def _draw_kernels(axes: Any, dtype: str, points: Sequence[KernelPoint]) -> None:
    """Plots speed over tokens, a line per rank: CaraServe solid, torch dashed."""
    peak = max(point.peak for point in points)
    for rank in sorted({point.rank for point in points}):
        at = [point for point in points if point.rank == rank]
        tokens = [point.tokens for point in at]
        (line,) = axes.plot(tokens, [point.ours for point in at], marker="o", ms=3, label=f"rank {rank}")
        axes.plot(tokens, [point.torch for point in at], ls="--", lw=0.9, color=line.get_color())
    axes.axhline(peak, color="black", lw=0.8)
    axes.annotate("fp32 peak", (min(point.tokens for point in points), peak), va="bottom", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens", ylabel="GFLOP/s, one core", title=f"{dtype}: CaraServe, torch dashed", ylim=(0, None))
    axes.legend(fontsize=8)


def _draw_round_trips(axes: Any, points: Sequence[RoundTripPoint]) -> None:
    """Plots the time beyond computing, with a bar for each transport."""
    kinds = list(dict.fromkeys((point.workers, point.tokens) for point in points))
    transports = list(dict.fromkeys(point.transport for point in points))
    for place, transport in enumerate(transports):
        mine = [point for point in points if point.transport == transport]
        at = [kinds.index((point.workers, point.tokens)) + 0.4 * place for point in mine]
        bars = axes.bar(at, [point.beyond_us for point in mine], width=0.4, label=transport)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(
        [index + 0.2 for index in range(len(kinds))],
        [f"{tokens} tokens\n{workers} worker{'s' * (workers > 1)}" for workers, tokens in kinds],
        fontsize=8,
    )
    axes.set(ylabel="µs beyond computing", title="hand-off", yscale="log")
    axes.legend(fontsize=8)


def _draw_threads(axes: Any, points: Sequence[ThreadsPoint]) -> None:
    """Plots milliseconds over rank, two lines per number of cores: workers solid, torch dashed."""
    for cores in sorted({point.cores for point in points}):
        at = [point for point in points if point.cores == cores]
        ranks, label = [point.rank for point in at], f"{cores} core{'s' * (cores > 1)}"
        (line,) = axes.plot(ranks, [point.workers_ms for point in at], marker="o", ms=3, label=f"workers, {label}")
        axes.plot(ranks, [point.torch_ms for point in at], ls="--", color=line.get_color(), label=f"torch, {label}")
    axes.set(xlabel="rank", ylabel="ms for 256 tokens, fp32", title="workers and torch's threads", ylim=(0, None))
    axes.legend(fontsize=8)
