"""Grouped codes times rows of int8: sums of integers for each 32 inputs, or 16 in smaller groups, then scaled in fp32.

For each such block of inputs, in order, with the sum of products of codes `dot`, and the `sum` of the row's codes:

    y = fma(dot + lowest value · sum, row's scale · scale, y)      and, if there is an offset,
    y = fma(row's scale · sum, offset, y)

The order is the same for any number of rows.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately, made_for, unset
from caraserve.cpu.linear.base import WeightKernels
from caraserve.cpu.linear.byte_products import LARGE_START, WIDTH, WORDS, emit_dots, emit_looked_up, filled
from caraserve.cpu.linear.expanding import add_sums
from caraserve.cpu.linear.grouped import globals_of, kernels_of_codes, name_of
from caraserve.cpu.linear.grouped_decoding import Decoder, emit_joined
from caraserve.cpu.linear.int8_rows import BLOCK, BLOCK_BYTES, quantise, row_bytes
from caraserve.cpu.simd import (
    DTYPE_F32,
    F32,
    I32,
    LANES,
    VF,
    VI,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    i64,
    make_void_intrinsic,
    offset,
    pointer,
    vsplat,
    vstore,
)
from caraserve.cpu.structs import site_at
from caraserve.cpu.tiles import stack_bytes
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Matrix
from caraserve.model.formats.grouped import SUPER_GROUP, GroupedCodes, Offset, Scale

_VECTORS, _VECTOR_BYTES = PANEL // LANES, 4 * LANES
_ROWS = np.int64(128)
_sums = stack_bytes(4 * PANEL * int(_ROWS))


_constants = _held = _dots = unset
_DIVISORS = _ABOVE = _SCALES = _CHUNK = _INPUTS = np.int64(0)
_UNIT = np.int64(0)  # inputs of a block
_PAIRED = np.int64(0)  # 1: inputs with an even index come first
_SUPER = np.int64(SUPER_GROUP)


class _Dots:
    """Emits sums of products of `unit` inputs for WIDTH outputs. `added`: a value less what is multiplied for it."""

    def __init__(self, kind: GroupedCodes, decoder: Decoder) -> None:
        self.unit, self._layout, self._table = unit_of(kind), decoder.layout, list[int]()
        values = np.array(kind.values, np.float32)
        self.exponent, self.added, self._largest = 0, int(decoder.lowest), (1 << kind.bits) - 1
        if kind.bits == 8:
            self.added -= LARGE_START
        elif not decoder.has_integers:
            self.exponent = next(power for power in (0, 1) if _are_bytes(np.ldexp(values, power)))
            self.added, self._largest = -128 - LARGE_START, 255
            self._table = (np.ldexp(values, self.exponent).astype(np.int64) - self.added).tolist()

    def emit(self, b: Any, codes: Any, x: Sequence[Any]) -> Any:
        """Returns int32. `codes`: address of the first chunk; x: addresses of the words of a row."""
        return emit_dots(b, self._values(b, codes), x, self._largest)

    def _values(self, b: Any, codes: Any) -> list[Any]:
        """Returns words of four bytes, in the order of a row's words."""
        layout, loaded = self._layout, list[Any]()
        for index in range(self.unit // layout.inputs * layout.words):
            word = b.load(pointer(b, offset(b, codes, i64(4 * PANEL * index)), WORDS))
            word.align = 4
            loaded.append(word)
        if layout.bits == 8:
            return [b.xor(word, filled(WORDS, -0x7F7F7F80)) for word in loaded] if LARGE_START else loaded
        if layout.high:
            chunks = (loaded[first : first + layout.words] for first in range(0, len(loaded), layout.words))
            return [
                emit_joined(b, word, chunk[-1], number, parity, layout.high)
                for chunk in chunks
                for number, word in enumerate(chunk[:-1])
                for parity in (0, 1)
            ]
        nibbles = []
        for word in loaded:
            for shifted in (word, b.lshr(word, filled(WORDS, 4))):
                nibbles.append(b.and_(shifted, filled(WORDS, 0x0F0F0F0F)))
        return [emit_looked_up(b, word, self._table) for word in nibbles] if self._table else nibbles


def unit_of(kind: GroupedCodes) -> int:
    """Returns the inputs of a block: half of a row's for Q6_K and NVFP4, which have groups of 16 without offsets."""
    has_groups_of_16 = kind.offset is Offset.NONE and (kind.bits == 6 or kind.scale is Scale.E4M3)
    return BLOCK // 2 if has_groups_of_16 else BLOCK


def _are_bytes(values: Any) -> bool:
    return bool((values == np.rint(values)).all() and values.min() >= -128 and values.max() < 128)


def dots_tile(kind: GroupedCodes, decoder: Decoder) -> Any:
    """Intrinsic `(codes, constants, x, blocks, first, count, sums)`: adds the products of `count` blocks of a group to
    sums[64]. x: address of a row's codes for them; blocks: of all scales and sums of the row; first: number of the
    first block in the row."""
    dots = _Dots(kind, decoder)
    unit, per_row_block = dots.unit, BLOCK // dots.unit

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        codes, constants, x, blocks, first, count, sums = arguments
        with cgutils.for_range(b, count) as loop:
            number = b.add(first, loop.index)
            at = offset(b, blocks, b.mul(b.udiv(number, i64(per_row_block)), i64(BLOCK_BYTES)))
            scale, scaled_sum = (emit_splat(b, b.load(pointer(b, offset(b, at, i64(by)), F32))) for by in (0, 4))
            if per_row_block == 1:
                halves = [b.load(pointer(b, offset(b, at, i64(by)), I32)) for by in (8, 12)]
                row_sum = b.add(*halves)
            else:
                half = b.mul(b.urem(number, i64(per_row_block)), i64(4))
                row_sum = b.load(pointer(b, offset(b, offset(b, at, i64(8)), half), I32))
            more = b.mul(row_sum, I32(dots.added))
            row = offset(b, x, b.mul(loop.index, i64(unit)))
            words = [offset(b, row, i64(4 * index)) for index in range(unit // 4)]
            chunk = offset(b, codes, b.mul(loop.index, i64(unit // decoder.layout.inputs * decoder.layout.chunk)))
            with cgutils.for_range(b, i64(_VECTORS)) as vectors:
                lane = b.mul(vectors.index, i64(_VECTOR_BYTES))
                starts = [offset(b, offset(b, chunk, lane), i64(4 * start)) for start in range(0, LANES, WIDTH)]
                parts = [dots.emit(b, start, words) for start in starts]
                dot = parts[0] if WIDTH == LANES else b.shuffle_vector(*parts, ir.Constant(VI, list(range(LANES))))
                if dots.added:
                    dot = b.add(dot, _splat_number(b, more))
                held = offset(b, constants, b.mul(lane, i64(decoder.constants)))
                factor = emit_load(b, held, DTYPE_F32)
                by = 2.0 ** (decoder.exponent - dots.exponent)
                factor = factor if by == 1.0 else b.fmul(factor, ir.Constant(VF, [by] * LANES))
                to = offset(b, sums, lane)
                total = emit_fma(b, b.sitofp(dot, VF), b.fmul(scale, factor), emit_load(b, to, DTYPE_F32))
                if kind.offset is not Offset.NONE:
                    added = emit_load(b, offset(b, held, i64((decoder.constants - 1) * _VECTOR_BYTES)), DTYPE_F32)
                    total = emit_fma(b, scaled_sum, added, total)
                emit_store(b, total, to)

    return make_void_intrinsic("grouped_dots", 7, emit)


def _splat_number(b: Any, number: Any) -> Any:
    first = b.insert_element(ir.Constant(VI, ir.Undefined), number, I32(0))
    return b.shuffle_vector(first, ir.Constant(VI, ir.Undefined), ir.Constant(VI, [0] * LANES))


# --- the product ---


def _product(site_address, x, x_stride, rows, first_panel, end_panel, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64 · panel :] (+)= x[rows, inputs] @ w[inputs, 64]` for some panels and rows of int8."""
    site, held, sums, zero = site_at(site_address), _held(), _sums(), vsplat(np.float32(0.0))
    inputs, group = site.inputs, site.group
    for panel in range(first_panel, end_panel):
        start = site.weight + panel * site.panel_bytes
        for first in range(0, rows, _ROWS):
            count, above, codes = min(_ROWS, rows - first), start, start + _DIVISORS
            for lane in range(0, 4 * PANEL * count, 4 * LANES):
                vstore(sums + lane, zero)
            for position in range(0, inputs, group):
                if _ABOVE != 0 and position % _SUPER == 0:
                    above = codes
                    codes += _ABOVE
                _constants(start, above, codes, held)
                codes += _SCALES
                size = min(group, inputs - position)
                for row in range(count):
                    at = x + (first + row) * x_stride
                    x_codes, to = at + _PAIRED * inputs + position, sums + 4 * PANEL * row
                    _dots(codes, held, x_codes, at + 2 * inputs, position // _UNIT, size // _UNIT, to)
                codes += size // _INPUTS * _CHUNK
            add_sums(sums, count, y + first * y_stride + 4 * PANEL * panel, y_stride, accumulate != 0)


_FUNCTIONS: list[Any] = []  # keeps functions alive of which others have the address


def has_dots(kind: GroupedCodes) -> bool:
    """Returns whether there are integer products for a kind of codes."""
    if kind.rounds_to is not None:
        return False
    decoder = Decoder(kind)
    values = np.array(kind.values, np.float32)
    return decoder.has_integers or (kind.bits == 4 and any(_are_bytes(np.ldexp(values, power)) for power in (0, 1)))


@cache
def int8_kernels_of(kind: GroupedCodes) -> WeightKernels:
    """Returns kernels that multiply rows of int8, where there are any for the kind of codes and the groups of a
    matrix; exact ones otherwise."""
    exact = kernels_of_codes(kind)
    if not has_dots(kind):
        return exact
    decoder, values = globals_of(kind)
    values |= {"_dots": dots_tile(kind, decoder), "_UNIT": np.int64(unit_of(kind)), "_PAIRED": np.int64(kind.bits != 8)}
    product = compiled_separately(9)(made_for(name_of(kind), **values)(_product))
    _FUNCTIONS.append(product)

    def pack(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
        fields, inputs = dict(exact.pack(matrix, dtype, memory)), matrix.arrays["codes"].shape[1]
        if matrix.order is not None or inputs % BLOCK or matrix.group % unit_of(kind):
            return fields
        return fields | {
            "product": product.address,
            "prepare": quantise.address,
            "prepared_bytes": row_bytes(inputs),
        }

    return WeightKernels(pack, exact.product, exact.expand, exact.row)
