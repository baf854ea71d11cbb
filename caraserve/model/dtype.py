"""Storage types of weights, and their values."""

import struct
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Dtype(Enum):
    """Storage type of weights. Kernels switch on the value."""

    F32 = 0
    BF16 = 1
    F16 = 2

    @property
    def itemsize(self) -> int:
        return 4 if self is Dtype.F32 else 2

    @property
    def storage(self) -> np.dtype[np.generic]:
        """Returns the NumPy type of stored weights. NumPy has no bfloat16, so 16-bit weights are raw bits in uint16."""
        return np.dtype(np.float32 if self is Dtype.F32 else np.uint16)


class Code(Enum):
    """Storage type of quantised weights, one byte each. The value is its name in the headers of safetensors files."""

    F8_E4M3 = "F8_E4M3"  # without infinities
    I8 = "I8"
    U8 = "U8"  # codes of fewer bits, packed

    @property
    def largest(self) -> float:
        """Returns the largest value that a code stands for, to which scales map the largest of what is quantised."""
        return 448.0 if self is Code.F8_E4M3 else 127.0


DTYPES = {"float32": Dtype.F32, "bfloat16": Dtype.BF16, "float16": Dtype.F16}  # names in --dtype and config.json
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_float32(raw: NDArray[np.generic], dtype: Dtype) -> NDArray[np.float32]:
    """Converts stored weights to fp32, exactly."""
    if dtype is Dtype.F32:
        return raw.astype(np.float32, copy=False)
    if dtype is Dtype.F16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def value_of(bits: int, dtype: Dtype) -> float:
    """Returns the value that bits of a dtype stand for."""
    if dtype is Dtype.F16:
        return float(struct.unpack("<e", struct.pack("<H", bits))[0])
    return float(struct.unpack("<f", struct.pack("<I", bits << 16 if dtype is Dtype.BF16 else bits))[0])


def rounded(values: NDArray[np.float32], dtype: Dtype) -> NDArray[np.generic]:
    """Converts fp32 to stored weights of a dtype, rounding to nearest even."""
    if dtype is Dtype.F32:
        return values
    if dtype is Dtype.F16:
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decoded(codes: NDArray[np.uint8], code: Code) -> NDArray[np.float32]:
    """Returns the values that codes stand for, in the shape of `codes`, exactly."""
    return _VALUES[code][codes]


def _fp8_values() -> NDArray[np.float32]:
    """Returns the value of each of the 256 codes: sign, 4 bits of an exponent with bias 7, 3 bits of a fraction."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    normal, subnormal = np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6)
    size = np.where(bits & 127 == 127, np.nan, np.where(exponent > 0, normal, subnormal))
    return np.where(bits & 128, -size, size).astype(np.float32)


_BYTES = np.arange(256, dtype=np.uint8)
_VALUES = {
    Code.F8_E4M3: _fp8_values(),
    Code.I8: _BYTES.view(np.int8).astype(np.float32),
    Code.U8: _BYTES.astype(np.float32),
}
