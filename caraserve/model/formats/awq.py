"""Weights as AWQ stores them for its `gemm` kernel: words of codes along the outputs, in an order of their own."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Matrix, TensorReader
from caraserve.model.formats.gptq import named
from caraserve.model.formats.grouped import INTEGERS_4, GroupedCodes, GroupedFormat, Offset, Scale
from caraserve.model.formats.unpacking import read_scales, require

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the half byte of a word that has each of eight outputs


@dataclass(frozen=True, slots=True)
class Awq(GroupedFormat):
    """Implements WeightFormat. Weights are rounded to float16, as by the library's kernels."""

    @classmethod
    def of(cls, group: int) -> "Awq":
        """`group`: 0 for all inputs."""
        kind = GroupedCodes(4, INTEGERS_4, Scale.F16, Offset.ZERO, Dtype.F16)
        return cls(named("4-bit AWQ", group), kind, group)

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}.qweight",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        outputs, inputs = shape
        group = self.group or inputs
        if inputs % group or outputs % 8:
            raise ModelLoadError(f"{module} has shape {list(shape)}; {self.name} needs multiples of 8 and {group}")
        require(tensors, module, f"{module}.qweight", self.name)
        groups = inputs // group
        scale = read_scales(tensors, f"{module}.scales", (groups, outputs), self.kind)
        arrays = {
            "codes": _columns(tensors.words(f"{module}.qweight", (inputs, outputs // 8))),
            "scale": np.ascontiguousarray(scale.T),
            "zero": _columns(tensors.words(f"{module}.qzeros", (groups, outputs // 8))),
        }
        return Matrix(arrays, group=group)


def _columns(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Returns the codes in words, transposed: [rows, n] → [8 n, rows]."""
    turned = np.ascontiguousarray(words.T)
    codes = np.empty((len(turned), 8, turned.shape[1]), np.uint8)
    for output, place in enumerate(_PLACES):
        codes[:, output] = turned >> 4 * place & 15
    return codes.reshape(-1, turned.shape[1])
