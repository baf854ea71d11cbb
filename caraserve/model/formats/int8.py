"""int8 weights, symmetric, with a scale for each output."""

from dataclasses import dataclass, field

from caraserve.model.dtype import Code
from caraserve.model.formats.grouped import GroupedCodes
from caraserve.model.formats.scaled_codes import CODES, Inputs, ScaledCodes


@dataclass(frozen=True, slots=True)
class Int8(ScaledCodes):
    """Weights in int8 from -127 to 127."""

    name: str = field(default="int8", init=False)
    kind: GroupedCodes = field(default=CODES[Code.I8], init=False)
    group: int = field(default=0, init=False)
    inputs: Inputs
    code: Code = field(default=Code.I8, init=False)
