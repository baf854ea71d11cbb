"""Storage types of weights."""

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


DTYPES = {"float32": Dtype.F32, "bfloat16": Dtype.BF16, "float16": Dtype.F16}  # names in --dtype and config.json


def to_float32(raw: NDArray[np.generic], dtype: Dtype) -> NDArray[np.float32]:
    """Converts stored weights to fp32, exactly."""
    if dtype is Dtype.F32:
        return raw.astype(np.float32, copy=False)
    if dtype is Dtype.F16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)
