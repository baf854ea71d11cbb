"""Weights in int8."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.model.dtype import Code


@dataclass(frozen=True, slots=True)
class Int8Linear(QuantizedLinear):
    """Implements Linear."""

    code: ClassVar[Code] = Code.I8
    stored: ClassVar[torch.dtype] = torch.int8
