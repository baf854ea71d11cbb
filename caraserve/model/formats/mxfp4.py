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
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


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
        if inputs % GROUP:
            raise ModelLoadError(f"{module} has {inputs} inputs, not a multiple of {GROUP}, which MXFP4 needs")
        groups = (*outputs, inputs // GROUP)
        codes = tensors.codes(f"{module}_blocks", (*groups, GROUP // 2), Code.U8)
        scale = tensors.codes(f"{module}_scales", groups, Code.U8)
        if scale.max() > _LARGEST_SCALE:
            raise ModelLoadError(
                f"{module}_scales has {scale.max()}; scales up to {_LARGEST_SCALE} (2^{_LARGEST_SCALE - BIAS}) are "
                "computed"
            )
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


MXFP4 = Mxfp4()
