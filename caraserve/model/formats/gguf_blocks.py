"""Weights in the blocks of GGUF files: a row of a matrix is blocks of 32 or 256 weights, one after another.

Each type of block becomes grouped codes, exactly. `gguf_format` has all types that are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.formats import Array, Matrix, TensorReader, WeightFormat
from caraserve.model.formats.grouped import (
    FP4,
    INTEGERS_4,
    INTEGERS_5,
    GroupedCodes,
    GroupedFormat,
    Offset,
    Scale,
    centred,
    check_powers,
)
from caraserve.model.formats.plain import PLAIN

Bytes = NDArray[np.uint8]  # of blocks or of parts of them: [blocks, bytes]
Arrays = Mapping[str, Array]  # of GroupedCodes, the blocks along the first axis

_IQ4_NL = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
_PIECE_BYTES = 1 << 19  # of blocks that are unpacked at a time, so that they stay in the cache


@dataclass(frozen=True, slots=True)
class GgufBlocks(GroupedFormat):
    """Implements WeightFormat for one type of blocks."""

    type: str  # as GGUF names it
    block: int  # weights of a block
    block_bytes: int
    unpack: Callable[[Bytes], Arrays]
    order: tuple[int, ...] | None = None  # the input of each column

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Reads the arrays of `GroupedCodes`."""
        return self._read(tensors, f"{module}.weight", shape)

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Reads what `read` does, of each expert."""
        return self._read(tensors, tensor, shape)

    def _read(self, tensors: TensorReader, tensor: str, shape: tuple[int, ...]) -> Matrix:
        *outputs, inputs = shape
        if inputs % self.block:
            raise ModelLoadError(
                f"{tensor} has {inputs} inputs, not a multiple of {self.block}, which {self.type} needs"
            )
        blocks = tensors.blocks(tensor, shape, self.type).reshape(-1, self.block_bytes)
        arrays = self._unpacked(blocks)
        for name, array in arrays.items():
            self._check(tensor, name, array)
        shaped = {name: array.reshape(*outputs, -1) for name, array in arrays.items()}
        return Matrix(shaped, group=self.group, order=self.order)

    def _unpacked(self, blocks: Bytes) -> dict[str, Array]:
        step = _PIECE_BYTES // self.block_bytes
        if len(blocks) <= step:
            return {name: np.ascontiguousarray(array) for name, array in self.unpack(blocks).items()}
        made: dict[str, Array] = {}
        for start in range(0, len(blocks), step):
            for name, array in self.unpack(blocks[start : start + step]).items():
                if name not in made:
                    made[name] = np.empty((len(blocks), *array.shape[1:]), array.dtype)
                made[name][start : start + step] = array
        return made

    def _check(self, tensor: str, name: str, array: Array) -> None:
        if array.dtype == np.uint16 and not np.isfinite(to_float32(array, Dtype.F16)).all():
            raise ModelLoadError(f"{tensor}: a block of {self.type} has a scale that is not finite")
        if self.kind.scale is Scale.E8M0 and name == "scale":
            check_powers(tensor, int(array.max()))


def gguf_format(kind: str) -> WeightFormat:
    """Returns the format of a tensor of a GGUF file by the name of its type. Raises ModelLoadError for types that are
    not read."""
    if kind in _NUMBERS:
        return PLAIN
    if kind not in GGUF_BLOCKS:
        raise ModelLoadError(f"tensors of type {kind} are not read; {', '.join((*_NUMBERS, *GGUF_BLOCKS))} are")
    return GGUF_BLOCKS[kind]


def _half(blocks: Bytes, at: int) -> NDArray[np.uint16]:
    """Returns the float16 bits at a place of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2").astype(np.uint16, copy=False)


def _nibbles(blocks: Bytes, at: int, run: int, runs: int = 1) -> Bytes:
    """Returns the codes of half bytes: `runs` times, `run` bytes hold 2 · `run` codes, first the low halves."""
    packed = np.ascontiguousarray(blocks[:, at : at + run * runs])
    # Runs are moved as items of 16 bytes, which NumPy does ten times as fast as byte by byte.
    codes = np.empty((len(blocks), runs, 2, run // 16), np.complex128)
    codes[:, :, 0] = (packed & 15).view(np.complex128).reshape(-1, runs, run // 16)
    codes[:, :, 1] = (packed >> 4).view(np.complex128).reshape(-1, runs, run // 16)
    return codes.view(np.uint8).reshape(len(blocks), -1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Returns 16 for each of 32 bits that is set, [blocks, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q8_0(blocks: Bytes) -> Arrays:
    return {"codes": blocks[:, 2:34] ^ 128, "scale": _half(blocks, 0)}


def _q4_0(blocks: Bytes) -> Arrays:
    return {"codes": _nibbles(blocks, 2, 16), "scale": _half(blocks, 0)}


def _q4_1(blocks: Bytes) -> Arrays:
    return {"codes": _nibbles(blocks, 4, 16), "scale": _half(blocks, 0), "offset": _half(blocks, 2)}


def _q5_0(blocks: Bytes) -> Arrays:
    return {"codes": _nibbles(blocks, 6, 16) | _fifth_bits(blocks, 2), "scale": _half(blocks, 0)}


def _q5_1(blocks: Bytes) -> Arrays:
    codes = _nibbles(blocks, 8, 16) | _fifth_bits(blocks, 4)
    return {"codes": codes, "scale": _half(blocks, 0), "offset": _half(blocks, 2)}


def _mxfp4(blocks: Bytes) -> Arrays:
    return {"codes": _nibbles(blocks, 1, 16), "scale": blocks[:, :1]}


def _k_scales(blocks: Bytes) -> Arrays:
    """Returns the scales of Q4_K and Q5_K: eight of six bits, and as many minima, in twelve bytes."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    offset = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return {"scale": scale, "offset": offset, "super_scale": _half(blocks, 0), "super_offset": _half(blocks, 2)}


def _q4_k(blocks: Bytes) -> Arrays:
    return {"codes": _nibbles(blocks, 16, 32, 4), **_k_scales(blocks)}


def _q5_k(blocks: Bytes) -> Arrays:
    codes = _nibbles(blocks, 48, 32, 4).reshape(-1, 8, 32)
    high = np.ascontiguousarray(blocks[:, 16:48])
    for group in range(8):
        codes[:, group] |= (high >> group & 1) << 4
    return {"codes": codes.reshape(-1, 256), **_k_scales(blocks)}


def _q6_k(blocks: Bytes) -> Arrays:
    codes = _nibbles(blocks, 0, 64, 2).reshape(-1, 2, 4, 32)
    high = np.ascontiguousarray(blocks[:, 128:192]).reshape(-1, 2, 32)
    for quarter in range(4):
        codes[:, :, quarter] |= (high >> 2 * quarter & 3) << 4
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return {"codes": codes.reshape(-1, 256), "scale": scale, "super_scale": _half(blocks, 208)}


def _two_bits(blocks: Bytes, at: int) -> Bytes:
    """Returns the codes of 64 bytes with four each: of 32 bytes first the lowest bits."""
    packed = blocks[:, at : at + 64].reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    return (packed >> shifts & np.uint8(3)).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Arrays:
    both = blocks[:, :16]
    found = {"codes": _two_bits(blocks, 16), "scale": both & 15, "offset": both >> 4}
    return found | {"super_scale": _half(blocks, 80), "super_offset": _half(blocks, 82)}


def _q3_k(blocks: Bytes) -> Arrays:
    """Codes are 4 more than the file's, so that the middle is that of four bits."""
    high = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1).reshape(-1, 256)
    first, second, third = (blocks[:, at : at + 4] for at in (96, 100, 104))
    lows = (first & 15, second & 15, first >> 4, second >> 4)
    fours = [low | (third >> 2 * part & 3) << 4 for part, low in enumerate(lows)]
    scale = np.concatenate(fours, axis=1).view(np.int8) - np.int8(32)
    return {"codes": _two_bits(blocks, 32) + 4 * high + 4, "scale": scale, "super_scale": _half(blocks, 108)}


def _iq4_xs(blocks: Bytes) -> Arrays:
    groups = np.arange(8)
    low = blocks[:, 4 + groups // 2] >> (4 * (groups % 2)).astype(np.uint8) & 15
    high = (_half(blocks, 2) >> (2 * groups).astype(np.uint16) & 3).astype(np.uint8)
    scale = (low | high << 4).view(np.int8) - np.int8(32)
    return {"codes": _nibbles(blocks, 8, 16, 8), "scale": scale, "super_scale": _half(blocks, 0)}


def _format(
    kind: str, block: int, block_bytes: int, group: int, codes: GroupedCodes, unpack: Callable[[Bytes], Arrays]
) -> GgufBlocks:
    return GgufBlocks(f"gguf {kind}", codes, group, kind, block, block_bytes, unpack)


_NUMBERS = ("F32", "F16", "BF16")
_K = (Scale.NESTED, Offset.NESTED)
GGUF_BLOCKS: Mapping[str, GgufBlocks] = {
    one.type: one
    for one in (
        _format("Q8_0", 32, 34, 32, GroupedCodes(8, centred(8), Scale.F16), _q8_0),
        _format("Q4_0", 32, 18, 32, GroupedCodes(4, centred(4), Scale.F16), _q4_0),
        _format("Q4_1", 32, 20, 32, GroupedCodes(4, INTEGERS_4, Scale.F16, Offset.ADDED), _q4_1),
        _format("Q5_0", 32, 22, 32, GroupedCodes(5, centred(5), Scale.F16), _q5_0),
        _format("Q5_1", 32, 24, 32, GroupedCodes(5, INTEGERS_5, Scale.F16, Offset.ADDED), _q5_1),
        _format("Q4_K", 256, 144, 32, GroupedCodes(4, INTEGERS_4, *_K), _q4_k),
        _format("Q5_K", 256, 176, 32, GroupedCodes(5, INTEGERS_5, *_K), _q5_k),
        _format("Q6_K", 256, 210, 16, GroupedCodes(6, centred(6), Scale.NESTED), _q6_k),
        _format("Q2_K", 256, 84, 16, GroupedCodes(4, INTEGERS_4, *_K), _q2_k),
        _format("Q3_K", 256, 110, 16, GroupedCodes(4, centred(4), Scale.NESTED), _q3_k),
        _format("IQ4_NL", 32, 18, 32, GroupedCodes(4, _IQ4_NL, Scale.F16), _q4_0),
        _format("IQ4_XS", 256, 136, 32, GroupedCodes(4, _IQ4_NL, Scale.NESTED), _iq4_xs),
        _format("MXFP4", 32, 17, 32, GroupedCodes(4, FP4, Scale.E8M0), _mxfp4),
    )
}
