"""What linear modules with codes of one byte for weights have in common: fp8.py and int8.py are the formats.

A code times the scale of its output is a weight. Inputs are multiplied as they are, or quantised first. Of quantised
inputs, a format has torch's product of codes where that is faster; other products of few rows are those of
kernels/quantized.py, of many rows those of `dequantised.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

import torch
from torch import Tensor

from caraserve.gpu.kernels.capability import compute_capability
from caraserve.gpu.kernels.quantized import dequantise, multiply, round_rows
from caraserve.gpu.linear.base import TORCH_CODES, JoinedModules, LinearLoader, row_pieces
from caraserve.gpu.linear.dequantised import FUSED_ROWS, is_fused, multiply_dequantised, numbers_room
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from caraserve.model.dtype import Code
from caraserve.model.formats.scaled_codes import Inputs, ScaledCodes

_TORCH_STEP = 16  # torch's products of codes need multiples of it in inputs and outputs
_VALUE_BYTES = 2  # of an input in any other form than x's: a code, or its value


class Product(Enum):
    """The ways to multiply."""

    FUSED = "by our kernel, in which codes become numbers in registers"
    OF_CODES = "by torch, codes by codes"
    DEQUANTISED = "by torch, numbers by numbers, after the weights have become numbers"


@dataclass(frozen=True, slots=True)
class QuantizedLinear(ABC):
    """Implements Linear."""

    code: ClassVar[Code]
    values: ClassVar[torch.dtype]  # of quantised inputs in our kernel; holds the values of all codes

    weight: Tensor  # codes [outputs, inputs]
    scale: Tensor  # float32 [outputs], times `input_scale` if there is one
    bias: Tensor | None  # [outputs]
    inputs: Inputs
    input_scale: Tensor | None  # float32 [1] of STATIC inputs, the largest of the modules'
    one: Tensor  # float32 [1]
    capability: int
    torch_rows: int = 1  # fewest rows of a product that may be torch's, of codes
    fused_rows: int = FUSED_ROWS  # most rows of a product that is ours

    @classmethod
    def load(cls, loader: LinearLoader, modules: JoinedModules) -> Self:
        """Fills the modules' codes, scales and biases."""
        modules.refuse_transposed()
        scheme = modules.format
        assert isinstance(scheme, ScaledCodes)
        bias, capability = loader.bias(modules), compute_capability(loader.device)
        weight = loader.joined(modules, ".weight", modules.inputs, TORCH_CODES[cls.code])
        scale, input_scale = loader.joined(modules, ".weight_scale", None, torch.float32), None
        inputs = cls.inputs_on(capability, scheme)
        if inputs is Inputs.STATIC:
            scales = loader.empty((len(modules.linears),), torch.float32)
            for index, linear in enumerate(modules.linears):
                loader.fill(f"{linear.module}.input_scale", scales[index : index + 1])
            input_scale = scales.amax(0, keepdim=True)
            scale *= input_scale
        return cls(weight, scale, bias, inputs, input_scale, loader.one, capability)

    @classmethod
    def inputs_on(cls, capability: int, scheme: ScaledCodes) -> Inputs:
        """Returns how a module's inputs are quantised on a GPU of this compute capability."""
        return scheme.inputs

    @classmethod
    def fill_numbers(cls, module: str, target: Tensor, loader: LinearLoader) -> None:
        """Fills a matrix with a module's weights, dequantised."""
        codes = torch.empty(target.shape, dtype=TORCH_CODES[cls.code], device=target.device)
        scale = torch.empty(len(target), dtype=torch.float32, device=target.device)
        loader.fill(f"{module}.weight", codes)
        loader.fill(f"{module}.weight_scale", scale)
        for rows in row_pieces(*target.shape):
            target[rows] = codes[rows].float() * scale[rows, None]

    @property
    def kernels(self) -> Hashable:
        return self.code, self.inputs

    def product(self, rows: int, dtype: torch.dtype, *, fills_rows: bool = True) -> Product:
        """Returns how `rows` rows of inputs of `dtype` are multiplied. `fills_rows`: see `Linear.room`."""
        is_quantised = self.inputs is not Inputs.KEPT
        fits = all(size % _TORCH_STEP == 0 for size in self.weight.shape)
        if is_quantised and fits and rows >= self.torch_rows and self.torch_multiplies(dtype, fills_rows=fills_rows):
            return Product.OF_CODES
        return Product.FUSED if is_fused(rows, dtype, self.fused_rows) else Product.DEQUANTISED

    @abstractmethod
    def torch_multiplies(self, dtype: torch.dtype, *, fills_rows: bool) -> bool:
        """Returns whether torch's product of codes is right and fast here for inputs and outputs of `dtype`."""

    def room(self, rows: int, dtype: torch.dtype, *, fills_rows: bool = True) -> RoomSize:
        outputs, inputs = self.weight.shape
        matrix = RoomSize()
        match self.product(rows, dtype, fills_rows=fills_rows):
            case Product.OF_CODES:
                matrix = self.sums_room(rows)
            case Product.DEQUANTISED:
                matrix = numbers_room(outputs, inputs, dtype)
        return RoomSize.for_all([matrix, RoomSize(self.taken_rows(rows, dtype) * inputs * _VALUE_BYTES)])

    def taken_rows(self, rows: int, dtype: torch.dtype) -> int:
        """Returns the most rows, of `rows`, that are in the room in another form."""
        return 0 if self.inputs is Inputs.KEPT else rows

    def sums_room(self, rows: int) -> RoomSize:
        """Returns the memory that `multiply_codes` needs for sums."""
        return RoomSize()

    def apply(self, x: Tensor, out: Tensor, room: ProductRoom | None = None) -> None:
        """Computes `out = x weightᵀ · scale + bias`, [rows, …]."""
        match self.product(len(x), x.dtype, fills_rows=out.is_contiguous()):
            case Product.FUSED:
                values, row_scale = self.taken(x, room)
                codes = self.weight.view(torch.int8)
                multiply(values, codes, out, self.scale, self.code, self.capability, row_scale, self.bias)
            case Product.OF_CODES:
                self.multiply_codes(x, out, room)
            case Product.DEQUANTISED:
                self._multiply_dequantised(x, out, room)

    def with_bias(self, bias: Tensor) -> Self:
        return replace(self, bias=bias)

    def copy(self) -> "QuantizedLinear":
        raise AssertionError("quantised weights cannot hold a sum")

    def taken(self, x: Tensor, room: ProductRoom | None) -> tuple[Tensor, Tensor | None]:
        """Returns the inputs as our kernel takes them, and what each row's sums are multiplied by."""
        return (x, None) if self.inputs is Inputs.KEPT else self.rounded(x, room, self.values)

    def rounded(self, x: Tensor, room: ProductRoom | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Quantises inputs to codes, or to their values, by `dtype`. Returns them, and the scale of each row if any."""
        assert room is not None
        codes = room.inputs_as(dtype, *x.shape)
        has_scales = round_rows(x, codes, room.scales, self.code, self.input_scale)
        return codes, room.scales[: len(x)] if has_scales else None

    @abstractmethod
    def multiply_codes(self, x: Tensor, out: Tensor, room: ProductRoom | None) -> None:
        """Quantises the inputs, and multiplies codes by codes."""

    def _multiply_dequantised(self, x: Tensor, out: Tensor, room: ProductRoom | None) -> None:
        """Multiplies numbers in x's dtype: inputs that are quantised are rounded to codes and become numbers again, but
        for a scale in the checkpoint, which is part of the weights'."""
        if self.inputs is not Inputs.KEPT:
            assert room is not None
            numbers = room.inputs_as(x.dtype, *x.shape)
            round_rows(x, numbers, room.scales, self.code, self.input_scale, as_numbers=self.input_scale is None)
            x = numbers

        def numbers_of(outputs: slice, target: Tensor) -> None:
            codes = self.weight[outputs].view(torch.int8)
            dequantise(codes, self.scale[outputs], target, self.code, self.capability)

        multiply_dequantised(x, out, room, self.bias, numbers_of)
