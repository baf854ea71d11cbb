"""Stage `quantized`: times products with quantised weights beside those of bf16."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from caraserve.gpu.kernels.capability import compute_capability
from caraserve.gpu.linear.base import TORCH_CODES, Linear
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.fp8 import Fp8Linear
from caraserve.gpu.linear.int8 import Int8Linear
from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.gpu.linear.room import ProductRoom
from caraserve.model.dtype import Code
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.scaled_codes import Inputs
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.backends import DTYPE
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

_INPUT_SCALE = 0.03  # of standard normal inputs: few exceed the largest int8


def random_linear(
    acc: Accelerator,
    generator: torch.Generator,
    outputs: int,
    inputs: int,
    code: Code,
    taken: Inputs,
    *,
    has_bias: bool = False,
) -> QuantizedLinear:
    """Returns a module whose results for standard normal inputs are about 1."""
    codes = acc.random(generator, outputs, inputs, dtype=torch.float32) * (code.largest / 4)
    codes.clamp_(-code.largest, code.largest)
    scale = acc.random(generator, outputs, dtype=torch.float32).abs_() * (4 / code.largest / inputs**0.5)
    capability = compute_capability(acc.place)
    made, scheme = (Fp8Linear, Fp8) if code is Code.F8_E4M3 else (Int8Linear, Int8)
    quantized = made.inputs_on(capability, scheme(taken))
    given = torch.full((1,), _INPUT_SCALE, device=acc.place) if quantized is Inputs.STATIC else None
    return made(
        codes.to(TORCH_CODES[code]),
        scale if given is None else scale * given,
        acc.random(generator, outputs) if has_bias else None,
        quantized,
        given,
        torch.ones(1, device=acc.place),
        capability,
    )


def room_of(acc: Accelerator, linear: Linear, rows: int) -> ProductRoom:
    """Returns memory for a linear's products, full of NaN."""
    room = ProductRoom.empty(linear.room(rows, acc.torch_dtype), rows, acc.place)
    for memory in (room.inputs, room.scales, room.matrix):
        memory.view(torch.uint8).fill_(0xFF)
    return room


class RowScaled(Fp8Linear):
    """Multiplies codes with scales of rows and outputs by torch: faster than with a kernel of ours behind, perhaps, and
    where torch takes cuBLASLt for it."""

    def multiply_codes(self, x: Tensor, out: Tensor, room: ProductRoom | None) -> None:
        codes, row_scale = self.rounded(x, room, torch.float8_e4m3fn)
        assert row_scale is not None
        scales = row_scale[:, None], self.scale[None]
        torch._scaled_mm(codes, self.weight.t(), *scales, out_dtype=out.dtype, out=out)


_BASE, _OURS, _TORCHS, _ROW_SCALED = (
    *("bf16", "fp8, inputs per token", "the same by torch", "the same by torch with scales of rows"),
)
_FEW_TARGET, _MANY_TARGET = 0.65, 0.75  # of bf16's time, with the fewest and the most rows
_ALL_ROWS = 1 << 30


@dataclass(frozen=True, slots=True)
class ProductPoint:
    """Times of the products of `rows` rows with one layer's gate and up."""

    rows: int
    us: dict[str, float]  # by way


@dataclass(frozen=True, slots=True)
class QuantizedFigures:
    """All points; the weights are [outputs, inputs]."""

    outputs: int
    inputs: int
    points: tuple[ProductPoint, ...]


def quantized(setup: CheckSetup) -> StageResult[QuantizedFigures]:
    """Measures every way with every number of rows, as captured graphs; results are checked in stage `correct`."""
    acc, lines, points = setup.accelerator(DTYPE), Lines(), list[ProductPoint]()
    outputs, inputs = 2 * setup.effort.shape.intermediate, setup.effort.shape.hidden
    ways = dict(_ways(acc, outputs, inputs))
    for rows in setup.effort.product_rows:
        us = _times_us(setup, acc, {way: linear for way, (linear, least) in ways.items() if rows >= least}, rows, lines)
        points.append(ProductPoint(rows, us))
        lines.add(f"gate and up, {rows} rows: µs", ", ".join(f"{way} {took:.0f}" for way, took in us.items()))
        best = min(us[_OURS], us.get(_TORCHS, us[_OURS])) / us[_BASE]
        if rows in (min(setup.effort.product_rows), max(setup.effort.product_rows)):
            target = _FEW_TARGET if rows == min(setup.effort.product_rows) else _MANY_TARGET
            lines.at_most(f"the better of fp8 ÷ bf16, {rows} rows", best, target)
    return StageResult(QuantizedFigures(outputs, inputs, tuple(points)), lines.all)


def _times_us(
    setup: CheckSetup, acc: Accelerator, ways: Mapping[str, Linear], rows: int, lines: Lines
) -> dict[str, float]:
    """Returns the times of those ways that can be captured."""
    first = next(iter(ways.values()))
    x = acc.random(acc.generator(rows), rows, first.weight.shape[1])
    out, us = torch.empty((rows, len(first.weight)), dtype=acc.torch_dtype, device=acc.place), {}
    for way, linear in ways.items():
        room = room_of(acc, linear, rows)

        def multiply(linear: Linear = linear, room: ProductRoom = room) -> None:
            acc.run(lambda: linear.apply(x, out, room))

        try:
            us[way] = acc.median_us(multiply, setup.effort.replays)
        except RuntimeError as error:  # torch's, and those of a capture
            if way != _ROW_SCALED:
                raise
            lines.add(f"{way}, {rows} rows", f"not here: {' '.join(str(error).split())[:200]}")
    return us


def _ways(acc: Accelerator, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[Linear, int]]]:
    """Yields each way's name, linear and fewest rows. Ours are for all rows, torch's products of codes and those of
    dequantised weights for as few as they may have."""
    generator = acc.generator(0)
    yield _BASE, (DenseLinear.of(acc.random(generator, outputs, inputs), None), 1)
    fp8 = random_linear(acc, generator, outputs, inputs, Code.F8_E4M3, Inputs.PER_TOKEN)
    int8 = random_linear(acc, generator, outputs, inputs, Code.I8, Inputs.PER_TOKEN)
    yield _OURS, (_without_torch(fp8, _ALL_ROWS), 1)
    if fp8.inputs is not Inputs.KEPT:  # torch multiplies two fp8 matrices
        by_torch = replace(fp8, torch_rows=1)
        yield _TORCHS, (by_torch, 1)
        yield _ROW_SCALED, (RowScaled(*(getattr(by_torch, field.name) for field in fields(by_torch))), 1)
    yield "int8, inputs per token", (_without_torch(int8, _ALL_ROWS), 1)
    yield "int8 by torch", (int8, int8.torch_rows)
    yield "int8, weights dequantised", (_without_torch(int8, 0), 1)
    for name, linear in (("fp8", fp8), ("int8", int8)):
        kept = replace(linear, inputs=Inputs.KEPT)
        yield f"{name} weights", (_without_torch(kept, _ALL_ROWS), 1)
        yield f"{name} weights, dequantised", (_without_torch(kept, 0), 1)


def _without_torch(linear: QuantizedLinear, fused_rows: int) -> QuantizedLinear:
    """Returns a linear whose codes torch never multiplies."""
    return replace(linear, torch_rows=_ALL_ROWS, fused_rows=fused_rows)
