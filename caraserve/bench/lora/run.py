"""`caraserve bench lora`: measures LoRA on this machine's CPU, and on its GPU if there is one.

On the CPU it compares the kernels' speed with a core's peak, torch and NumPy; measures the time of a hand-off to
workers beyond their computing, over shared memory and over a UNIX socket; and compares workers with torch's threads.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from caraserve.bench.checkout import laboratory
from caraserve.bench.lora import PARTS
from caraserve.bench.lora.handoff import HandoffBench, RoundTripPoint, ThreadsPoint, beside_threads, round_trips
from caraserve.bench.lora.kernels import GpuPoint, KernelCase, KernelPoint, measure
from caraserve.bench.lora.process import pinned_process
from caraserve.bench.records import machine, versions
from caraserve.bench.report.files import as_json, make_folder, write_files
from caraserve.bench.report.plots import NO_FIGURES, Look, Panel, Series, can_draw, draw_panels
from caraserve.bench.report.tables import NONE, TextTable, open_console, to_rich, write_document
from caraserve.errors import ConfigError
from caraserve.gpu.driver.detect import detect
from caraserve.model.dtype import Dtype
from caraserve.telemetry.progress import terminal_bar

_ROUND_TRIP_RANK = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoraEffort:
    """The points to measure, and how often."""

    hidden: int
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    dtypes: tuple[Dtype, ...]
    round_trip_tokens: tuple[int, ...]
    hand_offs: int
    rounds: int  # in each, workers and torch's threads run once
    gpu_s: float  # time limit for the GPU's kernels


FULL = LoraEffort(
    hidden=4096,  # of Llama-2-7B
    ranks=(8, 16, 32, 64, 128),
    tokens=(1, 4, 16, 64, 256),
    dtypes=(Dtype.F16, Dtype.BF16, Dtype.F32),
    round_trip_tokens=(16, 256),
    hand_offs=300,
    rounds=15,
    gpu_s=60.0,
)
QUICK = replace(
    FULL, ranks=(8, 64), tokens=(64,), dtypes=(Dtype.F16,), round_trip_tokens=(64,), hand_offs=10, rounds=3, gpu_s=15.0
)


@dataclass(slots=True)
class LoraReport:
    """All points measured so far."""

    hidden: int
    cores: tuple[int, ...]
    kernels: list[KernelPoint] = field(default_factory=list)
    round_trips: list[RoundTripPoint] = field(default_factory=list)
    threads: list[ThreadsPoint] = field(default_factory=list)
    gpu: list[GpuPoint] = field(default_factory=list)
    complete: bool = False

    def document(self) -> dict[str, object]:
        """Returns the points, the machine and package versions as a JSON document."""
        return {"bench": "lora", "machine": machine(), "versions": versions(), **asdict(self)}


def bench_lora(
    parts: Sequence[str] | None, cores: Sequence[int] | None, effort: LoraEffort, save: Path | None, as_line: bool
) -> None:
    """Measures, prints tables and, for programs or with `as_line`, one JSON line; writes JSON and a PNG to `save`.

    `parts` None means all that this machine has. Ctrl-C ends the measurement early and reports the points so far.
    Raises ConfigError for cores, a folder or a GPU that cannot be used.
    """
    console = Console(stderr=True)
    parts = _parts(parts, console)
    here = sorted(os.sched_getaffinity(0))
    cores = tuple(cores) if cores else (*here[1:], here[0])  # the first core last: a server's event loop uses it
    if missing := sorted(set(cores) - set(here)):
        raise ConfigError(f"--lora-cpus {missing[0]}: this process may use cores {', '.join(map(str, here))}")
    make_folder(save)
    report = LoraReport(effort.hidden, tuple(cores))
    try:
        with terminal_bar() as progress:
            teams = len({1, len(cores)})  # one worker, and all
            steps = {
                "kernels": len(effort.ranks) * len(effort.tokens) * len(effort.dtypes),
                "round-trip": 2 * teams * len(effort.round_trip_tokens),
                "threads": teams * len(effort.ranks),
                "gpu": 1,
            }
            task = progress.add_task("measuring", total=sum(steps[part] for part in parts))
            if not console.is_terminal:
                console.print(f"measuring {', '.join(parts)} on cores {', '.join(map(str, cores))}")
            _measure(report, parts, effort, lambda: progress.advance(task))
            report.complete = True
    except KeyboardInterrupt:
        console.print("interrupted: the points measured so far follow")
    _show(report, save, as_line)


def _parts(requested: Sequence[str] | None, console: Console) -> Sequence[str]:
    """Returns the requested parts, or all that this machine and this installation have. Raises ConfigError for a
    requested part without a GPU, or without a checkout."""
    if requested is not None:
        if "gpu" in requested:
            detect("cuda")
            _gpu_bench()
        return requested
    parts = list(PARTS[:-1])
    if detect("auto").device == "cuda":
        try:
            _gpu_bench()
            parts.append("gpu")
        except ConfigError as error:
            console.print(f"not measured: {error}")
    return parts


def _gpu_bench() -> ModuleType:
    """Returns the module of stage `lora` of `scripts/gpu_check`, which measures the GPU's kernels."""
    return laboratory("gpu.lora", "lora --parts gpu")


def _measure(report: LoraReport, parts: Sequence[str], effort: LoraEffort, advance: Callable[[], None]) -> None:
    def keep(found: list[T], points: Iterable[T]) -> None:
        for point in points:
            found.append(point)
            advance()

    if "kernels" in parts:
        with pinned_process(report.cores[:1]) as pool:
            cases = product((effort.hidden,), effort.dtypes, effort.ranks, effort.tokens)
            keep(report.kernels, (pool.submit(measure, KernelCase(*case)).result() for case in cases))
    if "gpu" in parts:
        report.gpu += _gpu_bench().gpu_points(effort.gpu_s)
        advance()
    if not {"round-trip", "threads"} & set(parts):
        return
    rank, cores = _ROUND_TRIP_RANK, report.cores
    adapters = [(Dtype.F16, rank), *((Dtype.F32, each) for each in effort.ranks)]
    with HandoffBench(effort.hidden, adapters, cores) as bench:
        if "round-trip" in parts:
            prompts, repeats = effort.round_trip_tokens, effort.hand_offs
            keep(report.round_trips, round_trips(bench, effort.hidden, rank, prompts, cores, repeats))
        if "threads" in parts:
            keep(report.threads, beside_threads(bench, effort.hidden, effort.ranks, cores, effort.rounds))


def _show(report: LoraReport, save: Path | None, as_line: bool) -> None:
    console = open_console()
    for table in tables(report.kernels, report.round_trips, report.threads, report.gpu):
        console.print(table)
    document = report.document()
    if save is not None:
        contents = {"lora.json": as_json(document)}
        if can_draw():
            contents["lora.png"] = draw(report.kernels, report.round_trips, report.threads)
        for path in write_files(save, contents):
            console.print(f"written: {path}")
        if not can_draw():
            console.print(NO_FIGURES)
    write_document(document, as_line)


# --- tables and the figure ---


def tables(
    kernels: Sequence[KernelPoint],
    round_trips: Sequence[RoundTripPoint],
    threads: Sequence[ThreadsPoint],
    gpu: Sequence[GpuPoint] = (),
) -> Iterator[Table]:
    """Yields a table for each part that was measured."""
    every = (
        TextTable(
            "q, k and v of one layer on one core",
            ("dtype", "rank", "tokens", "GFLOP/s", "of the core's peak", "× torch", "× NumPy"),
            [
                (
                    *(one.dtype, str(one.rank), str(one.tokens), f"{one.ours:.0f}", f"{one.share_of_peak:.0%}"),
                    *(f"{one.ours / one.torch:.1f}", NONE if one.numpy is None else f"{one.ours / one.numpy:.1f}"),
                )
                for one in kernels
            ],
        ),
        TextTable(
            "one hand-off of q, k and v",
            ("workers", "tokens", "through", "µs", "beyond computing, µs", "p99"),
            [
                (
                    *(str(trip.workers), str(trip.tokens), trip.transport),
                    *(f"{trip.total_us:,.0f}", f"{trip.beyond_us:,.1f}", f"{trip.beyond_p99_us:,.0f}"),
                )
                for trip in round_trips
            ],
        ),
        TextTable(
            "256 tokens, fp32: CPU LoRA workers beside torch's threads",
            ("cores", "rank", "workers, ms", "torch, ms", "torch ÷ workers"),
            [
                (str(at.cores), str(at.rank), *(f"{x:.2f}" for x in (at.workers_ms, at.torch_ms, at.ratio)))
                for at in threads
            ],
        ),
        TextTable(
            "q, k and v of one layer on the GPU, every row another adapter, bf16",
            ("rows", "rank", "µs", "MB", "of the memory's bandwidth", "× torch.bmm"),
            [
                (
                    *(str(at.rows), "+".join(map(str, at.ranks)), f"{at.us:.1f}", f"{at.mbytes:.1f}"),
                    *(f"{at.share_of_floor:.0%}", NONE if at.torch_us is None else f"{at.torch_us / at.us:.1f}"),
                )
                for at in gpu
            ],
        ),
    )
    yield from (to_rich(table) for table in every if table.rows)


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
