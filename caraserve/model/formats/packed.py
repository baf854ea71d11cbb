"""Weights as compressed-tensors packs them: integers in words, and fp4 in bytes with scales in fp8 or powers of two."""

from dataclasses import dataclass

import numpy as np

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, decoded, to_float32
from caraserve.model.formats import Array, Matrix, TensorReader
from caraserve.model.formats.gptq import named
from caraserve.model.formats.grouped import (
    FP4,
    INTEGERS_4,
    INTEGERS_8,
    GroupedCodes,
    GroupedFormat,
    Offset,
    Scale,
    centred,
    check_powers,
    check_scales,
)
from caraserve.model.formats.unpacking import codes_of_words, column_order, halves, read_scales, require
from caraserve.util.units import ceil_div

NVFP4_GROUP, MXFP4_GROUP = 16, 32


@dataclass(frozen=True, slots=True)
class PackedIntegers(GroupedFormat):
    """Implements WeightFormat for `pack-quantized`."""

    @classmethod
    def of(cls, bits: int, group: int, scale: Scale, *, symmetric: bool) -> "PackedIntegers":
        """`bits`: 4 or 8. `group`: 0 for all inputs. `scale`: the type of the checkpoint's scales."""
        offset = Offset.NONE if symmetric else Offset.ZERO
        values = centred(bits) if symmetric else INTEGERS_4 if bits == 4 else INTEGERS_8
        return cls(named(f"int{bits}", group), GroupedCodes(bits, values, scale, offset), group)

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}.weight_packed",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        (outputs, inputs), bits = shape, self.kind.bits
        group = self.group or inputs
        groups = ceil_div(inputs, group)
        require(tensors, module, f"{module}.weight_packed", self.name)
        words = tensors.words(f"{module}.weight_packed", (outputs, ceil_div(inputs * bits, 32)))
        codes = codes_of_words(words, bits)[:, :inputs]
        arrays: dict[str, Array] = {"codes": np.ascontiguousarray(codes)}
        arrays["scale"] = read_scales(tensors, f"{module}.weight_scale", (outputs, groups), self.kind)
        if self.kind.offset is Offset.ZERO:
            self._check_exact(f"{module}.weight_scale", arrays["scale"])
            packed = tensors.words(f"{module}.weight_zero_point", (ceil_div(outputs * bits, 32), groups))
            along_outputs = codes_of_words(np.ascontiguousarray(packed.T), bits)  # [groups, outputs, filled up]
            arrays["zero"] = np.ascontiguousarray(along_outputs[:, :outputs].T)
        order = self._order(tensors, f"{module}.weight_g_idx", inputs, group)
        if order is not None:
            arrays["codes"] = arrays["codes"][:, list(order)]
        return Matrix(arrays, group=group, order=order)

    def _check_exact(self, tensor: str, scale: Array) -> None:
        """Raises ModelLoadError for scales of which a product with a zero point would be rounded."""
        if self.kind.scale is Scale.F32 and (scale.view(np.uint32) & 0xFF).any():
            raise ModelLoadError(
                f"tensor {tensor} has scales of more than 16 bits beside zero points; store them in 16"
            )

    def _order(self, tensors: TensorReader, tensor: str, inputs: int, group: int) -> tuple[int, ...] | None:
        if tensors.shape(tensor) is None:
            return None
        groups = tensors.words(tensor, (inputs,)).view(np.int32)
        if (groups == -1).all():  # as some files say that inputs are in order
            return None
        return column_order(tensor, groups, group)


@dataclass(frozen=True, slots=True)
class PackedFp4(GroupedFormat):
    """Implements WeightFormat for `nvfp4-pack-quantized` and `mxfp4-pack-quantized`."""

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}.weight_packed",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        outputs, inputs = shape
        if inputs % self.group:
            raise ModelLoadError(
                f"{module} has {inputs} inputs, not a multiple of {self.group}, which {self.name} needs"
            )
        require(tensors, module, f"{module}.weight_packed", self.name)
        codes = halves(tensors.codes(f"{module}.weight_packed", (outputs, inputs // 2), Code.U8))
        tensor, groups = f"{module}.weight_scale", inputs // self.group
        if self.kind.scale is Scale.E8M0:
            scale = tensors.codes(tensor, (outputs, groups), Code.U8)
            check_powers(tensor, int(scale.max()))
            return Matrix({"codes": codes, "scale": scale}, group=self.group)
        scale = tensors.codes(tensor, (outputs, groups), Code.F8_E4M3)
        divisor = to_float32(*tensors(f"{module}.weight_global_scale", (1,)))
        if not np.inf > divisor[0] > 0:
            raise ModelLoadError(
                f"tensor {module}.weight_global_scale is {divisor[0]:.4g}; a finite number above 0 is computed"
            )
        with np.errstate(over="ignore"):
            divided = decoded(scale, Code.F8_E4M3) / divisor
        check_scales(f"{tensor} / weight_global_scale", divided, self.kind)
        return Matrix({"codes": codes, "scale": scale, "divisor": np.repeat(divisor, outputs)}, group=self.group)


NVFP4 = PackedFp4("NVFP4", GroupedCodes(4, FP4, Scale.E4M3), NVFP4_GROUP)
PACKED_MXFP4 = PackedFp4("MXFP4", GroupedCodes(4, FP4, Scale.E8M0), MXFP4_GROUP)
