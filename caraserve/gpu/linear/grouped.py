"""Weights in grouped codes (model/formats/grouped.py), which stay packed on the device.

A file's format reads a module's arrays on the host; they are copied to the device some rows at a time, and packed
there.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.kernels.grouped import BLOCK, UNIT, GroupedMatrix, dequantise, multiply, values_are
from caraserve.gpu.linear.base import JoinedModules, Linear, LinearLoader, row_pieces
from caraserve.gpu.linear.dequantised import is_fused, multiply_dequantised, numbers_room
from caraserve.gpu.linear.mixed import mixed
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from caraserve.model.formats import Array, Matrix, WeightFormat
from caraserve.model.formats.grouped import SUPER_GROUP, GroupedCodes, Offset, Scale
from caraserve.model.linear_plan import LinearPlan, Rows
from caraserve.util.units import ceil_div

_FLOATS = {Scale.F32: torch.float32, Scale.F16: torch.float16, Scale.BF16: torch.bfloat16}


class GroupedWeights(WeightFormat, Protocol):
    """A format of a file that derives from `GroupedFormat`."""

    @property
    def kind(self) -> GroupedCodes:
        """What codes stand for."""

    @property
    def group(self) -> int:
        """Inputs with one scale; 0: all."""


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Implements Linear."""

    matrix: GroupedMatrix
    bias: Tensor | None  # [outputs]

    @property
    def weight(self) -> Tensor:
        return self.matrix.codes

    @property
    def kernels(self) -> Hashable:
        return self.matrix.kernels

    def room(self, rows: int, dtype: torch.dtype, *, fills_rows: bool = True) -> RoomSize:
        if is_fused(rows, dtype):
            return RoomSize()
        return numbers_room(self.matrix.outputs, self.matrix.inputs, dtype)

    def apply(self, x: Tensor, out: Tensor, room: ProductRoom | None = None) -> None:
        """Computes `out = x weightᵀ + bias`, [rows, …]."""
        if is_fused(len(x), x.dtype):
            multiply(x, self.matrix, out, self.bias)
        else:
            multiply_dequantised(
                x, out, room, self.bias, lambda outputs, numbers: dequantise(self.matrix.rows(outputs), numbers)
            )

    def with_bias(self, bias: Tensor) -> "GroupedLinear":
        return replace(self, bias=bias)

    def copy(self) -> "GroupedLinear":
        raise AssertionError("grouped codes cannot hold a sum")


@dataclass(frozen=True, slots=True)
class GroupedCodesClass:
    """Implements LinearClass for one format."""

    format: GroupedWeights

    def load(self, loader: LinearLoader, modules: JoinedModules) -> Linear:
        """Reads the modules' codes, and fills their biases. Modules whose columns are sorted alike are one matrix."""
        modules.refuse_transposed()
        bias, parts, first = loader.bias(modules), list[tuple[Linear, int]](), 0
        for matrix in load_matrices(loader, self.format, modules.linears):
            own = None if bias is None else bias[first : first + matrix.outputs]
            parts.append((GroupedLinear(matrix, own), matrix.outputs))
            first += matrix.outputs
        return mixed(parts)

    def fill_numbers(self, module: str, target: Tensor, loader: LinearLoader) -> None:
        """Fills a matrix of numbers, [outputs, inputs], or those of all experts, with a module's weights."""
        if target.is_meta:
            return
        read = loader.read(self.format, module, tuple(target.shape))
        matrices = [read] if target.dim() == 2 else [_expert(read, index) for index in range(len(target))]
        for numbers, matrix in zip([target] if target.dim() == 2 else target, matrices, strict=True):
            for rows in row_pieces(*numbers.shape):
                values = self.format.values(matrix.rows(range(rows.start, rows.stop)))
                numbers[rows].copy_(torch.from_numpy(values))


def load_matrices(loader: LinearLoader, stored: GroupedWeights, linears: Sequence[LinearPlan]) -> list[GroupedMatrix]:
    """Returns the weights of modules that read the same rows, those one below the other whose columns are in the same
    order. Without memory to fill nothing is read."""
    inputs, module = linears[0].inputs, linears[0].module
    if loader.device.type == "meta":
        outputs = sum(len(_rows(linear)) for linear in linears)
        group = _group(module, stored.kind, stored.group, inputs)
        return [_empty(stored.kind, group, inputs, outputs, None, loader)]
    read = [(linear, loader.read(stored, linear.module, (linear.outputs, inputs))) for linear in linears]
    made = []
    for _, run in groupby(read, key=lambda pair: pair[1].order):
        chosen = [(matrix, _rows(linear)) for linear, matrix in run]
        outputs, (matrix, _) = sum(len(rows) for _, rows in chosen), chosen[0]
        group = _group(module, stored.kind, matrix.group, inputs)
        target, first = _empty(stored.kind, group, inputs, outputs, matrix, loader), 0
        for matrix, rows in chosen:
            _fill(target.rows(slice(first, first + len(rows))), matrix, rows)
            first += len(rows)
        made.append(target)
    return made


def _rows(linear: LinearPlan) -> Rows:
    """Returns the outputs of a module that have a part in its block, in the order of the parts."""
    return linear.order or range(linear.outputs)


def _expert(matrix: Matrix, index: int) -> Matrix:
    return replace(matrix, arrays={name: array[index] for name, array in matrix.arrays.items()})


def _group(module: str, kind: GroupedCodes, group: int, inputs: int) -> int:
    """Returns the inputs with one scale as kernels have them, 0 for all. Raises ModelLoadError for groups that they
    cannot compute."""
    group = 0 if group >= inputs else group
    if group % UNIT or (kind.scale is Scale.NESTED and (inputs % SUPER_GROUP or SUPER_GROUP % (group or 1))):
        raise ModelLoadError(
            f"{module}: groups of {group} of {inputs} inputs with scales as {kind.scale.value} cannot be computed on a "
            f"GPU; multiples of {UNIT} can, and of nested scales those in whole groups of {SUPER_GROUP}"
        )
    return group


def _empty(
    kind: GroupedCodes, group: int, inputs: int, outputs: int, matrix: Matrix | None, loader: LinearLoader
) -> GroupedMatrix:
    """Allocates a matrix, and fills what all its outputs share. `matrix`: one of those that will fill it."""
    is_nested = kind.scale is Scale.NESTED
    blocks, groups, supers = ceil_div(inputs, BLOCK), ceil_div(inputs, group or inputs), inputs // SUPER_GROUP

    def array(width: int, dtype: torch.dtype, *, exists: bool) -> Tensor | None:
        return loader.empty((outputs, width), dtype) if exists else None

    is_signed = kind.offset is Offset.NONE if matrix is None else matrix.arrays["scale"].dtype.kind == "i"
    of_scale = _FLOATS.get(kind.scale, torch.int8 if is_nested and is_signed else torch.uint8)
    scale_above = array(supers, torch.float16, exists=is_nested)
    if kind.scale is Scale.E4M3:
        scale_above = loader.empty((outputs,), torch.float32)
    order = None if matrix is None else matrix.order
    return GroupedMatrix(
        kind,
        group,
        inputs,
        loader.empty((outputs, inputs if kind.bits == 8 else blocks * BLOCK // 2), torch.uint8),
        array((kind.bits - 4) * blocks, torch.int32, exists=kind.bits in (5, 6)),
        loader.empty((outputs, groups), of_scale),
        array(groups, of_scale if kind.offset is Offset.ADDED else torch.uint8, exists=kind.offset is not Offset.NONE),
        scale_above,
        array(supers, torch.float16, exists=kind.offset is Offset.NESTED),
        torch.tensor(kind.values, device=loader.device) if values_are(kind) == "table" else None,
        None if order is None else torch.tensor(order, dtype=torch.int32, device=loader.device),
    )


def _fill(target: GroupedMatrix, matrix: Matrix, rows: Rows) -> None:
    """Copies some outputs of a matrix as read to the device, and packs them there."""
    others = {
        "scale": target.scale,
        "zero" if target.kind.offset is Offset.ZERO else "offset": target.offset,
        "divisor" if target.kind.scale is Scale.E4M3 else "super_scale": target.scale_above,
        "super_offset": target.offset_above,
    }
    for piece in row_pieces(len(rows), target.inputs):
        found = matrix.rows(rows[piece]).arrays
        codes = torch.from_numpy(np.ascontiguousarray(found["codes"])).to(target.codes.device)
        packed, high = pack_codes(codes, target.kind.bits)
        target.codes[piece].copy_(packed)
        if target.high is not None and high is not None:
            target.high[piece].copy_(high)
        for name, own in others.items():
            if own is not None:
                own[piece].copy_(_tensor(found[name], own.dtype))


def _tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """Returns an array as a tensor; 16-bit floating-point numbers are given as their bits."""
    whole = np.ascontiguousarray(array)
    if dtype in (torch.float16, torch.bfloat16):
        return torch.from_numpy(whole.view(np.int16)).view(dtype)
    return torch.from_numpy(whole)


def pack_codes(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Packs codes, uint8 [outputs, inputs], as kernels/grouped.py has them: bytes, and words of the bits above four."""
    if bits == 8:
        return codes, None
    outputs, inputs = codes.shape
    blocks = ceil_div(inputs, BLOCK)
    whole = torch.nn.functional.pad(codes, (0, blocks * BLOCK - inputs)).view(outputs, blocks, 2, BLOCK // 2)
    packed = ((whole[:, :, 1] << 4) | (whole[:, :, 0] & 15)).view(outputs, -1)
    if bits == 4:
        return packed, None
    above = bits - 4
    upper = (whole >> 4).to(torch.int32).view(outputs, blocks * above, BLOCK // above)
    shifts = torch.arange(0, BLOCK, above, dtype=torch.int32, device=codes.device)
    return packed, (upper << shifts).sum(-1, dtype=torch.int32)
