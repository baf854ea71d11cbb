"""A made-up weight format: blocks of 32 inputs, a code of four bits for each weight and a scale for each block."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, to_float32
from caraserve.model.formats import Matrix, TensorReader

BLOCK = 32  # inputs
ZERO = 8  # the code of 0


@dataclass(frozen=True, slots=True)
class FourBits:
    """Weight = (code - 8) · scale of its block; a byte has the codes of two inputs, the lower one first."""

    name: str = "four-bits"

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Returns `codes` [outputs, inputs / 2] and `scale` [outputs, inputs / 32]."""
        outputs, inputs = shape
        scale = to_float32(*tensors(f"{module}.scale", (outputs, inputs // BLOCK)))
        return Matrix({"codes": tensors.codes(module, (outputs, inputs // 2), Code.I8), "scale": scale})

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Raises ModelLoadError."""
        raise ModelLoadError(f"{tensor}: no experts in four bits are stored so")

    def values(self, matrix: Matrix) -> NDArray[np.float32]:
        """Returns code less 8 times scale, rounded once."""
        codes = matrix.arrays["codes"].astype(np.uint8, copy=False)
        pairs = np.stack([codes & 15, codes >> 4], axis=2).astype(np.float32) - ZERO
        return pairs.reshape(len(codes), -1) * np.repeat(matrix.arrays["scale"].astype(np.float32), BLOCK, axis=1)

    def num_bytes(self, inputs: int, outputs: int, itemsize: int) -> int:
        """Returns the bytes of codes and scales."""
        return outputs * (inputs // 2 + 4 * inputs // BLOCK)
