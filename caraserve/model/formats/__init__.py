"""Formats in which a linear's weights are stored: one file each, with a numpy reference of the values.

A backend finds its kernels for a format by the format's name (`cpu/linear/`, `gpu/linear/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.model.dtype import Code, Dtype

Array = NDArray[np.generic]
# Ends of the names of scales by which codes are multiplied; the second is transformers' for one scale of all weights.
SCALES = (".weight_scale", ".weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weights of a linear as stored: arrays by name, each with the outputs as its first axis."""

    arrays: Mapping[str, Array]
    dtype: Dtype | None = None  # of weights that are plain numbers
    group: int = 0  # inputs with one scale, of weights that are grouped codes
    order: tuple[int, ...] | None = None  # the input of each column, if columns are in another order than inputs

    def rows(self, rows: range | tuple[int, ...]) -> "Matrix":
        """Returns the weights of some outputs, in their order."""
        index = slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else list(rows)
        return replace(self, arrays={name: array[index] for name, array in self.arrays.items()})


class TensorReader(Protocol):
    """Reads the tensors of a checkpoint. Every error is a ModelLoadError that names the tensor."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[Array, Dtype]:
        """Reads a tensor of plain numbers, which must have this shape."""

    def codes(self, name: str, shape: tuple[int, ...], code: Code) -> NDArray[np.uint8]:
        """Reads codes of one byte, which must have this shape."""

    def blocks(self, name: str, shape: tuple[int, ...], kind: str) -> NDArray[np.uint8]:
        """Reads the blocks of a tensor of a GGUF file, which must have this shape and type: [..., bytes of a row]."""

    def words(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint32]:
        """Reads a tensor of integers of 32 bits, which must have this shape."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor, None if there is no such tensor."""

    def scales(self, module: str, outputs: int) -> NDArray[np.float32]:
        """Reads the scale of each output; the checkpoint may have one for all."""


class WeightFormat(Protocol):
    """How the weights of a linear are stored, and what they stand for."""

    @property
    def name(self) -> str:
        """The name by which backends find their kernels."""

    def main_tensors(self, module: str) -> tuple[str, ...]:
        """Returns the names of tensors of which each module of this format has one."""

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads a module's weights of shape [outputs, inputs]. Raises ModelLoadError."""

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Reads the weights of all experts from one tensor, or from tensors with its name and endings. Arrays have the
        experts as their first axis. Raises ModelLoadError, also if the format has none such."""

    def values(self, matrix: Matrix) -> NDArray[np.float32]:
        """Returns the weights as numbers, [outputs, inputs]: the reference for kernels."""

    def num_bytes(self, inputs: int, outputs: int, itemsize: int) -> int:
        """Returns the bytes of a matrix in memory. `itemsize`: of a weight that is stored as a number."""
