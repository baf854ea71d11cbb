"""The interface of a linear module on the device, and what the class of a weight format gets to load one."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

# (tensor name, contiguous tensor to fill); torch may use it at once. Targets in a dtype of codes are filled with the
# codes of a quantised module's weights; targets of names that end in SCALE are float32 vectors, also where the
# checkpoint has one scale for all of one.
Fill = Callable[[str, Tensor], None]
SCALE = "_scale"


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """A lane's memory for quantised inputs of one product."""

    codes: Tensor  # uint8 [rows · widest input · 2]
    scales: Tensor  # float32 [rows]

    @classmethod
    def empty(cls, widest: int, rows: int, device: torch.device) -> Self:
        codes = torch.empty(rows * widest * torch.float16.itemsize, dtype=torch.uint8, device=device)
        return cls(codes, torch.empty(rows, dtype=torch.float32, device=device))

    def room(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for codes, or for their values, [rows, width]."""
        return self.codes[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


class Linear(Protocol):
    """One or more modules that read the same input, with their outputs concatenated."""

    @property
    def weight(self) -> Tensor:
        """The weights as they are stored, [outputs, inputs]."""

    @property
    def bias(self) -> Tensor | None:
        """The biases, [outputs]."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are quantised, for which `apply` needs `RoundedRows`."""

    @property
    def kernels(self) -> Hashable:
        """What the kernels depend on besides sizes: two linears of equal sizes that agree in it run the same ones."""

    def apply(self, x: Tensor, out: Tensor, rounded: RoundedRows | None = None) -> None:
        """Computes `out = x weightᵀ + bias`, [rows, …]. Allocates nothing on the device."""

    def copy(self) -> "Linear":
        """Returns a linear with weights of its own, to which an adapter may be added. Raises AssertionError if the
        format cannot hold the sum."""


@dataclass(frozen=True, slots=True)
class LinearLoader:
    """Allocates the tensors of linear modules and fills them."""

    dtype: torch.dtype  # of weights that are not quantised, and of biases
    device: torch.device
    fill: Fill
    one: Tensor  # float32 [1]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Allocates a tensor, by default in the loader's dtype."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def filled(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Returns one tensor of the checkpoint."""
        made = self.empty(shape, dtype)
        self.fill(name, made)
        return made

    def joined(self, modules: "JoinedModules", what: str, width: int | None, dtype: torch.dtype | None) -> Tensor:
        """Returns a tensor of each module, one below the other: [outputs, width], or [outputs] without a width."""
        made = self.empty((modules.outputs,) if width is None else (modules.outputs, width), dtype)
        for name, rows in zip(modules.names, modules.rows, strict=True):
            self.fill(f"{name}.{what}", made[rows])
        return made

    def bias(self, modules: "JoinedModules") -> Tensor | None:
        """Returns the modules' biases, [outputs], or None if they have none."""
        return self.joined(modules, "bias", None, None) if modules.has_bias else None


@dataclass(frozen=True, slots=True)
class JoinedModules:
    """Modules that read the same input: their names in the checkpoint, and each one's outputs."""

    names: Sequence[str]
    widths: Sequence[int]
    inputs: int
    has_bias: bool

    @property
    def outputs(self) -> int:
        return sum(self.widths)

    @property
    def rows(self) -> list[slice]:
        """Each module's rows of the joined weights."""
        ends = [sum(self.widths[: index + 1]) for index in range(len(self.widths))]
        return [slice(end - width, end) for end, width in zip(ends, self.widths, strict=True)]
