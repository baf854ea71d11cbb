"""MXFP4 weights of experts, as published checkpoints of GPT-OSS store them: codes of 4 bits (E2M1), and a power of two
for each 32 inputs of an output."""

from dataclasses import dataclass

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code
from caraserve.model.formats import Matrix, TensorReader
from caraserve.model.formats.grouped import FP4, GroupedCodes, GroupedFormat, Scale, check_powers
from caraserve.model.formats.unpacking import halves

GROUP = 32  # inputs with one scale
VALUES = FP4  # of codes


@dataclass(frozen=True, slots=True)
class Mxfp4(GroupedFormat):
    """Weight = value of its code · 2^(scale - 127). The low four bits of a byte are the code of the input before that
    of the high ones."""

    def main_tensors(self, module: str) -> tuple[str, ...]:
        return (f"{module}_blocks",)

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        return self._read(tensors, module, shape)

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Reads what `read` does, of each expert."""
        return self._read(tensors, tensor, shape)

    def _read(self, tensors: TensorReader, module: str, shape: tuple[int, ...]) -> Matrix:
        *outputs, inputs = shape
        check_inputs(module, inputs)
        groups = (*outputs, inputs // GROUP)
        codes = tensors.codes(f"{module}_blocks", (*groups, GROUP // 2), Code.U8)
        scale = tensors.codes(f"{module}_scales", groups, Code.U8)
        check_scales(module, int(scale.max()))
        return Matrix({"codes": halves(codes).reshape(shape), "scale": scale}, group=GROUP)


def check_inputs(module: str, inputs: int) -> None:
    """Raises ModelLoadError unless inputs are a whole number of groups."""
    if inputs % GROUP:
        raise ModelLoadError(f"{module} has {inputs} inputs, not a multiple of {GROUP}, which MXFP4 needs")


def check_scales(module: str, largest: int) -> None:
    """Raises ModelLoadError for a largest scale with which weights could be too large."""
    check_powers(f"{module}_scales", largest)


MXFP4 = Mxfp4("mxfp4", GroupedCodes(4, FP4, Scale.E8M0), GROUP)
