"""Quantised linear modules on the device: which kernels compute their products.

Products of fp8 inputs with many rows are torch's (`torch._scaled_mm`, cuBLASLt), all others ours. torch's product of
rows with scales of their own would allocate memory, which a captured pass must not; so it multiplies with scales of 1,
and a kernel applies scales and bias to its result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from caraserve.core.lora_layout import GROUPS
from caraserve.gpu.kernels.quantized import FP8_CAPABILITY, multiply, round_rows, scale_rows
from caraserve.model.dtype import Code
from caraserve.model.formats.scaled_codes import Inputs, ScaledCodes
from caraserve.model.spec import ModelSpec

TORCH_CODES = {Code.F8_E4M3: torch.float8_e4m3fn, Code.I8: torch.int8}
_TORCH_COLUMNS = 16  # torch's fp8 product needs multiples of it in inputs and outputs
FUSED_ROWS = 64  # up to here a product takes as long as reading the weights, and each launch beside it adds to that


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """A lane's memory for quantised inputs of one product."""

    codes: Tensor  # uint8 [rows · widest input · 2]
    scales: Tensor  # float32 [rows]

    @classmethod
    def empty(cls, spec: ModelSpec, rows: int, device: torch.device) -> "RoundedRows":
        widest = max(spec.site_shape(group[0])[0] for group in GROUPS)
        codes = torch.empty(rows * widest * torch.float16.itemsize, dtype=torch.uint8, device=device)
        return cls(codes, torch.empty(rows, dtype=torch.float32, device=device))

    def room(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for codes, or for their values, [rows, width]."""
        return self.codes[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


def inputs_on(capability: int, scheme: ScaledCodes) -> Inputs:
    """Returns how a module's inputs are quantised on a GPU of this compute capability: without instructions for fp8
    there is nothing to gain from fp8 inputs, which only lose precision."""
    if scheme.code is Code.F8_E4M3 and capability < FP8_CAPABILITY:
        return Inputs.KEPT
    return scheme.inputs


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """One or more quantised modules that read the same input, with their outputs concatenated."""

    weight: Tensor  # codes [outputs, inputs]: float8_e4m3fn or int8
    scale: Tensor  # float32 [outputs], times `input_scale` if there is one
    bias: Tensor | None  # [outputs]
    code: Code
    inputs: Inputs
    input_scale: Tensor | None  # float32 [1] of STATIC inputs, the largest of the modules'
    one: Tensor  # float32 [1]
    capability: int
    fused_rows: int = FUSED_ROWS  # most rows of a product that is never torch's

    def apply(self, x: Tensor, out: Tensor, rounded: RoundedRows | None = None) -> None:
        """Computes `out = x weightᵀ · scale + bias`, [rows, …]; `rounded` is overwritten if inputs are quantised."""
        if self.inputs is Inputs.KEPT:
            self._multiply(x, out, None)
            return
        assert rounded is not None
        rows, width = x.shape
        is_torchs = rows > self.fused_rows and self._fits_torch(x.dtype)
        # Ours multiplies values: float16 has those of all codes.
        codes = rounded.room(rows, width, torch.float8_e4m3fn if is_torchs else torch.float16)
        round_rows(x, codes, rounded.scales, self.code, self.input_scale)
        row_scale = rounded.scales[:rows] if self.inputs is Inputs.PER_TOKEN else None
        if is_torchs:
            torch._scaled_mm(codes, self.weight.t(), self.one, self.one, out_dtype=out.dtype, out=out)
            scale_rows(out, self.scale, row_scale, self.bias)
        else:
            self._multiply(codes, out, row_scale)

    def _fits_torch(self, dtype: torch.dtype) -> bool:
        """Returns whether torch has a product for these weights and inputs of this dtype."""
        is_supported = self.code is Code.F8_E4M3 and dtype is torch.bfloat16
        return is_supported and all(size % _TORCH_COLUMNS == 0 for size in self.weight.shape)

    def _multiply(self, x: Tensor, out: Tensor, row_scale: Tensor | None) -> None:
        codes = self.weight.view(torch.int8)
        multiply(x, codes, out, self.scale, self.code, self.capability, row_scale, self.bias)
