"""Weights that are numbers: float32, bfloat16 or float16, multiplied by torch (cuBLAS)."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from caraserve.gpu.linear.base import JoinedModules, LinearLoader
from caraserve.gpu.linear.room import ProductRoom, RoomSize


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Implements Linear."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]
    transposed: Tensor  # view of `weight`

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "DenseLinear":
        return cls(weight, bias, weight.t())

    @classmethod
    def load(cls, loader: LinearLoader, modules: JoinedModules) -> "DenseLinear":
        """Fills the modules' weights and biases."""
        bias = loader.bias(modules)
        return cls.of(loader.joined(modules, ".weight", modules.inputs), bias)

    @classmethod
    def fill_numbers(cls, module: str, target: Tensor, loader: LinearLoader) -> None:
        """Fills a matrix with a module's weights."""
        loader.fill(f"{module}.weight", target)

    @property
    def kernels(self) -> Hashable:
        return self.weight.dtype

    def room(self, rows: int, dtype: torch.dtype, *, fills_rows: bool = True) -> RoomSize:
        return RoomSize()

    def apply(self, x: Tensor, out: Tensor, room: ProductRoom | None = None) -> None:
        """Computes `out = x weightᵀ + bias`. Adds the bias in a second call: torch.addmm might allocate memory."""
        torch.mm(x, self.transposed, out=out)
        if self.bias is not None:
            out.add_(self.bias)

    def with_bias(self, bias: Tensor) -> "DenseLinear":
        return DenseLinear.of(self.weight, bias)

    def copy(self) -> "DenseLinear":
        return DenseLinear.of(self.weight.clone(), self.bias)
