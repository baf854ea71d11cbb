"""How grouped codes lie in memory: as small as in a file, and each panel of 64 outputs as one stream.

    panel:  [divisors fp32 [64]] · for each super group: [scales and offsets of scales, fp16 [64] each] · groups
    group:  scales [64] · offsets [64], as they are stored · chunks
    chunk:  words of 32 bits, [words, 64]: the codes of consecutive inputs of each output

A word holds the codes of consecutive inputs, the first one lowest. Of five and six bits, words hold the low four, and
the last word of a chunk the others: byte k has those of the codes 2k and 2k + 1 of the first word, then of the second,
and so on, so that one shift and one mask put the high bits of four codes above their low bits. Codes are renumbered so
that the lowest value has code 0 if values are integers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import entry, kernel
from caraserve.cpu.simd import LANES, load_u64, store_u8, store_u32, vload, vsplat, vstore
from caraserve.cpu.tiles import stack_bytes, words_transpose
from caraserve.model.formats import Array, Matrix
from caraserve.model.formats.grouped import SUPER_GROUP, GroupedCodes, Offset, Scale
from caraserve.util.units import ceil_div

_SCALE_TYPES = {
    Scale.F32: np.float32,
    Scale.F16: np.uint16,
    Scale.BF16: np.uint16,
    Scale.E4M3: np.uint8,
    Scale.E8M0: np.uint8,
    Scale.NESTED: np.uint8,
}
_WORDS = {4: 1, 5: 5, 6: 3, 8: 2}  # of a chunk


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes in bytes, of what belongs to the 64 outputs of a panel."""

    bits: int
    words: int  # of a chunk
    inputs: int  # of a chunk
    divisors: int
    above: int  # of a super group, before its groups
    scales: int  # of a group
    offsets: int

    @classmethod
    def of(cls, kind: GroupedCodes) -> "Layout":
        """Returns the layout of a kind of codes."""
        words = _WORDS[kind.bits]
        stored = PANEL * np.dtype(_SCALE_TYPES[kind.scale]).itemsize
        offsets = {Offset.NONE: 0, Offset.ADDED: stored}.get(kind.offset, PANEL)
        nested = (kind.scale is Scale.NESTED) + (kind.offset is Offset.NESTED)
        divisors = 4 * PANEL if kind.scale is Scale.E4M3 else 0
        return cls(kind.bits, words, 32 * words // kind.bits, divisors, 2 * PANEL * nested, stored, offsets)

    @property
    def high(self) -> int:
        """The bits of a code that are in the last word of a chunk."""
        return self.bits - 4 if self.bits in (5, 6) else 0

    @property
    def chunk(self) -> int:
        """The bytes of a chunk."""
        return 4 * PANEL * self.words

    def group_start(self, group: int, size: int) -> int:
        """Returns the bytes of a panel before group number `group` of `size` inputs."""
        supers = group // (SUPER_GROUP // size) + 1 if self.above else 0
        before = supers * self.above + group * (self.scales + self.offsets)
        return self.divisors + before + group * size // self.inputs * self.chunk

    def panel_bytes(self, inputs: int, size: int) -> int:
        """Returns the bytes of a panel. The last group may have fewer inputs than `size`."""
        last = (inputs - 1) // size
        codes = ceil_div(inputs - last * size, self.inputs) * self.chunk
        return self.group_start(last, size) + self.scales + self.offsets + codes


# --- packing ---

_TILE = np.int64(256)  # inputs whose words are made and transposed at once, in the L1 cache; whole chunks
_held = stack_bytes(int(_TILE))
_ROW_BYTES = np.int64(_TILE)  # of the words of an output, which 8 bits fill
_rows, _columns = stack_bytes(PANEL * int(_ROW_BYTES)), stack_bytes(PANEL * int(_ROW_BYTES))
_transpose = words_transpose()


@kernel
def _together(word, bits):  # type: ignore[no-untyped-def]
    """Moves eight codes, one a byte and of so many bits, together: two to a byte, the bytes to 32 bits."""
    word = (word | word >> np.uint64(8) - bits) & np.uint64(0x00FF00FF00FF00FF)
    word = (word | word >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
    return (word | word >> np.uint64(16)) & np.uint64(0xFFFFFFFF)


@kernel
def _write_words(codes, high, chunk, to):  # type: ignore[no-untyped-def]
    """Writes the words of the codes of a tile, of four bits and `high` more in the last word of a chunk."""
    highs = np.uint64(0x0101010101010101) * np.uint64((1 << high) - 1)
    for start in range(0, _TILE, chunk):
        rest = np.uint64(0)
        for word in range(chunk // 8):
            eight = load_u64(codes + start + 8 * word)
            store_u32(to, np.uint32(_together(eight & np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4))))
            to += 4
            if high > 0:
                rest |= _together(eight >> np.uint64(4) & highs, np.uint64(high)) << np.uint64(2 * word * high)
        if high > 0:
            store_u32(to, np.uint32(rest))
            to += 4


@kernel
def _copy(source, num_bytes, to):  # type: ignore[no-untyped-def]
    for at in range(0, num_bytes, 4 * LANES):
        vstore(to + at, vload(source + at))


@kernel
def _clear(to, num_bytes):  # type: ignore[no-untyped-def]
    for at in range(0, num_bytes, 4 * LANES):
        vstore(to + at, vsplat(np.float32(0.0)))


@entry
def _pack_codes(codes, renumbered, is_renumbered, bits, high, words, chunk, size, starts, panels):  # type: ignore[no-untyped-def]
    """Packs codes uint8 [outputs, inputs] into `panels`, uint32 [panels, words of a panel]. `starts`: of each group's
    codes in a panel, in words; `chunk`: inputs of a chunk; `size`: inputs of a group; `high`: as in `Layout`."""
    outputs, inputs = codes.shape
    held, rows, columns = _held(), _rows(), _columns()
    for panel in range(panels.shape[0]):
        lanes, target = min(64, outputs - 64 * panel), panels.ctypes.data + 4 * panel * panels.shape[1]
        _clear(rows + lanes * _ROW_BYTES, (64 - lanes) * _ROW_BYTES)
        for start in range(0, inputs, _TILE):
            count = min(_TILE, inputs - start)
            for lane in range(lanes):
                source, to = codes.ctypes.data + (64 * panel + lane) * inputs + start, rows + lane * _ROW_BYTES
                if is_renumbered or count < _TILE:
                    _clear(held, _TILE)
                    for index in range(count):
                        store_u8(held + index, renumbered[codes[64 * panel + lane, start + index]])
                    source = held
                if bits == 8:
                    _copy(source, _TILE, to)
                else:
                    _write_words(source, high, chunk, to)
            for word in range(0, _TILE // chunk * words, 16):
                for lane in range(0, 64, 16):
                    at = rows + lane * _ROW_BYTES + 4 * word
                    _transpose(at, _ROW_BYTES, columns + 4 * PANEL * word + 4 * lane, np.int64(4 * PANEL))
            for index in range((count + chunk - 1) // chunk):
                group = (start + index * chunk) // size
                place = starts[group] + (start + index * chunk - group * size) // chunk * words * PANEL
                _copy(columns + 4 * PANEL * words * index, 4 * PANEL * words, target + 4 * place)


@entry
def _place_columns(values, starts, panels):  # type: ignore[no-untyped-def]
    """Writes the columns of values [outputs, columns] to each of `starts` in panels [panels, values of a panel]."""
    for panel in range(panels.shape[0]):
        for lane in range(min(64, values.shape[0] - 64 * panel)):
            for column in range(len(starts)):
                panels[panel, starts[column] + lane] = values[64 * panel + lane, column]


def pack(kind: GroupedCodes, matrix: Matrix, renumbered: NDArray[np.uint8], panels: NDArray[np.uint8]) -> None:
    """Writes a matrix to `panels`, zeroed bytes [panels, bytes of a panel]. `renumbered`: of each code."""
    layout, size = Layout.of(kind), matrix.group
    codes = np.ascontiguousarray(matrix.arrays["codes"], np.uint8)
    is_renumbered = not np.array_equal(renumbered, np.arange(256))
    groups = ceil_div(codes.shape[1], size)
    starts = np.array([layout.group_start(group, size) for group in range(groups)])
    at = (starts + layout.scales + layout.offsets) // 4
    sizes = layout.bits, layout.high, layout.words, layout.inputs, size
    _pack_codes(codes, renumbered, is_renumbered, *sizes, at, panels.view(np.uint32))
    scale_type = _SCALE_TYPES[kind.scale]
    _place(matrix.arrays["scale"], scale_type, starts, panels)
    if kind.offset is not Offset.NONE:
        is_added = kind.offset is Offset.ADDED
        name = "zero" if kind.offset is Offset.ZERO else "offset"
        _place(matrix.arrays[name], scale_type if is_added else np.uint8, starts + layout.scales, panels)
    supers = starts[:: SUPER_GROUP // size] if layout.above else starts
    if kind.scale is Scale.NESTED:
        _place(matrix.arrays["super_scale"], np.uint16, supers - layout.above, panels)
    if kind.offset is Offset.NESTED:
        _place(matrix.arrays["super_offset"], np.uint16, supers - 2 * PANEL, panels)
    if kind.scale is Scale.E4M3:
        _place(matrix.arrays["divisor"].reshape(-1, 1), np.float32, np.zeros(1, np.int64), panels)


def _place(values: Array, kind: Any, starts: NDArray[np.int64], panels: NDArray[np.uint8]) -> None:
    """Writes a column of `values` [outputs, columns] to each of `starts` in the panels."""
    stored = np.ascontiguousarray(values)
    raw = stored.astype(kind) if kind is np.float32 else stored.view(kind)
    _place_columns(raw, starts // raw.itemsize, panels.view(kind))
