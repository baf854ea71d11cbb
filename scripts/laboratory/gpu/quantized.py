"""Stage `quantized`: times products with quantised weights beside those of bf16."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caraserve.gpu.kernels.capability import compute_capability
from caraserve.gpu.linear.base import TORCH_CODES, Linear, RoundedRows
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.fp8 import Fp8Linear
from caraserve.gpu.linear.int8 import Int8Linear
from caraserve.gpu.linear.quantized import QuantizedLinear
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


def rounded_rows(acc: Accelerator, rows: int, inputs: int) -> RoundedRows:
    """Returns memory for the quantised inputs of a product, full of NaN."""
    codes = torch.full((rows * inputs * 2,), 0xFF, dtype=torch.uint8, device=acc.place)
    return RoundedRows(codes, torch.full((rows,), torch.nan, device=acc.place))


_BASE, _OURS, _TORCHS = "bf16", "fp8, inputs per token", "the same by torch"
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
        x, room = acc.random(acc.generator(rows), rows, inputs), rounded_rows(acc, rows, inputs)
        out = torch.empty((rows, outputs), dtype=acc.torch_dtype, device=acc.place)
        us = {way: _time_us(setup, acc, linear, x, out, room) for way, linear in ways.items()}
        points.append(ProductPoint(rows, us))
        lines.add(f"gate and up, {rows} rows: µs", ", ".join(f"{way} {took:.0f}" for way, took in us.items()))
        best = min(us[_OURS], us.get(_TORCHS, us[_OURS])) / us[_BASE]
        if rows in (min(setup.effort.product_rows), max(setup.effort.product_rows)):
            target = _FEW_TARGET if rows == min(setup.effort.product_rows) else _MANY_TARGET
            lines.at_most(f"the better of fp8 ÷ bf16, {rows} rows", best, target)
    return StageResult(QuantizedFigures(outputs, inputs, tuple(points)), lines.all)


def _time_us(setup: CheckSetup, acc: Accelerator, linear: Linear, x: Tensor, out: Tensor, room: RoundedRows) -> float:
    return acc.median_us(lambda: acc.run(lambda: linear.apply(x, out, room)), setup.effort.replays)


def _ways(acc: Accelerator, outputs: int, inputs: int) -> Iterator[tuple[str, Linear]]:
    generator = acc.generator(0)
    yield _BASE, DenseLinear.of(acc.random(generator, outputs, inputs), None)
    fp8 = random_linear(acc, generator, outputs, inputs, Code.F8_E4M3, Inputs.PER_TOKEN)
    assert isinstance(fp8, Fp8Linear)
    yield _OURS, replace(fp8, fused_rows=_ALL_ROWS)
    if fp8.inputs is not Inputs.KEPT:  # torch multiplies two fp8 matrices
        yield _TORCHS, replace(fp8, fused_rows=0)
    yield "fp8 weights", replace(fp8, inputs=Inputs.KEPT)
    int8 = random_linear(acc, generator, outputs, inputs, Code.I8, Inputs.PER_TOKEN)
    yield "int8, inputs per token", int8
    yield "int8 weights", replace(int8, inputs=Inputs.KEPT)
