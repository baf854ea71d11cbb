"""The made-up format of four_bits.py on a GPU; its import registers it."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caraserve.gpu.linear.base import JoinedModules, LinearLoader
from caraserve.gpu.linear.formats import register
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from tests.plans.four_bits import BLOCK, ZERO


@dataclass(frozen=True, slots=True)
class FourBitsLinear:
    """Implements Linear."""

    weight: Tensor  # int8 [outputs, inputs / 2]
    scale: Tensor  # float32 [outputs, inputs / 32]
    bias: Tensor | None

    @classmethod
    def load(cls, loader: LinearLoader, modules: JoinedModules) -> "FourBitsLinear":
        codes = loader.joined(modules, "", modules.inputs // 2, torch.int8)
        scale = loader.joined(modules, ".scale", modules.inputs // BLOCK, torch.float32)
        return cls(codes, scale, loader.bias(modules))

    @classmethod
    def fill_numbers(cls, module: str, target: Tensor, loader: LinearLoader) -> None:
        outputs, inputs = target.shape
        codes, scale = torch.empty((outputs, inputs // 2), dtype=torch.int8), torch.empty((outputs, inputs // BLOCK))
        loader.fill(module, codes)
        loader.fill(f"{module}.scale", scale)
        target.copy_(values(codes, scale))

    @property
    def kernels(self) -> Hashable:
        return "four-bits"

    def room(self, rows: int, dtype: torch.dtype, *, fills_rows: bool = True) -> RoomSize:
        return RoomSize()

    def apply(self, x: Tensor, out: Tensor, room: ProductRoom | None = None) -> None:
        torch.mm(x, values(self.weight, self.scale).to(x.dtype).t(), out=out)
        if self.bias is not None:
            out.add_(self.bias)

    def with_bias(self, bias: Tensor) -> "FourBitsLinear":
        return replace(self, bias=bias)

    def copy(self) -> "FourBitsLinear":
        raise AssertionError("codes cannot hold a sum")


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns the weights as numbers, [outputs, inputs]."""
    bits = codes.view(torch.uint8)
    pairs = torch.stack([bits & 15, bits >> 4], dim=2).flatten(1).float() - ZERO
    return pairs * scale.repeat_interleave(BLOCK, dim=1)


register("four-bits", FourBitsLinear)
