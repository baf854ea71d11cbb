"""Random quantised linear modules, for checks and measurements of their products."""

import torch

from caraserve.bench.gpu.accelerator import Accelerator
from caraserve.gpu.kernels.attention import compute_capability
from caraserve.gpu.quantized_linear import TORCH_CODES, QuantizedLinear, RoundedRows, inputs_on
from caraserve.model.dtype import Code
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.scaled_codes import Inputs

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
    quantized = inputs_on(capability, (Fp8 if code is Code.F8_E4M3 else Int8)(taken))
    given = torch.full((1,), _INPUT_SCALE, device=acc.place) if quantized is Inputs.STATIC else None
    return QuantizedLinear(
        codes.to(TORCH_CODES[code]),
        scale if given is None else scale * given,
        acc.random(generator, outputs) if has_bias else None,
        code,
        quantized,
        given,
        torch.ones(1, device=acc.place),
        capability,
    )


def rounded_rows(acc: Accelerator, rows: int, inputs: int) -> RoundedRows:
    """Returns memory for the quantised inputs of a product, full of NaN."""
    codes = torch.full((rows * inputs * 2,), 0xFF, dtype=torch.uint8, device=acc.place)
    return RoundedRows(codes, torch.full((rows,), torch.nan, device=acc.place))
