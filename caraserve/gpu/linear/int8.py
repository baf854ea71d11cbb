"""Weights in int8.

torch's product of codes (`torch._int_mm`, cuBLASLt) writes int32 sums, which are exact, to the lane's room, and a
kernel of ours applies scales and bias.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from caraserve.gpu.kernels.quantized import scale_rows
from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from caraserve.model.dtype import Code

# torch refuses products of fewer than 17 rows, or of fewer than 32 pads them in memory that it allocates, which a
# captured pass must not.
_TORCH_ROWS = 32
_SLOW = range(100, 120)  # compute capabilities on which cuBLASLt has kernels of older GPUs alone, slower than bf16's


@dataclass(frozen=True, slots=True)
class Int8Linear(QuantizedLinear):
    """Implements Linear."""

    code: ClassVar[Code] = Code.I8
    values: ClassVar[torch.dtype] = torch.bfloat16  # which Triton makes of codes in half the time of float16

    torch_rows: int = _TORCH_ROWS

    def torch_multiplies(self, dtype: torch.dtype, *, fills_rows: bool) -> bool:
        """Returns whether integers are multiplied fast, and need not be as our kernel multiplies them, as in
        float32."""
        return self.capability not in _SLOW and dtype is not torch.float32

    def sums_room(self, rows: int) -> RoomSize:
        return RoomSize.for_matrix(len(self.weight), rows * torch.int32.itemsize)

    def multiply_codes(self, x: Tensor, out: Tensor, room: ProductRoom | None) -> None:
        codes, row_scale = self.rounded(x, room, torch.int8)
        assert room is not None
        for piece in room.pieces(out.shape[1], len(x) * torch.int32.itemsize):
            sums = room.matrix_as(torch.int32, len(x), piece.stop - piece.start)
            torch._int_mm(codes, self.weight[piece].t(), out=sums)
            bias = None if self.bias is None else self.bias[piece]
            scale_rows(sums, out[:, piece], self.scale[piece], row_scale, bias)
