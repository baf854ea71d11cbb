"""Weights in int8."""

from dataclasses import dataclass
from typing import ClassVar

from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.model.dtype import Code


@dataclass(frozen=True, slots=True)
class Int8Linear(QuantizedLinear):
    """Implements Linear."""

    code: ClassVar[Code] = Code.I8
