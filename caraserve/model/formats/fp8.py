"""fp8 weights (E4M3 without infinities) with a scale for each output."""

from dataclasses import dataclass
from typing import ClassVar

from caraserve.model.dtype import Code
from caraserve.model.formats.scaled_codes import ScaledCodes


@dataclass(frozen=True, slots=True)
class Fp8(ScaledCodes):
    """Weights in fp8; their largest value is 448."""

    code: ClassVar[Code] = Code.F8_E4M3
    name: ClassVar[str] = "fp8"
