"""Tensors in memory as a format reads them from a checkpoint."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, Dtype
from caraserve.model.formats import Array

_DTYPES = {"float32": Dtype.F32, "float16": Dtype.F16, "uint16": Dtype.BF16}


class Tensors:
    """Implements TensorReader. uint16 are the bits of bfloat16."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[Array, Dtype]:
        found = self._found(name, shape)
        return found.view(np.uint16) if found.itemsize == 2 else found, _DTYPES[found.dtype.name]

    def codes(self, name: str, shape: tuple[int, ...], code: Code) -> NDArray[np.uint8]:
        return self._found(name, shape).view(np.uint8)

    def blocks(self, name: str, shape: tuple[int, ...], kind: str) -> NDArray[np.uint8]:
        found = self._arrays[name]
        assert found.shape[:-1] == shape[:-1]
        return found.view(np.uint8)

    def words(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint32]:
        return self._found(name, shape).view(np.uint32)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._arrays[name].shape if name in self._arrays else None

    def scales(self, module: str, outputs: int) -> NDArray[np.float32]:
        return self._arrays[f"{module}.weight_scale"].astype(np.float32)

    def _found(self, name: str, shape: tuple[int, ...]) -> Array:
        if name not in self._arrays:
            raise ModelLoadError(f"tensor {name} is missing")
        if self._arrays[name].shape != shape:
            raise ModelLoadError(f"tensor {name} has shape {list(self._arrays[name].shape)}, not {list(shape)}")
        return self._arrays[name]
