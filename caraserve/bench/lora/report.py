"""Tables and the figure of `caraserve bench lora`."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from caraserve.bench.lora.handoff import RoundTripPoint, ThreadsPoint
from caraserve.bench.lora.kernels import GpuPoint, KernelPoint
from caraserve.bench.report.plots import Look, Panel, Series, draw_panels
from caraserve.bench.report.tables import NONE, TextTable, to_rich


def tables(
    kernels: Sequence[KernelPoint],
    round_trips: Sequence[RoundTripPoint],
    threads: Sequence[ThreadsPoint],
    gpu: Sequence[GpuPoint] = (),
) -> Iterator[Table]:
    """Yields a table for each part that was measured."""
    yield from _table(
        "q, k and v of one layer on one core",
        ("dtype", "rank", "tokens", "GFLOP/s", "of the core's peak", "× torch", "× NumPy"),
        [
            (
                *(one.dtype, str(one.rank), str(one.tokens), f"{one.ours:.0f}", f"{one.share_of_peak:.0%}"),
                *(f"{one.ours / one.torch:.1f}", NONE if one.numpy is None else f"{one.ours / one.numpy:.1f}"),
            )
            for one in kernels
        ],
    )
    yield from _table(
        "one hand-off of q, k and v",
        ("workers", "tokens", "through", "µs", "beyond computing, µs", "p99"),
        [
            (
                *(str(trip.workers), str(trip.tokens), trip.transport),
                *(f"{trip.total_us:,.0f}", f"{trip.beyond_us:,.1f}", f"{trip.beyond_p99_us:,.0f}"),
            )
            for trip in round_trips
        ],
    )
    yield from _table(
        "256 tokens, fp32: CPU LoRA workers beside torch's threads",
        ("cores", "rank", "workers, ms", "torch, ms", "torch ÷ workers"),
        [
            (str(at.cores), str(at.rank), *(f"{x:.2f}" for x in (at.workers_ms, at.torch_ms, at.ratio)))
            for at in threads
        ],
    )
    yield from _table(
        "q, k and v of one layer on the GPU, every row another adapter, bf16",
        ("rows", "rank", "µs", "MB", "of the memory's bandwidth", "× torch.bmm"),
        [
            (
                *(str(at.rows), "+".join(map(str, at.ranks)), f"{at.us:.1f}", f"{at.mbytes:.1f}"),
                *(f"{at.share_of_floor:.0%}", NONE if at.torch_us is None else f"{at.torch_us / at.us:.1f}"),
            )
            for at in gpu
        ],
    )


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    if rows:
        yield to_rich(TextTable(title, heads, rows))


def draw(
    kernels: Sequence[KernelPoint], round_trips: Sequence[RoundTripPoint], threads: Sequence[ThreadsPoint]
) -> bytes:
    """Draws the measured parts. Needs matplotlib."""
    panels, looks = [], []
    for dtype in dict.fromkeys(point.dtype for point in kernels):
        points = [point for point in kernels if point.dtype == dtype]
        panels.append(_speeds(dtype, points))
        looks.append(Look("x", levels={"fp32 peak": max(point.peak for point in points)}))
    if round_trips:
        panels.append(_round_trips(round_trips))
        looks.append(Look("y", numbers="%.0f"))
    if threads:
        panels.append(_threads(threads))
    return draw_panels(panels, looks)


def _speeds(dtype: str, points: Sequence[KernelPoint]) -> Panel:
    """Returns speeds over tokens: a line per rank, and torch's in grey."""
    lines = []
    for rank in sorted({point.rank for point in points}):
        at = [point for point in points if point.rank == rank]
        tokens = tuple(float(point.tokens) for point in at)
        lines.append(Series(f"rank {rank}", tuple(point.ours for point in at), tokens))
        lines.append(Series(f"torch, rank {rank}", tuple(point.torch for point in at), tokens, theirs=True))
    return Panel(dtype, "GFLOP/s, one core", tuple(lines), "tokens")


def _round_trips(points: Sequence[RoundTripPoint]) -> Panel:
    """Returns the time beyond computing, with a bar for each transport."""
    kinds = dict.fromkeys((point.workers, point.tokens) for point in points)
    bars = []
    for transport in dict.fromkeys(point.transport for point in points):
        beyond_us = {(one.workers, one.tokens): one.beyond_us for one in points if one.transport == transport}
        bars.append(Series(transport, tuple(beyond_us.get(kind) for kind in kinds)))
    names = tuple(f"{tokens} tokens, {workers} worker{'s' * (workers > 1)}" for workers, tokens in kinds)
    return Panel("hand-off of q, k and v", "time beyond computing, µs", tuple(bars), categories=names)


def _threads(points: Sequence[ThreadsPoint]) -> Panel:
    """Returns times by rank: a line per number of cores, and torch's in grey."""
    lines = []
    for cores in sorted({point.cores for point in points}):
        at, label = [point for point in points if point.cores == cores], f"{cores} core{'s' * (cores > 1)}"
        ranks = tuple(float(point.rank) for point in at)
        lines.append(Series(f"workers, {label}", tuple(point.workers_ms for point in at), ranks))
        lines.append(Series(f"torch, {label}", tuple(point.torch_ms for point in at), ranks, theirs=True))
    return Panel("workers and torch's threads", "time for 256 tokens in fp32, ms", tuple(lines), "rank")
