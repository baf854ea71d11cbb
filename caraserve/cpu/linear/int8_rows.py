"""Rows as int8, for products of integers: codes of 32 inputs at a time, with a scale.

A prepared row has the codes twice: in the order of the inputs, and with those of an even index first of each eight, as
words of weights of 4, 5 and 6 bits hold them. Then 16 bytes for each 32 inputs: scale (fp32), scale · sum of the codes
(fp32), and the sums of the first and the last sixteen codes (int32).
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.simd import (
    DTYPE_F32,
    F32,
    I32,
    LANES,
    VF,
    VI,
    VI8,
    emit_load,
    emit_reduce,
    emit_splat,
    i64,
    ints,
    make_void_intrinsic,
    offset,
    pointer,
)
from caraserve.cpu.structs import site_at

BLOCK = 32  # inputs with one scale
BLOCK_BYTES = 16  # after the codes
_LARGEST, _INFINITE = F32(127.0), I32(0x7F800000)  # the latter: bits, which those of NaN follow
_ROUNDS = ir.Constant(VF, [12582912.0] * LANES)  # 1.5 · 2^23: adding it rounds to an integer
_PAIRED = [first + index for first in (0, 8) for index in (0, 2, 4, 6, 1, 3, 5, 7)]


def row_bytes(inputs: int) -> int:
    """Returns the bytes of a prepared row."""
    return 2 * inputs + inputs // BLOCK * BLOCK_BYTES


def _emit_block(b: Any, arguments: Sequence[Any]) -> None:
    x, codes, inputs, block = arguments
    values = [emit_load(b, offset(b, x, i64(4 * LANES * half)), DTYPE_F32) for half in (0, 1)]
    sizes = [b.and_(b.bitcast(value, VI), ints(0x7FFFFFFF)) for value in values]  # in the order of the numbers

    def larger(one: Any, other: Any) -> Any:
        return b.select(b.icmp_signed(">", one, other), one, other)

    bits = emit_reduce(b, larger(*sizes), larger)
    largest, is_finite = b.bitcast(bits, F32), b.icmp_signed("<", bits, _INFINITE)
    has_factor = b.and_(is_finite, b.icmp_signed(">", bits, I32(0)))
    factor = emit_splat(b, b.select(has_factor, b.fdiv(_LARGEST, largest), F32(0.0)))
    scale = b.select(is_finite, b.fdiv(largest, _LARGEST), F32(float("nan")))
    sums = []
    for half, value in enumerate(values):
        rounded = b.fptosi(b.fsub(b.fadd(b.fmul(value, factor), _ROUNDS), _ROUNDS), VI)
        to = offset(b, codes, i64(LANES * half))
        for places, order in ((to, range(LANES)), (offset(b, to, inputs), _PAIRED)):
            ordered = b.trunc(b.shuffle_vector(rounded, rounded, ir.Constant(VI, list(order))), VI8)
            b.store(ordered, pointer(b, places, VI8), align=1)
        sums.append(emit_reduce(b, rounded, b.add))
    scaled_sum = b.fmul(scale, b.sitofp(b.add(*sums), F32))
    for index, number in enumerate((scale, scaled_sum, *sums)):
        b.store(number, pointer(b, offset(b, block, i64(4 * index)), number.type), align=4)


# (x, codes, inputs, block): writes the codes of 32 inputs, again `inputs` bytes after them, and the block's numbers
_write_block = make_void_intrinsic("int8_block", 4, _emit_block)


@compiled_separately(6)
def quantise(site_address, x, x_stride, rows, to, to_stride):  # type: ignore[no-untyped-def]
    """Writes rows of fp32 as int8: code = x · 127 / largest |x| of its block, rounded to nearest even."""
    inputs = site_at(site_address).inputs
    for row in range(rows):
        at, codes = x + row * x_stride, to + row * to_stride
        blocks = codes + 2 * inputs
        for first in range(0, inputs, 32):
            _write_block(at + 4 * first, codes + first, inputs, blocks + first // 32 * 16)
