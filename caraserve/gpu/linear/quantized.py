"""What linear modules with codes of one byte for weights have in common: fp8.py and int8.py are the formats.

A code times the scale of its output is a weight. Inputs are multiplied as they are, or quantised first. Products are
those of kernels/quantized.py, unless a format has its own.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from caraserve.gpu.kernels.capability import compute_capability
from caraserve.gpu.kernels.quantized import multiply, round_rows
from caraserve.gpu.linear.base import TORCH_CODES, JoinedModules, LinearLoader, RoundedRows, row_pieces
from caraserve.model.dtype import Code
from caraserve.model.formats.scaled_codes import Inputs, ScaledCodes


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Implements Linear."""

    code: ClassVar[Code]

    weight: Tensor  # codes [outputs, inputs]
    scale: Tensor  # float32 [outputs], times `input_scale` if there is one
    bias: Tensor | None  # [outputs]
    inputs: Inputs
    input_scale: Tensor | None  # float32 [1] of STATIC inputs, the largest of the modules'
    one: Tensor  # float32 [1]
    capability: int

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
    def rounds_inputs(self) -> bool:
        return self.inputs is not Inputs.KEPT

    @property
    def kernels(self) -> Hashable:
        return self.code, self.inputs

    def apply(self, x: Tensor, out: Tensor, rounded: RoundedRows | None = None) -> None:
        """Computes `out = x weightᵀ · scale + bias`, [rows, …]; `rounded` is overwritten if inputs are quantised."""
        if self.inputs is Inputs.KEPT:
            self._multiply(x, out, None)
        else:
            # float16 has the values of all codes.
            codes, row_scale = self._rounded(x, rounded, torch.float16)
            self._multiply(codes, out, row_scale)

    def with_bias(self, bias: Tensor) -> Self:
        return replace(self, bias=bias)

    def copy(self) -> "QuantizedLinear":
        raise AssertionError("quantised weights cannot hold a sum")

    def _rounded(self, x: Tensor, rounded: RoundedRows | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Quantises x. Returns the codes, or their values, and the scale of each row."""
        assert rounded is not None
        codes = rounded.room(len(x), x.shape[1], dtype)
        round_rows(x, codes, rounded.scales, self.code, self.input_scale)
        return codes, rounded.scales[: len(x)] if self.inputs is Inputs.PER_TOKEN else None

    def _multiply(self, x: Tensor, out: Tensor, row_scale: Tensor | None) -> None:
        codes = self.weight.view(torch.int8)
        multiply(x, codes, out, self.scale, self.code, self.capability, row_scale, self.bias)
