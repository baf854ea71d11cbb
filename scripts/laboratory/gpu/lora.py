"""Stage `lora`: measures the decode LoRA kernels; `caraserve bench lora` uses it for its GPU part.

One CUDA graph holds the LoRA work of many layers, each with its own weights, in total more than the L2 cache can hold.
The floor is the time in which the device reads as many bytes as the adapters have, at its memory's highest speed.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from caraserve.bench.lora.kernels import GpuPoint
from caraserve.errors import BackendFailed
from caraserve.gpu.driver.environment import prepare_environment
from caraserve.gpu.kernels.bgmv_work import MOST_ROWS
from caraserve.model.dtype import Dtype
from caraserve.util.units import ceil_div
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.adapters import SEGMENTS_TOLERANCE, TOLERANCE, Adapters, DecodingRows, SegmentedRows, Site
from scripts.laboratory.gpu.limits import memory_bytes_per_s
from scripts.laboratory.gpu.results import Lines, StageResult, WrongResult, check_close
from scripts.laboratory.gpu.setup import CheckSetup, real_setup

_PROJECTIONS = 3  # q, k and v
_LAYERS_LEAST, _LAYERS_MOST = 4, 320
_MIX = (8, 16, 32, 64)
_SHARED_RANK = 64
_SHARE_TARGET = 0.8  # floor ÷ measured time at rank 64, where reading weights dominates
_MIX_TARGET = 1.10


@dataclass(frozen=True, slots=True)
class SharedPoint:
    """The decode LoRA of q, k and v in one layer, with many rows of few adapters: by the kernels of segments, which
    serve such rows, and by BGMV, which serves adapters of fewer rows."""

    rows: int
    adapters: int
    rank: int
    us: float
    bgmv_us: float


@dataclass(frozen=True, slots=True)
class LoraFigures:
    """All points, and the ratios of the points with most rows."""

    memory_bytes_per_s: float
    points: tuple[GpuPoint, ...]
    times_torch: dict[str, float]  # torch's time ÷ this project's, by point
    mix_over_sum: float | None  # mixed ranks ÷ the mean of the same ranks alone
    padded_over_mix: float | None  # the largest of these ranks alone ÷ mixed ranks
    few_adapters: SharedPoint | None = None  # None: there was no time left


def lora(setup: CheckSetup) -> StageResult[LoraFigures]:
    """Measures all points. Raises WrongResult for wrong results; each point is checked before it is timed."""
    acc = setup.accelerator(Dtype.BF16)
    bytes_per_s = memory_bytes_per_s(setup, acc)
    points, lines = tuple(measure(setup, acc, bytes_per_s)), Lines()
    figures = _judge(setup, points, bytes_per_s, lines)
    if setup.left_s > 0:
        few_adapters = _few_adapters(setup, acc)
        figures = replace(figures, few_adapters=few_adapters)
        lines.add(
            f"LoRA n {few_adapters.rows}, adapters {few_adapters.adapters}, rank {few_adapters.rank}",
            f"{few_adapters.us:.1f} µs by segments, {few_adapters.bgmv_us:.1f} µs by BGMV",
        )
    return StageResult(figures, lines.all)


def gpu_points(budget_s: float) -> list[GpuPoint]:
    """Returns as many points as the time allows, most rows first, on this machine's GPU. Raises BackendFailed for wrong
    results."""
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        setup = real_setup(Path(folder), budget_s, None, ())
        acc = setup.accelerator(Dtype.BF16)
        try:
            return list(measure(setup, acc, memory_bytes_per_s(setup, acc)))
        except WrongResult as error:
            raise BackendFailed(f"the GPU's LoRA kernels are wrong: {error}") from error


def measure(setup: CheckSetup, acc: Accelerator, bytes_per_s: float) -> Iterator[GpuPoint]:
    """Yields every number of rows with every rank and with mixed ranks, most rows first, until the time is up."""
    effort = setup.effort
    wanted: list[tuple[int, tuple[int, ...]]] = [
        (rows, (rank,)) for rank in effort.lora_ranks for rows in effort.lora_rows
    ]
    mix = tuple(rank for rank in _MIX if rank in effort.lora_ranks)
    wanted += [(rows, mix) for rows in effort.lora_rows if rows >= len(mix) > 1]
    wanted.sort(key=lambda each: -each[0])  # the targets are for the most rows
    for rows, ranks in wanted:
        if setup.left_s > 0:
            yield _point(setup, acc, rows, ranks, bytes_per_s)


def _point(setup: CheckSetup, acc: Accelerator, rows: int, ranks: tuple[int, ...], bytes_per_s: float) -> GpuPoint:
    hidden, effort = setup.effort.shape.hidden, setup.effort
    by_slot = [0, *(ranks[row % len(ranks)] for row in range(rows))]
    site = Site(hidden, (hidden,) * _PROJECTIONS, [by_slot] * _PROJECTIONS, [acc.dtype] * (rows + 1))
    slots = range(1, rows + 1)
    num_bytes = site.num_bytes(slots)
    layers = min(max(_LAYERS_LEAST, ceil_div(2 * acc.l2_bytes, num_bytes)), _LAYERS_MOST)
    adapters = Adapters(acc, site, layers, effort.lora_pool_bytes)
    batch = DecodingRows(acc, adapters, slots)
    expected = batch.expected(0)
    batch.issue(0)
    acc.settle()
    check_close(f"LoRA of decode, {rows} rows of rank {ranks}", batch.results(), expected, TOLERANCE[acc.dtype])

    def step() -> None:
        for layer in range(layers):
            batch.issue(layer)

    us = acc.median_us(step, effort.replays) / layers
    floor_us = 1e6 * num_bytes / bytes_per_s
    torch_us = _bmm_us(setup, acc, rows, ranks[0], layers) if len(ranks) == 1 else None
    return GpuPoint(rows, ranks, us, num_bytes / 1e6, floor_us / us, torch_us)


def _few_adapters(setup: CheckSetup, acc: Accelerator) -> SharedPoint:
    """Times rows that are divided evenly among few adapters. Raises WrongResult."""
    (rows, count), hidden = setup.effort.few_adapters, setup.effort.shape.hidden
    rank = min(_SHARED_RANK, max(setup.effort.lora_ranks))
    assert rows // count > MOST_ROWS, "BGMV would serve these rows"
    slots = [1 + row % count for row in range(rows)]
    site = Site(hidden, (hidden,) * _PROJECTIONS, [[0, *[rank] * count]] * _PROJECTIONS, [acc.dtype] * (count + 1))
    layers = min(max(_LAYERS_LEAST, ceil_div(2 * acc.l2_bytes, site.num_bytes(slots))), _LAYERS_MOST)
    adapters = Adapters(acc, site, layers, setup.effort.lora_pool_bytes)
    batch = DecodingRows(acc, adapters, slots)
    segmented = SegmentedRows(acc, adapters, slots, batch.x, batch.y, batch.max_rank)
    expected = batch.expected(0)
    segmented.issue(0)
    acc.settle()
    name = f"LoRA of decode, {rows} rows of {count} adapters"
    check_close(name, batch.results(), expected, SEGMENTS_TOLERANCE[acc.dtype])

    def us(issue: Callable[[int], None]) -> float:
        def step() -> None:
            for layer in range(layers):
                issue(layer)

        return acc.median_us(step, setup.effort.replays) / layers

    return SharedPoint(rows, count, rank, us(segmented.issue), us(batch.issue))


def _bmm_us(setup: CheckSetup, acc: Accelerator, rows: int, rank: int, layers: int) -> float:
    """Times two batched products per layer over weights stacked by row: torch's speed if stacking were free."""
    hidden, generator = setup.effort.shape.hidden, acc.generator(2)
    per_layer = 2 * _PROJECTIONS * rows * rank * hidden
    layers = max(1, min(layers, setup.effort.lora_pool_bytes // (per_layer * acc.dtype.itemsize)))
    x = acc.random(generator, rows, 1, hidden)
    a = acc.random(generator, layers, rows, hidden, _PROJECTIONS * rank)
    b = acc.random(generator, layers, _PROJECTIONS * rows, rank, hidden)
    shrunk = torch.empty((rows, 1, _PROJECTIONS * rank), dtype=acc.torch_dtype, device=acc.place)
    parts = torch.empty((_PROJECTIONS * rows, 1, rank), dtype=acc.torch_dtype, device=acc.place)
    y = torch.empty((_PROJECTIONS * rows, 1, hidden), dtype=acc.torch_dtype, device=acc.place)

    def multiply() -> None:
        for layer in range(layers):
            torch.bmm(x, a[layer], out=shrunk)
            torch.bmm(parts, b[layer], out=y)

    return acc.median_us(lambda: acc.run(multiply), setup.effort.replays) / layers


def _judge(setup: CheckSetup, points: tuple[GpuPoint, ...], bytes_per_s: float, lines: Lines) -> LoraFigures:
    most = max(setup.effort.lora_rows)
    alone = {point.ranks[0]: point for point in points if point.rows == most and len(point.ranks) == 1}
    times_torch: dict[str, float] = {}
    for rank, point in alone.items():
        text = f"{point.us:.1f} µs, {point.share_of_floor:.0%} of the floor"
        if rank == 64:
            lines.add(f"LoRA {point.name}", text, f"≥ {_SHARE_TARGET:.0%}", point.share_of_floor >= _SHARE_TARGET)
        else:
            lines.add(f"LoRA {point.name}", text)
        if point.torch_us is not None:
            times_torch[point.name] = point.torch_us / point.us
    ratio = padded = None
    for mix in (point for point in points if len(point.ranks) > 1 and point.rows == most):
        if all(rank in alone for rank in mix.ranks):
            ratio = mix.us * len(mix.ranks) / sum(alone[rank].us for rank in mix.ranks)
            padded = alone[max(mix.ranks)].us / mix.us
            lines.at_most(f"{mix.name} ÷ the sum of its parts", ratio, _MIX_TARGET)
            lines.add("the same, padded to its largest rank", f"{padded:.2f} times as long")
    return LoraFigures(bytes_per_s, points, times_torch, ratio, padded)
