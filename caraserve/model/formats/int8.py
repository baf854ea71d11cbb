"""int8 weights, symmetric, with a scale for each output."""

from dataclasses import dataclass
from typing import ClassVar

from caraserve.model.dtype import Code
from caraserve.model.formats.scaled_codes import ScaledCodes


@dataclass(frozen=True, slots=True)
class Int8(ScaledCodes):
    """Weights in int8 from -127 to 127."""

    code: ClassVar[Code] = Code.I8
    name: ClassVar[str] = "int8"
