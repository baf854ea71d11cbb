"""Compares products with quantised weights with fp64, for every way of storing weights and taking inputs; and the
codes of the inputs with the nearest ones, bit by bit."""

import torch
from torch import Tensor

from caraserve.gpu.kernels.quantized import round_rows
from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from caraserve.model.dtype import Code, Dtype
from caraserve.model.formats.scaled_codes import Inputs
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.quantized import random_linear, room_of
from scripts.laboratory.gpu.results import check_close
from scripts.laboratory.gpu.setup import CheckSetup
from tests.gpu_device.nearest_codes import nearest_codes

_CODES = Code.F8_E4M3, Code.I8
_MOST_ROWS = 300  # more than any tile has
# Of 1 or of the result, if that is larger. Products of torch are rounded twice, the numbers of codes once more.
_TOLERANCE = {Dtype.F32: 5e-5, Dtype.BF16: 2.0**-6, Dtype.F16: 2.0**-9}


def check_quantized(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks all combinations of codes and inputs, with one number of rows for each; a bias in every other case."""
    generator, worst = acc.generator(case), 0.0
    inputs, outputs, counts = setup.effort.shape.hidden, setup.effort.shape.intermediate, setup.effort.product_rows
    for index, (code, taken) in enumerate((code, taken) for code in _CODES for taken in Inputs):
        linear = random_linear(acc, generator, outputs, inputs, code, taken, has_bias=bool(case % 2))
        x = acc.random(generator, min(counts[(case + index) % len(counts)], _MOST_ROWS), inputs)
        x[0, : inputs // 2] *= 1e-3
        worst = max(worst, _check(acc, linear, x))
    return worst


def _check(acc: Accelerator, linear: QuantizedLinear, x: Tensor) -> float:
    rows = len(x)
    room = room_of(acc, linear, rows)
    out = torch.full((rows, len(linear.weight)), torch.nan, dtype=acc.torch_dtype, device=acc.place)
    acc.run(lambda: linear.apply(x, out, room))
    acc.settle()
    name = f"{rows} rows, {linear.code.value} weights, inputs {linear.inputs.value}, {acc.dtype.name}"
    if linear.inputs is Inputs.KEPT:
        return check_close(name, out, _products(linear, x.double()), _TOLERANCE[acc.dtype])
    values, scales = nearest_codes(x, linear.code, linear.input_scale)
    _check_codes(name, acc, linear, x, values, scales)
    taken = values.double() * (scales.double()[:, None] if linear.input_scale is None else 1.0)
    return check_close(name, out, _products(linear, taken), _TOLERANCE[acc.dtype])


def _check_codes(
    name: str, acc: Accelerator, linear: QuantizedLinear, x: Tensor, values: Tensor, scales: Tensor
) -> None:
    """Checks that the inputs are quantised to `values`, by `scales`, in each form that a product takes them in."""
    room = ProductRoom.empty(RoomSize(inputs=2 * x.numel()), len(x), acc.place)
    for form in (linear.values, *([torch.int8] if linear.code is Code.I8 else [torch.float8_e4m3fn])):
        codes = room.inputs_as(form, *x.shape)
        acc.run(lambda codes=codes: round_rows(x, codes, room.scales, linear.code, linear.input_scale))
        acc.settle()
        check_close(f"codes as {form}, {name}", codes.float(), values, 0.0)
    if linear.input_scale is None:
        check_close(f"scales of codes, {name}", room.scales[: len(x)], scales, 0.0)


def _products(linear: QuantizedLinear, taken: Tensor) -> Tensor:
    """Returns the products of the weights with inputs `taken`, float64. A scale in the checkpoint is part of the
    weights'."""
    sums = taken @ linear.weight.double().t() * linear.scale.double()
    return sums if linear.bias is None else sums + linear.bias.double()
