"""Pairs of bfloat16 in words of 32 bits: rounding, widening, and the instruction for their products.

The first of a pair is the upper half of its word, whose product the instruction adds first.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from caraserve.cpu.simd import (
    HAS_PAIR_PRODUCTS,
    LANES,
    VF,
    VI,
    emit_nearest_bf16,
    emit_store,
    i64,
    ints,
    offset,
    pointer,
    v16,
    vector_load,
)


class _BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return hash(type(self))


_VBF = ir.VectorType(_BFloatType(), 2 * LANES)


def emit_load_words(b: Any, address: Any) -> Any:
    """Loads sixteen words: each a pair of bfloat16, of which the upper half is the first."""
    words = b.load(pointer(b, address, VI))
    words.align = 4
    return words


def emit_first(b: Any, words: Any) -> Any:
    """Returns the first of sixteen pairs of bfloat16 as fp32."""
    return b.bitcast(b.and_(words, ints(-0x10000)), VF)


def emit_second(b: Any, words: Any) -> Any:
    """Returns the second of sixteen pairs of bfloat16 as fp32."""
    return b.bitcast(b.shl(words, ints(16)), VF)


def emit_pair_product(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Returns z plus the product of the first of pairs, then plus that of the second, by the instruction for it."""
    kind = ir.FunctionType(VF, [VF, _VBF, _VBF])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return b.call(function, [z, b.bitcast(x, _VBF), b.bitcast(y, _VBF)])


def round_to_bf16(b: Any, value: Any) -> Any:
    """Rounds fp32 to nearest even, as bits of fp32. A NaN stays one."""
    bits = b.bitcast(value, VI)
    nearest = b.and_(emit_nearest_bf16(b, bits), ints(-0x10000))
    return b.select(b.fcmp_unordered("uno", value, value), b.or_(bits, ints(0x400000)), nearest)


def emit_store_rounded(b: Any, address: Any, x: Any, y: Any) -> None:
    """Stores 32 numbers x, y rounded to bfloat16: as sixteen pairs where their products have an instruction, elsewhere
    as fp32."""
    x, y = round_to_bf16(b, x), round_to_bf16(b, y)
    if not HAS_PAIR_PRODUCTS:
        for index, half in enumerate((x, y)):
            emit_store(b, b.bitcast(half, VF), offset(b, address, i64(4 * LANES * index)))
        return
    firsts, seconds = (b.shuffle_vector(x, y, ir.Constant(VI, list(range(start, 2 * LANES, 2)))) for start in (0, 1))
    emit_store_words(b, firsts, seconds, address)


def emit_store_words(b: Any, firsts: Any, seconds: Any, address: Any) -> None:
    """Stores sixteen pairs of bfloat16, given as bits of fp32."""
    words = b.or_(firsts, b.lshr(seconds, ints(16)))
    b.store(words, pointer(b, address, VI)).align = 4


@intrinsic
def store_rounded(typing_context, address, x, y):  # type: ignore[no-untyped-def]
    """Stores 32 numbers, rounded to bfloat16; see `emit_store_rounded`."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        emit_store_rounded(b, *arguments)
        return context.get_dummy_value()

    return types.void(types.int64, v16, v16), codegen


@intrinsic
def store_pairs(typing_context, address, first, second):  # type: ignore[no-untyped-def]
    """Stores sixteen pairs of numbers, rounded to bfloat16."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        first, second = (round_to_bf16(b, value) for value in arguments[1:])
        emit_store_words(b, first, second, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, v16, v16), codegen


load_first = vector_load(lambda b, address: emit_first(b, emit_load_words(b, address)))
load_second = vector_load(lambda b, address: emit_second(b, emit_load_words(b, address)))
