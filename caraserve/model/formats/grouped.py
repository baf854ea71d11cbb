"""Weights as codes of a few bits with a scale for each group of inputs: what most quantised formats amount to.

A file's format reads its tensors into the arrays below; kernels know only `GroupedCodes`. In fp32, and in this order:

    weight = rounded(fma(values[code], scale, offset))

Kernels compute exactly these numbers and multiply inputs by them in the order of a dense matrix, so that a quantised
model gives the bits that a model of its dequantised weights gives.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import NAMES, Code, Dtype, decoded, rounded, to_float32
from caraserve.model.formats import Matrix, TensorReader
from caraserve.util.units import ceil_div

SUPER_GROUP = 256  # inputs with one scale of scales (Scale.NESTED)


class Scale(Enum):
    """How scales are stored: `scale`, [outputs, groups], and what else belongs to them."""

    F32 = "float32"
    F16 = "bits of float16"
    BF16 = "bits of bfloat16"
    E4M3 = "fp8 codes, each divided by its output's `divisor` (float32 [outputs])"
    E8M0 = "exponents: 2^(scale - 127)"
    NESTED = "int8 or uint8, times `super_scale` (float16 bits, [outputs, inputs / 256])"


class Offset(Enum):
    """What is added to a product of value and scale."""

    NONE = "nothing"
    ADDED = "`offset`, [outputs, groups], stored as scales are (F32, F16 or BF16)"
    ZERO = "-scale · `zero` (uint8 [outputs, groups])"
    NESTED = "-`super_offset` · `offset`: float16 bits [outputs, inputs / 256], uint8 [outputs, groups]"


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """What codes stand for; two formats that agree in it have the same kernels.

    `codes` are uint8 [outputs, inputs], one code a byte, in a `Matrix`; backends pack them. If the groups are not of
    consecutive inputs, the columns of `codes` are sorted by group, and `Matrix.order` has the input of each column.
    """

    bits: int  # 4, 5, 6 or 8
    values: tuple[float, ...]  # of the codes, 2^bits; integers may be computed instead of looked up
    scale: Scale
    offset: Offset = Offset.NONE
    rounds_to: Dtype | None = None  # what a weight is rounded to after all, as the format's library does

    @property
    def are_integers(self) -> bool:
        """Whether the value of a code is the code plus a constant."""
        return all(value - code == self.values[0] for code, value in enumerate(self.values))


def centred(bits: int) -> tuple[float, ...]:
    """Returns the values of unsigned codes of which the middle one stands for 0."""
    return tuple(float(code - (1 << bits - 1)) for code in range(1 << bits))


INTEGERS_4, INTEGERS_5, INTEGERS_8 = (tuple(float(code) for code in range(1 << bits)) for bits in (4, 5, 8))
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (*_POSITIVE, *(-value for value in _POSITIVE))  # E2M1

POWER_BIAS = 127  # of the exponents in scales of Scale.E8M0
_LARGEST_POWER = 240  # 2^113: with it no weight overflows; 255 stands for NaN
_LARGEST = {Dtype.F32: float(np.finfo(np.float32).max), Dtype.F16: 65504.0, Dtype.BF16: (2 - 2**-7) * 2.0**127}
_SCALE_BYTES = {Scale.F32: 4, Scale.F16: 2, Scale.BF16: 2, Scale.E4M3: 1, Scale.E8M0: 1, Scale.NESTED: 1}


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """A format of grouped codes. A file's format derives from it, and reads the arrays of `GroupedCodes`."""

    name: str
    kind: GroupedCodes
    group: int  # inputs with one scale; 0: all

    def main_tensors(self, module: str) -> tuple[str, ...]:
        """Returns the names of tensors of which each module of this format has one."""
        return (f"{module}.weight",)

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Raises ModelLoadError: most formats never have weights of all experts in one tensor."""
        raise ModelLoadError(f"{tensor}: {self.name} weights of all experts in one tensor are not supported")

    def values(self, matrix: Matrix) -> NDArray[np.float32]:
        """Returns the weights as numbers, in the order of the inputs."""
        return values_of(self.kind, matrix)

    def num_bytes(self, inputs: int, outputs: int, itemsize: int) -> int:
        """Returns the bytes of codes, scales and offsets."""
        groups, supers = ceil_div(inputs, self.group or inputs), ceil_div(inputs, SUPER_GROUP)
        scale_bytes = _SCALE_BYTES[self.kind.scale]
        match self.kind.offset:
            case Offset.NONE:
                offset_bytes = 0
            case Offset.ADDED:
                offset_bytes = scale_bytes
            case Offset.ZERO | Offset.NESTED:
                offset_bytes = 1
        above = 2 * supers * ((self.kind.scale is Scale.NESTED) + (self.kind.offset is Offset.NESTED))
        divisor = 4 if self.kind.scale is Scale.E4M3 else 0
        return outputs * (
            ceil_div(inputs * self.kind.bits, 8) + groups * (scale_bytes + offset_bytes) + above + divisor
        )


def check_scales(tensor: str, scales: NDArray[np.float32], kind: GroupedCodes) -> None:
    """Raises ModelLoadError for scales that are not numbers, and for those with which weights could be infinite."""
    reach = max(map(abs, kind.values))
    if kind.offset is Offset.ZERO:
        reach = max(reach, 1 << kind.bits)
    largest = max(float(np.max(scales)), -float(np.min(scales)))
    dtype = kind.rounds_to or Dtype.F32
    limit = _LARGEST[dtype] / reach
    if not largest <= limit:  # nor if it is NaN
        raise ModelLoadError(
            f"tensor {tensor} has a scale of {largest:.4g}; finite ones up to {limit:.4g}, with which no weight "
            f"overflows {NAMES[dtype]}, are computed"
        )


def check_powers(tensor: str, largest: int) -> None:
    """Raises ModelLoadError for a largest scale of `Scale.E8M0` with which weights could be too large."""
    if largest > _LARGEST_POWER:
        raise ModelLoadError(
            f"{tensor} has a scale of {largest}; scales up to {_LARGEST_POWER} (2^{_LARGEST_POWER - POWER_BIAS}) "
            "are computed"
        )


def values_of(kind: GroupedCodes, matrix: Matrix) -> NDArray[np.float32]:
    """Returns the weights of a matrix as numbers, [outputs, inputs], in the order of the inputs: the reference for
    kernels. The last group may have fewer inputs than others."""
    codes, group = matrix.arrays["codes"], matrix.group
    inputs = codes.shape[-1]

    def spread(values: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        return np.repeat(values, count, axis=-1)[..., :inputs]

    scale = _scales(kind, group, matrix)
    weights: NDArray[np.float32] = np.asarray(kind.values, np.float32)[codes] * spread(scale, group)
    offset = _offsets(kind, group, matrix, scale)
    if offset is not None:
        # A product of value and scale has less than 24 bits wherever there is an offset, so the sum rounds once.
        weights = weights + spread(offset, group)
    if kind.rounds_to is not None:
        weights = to_float32(rounded(weights, kind.rounds_to), kind.rounds_to)
    if matrix.order is not None:
        weights = weights[..., np.argsort(matrix.order)]
    return weights


def _scales(kind: GroupedCodes, group: int, matrix: Matrix) -> NDArray[np.float32]:
    scale = matrix.arrays["scale"]
    match kind.scale:
        case Scale.E4M3:
            divisor = matrix.arrays["divisor"].astype(np.float32, copy=False)
            return decoded(scale.astype(np.uint8), Code.F8_E4M3) / divisor[..., None]
        case Scale.E8M0:
            powers: NDArray[np.float32] = np.ldexp(
                np.ones(scale.shape, np.float32), scale.astype(np.int32) - POWER_BIAS
            )
            return powers
        case Scale.NESTED:
            above = to_float32(matrix.arrays["super_scale"], Dtype.F16)
            return np.repeat(above, SUPER_GROUP // group, axis=-1) * scale.astype(np.float32)
        case _:
            return to_float32(scale, Dtype[kind.scale.name])


def _offsets(kind: GroupedCodes, group: int, matrix: Matrix, scale: NDArray[np.float32]) -> NDArray[np.float32] | None:
    match kind.offset:
        case Offset.NONE:
            return None
        case Offset.ADDED:
            return to_float32(matrix.arrays["offset"], Dtype[kind.scale.name])
        case Offset.ZERO:
            return -scale * matrix.arrays["zero"].astype(np.float32)
        case Offset.NESTED:
            above = to_float32(matrix.arrays["super_offset"], Dtype.F16)
            return -np.repeat(above, SUPER_GROUP // group, axis=-1) * matrix.arrays["offset"].astype(np.float32)
