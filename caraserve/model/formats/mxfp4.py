"""MXFP4 weights of experts, as published checkpoints of GPT-OSS store them: codes of 4 bits (E2M1), and a power of two
for each 32 inputs of an output."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code
from caraserve.model.formats import Matrix, TensorReader

GROUP = 32  # inputs with one scale
BIAS = 127  # of a scale's exponent
_LARGEST_SCALE = 240  # 2^113: with it no weight overflows; 255 stands for NaN
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))  # of codes
_VALUES = np.array(VALUES, np.float32)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Weight = value of its code · 2^(scale - 127). The low four bits of a byte are the code of the input before that
    of the high ones."""

    name: ClassVar[str] = "mxfp4"

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Returns `codes` [outputs, inputs / 2] and `scale` [outputs, inputs / 32]."""
        return self._read(tensors, module, shape)

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Returns what `read` does, of each expert."""
        return self._read(tensors, tensor, shape)

    def _read(self, tensors: TensorReader, module: str, shape: tuple[int, ...]) -> Matrix:
        *outputs, inputs = shape
        check_inputs(module, inputs)
        groups = (*outputs, inputs // GROUP)
        codes = tensors.codes(f"{module}_blocks", (*groups, GROUP // 2), Code.U8)
        scale = tensors.codes(f"{module}_scales", groups, Code.U8)
        check_scales(module, int(scale.max()))
        return Matrix({"codes": codes.reshape(*outputs, inputs // 2), "scale": scale})

    def values(self, matrix: Matrix) -> NDArray[np.float32]:
        """Returns the weights as numbers, exactly."""
        codes = matrix.arrays["codes"].astype(np.uint8, copy=False)
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        exponents = matrix.arrays["scale"].astype(np.int32) - BIAS
        return np.ldexp(_VALUES[pairs], np.repeat(exponents, GROUP, axis=-1))

    def num_bytes(self, inputs: int, outputs: int, itemsize: int) -> int:
        """Returns the bytes of codes and scales."""
        return outputs * (inputs // 2 + inputs // GROUP)


def check_inputs(module: str, inputs: int) -> None:
    """Raises ModelLoadError unless inputs are a whole number of groups."""
    if inputs % GROUP:
        raise ModelLoadError(f"{module} has {inputs} inputs, not a multiple of {GROUP}, which MXFP4 needs")


def check_scales(module: str, largest: int) -> None:
    """Raises ModelLoadError for a largest scale with which weights could be too large."""
    if largest > _LARGEST_SCALE:
        raise ModelLoadError(
            f"{module}_scales has {largest}; scales up to {_LARGEST_SCALE} (2^{_LARGEST_SCALE - BIAS}) are computed"
        )


MXFP4 = Mxfp4()
