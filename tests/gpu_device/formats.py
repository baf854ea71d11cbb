"""Stage `formats`: compares products with weights in grouped codes with the numbers that they stand for, for every
kind of codes, and times them beside those of bf16."""

from dataclasses import dataclass

import torch
from torch import Tensor

from caraserve.gpu.kernels.grouped import GroupedMatrix
from caraserve.gpu.linear.base import LinearLoader
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.dequantised import FUSED_ROWS
from caraserve.gpu.linear.grouped import GroupedLinear, load_matrices
from caraserve.model.linear_plan import LinearPlan
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.backends import DTYPE
from scripts.laboratory.gpu.quantized import room_of
from scripts.laboratory.gpu.results import Lines, StageResult, check_close
from scripts.laboratory.gpu.setup import CheckSetup
from tests.gpu_device.grouped_codes import KINDS, MadeUp, plain_values, read_made_up

_ROWS = 1, 7, 64, FUSED_ROWS + 1
_OUTPUTS, _INPUTS = 160, 512  # of products that are checked
_TOLERANCE = 2.0**-6  # of products in bf16
_TIMED = "Q4_0", "Q8_0", "Q4_K", "GPTQ", "nf4"
_KEPT_S = 3.0


@dataclass(frozen=True, slots=True)
class FormatFigures:
    """Times of products with a square matrix, in µs, by format and rows."""

    size: int
    us: dict[str, dict[int, float]]


def formats(setup: CheckSetup) -> StageResult[FormatFigures]:
    """Runs the stage. Raises WrongResult at the first wrong result."""
    acc, lines = setup.accelerator(DTYPE), Lines()
    for kind in KINDS:
        _check(acc, kind, packed(acc, kind, _OUTPUTS, _INPUTS))
    lines.add("products with grouped codes", f"{len(KINDS)} kinds right, every weight to the bit")
    size, us = max(_INPUTS, setup.effort.shape.hidden), dict[str, dict[int, float]]()
    plain = DenseLinear.of(acc.random(acc.generator(0), size, size), None)
    for name in ("bf16", *_TIMED):
        if setup.left_s < _KEPT_S:
            lines.add(f"{name}: µs", "not timed: the stage's time is up")
            continue
        linear = plain if name == "bf16" else GroupedLinear(packed(acc, name, size, size), None)
        us[name] = {rows: _time_us(setup, acc, linear, rows, size) for rows in setup.effort.product_rows}
        lines.add(f"{name}: µs", ", ".join(f"{rows} rows {took:.0f}" for rows, took in us[name].items()))
    return StageResult(FormatFigures(size, us), lines.all)


def packed(acc: Accelerator, kind: str, outputs: int, inputs: int) -> GroupedMatrix:
    """Returns random weights on the device."""
    one = torch.ones(1, device=acc.place)
    loader = LinearLoader(acc.torch_dtype, acc.place, lambda name, target: None, read_made_up, one)
    stored, linear = MadeUp.of(kind), LinearPlan.of_role("module", inputs, outputs, "out")
    return load_matrices(loader, stored, (linear,))[0]


def _check(acc: Accelerator, kind: str, matrix: GroupedMatrix) -> None:
    """Rows of one 1 pick out weights, which have to be equal to the bit; random rows have sums of them."""
    values, linear = plain_values(matrix).to(acc.place).to(acc.torch_dtype), GroupedLinear(matrix, None)
    ones = torch.eye(_INPUTS, dtype=acc.torch_dtype, device=acc.place)
    check_close(f"weights of {kind}, many rows", _product(acc, linear, ones), values.T, 0.0)
    for few in ones.split(FUSED_ROWS):
        check_close(f"weights of {kind}", _product(acc, linear, few), few @ values.T, 0.0)
    for rows in _ROWS:
        x = acc.random(acc.generator(rows), rows, _INPUTS)
        wanted = x.double() @ values.double().T
        check_close(f"{rows} rows times {kind}", _product(acc, linear, x), wanted, _TOLERANCE)


def _product(acc: Accelerator, linear: GroupedLinear, x: Tensor) -> Tensor:
    out, room = torch.full((len(x), _OUTPUTS), torch.nan, dtype=x.dtype, device=acc.place), room_of(acc, linear, len(x))
    acc.run(lambda: linear.apply(x, out, room))
    acc.settle()
    return out


def _time_us(setup: CheckSetup, acc: Accelerator, linear: GroupedLinear | DenseLinear, rows: int, size: int) -> float:
    x = acc.random(acc.generator(rows), rows, size)
    out, room = torch.empty_like(x), room_of(acc, linear, rows)
    return acc.median_us(lambda: acc.run(lambda: linear.apply(x, out, room)), setup.effort.replays)
