"""Random weights in grouped codes, for a model without a checkpoint."""

import zlib

import numpy as np

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype, rounded
from caraserve.model.formats import Array, Matrix, WeightFormat
from caraserve.model.formats.grouped import SUPER_GROUP, GroupedCodes, GroupedFormat, Offset, Scale
from caraserve.util.units import ceil_div

_STD = 0.02  # of the weights
_ONE = 0x38  # as fp8
_STEPS = 16  # of a nested scale


def random_matrix(stored: WeightFormat, module: str, shape: tuple[int, ...]) -> Matrix:
    """Implements ReadMatrix: weights of plausible size, the same for the same name. Raises ModelLoadError for formats
    that are not of grouped codes."""
    if not isinstance(stored, GroupedFormat):
        raise ModelLoadError(f"{module}: random weights of format {stored.name} are not made")
    kind, (*outputs, inputs) = stored.kind, shape
    group = stored.group or inputs
    values = np.array(kind.values, np.float32)
    finite = np.flatnonzero(np.isfinite(values)).astype(np.uint8)
    generator = np.random.default_rng(zlib.crc32(module.encode()))
    arrays: dict[str, Array] = {"codes": finite[generator.integers(0, len(finite), shape, np.uint8)]}
    scale, middle = _STD / float(values[finite].std()), float(values[finite].mean())
    groups, supers = (*outputs, ceil_div(inputs, group)), (*outputs, inputs // SUPER_GROUP)
    for name, value in _scales(kind, scale, middle).items():
        of = tuple(outputs) if name == "divisor" else supers if name.startswith("super_") else groups
        arrays[name] = np.full(of, value)
    return Matrix(arrays, None, group)


def _scales(kind: GroupedCodes, scale: float, middle: float) -> dict[str, Array]:
    """Returns what is stored beside codes to multiply them by `scale`, after `middle` was subtracted."""

    def stored(value: float, dtype: Dtype) -> Array:
        return rounded(np.array([value], np.float32), dtype)

    made: dict[str, Array]
    match kind.scale:
        case Scale.E4M3:
            made = {"scale": np.array([_ONE], np.uint8), "divisor": np.array([1 / scale], np.float32)}
        case Scale.E8M0:
            made = {"scale": np.array([round(np.log2(scale)) + 127], np.uint8)}
        case Scale.NESTED:
            of = np.uint8 if kind.offset is Offset.NESTED else np.int8
            made = {"scale": np.array([_STEPS], of), "super_scale": stored(scale / _STEPS, Dtype.F16)}
        case _:
            made = {"scale": stored(scale, Dtype[kind.scale.name])}
    match kind.offset:
        case Offset.ADDED:
            made["offset"] = stored(-middle * scale, Dtype[kind.scale.name])
        case Offset.ZERO:
            made["zero"] = np.array([round(middle)], np.uint8)
        case Offset.NESTED:
            made |= {"offset": np.array([round(middle)], np.uint8), "super_offset": stored(scale, Dtype.F16)}
    return made
