"""The interface of a linear module on the device, and what the class of a weight format gets to load one."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Protocol

import torch
from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from caraserve.model.dtype import Code
from caraserve.model.formats import Matrix, WeightFormat
from caraserve.model.linear_plan import LinearPlan, accumulated

# (tensor name, contiguous tensor to fill); torch may use it at once. Targets in a dtype of codes are filled with the
# codes of a quantised module's weights; targets of names that end in SCALE are float32 vectors, also where the
# checkpoint has one scale for all of one.
Fill = Callable[[str, Tensor], None]
# (format, module, shape) → the module's weights as stored, of formats whose tensors are not filled one by one. Three
# sizes ask for the weights of all experts in one tensor.
ReadMatrix = Callable[[WeightFormat, str, tuple[int, ...]], Matrix]
SCALE = "_scale"
_PIECE_NUMBERS = 1 << 24  # of a matrix, which are drawn, dequantised or packed at a time
TORCH_CODES = {Code.F8_E4M3: torch.float8_e4m3fn, Code.I8: torch.int8, Code.U8: torch.uint8}


class Linear(Protocol):
    """One or more modules that read the same rows, with their outputs side by side."""

    @property
    def weight(self) -> Tensor:
        """The weights as they are stored, the outputs along the first axis."""

    @property
    def kernels(self) -> Hashable:
        """What the kernels depend on besides sizes: two linears of equal sizes that agree in it run the same ones."""

    def room(self, rows: int, dtype: torch.dtype, *, fills_rows: bool = True) -> RoomSize:
        """Returns the memory that `apply` needs for any number of rows up to `rows`. `dtype`: of the inputs;
        `fills_rows`: whether the outputs are whole rows of the tensor that they are part of."""

    def apply(self, x: Tensor, out: Tensor, room: ProductRoom | None = None) -> None:
        """Computes `out = x weightᵀ + bias`, [rows, …]. Overwrites the room, and allocates nothing on the device."""

    def with_bias(self, bias: Tensor) -> "Linear":
        """Returns a linear with the same weights and this bias, [outputs]."""

    def copy(self) -> "Linear":
        """Returns a linear with weights of its own, to which an adapter may be added. Raises AssertionError if the
        format cannot hold the sum."""


@dataclass(frozen=True, slots=True)
class JoinedModules:
    """Modules of one weight format that read the same rows; their parts are the rows of one matrix, in order."""

    linears: tuple[LinearPlan, ...]

    @property
    def format(self) -> WeightFormat:
        return self.linears[0].format

    @property
    def inputs(self) -> int:
        return self.linears[0].inputs

    @property
    def outputs(self) -> int:
        return sum(map(outputs_of, self.linears))

    def refuse_transposed(self) -> None:
        """Raises ModelLoadError for weights stored as [inputs, outputs], which codes cannot be."""
        for linear in self.linears:
            if linear.transposed:
                why = "weights stored as [inputs, outputs] can only be read as numbers"
                raise ModelLoadError(f"{linear.module}: {why}")

    def rows(self) -> Iterator[tuple[LinearPlan, slice]]:
        """Yields each module and its rows of the matrix."""
        ends = pairwise(accumulated(map(outputs_of, self.linears)))
        yield from zip(self.linears, starmap(slice, ends), strict=True)


def row_pieces(outputs: int, inputs: int) -> Iterator[slice]:
    """Yields ranges of a matrix's outputs with about `_PIECE_NUMBERS` numbers each."""
    step = max(1, _PIECE_NUMBERS // inputs)
    for start in range(0, outputs, step):
        yield slice(start, min(start + step, outputs))


def outputs_of(linear: LinearPlan) -> int:
    """Returns the outputs of a module that have a part in its block."""
    return sum(part.outputs for part in linear.parts)


@dataclass(frozen=True, slots=True)
class LinearLoader:
    """Allocates the tensors of linear modules and fills them."""

    dtype: torch.dtype  # of weights that are not quantised, and of biases
    device: torch.device
    fill: Fill
    read: ReadMatrix
    one: Tensor  # float32 [1]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Allocates a tensor, by default in the loader's dtype."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def filled(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Returns one tensor of the checkpoint."""
        made = self.empty(shape, dtype)
        self.fill(name, made)
        return made

    def joined(
        self, modules: JoinedModules, suffix: str, width: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns a tensor of each module, one below the other: [outputs, width], or [outputs] without a width.
        `suffix`: of the tensors' names, after the module's."""
        made = self.empty((modules.outputs,) if width is None else (modules.outputs, width), dtype)
        for linear, rows in modules.rows():
            self._fill_rows(linear, suffix, made[rows])
        return made

    def bias(self, modules: JoinedModules) -> Tensor | None:
        """Returns the modules' biases, [outputs], zeros for those without one; None if none has one."""
        if not any(linear.bias for linear in modules.linears):
            return None
        made = self.empty((modules.outputs,)).zero_()
        for linear, rows in modules.rows():
            if linear.bias:
                self._fill_rows(linear, ".bias", made[rows])
        return made

    def _fill_rows(self, linear: LinearPlan, suffix: str, target: Tensor) -> None:
        """Fills `target` with a module's tensor, its outputs in the order of the module's parts."""
        is_transposed, order = linear.transposed and target.dim() == 2, linear.order
        if order is None and not is_transposed:
            self.fill(f"{linear.module}{suffix}", target)
            return
        shape = (linear.outputs, *target.shape[1:])
        stored = self.filled(f"{linear.module}{suffix}", shape[::-1] if is_transposed else shape, target.dtype)
        values = stored.t() if is_transposed else stored
        if order is not None:
            bits = values.view(torch.uint8) if values.itemsize == 1 else values  # torch does not index codes of fp8
            values = bits[list(order)].view(values.dtype)
        target.copy_(values)
