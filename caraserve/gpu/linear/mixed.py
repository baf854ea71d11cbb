"""Several linears side by side, of modules that read the same rows and are stored in different ways."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap

import torch
from torch import Tensor

from caraserve.gpu.linear.base import Linear
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from caraserve.model.linear_plan import accumulated


@dataclass(frozen=True, slots=True)
class MixedLinear:
    """Implements Linear for modules of several formats: linears, and the columns of their outputs."""

    parts: tuple[tuple[Linear, slice], ...]

    @property
    def weight(self) -> Tensor:
        raise AssertionError("weights of several formats are several tensors")

    @property
    def kernels(self) -> Hashable:
        return tuple((linear.kernels, columns.start, columns.stop) for linear, columns in self.parts)

    def room(self, rows: int, dtype: torch.dtype, *, fills_rows: bool = True) -> RoomSize:
        return RoomSize.for_all(linear.room(rows, dtype, fills_rows=False) for linear, _ in self.parts)

    def apply(self, x: Tensor, out: Tensor, room: ProductRoom | None = None) -> None:
        for linear, columns in self.parts:
            linear.apply(x, out[:, columns], room)

    def with_bias(self, bias: Tensor) -> "MixedLinear":
        return MixedLinear(tuple((linear.with_bias(bias[columns]), columns) for linear, columns in self.parts))

    def copy(self) -> "MixedLinear":
        return MixedLinear(tuple((linear.copy(), columns) for linear, columns in self.parts))


def mixed(parts: Sequence[tuple[Linear, int]]) -> Linear:
    """Returns linears with so many outputs each as one."""
    if len(parts) == 1:
        return parts[0][0]
    columns = starmap(slice, pairwise(accumulated(outputs for _, outputs in parts)))
    return MixedLinear(tuple((linear, own) for (linear, _), own in zip(parts, columns, strict=True)))
