"""What fp8 and int8 share: a code of one byte for each weight, and a float32 scale for each output."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, decoded
from caraserve.model.formats import Matrix, TensorReader


class Inputs(Enum):
    """How a module's inputs are quantised before they are multiplied by its weights."""

    KEPT = "kept as they are"
    PER_TOKEN = "by a scale for each token"
    STATIC = "by a scale in the checkpoint"


@dataclass(frozen=True, slots=True)
class ScaledCodes:
    """Weight = code's value · scale of its output. Inputs that are quantised have the code of the weights."""

    inputs: Inputs
    code: ClassVar[Code]
    name: ClassVar[str]

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Returns `codes` [outputs, inputs] and `scale` [outputs]."""
        codes = tensors.codes(f"{module}.weight", shape, self.code)
        return Matrix({"codes": codes, "scale": tensors.scales(module, shape[0])})

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Raises ModelLoadError."""
        raise ModelLoadError(f"{tensor}: {self.name} weights of all experts in one tensor are not supported")

    def values(self, matrix: Matrix) -> NDArray[np.float32]:
        """Returns code times scale, rounded once."""
        values = decoded(matrix.arrays["codes"].astype(np.uint8, copy=False), self.code)
        values *= matrix.arrays["scale"].astype(np.float32, copy=False)[:, None]
        return values

    def num_bytes(self, inputs: int, outputs: int, itemsize: int) -> int:
        """Returns the bytes of codes and scales."""
        return outputs * (inputs + 4)
