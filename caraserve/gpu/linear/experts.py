"""Loads the experts of a layer: the matrices of all of them form two tensors, gate above up and down.

A tensor of the checkpoint whose numbers lie as they do here is filled in its place. Others are read into memory of
their own first, on the device: one expert's, or where the checkpoint has one tensor for all experts, all of it. Weights
that are codes become numbers, of the loader's dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.kernels.experts import ExpertWeights, Routing
from caraserve.gpu.linear.base import LinearLoader
from caraserve.gpu.linear.formats import class_of
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.plain import PLAIN
from caraserve.model.formats.scaled_codes import ScaledCodes
from caraserve.model.linear_plan import Part, accumulated
from caraserve.model.plan import ExpertTensor, Moe

_EXPERT = "{expert}"


def load_experts(loader: LinearLoader, body: Moe) -> ExpertWeights:
    """Allocates and fills a layer's experts, their biases and the correction of scores. Raises ModelLoadError."""
    for part in body.tensors:
        if isinstance(part.format, ScaledCodes) and (part.is_transposed or _EXPERT not in part.tensor):
            raise ModelLoadError(f"{part.tensor}: weights of format {part.format.name} are read expert by expert")
    correction = None
    if body.correction is not None:
        correction = loader.filled(body.correction, (body.experts,), torch.float32)
    routing = Routing(body.experts, body.top_k, body.scores, body.normalise, body.scale, body.groups, correction)
    sides = body.gate, body.up
    gate_up, down = _matrices(loader, body.experts, sides), _matrices(loader, body.experts, (body.down,))
    biases = _biases(loader, body.experts, sides), _biases(loader, body.experts, (body.down,))
    return ExpertWeights(routing, body.activation, gate_up, down, *biases)


def _matrices(loader: LinearLoader, experts: int, parts: Sequence[ExpertTensor]) -> Tensor:
    """Returns the matrices of each expert, one below the other, [experts, outputs, inputs]."""
    made = loader.empty((experts, sum(part.outputs for part in parts), parts[0].inputs))
    _fill(loader, [part.tensor for part in parts], parts, made)
    return made


def _biases(loader: LinearLoader, experts: int, parts: Sequence[ExpertTensor]) -> Tensor | None:
    """Returns the biases of each expert, [experts, outputs], zeros for parts without; None if none has one."""
    if not any(part.bias for part in parts):
        return None
    made = loader.empty((experts, sum(part.outputs for part in parts))).zero_()
    _fill(loader, [part.bias for part in parts], parts, made)
    return made


def _fill(loader: LinearLoader, names: Sequence[str | None], parts: Sequence[ExpertTensor], made: Tensor) -> None:
    """Fills `made`, [experts, outputs, …], with the tensors of its parts. Reads one that several parts share once."""
    ends = list(accumulated(part.outputs for part in parts))
    for name in dict.fromkeys(name for name in names if name is not None):
        of = [(part, start) for part, start, own in zip(parts, ends, names, strict=False) if own == name]
        if _EXPERT not in name:
            _fill_one(loader, name, of, made, 1)
            continue
        for expert, target in enumerate(made):
            _fill_one(loader, name.replace(_EXPERT, str(expert)), of, target, 0)


def _fill_one(
    loader: LinearLoader, name: str, parts: Sequence[tuple[ExpertTensor, int]], target: Tensor, axis: int
) -> None:
    """Fills the outputs of each part, from its start along `axis` of `target` on, from one stored tensor."""
    (one, start), is_matrix = parts[0], target.dim() == axis + 2
    stored = one.stored_outputs or one.outputs
    form = one.format if is_matrix else PLAIN  # biases are numbers
    is_transposed = one.is_transposed and is_matrix and form is PLAIN
    shape = (*target.shape[:axis], stored, *target.shape[axis + 1 :])
    order = [row for part, _ in parts for row in part.rows or range(stored)]
    if order == list(range(stored)) and not is_transposed:
        place = target.narrow(axis, start, stored)
        if place.is_contiguous():
            _fill_numbers(loader, form, name, place)
            return
    found = loader.empty((*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape)
    _fill_numbers(loader, form, name, found)
    values = found.transpose(-1, -2) if is_transposed else found
    for part, start in parts:
        index = Part("", part.rows or range(stored)).index
        chosen = values[index] if axis == 0 else values[:, index]
        target.narrow(axis, start, part.outputs).copy_(chosen)


def _fill_numbers(loader: LinearLoader, form: WeightFormat, name: str, target: Tensor) -> None:
    """Fills `target` with the numbers of a tensor, or of codes and scales named after it."""
    if form is PLAIN:
        loader.fill(name, target)
    else:
        class_of(form).fill_numbers(name.removesuffix(".weight"), target, loader)
