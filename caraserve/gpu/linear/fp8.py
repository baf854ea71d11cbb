"""Weights in fp8 (e4m3).

Products of fp8 inputs with many rows are torch's (`torch._scaled_mm`, cuBLASLt), all others ours. torch's product of
rows with scales of their own would allocate memory, which a captured pass must not; so it multiplies with scales of 1,
and a kernel applies scales and bias to its result.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from caraserve.gpu.kernels.capability import FP8_CAPABILITY
from caraserve.gpu.kernels.quantized import scale_rows
from caraserve.gpu.linear.base import RoundedRows
from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.model.dtype import Code
from caraserve.model.formats.scaled_codes import Inputs, ScaledCodes

_TORCH_COLUMNS = 16  # torch's product needs multiples of it in inputs and outputs
FUSED_ROWS = 64  # up to here a product takes as long as reading the weights, and each launch beside it adds to that


@dataclass(frozen=True, slots=True)
class Fp8Linear(QuantizedLinear):
    """Implements Linear. `fused_rows`: most rows of a product that is never torch's."""

    code: ClassVar[Code] = Code.F8_E4M3

    fused_rows: int = FUSED_ROWS

    @classmethod
    def inputs_on(cls, capability: int, scheme: ScaledCodes) -> Inputs:
        """Returns how inputs are quantised: without instructions for fp8 nothing is gained from fp8 inputs, which only
        lose precision."""
        return scheme.inputs if capability >= FP8_CAPABILITY else Inputs.KEPT

    def apply(self, x: Tensor, out: Tensor, rounded: RoundedRows | None = None) -> None:
        is_torchs = self.rounds_inputs and len(x) > self.fused_rows and self._fits_torch(x.dtype, out)
        if not is_torchs:
            QuantizedLinear.apply(self, x, out, rounded)
            return
        codes, row_scale = self._rounded(x, rounded, torch.float8_e4m3fn)
        torch._scaled_mm(codes, self.weight.t(), self.one, self.one, out_dtype=out.dtype, out=out)
        scale_rows(out, self.scale, row_scale, self.bias)

    def _fits_torch(self, dtype: torch.dtype, out: Tensor) -> bool:
        """Returns whether torch has a product for these weights, inputs of this dtype, and this result."""
        fits = all(size % _TORCH_COLUMNS == 0 for size in self.weight.shape)
        return fits and dtype is torch.bfloat16 and out.is_contiguous()
