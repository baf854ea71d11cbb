"""Loads the experts of a layer: a SITE record for each matrix of each expert, from tensors of one expert or of all."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu import structs
from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.formats import Array, Matrix, TensorReader, WeightFormat
from caraserve.model.formats.mxfp4 import MXFP4
from caraserve.model.formats.plain import PLAIN
from caraserve.model.plan import ExpertTensor, Moe

Floats = NDArray[np.float32]
# Packs weights: (format, weights, bias, inputs, outputs) → SITE record.
MakeSite = Callable[[WeightFormat, Matrix, Floats | None, int, int], NDArray[np.void]]


def expert_sites(body: Moe, read: TensorReader, make_site: MakeSite) -> NDArray[np.void]:
    """Returns SITE records [experts, 3]: gate, up and down of each expert. Raises ModelLoadError."""
    tensors = _Tensors(body.experts, read)
    sites = np.zeros((body.experts, 3), structs.SITE)
    for expert in range(body.experts):
        for which, one in enumerate(body.tensors):
            matrix, bias = tensors.matrix(one, expert), tensors.bias(one, expert)
            sites[expert, which] = make_site(one.format, matrix, bias, one.inputs, one.outputs)[0]
    return sites


class _Tensors:
    """The tensors of one layer's experts. A tensor of all experts is read once."""

    def __init__(self, experts: int, read: TensorReader) -> None:
        self._experts, self._read = experts, read
        self._of_all: dict[str, tuple[Array, Dtype]] = {}
        self._packed_of_all: dict[str, Matrix] = {}

    def matrix(self, one: ExpertTensor, expert: int) -> Matrix:
        """Returns a matrix of an expert, [outputs, inputs]."""
        stored = one.stored_outputs or one.outputs
        if one.format is MXFP4:
            matrix = self._packed(one.tensor, expert, (stored, one.inputs))
        elif one.format is not PLAIN:
            if one.is_transposed or "{expert}" not in one.tensor:
                raise ModelLoadError(f"{one.tensor}: weights of format {one.format.name} are read expert by expert")
            module = one.tensor.format(expert=expert).removesuffix(".weight")
            matrix = one.format.read(self._read, module, (stored, one.inputs))
        elif one.is_transposed:
            raw, dtype = self._tensor(one.tensor, expert, (one.inputs, stored))
            matrix = Matrix({"weight": raw.T}, dtype)
        else:
            raw, dtype = self._tensor(one.tensor, expert, (stored, one.inputs))
            matrix = Matrix({"weight": raw}, dtype)
        return matrix if one.rows is None else matrix.rows(one.rows)

    def bias(self, one: ExpertTensor, expert: int) -> Floats | None:
        if one.bias is None:
            return None
        stored = one.stored_outputs or one.outputs
        values = to_float32(*self._tensor(one.bias, expert, (stored,)))
        return values if one.rows is None else values[list(one.rows)]

    def _packed(self, name: str, expert: int, shape: tuple[int, int]) -> Matrix:
        if name not in self._packed_of_all:
            self._packed_of_all[name] = MXFP4.read(self._read, name, (self._experts, *shape))
        arrays = self._packed_of_all[name].arrays
        return Matrix({key: array[expert] for key, array in arrays.items()})

    def _tensor(self, name: str, expert: int, shape: tuple[int, ...]) -> tuple[Array, Dtype]:
        if "{expert}" in name:
            return self._read(name.format(expert=expert), shape)
        if name not in self._of_all:
            self._of_all[name] = self._read(name, (self._experts, *shape))
        raw, dtype = self._of_all[name]
        return raw[expert], dtype
