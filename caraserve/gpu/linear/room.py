"""The memory that products need beside their inputs and outputs. A lane has one room, which its products share."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from caraserve.util.units import align_up, ceil_div

_MOST_MATRIX_BYTES = 256 << 20  # so that gate and up of an 8B shape (235 MB in bf16) are dequantised at once
_STEP = 16  # outputs: products of torch need multiples of it


@dataclass(frozen=True, slots=True)
class RoomSize:
    """Bytes of a room."""

    inputs: int = 0  # of the inputs in another form
    matrix: int = 0  # of weights as numbers, or of sums

    @classmethod
    def for_all(cls, sizes: Iterable["RoomSize"]) -> "RoomSize":
        """Returns the size that is enough for each of `sizes`."""
        found = list(sizes)
        return cls(max((size.inputs for size in found), default=0), max((size.matrix for size in found), default=0))

    @classmethod
    def for_matrix(cls, outputs: int, bytes_of_output: int, inputs: int = 0) -> "RoomSize":
        """Returns the size for a matrix of so many outputs, which are computed in pieces if they take more than
        256 MiB."""
        return cls(inputs, min(outputs * bytes_of_output, max(_MOST_MATRIX_BYTES, _STEP * bytes_of_output)))


@dataclass(frozen=True, slots=True)
class ProductRoom:
    """A lane's memory for one product at a time."""

    inputs: Tensor  # uint8 [bytes]
    scales: Tensor  # float32 [rows], of the inputs
    matrix: Tensor  # uint8 [bytes]

    @classmethod
    def empty(cls, size: RoomSize, rows: int, device: torch.device) -> "ProductRoom":
        """Allocates memory for products of up to `rows` rows."""

        def memory(num_bytes: int) -> Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

        scales = torch.empty(rows if size.inputs else 0, dtype=torch.float32, device=device)
        return cls(memory(size.inputs), scales, memory(size.matrix))

    def inputs_as(self, dtype: torch.dtype, rows: int, width: int) -> Tensor:
        """Returns memory for inputs, [rows, width]."""
        return _view(self.inputs, dtype, rows, width)

    def matrix_as(self, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """Returns memory for weights or sums, [rows, columns]."""
        return _view(self.matrix, dtype, rows, columns)

    def pieces(self, outputs: int, bytes_of_output: int) -> Iterator[slice]:
        """Yields ranges of outputs for which `matrix` has room, as few and as equal as multiples of 16 allow."""
        fitting = self.matrix.numel() // bytes_of_output
        step = outputs
        if fitting < outputs:
            step = align_up(ceil_div(outputs, ceil_div(outputs, fitting // _STEP * _STEP)), _STEP)
        for start in range(0, outputs, step):
            yield slice(start, min(start + step, outputs))


def _view(memory: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
