"""Weights stored as numbers: float32, bfloat16 or float16."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.model.dtype import to_float32
from caraserve.model.formats import Matrix, TensorReader


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers of a floating-point type, which `--dtype` may convert to another."""

    name: str = "plain"

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}.weight",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Returns `weight`, [outputs, inputs]: float32, or the bits of a 16-bit type."""
        raw, dtype = tensors(f"{module}.weight", shape)
        return Matrix({"weight": raw}, dtype)

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Returns `weight`, as `read` does, in the tensor's shape."""
        raw, dtype = tensors(tensor, shape)
        return Matrix({"weight": raw}, dtype)

    def values(self, matrix: Matrix) -> NDArray[np.float32]:
        """Returns the weights as float32, exactly."""
        assert matrix.dtype is not None
        return to_float32(matrix.arrays["weight"], matrix.dtype)

    def num_bytes(self, inputs: int, outputs: int, itemsize: int) -> int:
        """Returns the bytes of `inputs` · `outputs` numbers."""
        return inputs * outputs * itemsize


PLAIN = Plain()
