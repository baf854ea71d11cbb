"""fp8 weights (E4M3 without infinities) with a scale for each output."""

from dataclasses import dataclass, field

from caraserve.model.dtype import Code
from caraserve.model.formats.grouped import GroupedCodes
from caraserve.model.formats.scaled_codes import CODES, Inputs, ScaledCodes


@dataclass(frozen=True, slots=True)
class Fp8(ScaledCodes):
    """Weights in fp8; their largest value is 448."""

    name: str = field(default="fp8", init=False)
    kind: GroupedCodes = field(default=CODES[Code.F8_E4M3], init=False)
    group: int = field(default=0, init=False)
    inputs: Inputs
    code: Code = field(default=Code.F8_E4M3, init=False)
