"""Compares products with quantised weights with fp64, for every way of storing weights and taking inputs."""

import torch
from torch import Tensor

from caraserve.bench.gpu.accelerator import Accelerator
from caraserve.bench.gpu.quantized_case import random_linear, rounded_rows
from caraserve.bench.gpu.results import check_close
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.gpu.quantized_linear import QuantizedLinear
from caraserve.model.dtype import Code, Dtype
from caraserve.model.quantization import Inputs

_MOST_ROWS = 300  # more than any tile has
# Of 1 or of the result, if that is larger. Products of torch are rounded twice.
_TOLERANCE = {Dtype.F32: 5e-5, Dtype.BF16: 2.0**-6, Dtype.F16: 2.0**-9}


def check_quantized(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks all combinations of codes and inputs, with one number of rows for each; a bias in every other case."""
    generator, worst = acc.generator(case), 0.0
    inputs, outputs, counts = setup.effort.shape.hidden, setup.effort.shape.intermediate, setup.effort.product_rows
    for index, (code, taken) in enumerate((code, taken) for code in Code for taken in Inputs):
        linear = random_linear(acc, generator, outputs, inputs, code, taken, has_bias=bool(case % 2))
        x = acc.random(generator, min(counts[(case + index) % len(counts)], _MOST_ROWS), inputs)
        x[0, : inputs // 2] *= 1e-3
        worst = max(worst, _check(acc, linear, x))
    return worst


def _check(acc: Accelerator, linear: QuantizedLinear, x: Tensor) -> float:
    rows, inputs = x.shape
    room = rounded_rows(acc, rows, inputs)
    out = torch.full((rows, len(linear.weight)), torch.nan, dtype=acc.torch_dtype, device=acc.place)
    acc.run(lambda: linear.apply(x, out, room))
    acc.settle()
    name = f"{rows} rows, {linear.code.value} weights, inputs {linear.inputs.value}, {acc.dtype.name}"
    return check_close(name, out, expected(linear, x), _TOLERANCE[acc.dtype])


def expected(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """Returns the result from torch's own rounding of the inputs, in float64."""
    values, scale = x.double(), linear.scale.double()
    if linear.inputs is not Inputs.KEPT:
        largest = linear.code.largest
        own = (x.float().abs().amax(1, keepdim=True) / largest).clamp(min=1e-30)
        by = own if linear.input_scale is None else linear.input_scale
        limited = (x.float() / by).clamp(-largest, largest)
        values = (limited.round() if linear.code is Code.I8 else limited.to(torch.float8_e4m3fn)).double()
        if linear.input_scale is None:
            values *= own.double()
    sums = values @ linear.weight.double().t() * scale
    return sums if linear.bias is None else sums + linear.bias.double()
