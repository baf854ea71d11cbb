"""What fp8 and int8 share: a code of one byte for each weight, and a float32 scale for each output or each block."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, decoded
from caraserve.model.formats import SCALES, Array, Matrix, TensorReader
from caraserve.model.formats.grouped import GroupedCodes, GroupedFormat, Scale, centred
from caraserve.model.formats.unpacking import read_scales
from caraserve.util.units import ceil_div


class Inputs(Enum):
    """How a module's inputs are quantised before they are multiplied by its weights."""

    KEPT = "kept as they are"
    PER_TOKEN = "by a scale for each token"
    STATIC = "by a scale in the checkpoint"


def _fp8_values() -> tuple[float, ...]:
    """Returns the values of fp8 codes. Two codes have none, and are refused; they get what follows from their bits."""
    values = decoded(np.arange(256, dtype=np.uint8), Code.F8_E4M3)
    return tuple(np.where(np.isnan(values), np.copysign(480.0, values), values).tolist())


CODES = {
    Code.F8_E4M3: GroupedCodes(8, _fp8_values(), Scale.F32),
    Code.I8: GroupedCodes(8, centred(8), Scale.F32),
}


@dataclass(frozen=True, slots=True)
class ScaledCodes(GroupedFormat):
    """Weight = code's value · scale of its output. Inputs that are quantised have the code of the weights."""

    inputs: Inputs
    code: Code

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}{suffix}" for suffix in SCALES)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`; the checkpoint may have one scale for all outputs."""
        codes = read_codes(tensors, f"{module}.weight", shape, self.code)
        scale = np.ascontiguousarray(tensors.scales(module, shape[0]))[:, None]
        return Matrix({"codes": codes, "scale": scale}, group=shape[1])


@dataclass(frozen=True, slots=True)
class BlockCodes(GroupedFormat):
    """Weight = code's value · scale of its block of `rows` outputs and `group` inputs; the last ones may be smaller."""

    code: Code
    rows: int
    suffix: str  # of the tensor of scales, after the module's name

    @classmethod
    def of(cls, code: Code, rows: int, group: int, suffix: str) -> "BlockCodes":
        title = "fp8" if code is Code.F8_E4M3 else "int8"
        name = f"{title}, blocks of {rows} × {group}" if rows > 1 else f"{title}, groups of {group}"
        return cls(name, CODES[code], group, code, rows, suffix)

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}{self.suffix}",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        outputs, inputs = shape
        codes = read_codes(tensors, f"{module}.weight", shape, self.code)
        blocks = ceil_div(outputs, self.rows), ceil_div(inputs, self.group)
        scale = read_scales(tensors, f"{module}{self.suffix}", blocks, self.kind)
        return Matrix({"codes": codes, "scale": np.repeat(scale, self.rows, axis=0)[:outputs]}, group=self.group)


def read_codes(tensors: TensorReader, tensor: str, shape: tuple[int, int], code: Code) -> Array:
    """Reads codes of one byte as `GroupedCodes` has them. Raises ModelLoadError for fp8 codes without a value."""
    codes = tensors.codes(tensor, shape, code)
    if code is Code.I8:
        return codes ^ 128
    if (codes & 127 == 127).any():
        raise ModelLoadError(f"tensor {tensor} has weights that are not numbers")
    return codes
