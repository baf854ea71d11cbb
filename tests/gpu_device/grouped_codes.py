"""Random weights in grouped codes of every kind, and what packed ones stand for, computed by torch."""

import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from caraserve.gpu.kernels.grouped import GroupedMatrix
from caraserve.model.dtype import Code, Dtype, decoded, rounded
from caraserve.model.formats import Array, Matrix, TensorReader, WeightFormat
from caraserve.model.formats.grouped import (
    FP4,
    INTEGERS_4,
    INTEGERS_5,
    INTEGERS_8,
    SUPER_GROUP,
    GroupedCodes,
    GroupedFormat,
    Offset,
    Scale,
    centred,
    values_of,
)
from caraserve.util.units import ceil_div

_IQ4_NL = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
_FP8 = tuple(map(float, decoded(np.arange(256, dtype=np.uint8), Code.F8_E4M3)))
_SIGNED = tuple(float(code - (code & 128) * 2) for code in range(256))
# By name: what codes stand for, and the inputs with one scale.
KINDS: dict[str, tuple[GroupedCodes, int]] = {
    "Q8_0": (GroupedCodes(8, centred(8), Scale.F16), 32),
    "Q4_0": (GroupedCodes(4, centred(4), Scale.F16), 32),
    "Q4_1": (GroupedCodes(4, INTEGERS_4, Scale.F16, Offset.ADDED), 32),
    "Q5_0": (GroupedCodes(5, centred(5), Scale.F16), 32),
    "Q5_1": (GroupedCodes(5, INTEGERS_5, Scale.F16, Offset.ADDED), 32),
    "Q4_K": (GroupedCodes(4, INTEGERS_4, Scale.NESTED, Offset.NESTED), 32),
    "Q5_K": (GroupedCodes(5, INTEGERS_5, Scale.NESTED, Offset.NESTED), 32),
    "Q6_K": (GroupedCodes(6, centred(6), Scale.NESTED), 16),
    "IQ4_NL": (GroupedCodes(4, _IQ4_NL, Scale.F16), 32),
    "IQ4_XS": (GroupedCodes(4, _IQ4_NL, Scale.NESTED), 32),
    "MXFP4": (GroupedCodes(4, FP4, Scale.E8M0), 32),
    "NVFP4": (GroupedCodes(4, FP4, Scale.E4M3), 16),
    "nf4": (GroupedCodes(4, tuple(value / 127 for value in _IQ4_NL), Scale.F32, rounds_to=Dtype.BF16), 64),
    "GPTQ": (GroupedCodes(4, INTEGERS_4, Scale.F16, Offset.ZERO), 128),
    "GPTQ-8": (GroupedCodes(8, INTEGERS_8, Scale.F16, Offset.ZERO), 64),
    "AWQ": (GroupedCodes(4, INTEGERS_4, Scale.F16, Offset.ZERO, Dtype.F16), 64),
    "w8": (GroupedCodes(8, _SIGNED, Scale.BF16), 0),
    "fp8-blocks": (GroupedCodes(8, _FP8, Scale.F32), 128),
}


@dataclass(frozen=True, slots=True)
class MadeUp(GroupedFormat):
    """A format of random weights, which are the same for the same name. `order`: where the columns are in another order
    than the inputs, it has this seed."""

    order: int | None = None

    @classmethod
    def of(cls, kind: str, order: int | None = None) -> "MadeUp":
        return cls(kind, *KINDS[kind], order)

    def read(self, tensors: TensorReader | None, module: str, shape: tuple[int, int]) -> Matrix:
        return random_codes(self.kind, self.group, *shape, order=self.order, seed=zlib.crc32(module.encode()))

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        each = [self.read(tensors, f"{tensor}.{expert}", (shape[1], shape[2])) for expert in range(shape[0])]
        names = each[0].arrays
        return replace(each[0], arrays={name: np.stack([one.arrays[name] for one in each]) for name in names})


def read_made_up(stored: WeightFormat, module: str, shape: tuple[int, ...]) -> Matrix:
    """Implements ReadMatrix without a checkpoint."""
    assert isinstance(stored, MadeUp)
    return stored.read(None, module, (shape[0], shape[1]))


def random_codes(
    kind: GroupedCodes, group: int, outputs: int, inputs: int, *, order: int | None = None, seed: int = 0
) -> Matrix:
    """Returns a matrix with scales of many sizes. `order`: seed of an order of the columns."""
    rng, group = np.random.default_rng(seed), group or inputs
    shape, above = (outputs, ceil_div(inputs, group)), (outputs, inputs // SUPER_GROUP)
    values = np.array(kind.values, np.float32)
    finite = np.flatnonzero(np.isfinite(values)).astype(np.uint8)
    size = 1 / (16 * float(values[finite].std()))

    def floats(of: tuple[int, ...], dtype: Dtype) -> Array:
        return rounded((rng.uniform(0.1, 2.0, of) * size).astype(np.float32), dtype)

    def integers(low: int, high: int, dtype: type[np.integer]) -> Array:
        return rng.integers(low, high, shape).astype(dtype)

    arrays: dict[str, Array] = {"codes": finite[rng.integers(0, len(finite), (outputs, inputs))]}
    match kind.scale:
        case Scale.E4M3:
            arrays |= {"scale": integers(0x20, 0x40, np.uint8), "divisor": np.reciprocal(floats((outputs,), Dtype.F32))}
        case Scale.E8M0:
            arrays["scale"] = integers(119, 125, np.uint8)
        case Scale.NESTED:
            size /= 32
            is_signed = kind.offset is Offset.NONE
            arrays["scale"] = integers(-64, 64, np.int8) if is_signed else integers(0, 64, np.uint8)
            arrays["super_scale"] = floats(above, Dtype.F16)
        case _:
            arrays["scale"] = floats(shape, Dtype[kind.scale.name])
    match kind.offset:
        case Offset.ADDED:
            arrays["offset"] = floats(shape, Dtype[kind.scale.name])
        case Offset.ZERO:
            arrays["zero"] = integers(0, 1 << kind.bits, np.uint8)
        case Offset.NESTED:
            arrays |= {"offset": integers(0, 64, np.uint8), "super_offset": floats(above, Dtype.F16)}
    columns = None if order is None else tuple(np.random.default_rng(order).permutation(inputs).tolist())
    return Matrix(arrays, None, group, columns)


def plain_values(matrix: GroupedMatrix) -> Tensor:
    """Returns the weights of a packed matrix, fp32 [outputs, inputs], in the order of the inputs, on the CPU."""
    codes, outputs = matrix.codes.cpu(), matrix.outputs
    if matrix.kind.bits < 8:
        halves = torch.stack([codes & 15, codes >> 4], dim=1).view(outputs, 2, -1, 16)
        codes = halves.transpose(1, 2).reshape(outputs, -1)
    if matrix.high is not None:
        above = matrix.kind.bits - 4
        words = matrix.high.cpu()[:, :, None] >> torch.arange(0, 32, above, dtype=torch.int32)
        codes = codes | ((words.view(outputs, -1) & ((1 << above) - 1)).to(torch.uint8) << 4)

    def stored(array: Tensor) -> Array:
        if array.dtype in (torch.float16, torch.bfloat16):
            return array.cpu().view(torch.int16).numpy().view(np.uint16)
        return array.cpu().numpy()

    above_scale = "divisor" if matrix.kind.scale is Scale.E4M3 else "super_scale"
    names = {
        "scale": matrix.scale,
        "zero" if matrix.kind.offset is Offset.ZERO else "offset": matrix.offset,
        above_scale: matrix.scale_above,
        "super_offset": matrix.offset_above,
    }
    arrays: dict[str, Array] = {name: stored(array) for name, array in names.items() if array is not None}
    arrays["codes"] = codes[:, : matrix.inputs].numpy()
    order = None if matrix.order is None else tuple(matrix.order.tolist())
    return torch.from_numpy(values_of(matrix.kind, Matrix(arrays, None, matrix.group or matrix.inputs, order)))
