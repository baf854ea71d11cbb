"""Random quantised linear modules, for checks and measurements of their products."""

import torch

from caraserve.gpu.kernels.capability import compute_capability
from caraserve.gpu.linear.base import RoundedRows
from caraserve.gpu.linear.formats import QUANTIZED
from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.model.dtype import Code
from caraserve.model.quantization import Inputs, Scheme
from scripts.laboratory.gpu.accelerator import Accelerator

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
    made = QUANTIZED[code]
    quantized = made.inputs_on(capability, Scheme(code, taken))
    given = torch.full((1,), _INPUT_SCALE, device=acc.place) if quantized is Inputs.STATIC else None
    return made(
        codes.to(made.stored),
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
