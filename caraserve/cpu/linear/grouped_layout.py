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


@kernel
def _four_codes(row, at, renumbered):  # type: ignore[no-untyped-def]
    """Returns a word of four codes of eight bits."""
    low = np.uint64(renumbered[row[at]]) | np.uint64(renumbered[row[at + 1]]) << np.uint64(8)
    high = np.uint64(renumbered[row[at + 2]]) | np.uint64(renumbered[row[at + 3]]) << np.uint64(8)
    return low | high << np.uint64(16)


@kernel
def _eight_codes(row, at, renumbered):  # type: ignore[no-untyped-def]
    """Returns a word of eight codes of four bits."""
    word = _four_codes(row, at, renumbered) | _four_codes(row, at + 4, renumbered) << np.uint64(32)
    # Moves codes together: two to a byte, four to two bytes, eight to four.
    word = (word | word >> np.uint64(4)) & np.uint64(0x00FF00FF00FF00FF)
    word = (word | word >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
    return (word | word >> np.uint64(16)) & np.uint64(0xFFFFFFFF)


@entry
def _pack_codes(codes, renumbered, bits, high, words, chunk, size, starts, panels):  # type: ignore[no-untyped-def]
    """Packs codes uint8 [outputs, inputs] into `panels`, uint32 [panels, words of a panel]. `starts`: of each group's
    codes in a panel, in words; `chunk`: inputs of a chunk; `size`: inputs of a group; `high`: as in `Layout`."""
    outputs, inputs = codes.shape
    low = bits - high
    in_word = 32 // low
    block = 64 // chunk  # chunks whose codes are on one cache line of a row
    for panel in range(panels.shape[0]):
        for group in range(len(starts)):
            first, end = group * size, min((group + 1) * size, inputs)
            for begin in range(first, end, block * chunk):
                for lane in range(min(64, outputs - 64 * panel)):
                    row = codes[64 * panel + lane]
                    for start in range(begin, min(begin + block * chunk, end), chunk):
                        at = starts[group] + (start - first) // chunk * words * 64 + lane
                        rest = np.uint64(0)
                        for word in range(chunk // in_word):
                            value, inside = np.uint64(0), start + word * in_word
                            if bits == 8 and end - inside >= 4:
                                value = _four_codes(row, inside, renumbered)
                            elif bits == 4 and end - inside >= 8:
                                value = _eight_codes(row, inside, renumbered)
                            else:
                                for index in range(min(in_word, end - inside)):
                                    code = np.uint64(renumbered[row[inside + index]])
                                    value |= (code & np.uint64((1 << low) - 1)) << np.uint64(index * low)
                                    if high:
                                        place = index // 2 * 8 + (2 * word + index % 2) * high
                                        rest |= code >> np.uint64(low) << np.uint64(place)
                            panels[panel, at + 64 * word] = np.uint32(value)
                        if high:
                            panels[panel, at + 64 * (words - 1)] = np.uint32(rest)


def pack(kind: GroupedCodes, matrix: Matrix, renumbered: NDArray[np.uint8], panels: NDArray[np.uint8]) -> None:
    """Writes a matrix to `panels`, zeroed bytes [panels, bytes of a panel]. `renumbered`: of each code."""
    layout, size = Layout.of(kind), matrix.group
    codes = np.ascontiguousarray(matrix.arrays["codes"], np.uint8)
    groups = ceil_div(codes.shape[1], size)
    starts = np.array([layout.group_start(group, size) for group in range(groups)])
    at = (starts + layout.scales + layout.offsets) // 4
    _pack_codes(
        codes, renumbered, layout.bits, layout.high, layout.words, layout.inputs, size, at, panels.view(np.uint32)
    )
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
    for panel, target in enumerate(panels):
        rows = np.ascontiguousarray(raw[PANEL * panel : PANEL * (panel + 1)].T)  # [columns, outputs]
        width = rows.shape[1] * rows.itemsize
        for start, row in zip(starts, rows, strict=True):
            target[start : start + width] = row.view(np.uint8)
