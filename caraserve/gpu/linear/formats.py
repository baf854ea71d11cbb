"""The weight formats on a GPU: which class loads and multiplies modules of one. Code outside the package calls
`register`."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, starmap
from typing import Protocol

from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.linear.base import Fill, JoinedModules, Linear, LinearLoader, RoundedRows
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.fp8 import Fp8Linear
from caraserve.gpu.linear.int8 import Int8Linear
from caraserve.gpu.linear.mxfp4 import Mxfp4
from caraserve.model.formats import WeightFormat
from caraserve.model.linear_plan import LinearPlan, accumulated


class LinearClass(Protocol):
    """What a format has on a GPU."""

    def load(self, loader: LinearLoader, modules: JoinedModules, /) -> Linear:
        """Allocates and fills what the modules have, also their biases. Raises ModelLoadError."""

    def fill_numbers(self, module: str, target: Tensor, fill: Fill, /) -> None:
        """Fills a matrix of numbers, [outputs, inputs], with a module's weights."""


_CLASSES: dict[str, LinearClass] = {"plain": DenseLinear, "fp8": Fp8Linear, "int8": Int8Linear, "mxfp4": Mxfp4}


def register(name: str, linear: LinearClass) -> None:
    """Adds a format by the name of its `WeightFormat`. Raises ValueError if the name is taken."""
    if name in _CLASSES:
        raise ValueError(f"weight format {name} is registered already")
    _CLASSES[name] = linear


def class_of(stored: WeightFormat) -> LinearClass:
    """Returns the class of a format. Raises ModelLoadError if there is none."""
    if stored.name not in _CLASSES:
        raise ModelLoadError(f"weights of format {stored.name} cannot be computed on a GPU; {', '.join(_CLASSES)} can")
    return _CLASSES[stored.name]


def load_linear(loader: LinearLoader, linears: Sequence[LinearPlan]) -> Linear:
    """Returns the linear of modules that read the same rows: one product for neighbours of the same format."""
    joined = [JoinedModules(tuple(run)) for _, run in groupby(linears, key=lambda linear: linear.format)]
    made = [class_of(modules.format).load(loader, modules) for modules in joined]
    if len(made) == 1:
        return made[0]
    columns = starmap(slice, pairwise(accumulated(modules.outputs for modules in joined)))
    return MixedLinear(tuple(zip(made, columns, strict=True)))


@dataclass(frozen=True, slots=True)
class MixedLinear:
    """Implements Linear for modules of several formats: linears, and the columns of their outputs. torch's product of
    fp8 needs a contiguous result, so such linears have ours for any number of rows."""

    parts: tuple[tuple[Linear, slice], ...]

    @property
    def weight(self) -> Tensor:
        raise AssertionError("weights of several formats are several tensors")

    @property
    def rounds_inputs(self) -> bool:
        return any(linear.rounds_inputs for linear, _ in self.parts)

    @property
    def kernels(self) -> Hashable:
        return tuple((linear.kernels, columns.start, columns.stop) for linear, columns in self.parts)

    def apply(self, x: Tensor, out: Tensor, rounded: RoundedRows | None = None) -> None:
        for linear, columns in self.parts:
            linear.apply(x, out[:, columns], rounded)

    def with_bias(self, bias: Tensor) -> "MixedLinear":
        return MixedLinear(tuple((linear.with_bias(bias[columns]), columns) for linear, columns in self.parts))

    def copy(self) -> "MixedLinear":
        return MixedLinear(tuple((linear.copy(), columns) for linear, columns in self.parts))
