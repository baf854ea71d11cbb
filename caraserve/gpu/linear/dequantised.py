"""Products of many rows with weights in codes: the weights become numbers in a lane's room first, and are multiplied as
those of a checkpoint without codes are.

Our kernels make numbers of codes in registers, in each tile of rows again. For gate and up of a 7B shape and codes of
one byte, on an H200, that takes 48 µs with 64 rows, 127 with 256 and 861 with 2,048, where the product of numbers takes
48, 68 and 485 and making them, 90 MB of codes, an estimated 64.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.room import ProductRoom, RoomSize

FUSED_ROWS = 128  # most rows of a product in which our kernels make the numbers


def is_fused(rows: int, dtype: torch.dtype, most: int = FUSED_ROWS) -> bool:
    """Returns whether a product of inputs of `dtype` is that of our kernels. In float32 it always is: there a row's
    result is the same whatever the batch."""
    return rows <= most or dtype is torch.float32


def numbers_room(outputs: int, inputs: int, dtype: torch.dtype) -> RoomSize:
    """Returns the memory that `multiply_dequantised` needs."""
    return RoomSize.for_matrix(outputs, inputs * dtype.itemsize)


def multiply_dequantised(
    x: Tensor,
    out: Tensor,
    room: ProductRoom | None,
    bias: Tensor | None,
    dequantise: Callable[[slice, Tensor], None],
) -> None:
    """Computes `out = x weightᵀ + bias`. x: [rows, inputs]; out: [rows, outputs]; bias: [outputs]. `dequantise`: writes
    the weights of some outputs, in x's dtype."""
    assert room is not None
    for piece in room.pieces(out.shape[1], x.shape[1] * x.itemsize):
        numbers = room.matrix_as(x.dtype, piece.stop - piece.start, x.shape[1])
        dequantise(piece, numbers)
        DenseLinear.of(numbers, None if bias is None else bias[piece]).apply(x, out[:, piece])
