"""The weight formats on a GPU: which class loads and multiplies modules of one. Code outside the package calls
`register`."""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.linear.base import JoinedModules, Linear, LinearLoader
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.fp8 import Fp8Linear
from caraserve.gpu.linear.grouped import GroupedCodesClass
from caraserve.gpu.linear.int8 import Int8Linear
from caraserve.gpu.linear.mixed import mixed
from caraserve.gpu.linear.mxfp4 import Mxfp4
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.grouped import GroupedFormat
from caraserve.model.linear_plan import LinearPlan


class LinearClass(Protocol):
    """What a format has on a GPU."""

    def load(self, loader: LinearLoader, modules: JoinedModules, /) -> Linear:
        """Allocates and fills what the modules have, also their biases. Raises ModelLoadError."""

    def fill_numbers(self, module: str, target: Tensor, loader: LinearLoader, /) -> None:
        """Fills a matrix of numbers, [outputs, inputs], with a module's weights."""


_CLASSES: dict[str, LinearClass] = {"plain": DenseLinear, "fp8": Fp8Linear, "int8": Int8Linear, "mxfp4": Mxfp4}


def register(name: str, linear: LinearClass) -> None:
    """Adds a format by the name of its `WeightFormat`. Raises ValueError if the name is taken."""
    if name in _CLASSES:
        raise ValueError(f"weight format {name} is registered already")
    _CLASSES[name] = linear


def class_of(stored: WeightFormat) -> LinearClass:
    """Returns the class of a format. Raises ModelLoadError if there is none."""
    # Fp8, Int8 and Mxfp4 are grouped codes too, but these classes round inputs, or make numbers of experts.
    if stored.name in _CLASSES:
        return _CLASSES[stored.name]
    if isinstance(stored, GroupedFormat):
        return GroupedCodesClass(stored)
    raise ModelLoadError(f"weights of format {stored.name} cannot be computed on a GPU; {', '.join(_CLASSES)} can")


def load_linear(loader: LinearLoader, linears: Sequence[LinearPlan]) -> Linear:
    """Returns the linear of modules that read the same rows: one product for neighbours of the same format."""
    joined = [JoinedModules(tuple(run)) for _, run in groupby(linears, key=lambda linear: linear.format)]
    made = [class_of(modules.format).load(loader, modules) for modules in joined]
    return mixed([(linear, modules.outputs) for linear, modules in zip(made, joined, strict=True)])
