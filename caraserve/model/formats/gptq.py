"""Weights as GPTQ stores them: words of codes along the inputs, a scale and a zero point for each group of inputs."""

from dataclasses import dataclass

import numpy as np

from caraserve.errors import ModelLoadError
from caraserve.model.formats import Array, Matrix, TensorReader
from caraserve.model.formats.grouped import INTEGERS_4, INTEGERS_8, GroupedCodes, GroupedFormat, Offset, Scale, centred
from caraserve.model.formats.unpacking import codes_of_words, column_order, read_scales, require
from caraserve.util.units import ceil_div


@dataclass(frozen=True, slots=True)
class Gptq(GroupedFormat):
    """Implements WeightFormat. `zero_step`: what is added to stored zero points, 1 in files of version 1."""

    zero_step: int
    has_order: bool  # whether a tensor says which group each input belongs to; if not, it may

    @classmethod
    def of(cls, bits: int, group: int, *, symmetric: bool, zero_step: int, has_order: bool) -> "Gptq":
        """`bits`: 4 or 8. `group`: 0 for all inputs."""
        offset = Offset.NONE if symmetric else Offset.ZERO
        values = centred(bits) if symmetric else INTEGERS_4 if bits == 4 else INTEGERS_8
        return cls(
            named(f"{bits}-bit GPTQ", group), GroupedCodes(bits, values, Scale.F16, offset), group, zero_step, has_order
        )

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}.qweight",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        (outputs, inputs), bits = shape, self.kind.bits
        group, per_word = self.group or inputs, 32 // bits
        if inputs % per_word or outputs % per_word:
            raise ModelLoadError(f"{module} has shape {list(shape)}; {self.name} needs multiples of {per_word}")
        require(tensors, module, f"{module}.qweight", self.name)
        groups = ceil_div(inputs, group)
        words = tensors.words(f"{module}.qweight", (inputs // per_word, outputs))
        codes = codes_of_words(np.ascontiguousarray(words.T), bits)
        scale = read_scales(tensors, f"{module}.scales", (groups, outputs), self.kind)
        arrays = {"codes": codes, "scale": np.ascontiguousarray(scale.T)}
        zeros = self._zeros(tensors, f"{module}.qzeros", (groups, outputs // per_word))
        if zeros is not None:
            arrays["zero"] = zeros
        order = self._order(tensors, f"{module}.g_idx", inputs, group)
        if order is not None:
            arrays["codes"] = codes[:, list(order)]
        return Matrix(arrays, group=group, order=order)

    def _zeros(self, tensors: TensorReader, tensor: str, shape: tuple[int, int]) -> Array | None:
        """Returns the zero points, [outputs, groups]; None if they are those of symmetric weights."""
        bits, step = self.kind.bits, self.zero_step
        if self.kind.offset is Offset.NONE and tensors.shape(tensor) is None:
            return None
        stored = codes_of_words(tensors.words(tensor, shape), bits)
        if self.kind.offset is Offset.NONE:
            middle = (1 << bits - 1) - step
            if (stored != middle).any():
                raise ModelLoadError(
                    f"tensor {tensor} has other zero points than {middle}, which sym of config.json says"
                )
            return None
        if bits == 8 and step and stored.max() == 255:
            raise ModelLoadError(f"tensor {tensor} has a zero point of 256; those up to 255 are computed")
        return np.ascontiguousarray(stored.T) + np.uint8(step)

    def _order(self, tensors: TensorReader, tensor: str, inputs: int, group: int) -> tuple[int, ...] | None:
        if tensors.shape(tensor) is None:
            if self.has_order:
                raise ModelLoadError(f"tensor {tensor} is missing, which desc_act of config.json needs")
            return None
        return column_order(tensor, tensors.words(tensor, (inputs,)).view(np.int32), group)


def named(title: str, group: int) -> str:
    """Returns the name of a format with its groups."""
    return f"{title}, groups of {group}" if group else f"{title}, a group for each output"
