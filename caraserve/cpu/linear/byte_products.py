"""Sums of products of four bytes, emitted as LLVM IR: weights times inputs of int8, which are exact in any form.

A CPU has one instruction for them, with weights of 0 to 255, or those of AVX2, or none.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from caraserve.cpu.simd import HAS_BYTE_PRODUCTS, HAS_PERMUTES, HAS_WIDE_BYTE_PRODUCTS, I32, LANES, pointer

WIDTH = LANES if HAS_WIDE_BYTE_PRODUCTS else LANES // 2  # words of a register
_BYTES, _SHORTS, WORDS = (ir.VectorType(ir.IntType(32 // per), WIDTH * per) for per in (4, 2, 1))
LARGE_START = 0 if HAS_BYTE_PRODUCTS else -128  # of weights that need all bits of a byte


def filled(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _call(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), list(arguments))


def emit_dots(b: Any, weights: Sequence[Any], x: Sequence[Any], largest: int) -> Any:
    """Returns the sums of the products of words. x: addresses of one word each, for all outputs; weights: 0 to
    `largest`, or those from LARGE_START if it is above 127."""
    rows = [_splat_word(b, address) for address in x]
    pairs = list(zip(weights, rows, strict=True))
    if HAS_BYTE_PRODUCTS:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}"
        return reduce(lambda total, pair: _call(b, name, WORDS, total, *pair), pairs, filled(WORDS, 0))
    if not HAS_PERMUTES:
        return reduce(b.add, [_slow_dot(b, *pair) for pair in pairs])
    if largest > 127:
        return reduce(b.add, [_added_up(b, _signed_products(b, *pair)) for pair in pairs])
    shorts = [_products(b, *pair) for pair in pairs]
    at_once = 32767 // (2 * 127 * largest)  # sums of two products that fit in int16
    parts = [shorts[first : first + at_once] for first in range(0, len(shorts), at_once)]
    return reduce(b.add, [_added_up(b, reduce(b.add, part)) for part in parts])


def _products(b: Any, small: Any, x: Any) -> Any:
    """Returns sums of two products each, int16: of bytes 0 to 127, and of bytes of x."""
    return _call(b, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, b.bitcast(small, _BYTES), b.bitcast(x, _BYTES))


def _signed_products(b: Any, weights: Any, x: Any) -> Any:
    """Returns the same of bytes -128 to 127; two products of at most 128 · 127 do not overflow."""
    weights = b.bitcast(weights, _BYTES)
    zero = filled(_BYTES, 0)
    sizes = b.select(b.icmp_signed("<", weights, zero), b.sub(zero, weights), weights)
    signed = _call(b, "llvm.x86.avx2.psign.b", _BYTES, b.bitcast(x, _BYTES), weights)
    return _products(b, sizes, signed)


def _added_up(b: Any, shorts: Any) -> Any:
    return _call(b, "llvm.x86.avx2.pmadd.wd", WORDS, shorts, filled(_SHORTS, 1))


def _slow_dot(b: Any, weights: Any, x: Any) -> Any:
    total = filled(WORDS, 0)
    for shift in (24, 16, 8, 0):
        pair = (b.ashr(b.shl(word, filled(WORDS, shift)), filled(WORDS, 24)) for word in (weights, x))
        total = b.add(total, b.mul(*pair))
    return total


def emit_looked_up(b: Any, indices: Any, table: Sequence[int]) -> Any:
    """Replaces each byte of words, 0 to 15, by that of the table."""
    if HAS_PERMUTES:
        name = "llvm.x86.avx512.pshuf.b.512" if HAS_WIDE_BYTE_PRODUCTS else "llvm.x86.avx2.pshuf.b"
        bytes_of_table = ir.Constant(_BYTES, [*table] * (_BYTES.count // len(table)))
        return b.bitcast(_call(b, name, _BYTES, bytes_of_table, b.bitcast(indices, _BYTES)), WORDS)
    bytes_of = b.bitcast(indices, _BYTES)
    found = filled(_BYTES, 0)
    for code, value in enumerate(table):
        found = b.select(b.icmp_signed("==", bytes_of, filled(_BYTES, code)), filled(_BYTES, value), found)
    return b.bitcast(found, WORDS)


def _splat_word(b: Any, address: Any) -> Any:
    word = b.load(pointer(b, address, I32))
    word.align = 4
    first = b.insert_element(ir.Constant(WORDS, ir.Undefined), word, I32(0))
    return b.shuffle_vector(first, ir.Constant(WORDS, ir.Undefined), filled(WORDS, 0))
