"""Loads the experts of a layer: a SITE record for each matrix of each expert, from tensors of one expert or of all."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu import structs
from caraserve.model.dtype import to_float32
from caraserve.model.formats import Matrix, TensorReader, WeightFormat
from caraserve.model.plan import ExpertTensor, Moe

Floats = NDArray[np.float32]
# Packs weights: (format, weights, bias, inputs, outputs) → SITE record.
MakeSite = Callable[[WeightFormat, Matrix, Floats | None, int, int], NDArray[np.void]]


def expert_sites(body: Moe, read: TensorReader, make_site: MakeSite) -> NDArray[np.void]:
    """Returns SITE records [experts, 3]: gate, up and down of each expert. Raises ModelLoadError."""
    tensors = _Tensors(body.experts, read)
    sites = np.zeros((body.experts, 3), structs.SITE)
    for which, one in enumerate(body.tensors):
        for expert in range(body.experts):
            matrix, bias = tensors.matrix(one, expert), tensors.bias(one, expert)
            sites[expert, which] = make_site(one.format, matrix, bias, one.inputs, one.outputs)[0]
    return sites


class _Tensors:
    """The tensors of one layer's experts. A tensor of all experts is read once, and kept until the next one is."""

    def __init__(self, experts: int, read: TensorReader) -> None:
        self._experts, self._read = experts, read
        self._stacked: tuple[str, Matrix] | None = None
        self._biases: dict[str, Floats] = {}

    def matrix(self, one: ExpertTensor, expert: int) -> Matrix:
        """Returns a matrix of an expert, [outputs, inputs]."""
        stored = one.stored_outputs or one.outputs
        found = self._stored(one, expert, (one.inputs, stored) if one.is_transposed else (stored, one.inputs))
        if one.is_transposed:
            found = Matrix({"weight": found.arrays["weight"].T}, found.dtype)
        return found if one.rows is None else found.rows(one.rows)

    def bias(self, one: ExpertTensor, expert: int) -> Floats | None:
        if one.bias is None:
            return None
        stored = one.stored_outputs or one.outputs
        if "{expert}" in one.bias:
            values = to_float32(*self._read(one.bias.format(expert=expert), (stored,)))
        else:
            if one.bias not in self._biases:
                self._biases[one.bias] = to_float32(*self._read(one.bias, (self._experts, stored)))
            values = self._biases[one.bias][expert]
        return values if one.rows is None else values[list(one.rows)]

    def _stored(self, one: ExpertTensor, expert: int, shape: tuple[int, int]) -> Matrix:
        if "{expert}" in one.tensor:
            return one.format.read(self._read, one.tensor.format(expert=expert).removesuffix(".weight"), shape)
        if self._stacked is None or self._stacked[0] != one.tensor:
            self._stacked = None
            self._stacked = one.tensor, one.format.read_stacked(self._read, one.tensor, (self._experts, *shape))
        of_all = self._stacked[1]
        return replace(of_all, arrays={name: array[expert] for name, array in of_all.arrays.items()})
