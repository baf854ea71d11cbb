"""Weights in fp8 (e4m3).

torch's product of codes (`torch._scaled_mm`, cuBLASLt) multiplies with scales of 1, and a kernel of ours applies scales
and bias to its result. Scales of rows would be torch's own on compute capability 9.0 alone: elsewhere that is a slower
kernel which allocates memory, as a captured pass must not, or fails.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from caraserve.gpu.kernels.capability import FP8_CAPABILITY
from caraserve.gpu.kernels.quantized import halve_rows, scale_rows
from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.gpu.linear.room import ProductRoom
from caraserve.model.dtype import Code
from caraserve.model.formats.scaled_codes import Inputs, ScaledCodes

# With 16 rows, gate and up of a 7B shape take 37 µs by our kernel and 33 by torch on an H200; matrices with less to
# read would lose more by the third launch.
_TORCH_ROWS = 17


@dataclass(frozen=True, slots=True)
class Fp8Linear(QuantizedLinear):
    """Implements Linear."""

    code: ClassVar[Code] = Code.F8_E4M3
    values: ClassVar[torch.dtype] = torch.float16  # which the GPU makes of codes by an instruction

    torch_rows: int = _TORCH_ROWS

    @classmethod
    def inputs_on(cls, capability: int, scheme: ScaledCodes) -> Inputs:
        """Returns how inputs are quantised: without instructions for fp8 nothing is gained from fp8 inputs, which only
        lose precision."""
        return scheme.inputs if capability >= FP8_CAPABILITY else Inputs.KEPT

    def torch_multiplies(self, dtype: torch.dtype, *, fills_rows: bool) -> bool:
        """Returns whether a result has the range of sums of codes, and torch writes it."""
        return dtype is torch.bfloat16 and fills_rows

    def taken_rows(self, rows: int, dtype: torch.dtype) -> int:
        if self.inputs is Inputs.KEPT and dtype is torch.bfloat16:
            return min(rows, self.fused_rows)
        return QuantizedLinear.taken_rows(self, rows, dtype)

    def taken(self, x: Tensor, room: ProductRoom | None) -> tuple[Tensor, Tensor | None]:
        """Returns the inputs as our kernel takes them: bf16 ones that are kept as float16, scaled by powers of two, for
        codes become float16 in half the time in which they become bf16."""
        if self.inputs is not Inputs.KEPT or x.dtype is not torch.bfloat16:
            return QuantizedLinear.taken(self, x, room)
        assert room is not None
        halves, scales = room.inputs_as(torch.float16, *x.shape), room.scales[: len(x)]
        halve_rows(x, halves, scales)
        return halves, scales

    def multiply_codes(self, x: Tensor, out: Tensor, room: ProductRoom | None) -> None:
        codes, row_scale = self.rounded(x, room, torch.float8_e4m3fn)
        torch._scaled_mm(codes, self.weight.t(), self.one, self.one, out_dtype=out.dtype, out=out)
        scale_rows(out, out, self.scale, row_scale, self.bias)
