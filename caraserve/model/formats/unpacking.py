"""Codes and scales as several formats store them: packed in bytes and words, and in several floating-point types."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import NAMES, Dtype, rounded, to_float32
from caraserve.model.formats import Array, TensorReader
from caraserve.model.formats.grouped import GroupedCodes, Scale, check_scales

Codes = NDArray[np.uint8]


def halves(packed: Codes) -> Codes:
    """Returns the codes of half bytes, the low half of each byte first: [..., n] → [..., 2 n]."""
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(np.uint8)


def halves_from_high(packed: Codes) -> Codes:
    """Returns the codes of half bytes, the high half of each byte first."""
    pairs = packed.astype("<u2")
    pairs = pairs >> 4 | (pairs & 15) << 8
    return pairs.view(np.uint8)


def codes_of_words(words: NDArray[np.uint32], bits: int) -> Codes:
    """Returns the codes of 4 or 8 bits in words, the lowest first: [..., n] → [..., n · 32 / bits]."""
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return halves(packed) if bits == 4 else packed


def read_scales(tensors: TensorReader, tensor: str, shape: tuple[int, ...], kind: GroupedCodes) -> Array:
    """Reads scales of any floating-point type. Raises ModelLoadError for those with which weights are not finite, and
    for those that `kind` cannot hold."""
    return stored_scales(tensor, to_float32(*tensors(tensor, shape)), kind)


def stored_scales(tensor: str, scales: NDArray[np.float32], kind: GroupedCodes) -> Array:
    """Returns scales as `kind` stores them. Raises ModelLoadError as `read_scales`."""
    check_scales(tensor, scales, kind)
    if kind.scale is Scale.F32:
        return scales
    dtype = Dtype[kind.scale.name]
    with np.errstate(over="ignore"):
        narrow = rounded(scales, dtype)
    if not np.array_equal(to_float32(narrow, dtype), scales):
        raise ModelLoadError(f"tensor {tensor} has scales that {NAMES[dtype]} does not hold")
    return narrow


def column_order(tensor: str, groups: Sequence[int] | Array, group: int) -> tuple[int, ...] | None:
    """Returns the inputs sorted by their groups, None if they are in order. Raises ModelLoadError unless each group but
    the last has `group` inputs."""
    found = np.asarray(groups)
    order = np.argsort(found, kind="stable")
    if not np.array_equal(found[order], np.arange(len(found)) // group):
        raise ModelLoadError(f"tensor {tensor} does not give {group} inputs to each group")
    return None if np.array_equal(order, np.arange(len(found))) else tuple(order.tolist())


def require(tensors: TensorReader, module: str, tensor: str, form: str) -> None:
    """Raises ModelLoadError if a module lacks the tensor that a format needs, and says what is wrong."""
    if tensors.shape(tensor) is None:
        raise ModelLoadError(f"tensor {tensor} is missing; by config.json the weights of {module} are {form}")
