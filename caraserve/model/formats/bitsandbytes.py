"""Weights as bitsandbytes stores them: 4-bit codes of its tables nf4 and fp4, and int8 with a scale for each output.

4-bit codes lie in blocks of 64 over the whole matrix, so a block may go on in the next row; groups are then smaller.
"""

import json
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import NAMES, Code, Dtype, to_float32
from caraserve.model.formats import Array, Matrix, TensorReader
from caraserve.model.formats.grouped import GroupedCodes, GroupedFormat, Scale, centred, check_scales
from caraserve.model.formats.unpacking import halves_from_high, require
from caraserve.util.units import ceil_div

BLOCK = 64  # weights with one scale
_LEAST_GROUP = 16  # inputs
_NESTED_BLOCK = 256  # scales with one scale of their own
_MOST_STATE_BYTES = 4096
TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(0.0, 0.005208333488553762, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.005208333488553762, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
    ),
}


@dataclass(frozen=True, slots=True)
class FourBits(GroupedFormat):
    """Implements WeightFormat. Weights are rounded to the type that they had before, as by the library."""

    table: str  # nf4 or fp4

    @classmethod
    def of(cls, table: str, dtype: Dtype) -> "FourBits":
        """`dtype`: of the weights before they were quantised."""
        rounds_to = None if dtype is Dtype.F32 else dtype
        kind = GroupedCodes(4, TABLES[table], Scale.F32, rounds_to=rounds_to)
        return cls(f"4-bit bitsandbytes ({table}), groups of {BLOCK}", kind, BLOCK, table)

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}.weight.quant_state.bitsandbytes__{self.table}",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        outputs, inputs = shape
        group, count, weight = gcd(inputs, BLOCK), outputs * inputs, f"{module}.weight"
        if group < _LEAST_GROUP:
            raise ModelLoadError(
                f"{module} has {inputs} inputs, not a multiple of {_LEAST_GROUP}, which nf4 needs here"
            )
        require(tensors, module, self.main_tensors(module)[0], self.name)
        state = self._state(tensors, module, shape)
        table = to_float32(*tensors(f"{weight}.quant_map", (len(self.kind.values),)))
        if not np.array_equal(table, np.asarray(self.kind.values, np.float32)):
            raise ModelLoadError(f"tensor {weight}.quant_map is not the table of {self.table}")
        codes = halves_from_high(tensors.codes(weight, (ceil_div(count, 2), 1), Code.U8).reshape(-1))
        scale = self._scales(tensors, weight, ceil_div(count, BLOCK), state)
        if group < BLOCK:
            scale = np.repeat(scale, BLOCK // group)[: count // group]
        arrays: dict[str, Array] = {"codes": codes[:count].reshape(shape), "scale": scale.reshape(outputs, -1)}
        return Matrix(arrays, group=group)

    def _state(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> dict[str, Any]:
        """Reads what the file says of a matrix, and checks it."""
        tensor = self.main_tensors(module)[0]
        stored = tensors.shape(tensor)
        if stored is None or len(stored) != 1 or stored[0] > _MOST_STATE_BYTES:
            raise ModelLoadError(
                f"tensor {tensor} has shape {stored}; it must be a text of at most {_MOST_STATE_BYTES} bytes"
            )
        try:
            state = json.loads(tensors.codes(tensor, stored, Code.U8).tobytes())
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise ModelLoadError(f"tensor {tensor} does not hold a JSON object")
        dtype = NAMES[self.kind.rounds_to or Dtype.F32]
        right = {"quant_type": self.table, "blocksize": BLOCK, "shape": list(shape), "dtype": dtype}
        if "nested_blocksize" in state or tensors.shape(f"{module}.weight.nested_absmax") is not None:
            right |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32"}
        for name, value in right.items():
            if state.get(name) != value:
                raise ModelLoadError(f"tensor {tensor} says {name} {state.get(name)!r:.80}; {value!r} is read")
        return state

    def _scales(self, tensors: TensorReader, weight: str, count: int, state: dict[str, Any]) -> NDArray[np.float32]:
        if "nested_blocksize" not in state:
            found = to_float32(*tensors(f"{weight}.absmax", (count,)))
        else:
            offset = state.get("nested_offset")
            if not isinstance(offset, float) or not np.isfinite(offset):
                raise ModelLoadError(f"{weight}: nested_offset is {ascii(offset)[:80]}; a finite number is read")
            places = tensors.codes(f"{weight}.absmax", (count,), Code.U8)
            above = to_float32(*tensors(f"{weight}.nested_absmax", (ceil_div(count, _NESTED_BLOCK),)))
            table = to_float32(*tensors(f"{weight}.nested_quant_map", (256,)))
            with np.errstate(all="ignore"):
                found = table[places] * np.repeat(above, _NESTED_BLOCK)[:count] + np.float32(offset)
        check_scales(f"{weight}.absmax", found, self.kind)
        return found


@dataclass(frozen=True, slots=True)
class EightBits(GroupedFormat):
    """Implements WeightFormat: code · SCB / 127, with an SCB for each output."""

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}.SCB",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        require(tensors, module, f"{module}.SCB", self.name)
        if tensors.shape(f"{module}.weight_format") is not None:
            layout = int(tensors.codes(f"{module}.weight_format", (), Code.U8))
            if layout:
                raise ModelLoadError(f"tensor {module}.weight_format is {layout}; 0 (rows one after another) is read")
        codes = tensors.codes(f"{module}.weight", shape, Code.I8) ^ 128
        scale = to_float32(*tensors(f"{module}.SCB", (shape[0],))) / np.float32(127)
        check_scales(f"{module}.SCB / 127", scale, self.kind)
        return Matrix({"codes": codes, "scale": scale[:, None]}, group=shape[1])


EIGHT_BITS = EightBits("8-bit bitsandbytes", GroupedCodes(8, centred(8), Scale.F32), 0)
