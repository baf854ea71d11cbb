"""Stage `experts`: times a layer's mixture of experts beside the memory's speed and dense products of as much work.

A graph has several steps, each with other rows and other experts: the weights of one step may fit into the L2 cache.
The floor of a step is the time in which the device reads the weights of the experts that it chooses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from caraserve.gpu.kernels.experts import ExpertRoom, ExpertWeights, Routing, apply_experts
from caraserve.gpu.weights import TORCH_DTYPES
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.backends import DTYPE
from scripts.laboratory.gpu.limits import memory_bytes_per_s
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup, ExpertShape

_STEPS = 6
_FLOOR_TARGET, _DENSE_TARGET = 0.6, 0.6  # shares, with the fewest and with the most rows


@dataclass(frozen=True, slots=True)
class ExpertPoint:
    """A step with `rows` rows, which choose `chosen` different experts on average; `dense_us`: of dense products of as
    many rows as there are choices."""

    rows: int
    chosen: float
    us: float
    bytes_per_s: float  # of chosen experts' weights
    flop_per_s: float
    share_of_floor: float
    dense_us: float


@dataclass(frozen=True, slots=True)
class ExpertFigures:
    """All points."""

    memory_bytes_per_s: float
    points: tuple[ExpertPoint, ...]


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """The inputs and the memory of one step."""

    x: Tensor  # [rows, hidden]
    logits: Tensor  # [rows, experts]
    position: Tensor  # int32 [rows]
    room: ExpertRoom
    out: Tensor  # [rows, hidden]

    @classmethod
    def empty(cls, experts: ExpertWeights, rows: int) -> "ExpertStep":
        how, (_, hidden, inner) = experts.routing, experts.down.shape
        dtype, device = experts.down.dtype, experts.down.device
        x, out = (torch.empty((rows, hidden), dtype=dtype, device=device) for _ in range(2))
        logits, position = x.new_empty((rows, how.experts)), torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(
            x, logits, position, ExpertRoom.empty(rows, how.top_k, how.experts, inner, hidden, dtype, device), out
        )

    def issue(self, experts: ExpertWeights) -> None:
        apply_experts(self.x, self.logits, self.position, experts, self.room, self.out, adds=False)


def empty_experts(shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    """Returns experts whose weights have not been written."""
    gate_up = torch.empty((shape.experts, 2 * shape.inner, shape.hidden), dtype=dtype, device=device)
    down = torch.empty((shape.experts, shape.hidden, shape.inner), dtype=dtype, device=device)
    return ExpertWeights(Routing(shape.experts, shape.top_k), "silu", gate_up, down)


def meet_experts(setup: CheckSetup, device: torch.device) -> None:
    """Launches what the stage launches, on a device where nothing runs, for stage `build`."""
    experts = empty_experts(setup.effort.experts, TORCH_DTYPES[DTYPE], device)
    for rows in setup.effort.expert_rows:
        ExpertStep.empty(experts, rows).issue(experts)


def experts(setup: CheckSetup) -> StageResult[ExpertFigures]:
    """Measures every number of rows; results are checked in stage `correct`."""
    acc, lines, points = setup.accelerator(DTYPE), Lines(), list[ExpertPoint]()
    floor_bytes_per_s, shape = memory_bytes_per_s(setup, acc), setup.effort.experts
    layer = empty_experts(shape, acc.torch_dtype, acc.place)
    for weights in (layer.gate_up, layer.down):
        weights.normal_(0.0, shape.hidden**-0.5, generator=acc.generator(0))
    for rows in setup.effort.expert_rows:
        point = _point(setup, acc, shape, layer, rows, floor_bytes_per_s)
        points.append(point)
        speeds = f"{point.bytes_per_s / 1e12:.2f} TB/s, {point.flop_per_s / 1e12:.0f} TFLOP/s"
        lines.add(
            f"experts, {rows} rows choose {point.chosen:.0f}",
            f"{point.us:.1f} µs, {speeds}, {point.share_of_floor:.0%} of the floor; dense {point.dense_us:.1f} µs",
        )
    lines.at_least(f"floor ÷ experts, {points[0].rows} rows", points[0].share_of_floor, _FLOOR_TARGET)
    most = points[-1]
    lines.at_least(f"dense ÷ experts, {most.rows} rows", most.dense_us / most.us, _DENSE_TARGET)
    return StageResult(ExpertFigures(floor_bytes_per_s, tuple(points)), lines.all)


def _point(
    setup: CheckSetup, acc: Accelerator, shape: ExpertShape, layer: ExpertWeights, rows: int, floor_bytes_per_s: float
) -> ExpertPoint:
    generator, chosen = acc.generator(rows), 0
    step = ExpertStep.empty(layer, rows)
    step.x.copy_(acc.random(generator, rows, shape.hidden))
    logits = [acc.random(generator, rows, shape.experts) for _ in range(_STEPS)]
    for each in logits:
        chosen += len(set(each.topk(shape.top_k)[1].flatten().tolist()))

    def run() -> None:
        for each in logits:
            step.logits.copy_(each)
            step.issue(layer)

    replays = setup.effort.replays
    us = acc.median_us(lambda: acc.run(run), replays) / _STEPS
    per_expert = 3 * shape.hidden * shape.inner
    num_bytes, flop = chosen / _STEPS * per_expert * acc.dtype.itemsize, 2.0 * rows * shape.top_k * per_expert
    return ExpertPoint(
        rows,
        chosen / _STEPS,
        us,
        1e6 * num_bytes / us,
        1e6 * flop / us,
        1e6 * num_bytes / floor_bytes_per_s / us,
        _dense_us(acc, shape, layer, rows * shape.top_k, replays),
    )


def _dense_us(acc: Accelerator, shape: ExpertShape, layer: ExpertWeights, rows: int, replays: int) -> float:
    """Times the products of `rows` rows with one expert's weights after another, each as if it were chosen by all."""
    x = acc.random(acc.generator(1), rows, shape.hidden)
    both, inner, out = x.new_empty((rows, 2 * shape.inner)), x.new_empty((rows, shape.inner)), torch.empty_like(x)
    inner.normal_(generator=acc.generator(2))

    def multiply() -> None:
        for expert in range(min(_STEPS, shape.experts)):
            torch.mm(x, layer.gate_up[expert].t(), out=both)
            torch.mm(inner, layer.down[expert].t(), out=out)

    return acc.median_us(lambda: acc.run(multiply), replays) / min(_STEPS, shape.experts)
