"""Register tiles: the inner loops of matmul, LoRA shrink and attention, emitted as LLVM IR. CPU only.

A tile keeps rows × vectors accumulators in registers. Memory is addressed by plain integers; simd.py explains why.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.bfloat16_pairs import (
    emit_first,
    emit_load_words,
    emit_pair_product,
    emit_second,
    round_to_bf16,
)
from caraserve.cpu.simd import (
    DTYPE_BF16,
    DTYPE_F32,
    F32,
    HAS_PAIR_PRODUCTS,
    HAS_WIDE_REGISTERS,
    I32,
    I64,
    LANES,
    VF,
    VI,
    VI16,
    emit_fma,
    emit_load,
    emit_load_splat,
    emit_prefetch,
    emit_reduce,
    emit_store,
    i64,
    ints,
    make_intrinsic,
    offset,
    pointer,
)

PAIRS = 3  # weights as pairs of bfloat16, beside the dtypes of simd.py
_X_PAIR_BYTES = 4 if HAS_PAIR_PRODUCTS else 8  # of a pair of numbers of a row
_LINE_BYTES = 64
# Weights that a single row fetches before it reads them: 12 % faster in 16 bits on Zen 3, up to 7 % in 32 on Zen 5, but
# a fifth slower in 32 on Zen 3, whose own prefetchers keep up.
_AHEAD_BYTES = 2048


class _Accumulators:
    """The accumulators of a tile: allocas that LLVM promotes to vector registers."""

    def __init__(self, b: Any, count: int) -> None:
        self._b = b
        self._slots = [cgutils.alloca_once_value(b, ir.Constant(VF, [0.0] * LANES)) for _ in range(count)]
        for slot in self._slots:  # alloca_once_value stores in the entry block only; the tile may be inside a loop
            b.store(ir.Constant(VF, [0.0] * LANES), slot)

    def __getitem__(self, index: int) -> Any:
        return self._b.load(self._slots[index])

    def __setitem__(self, index: int, value: Any) -> None:
        self._b.store(value, self._slots[index])


def _tile_intrinsic(
    name: str, num_args: int, emit: Callable[[Any, Sequence[Any]], None], *, scaled: bool = False
) -> Any:
    """Makes an intrinsic of int64 arguments (the last a float32 if `scaled`); `emit(builder, arguments)` emits it."""

    def codegen(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit(builder, arguments)
        return _context.get_dummy_value()

    kinds = [types.int64] * num_args
    signature = types.void(*([*kinds[:-1], types.float32] if scaled else kinds))
    return make_intrinsic(name, num_args, signature, codegen)


def _add_products(b: Any, acc: _Accumulators, x_places: Sequence[Any], weights: Sequence[Any]) -> None:
    """Adds the product of a number of each row and of vectors of weights."""
    for row, place in enumerate(x_places):
        splat = emit_load_splat(b, place)
        for v, weight in enumerate(weights):
            index = row * len(weights) + v
            acc[index] = emit_fma(b, splat, weight, acc[index])


def _add_pairs(b: Any, acc: _Accumulators, x_places: Sequence[Any], places: Sequence[Any]) -> None:
    """Adds the products of a pair of numbers of each row and of vectors of pairs of weights."""
    words = [emit_load_words(b, place) for place in places]
    if not HAS_PAIR_PRODUCTS:
        _add_products(b, acc, x_places, [emit_first(b, word) for word in words])
        _add_products(
            b, acc, [offset(b, place, i64(4)) for place in x_places], [emit_second(b, word) for word in words]
        )
        return
    for row, place in enumerate(x_places):
        pair = b.bitcast(emit_load_splat(b, place), VI)
        for v, word in enumerate(words):
            index = row * len(words) + v
            acc[index] = emit_pair_product(b, pair, word, acc[index])


def itemsize_bytes(dtype: int) -> int:
    return 4 if dtype == DTYPE_F32 else 2


def gemm_tile(rows: int, vectors: int, dtype: int) -> Any:
    """Intrinsic `(x, x_stride, w, k, y, y_stride, accumulate)`, strides in bytes.

    Semantics: `y[m, :] = (y[m, :] if accumulate else 0) + Σ_k x[m, k] · w[k, :]` for m < rows.
    x, y are fp32; w is `[k, 16 · vectors]` of `dtype`, columns of a panel. Sums run over k in order; if `accumulate` is
    2, they start from y, so that a sum in pieces has the bits of a sum in one.
    With PAIRS, k counts pairs of inputs; x and w are those of linear/pairs.py.
    """

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, x_stride, w, k, y, y_stride, accumulate = arguments
        itemsize = 4 if dtype in (DTYPE_F32, PAIRS) else 2
        acc = _Accumulators(b, rows * vectors)
        x_rows = [offset(b, x, b.mul(i64(row), x_stride)) for row in range(rows)]
        with b.if_then(b.icmp_signed("==", accumulate, i64(2))):
            for row in range(rows):
                for v in range(vectors):
                    at = offset(b, offset(b, y, b.mul(i64(row), y_stride)), i64(v * LANES * 4))
                    acc[row * vectors + v] = emit_load(b, at, DTYPE_F32)
        with cgutils.for_range(b, k) as loop:
            w_row = offset(b, w, b.mul(loop.index, i64(PANEL * itemsize)))
            places = [offset(b, w_row, i64(v * LANES * itemsize)) for v in range(vectors)]
            if rows == 1 and (dtype != DTYPE_F32 or HAS_WIDE_REGISTERS):
                for line in range(0, vectors * LANES * itemsize, _LINE_BYTES):
                    emit_prefetch(b, offset(b, w_row, i64(_AHEAD_BYTES + line)))
            if dtype == PAIRS:
                _add_pairs(b, acc, [b.add(row, b.mul(loop.index, i64(_X_PAIR_BYTES))) for row in x_rows], places)
            else:
                weights = [emit_load(b, place, dtype) for place in places]
                _add_products(b, acc, [b.add(row, b.mul(loop.index, i64(4))) for row in x_rows], weights)
        with b.if_then(b.icmp_signed("==", accumulate, i64(1))):
            for row in range(rows):
                for v in range(vectors):
                    at = offset(b, offset(b, y, b.mul(i64(row), y_stride)), i64(v * LANES * 4))
                    acc[row * vectors + v] = b.fadd(emit_load(b, at, DTYPE_F32), acc[row * vectors + v])
        for row in range(rows):
            for v in range(vectors):
                at = offset(b, offset(b, y, b.mul(i64(row), y_stride)), i64(v * LANES * 4))
                emit_store(b, acc[row * vectors + v], at)

    return _tile_intrinsic(f"gemm_tile_{rows}x{vectors}_{dtype}", 7, emit)


def dot_tile(rows: int, columns: int, dtype: int) -> Any:
    """Intrinsic `(x, x_stride, a, a_stride, k, y, y_stride, kept, begins, ends, scale)`, strides in bytes, k a multiple
    of 16.

    Semantics: `y[m, j] = scale · Σ_k x[m, k] · a[j, k]` for m < rows, j < columns. x, y fp32; a of `dtype`. The sum may
    be cut into pieces of k: all but the first (`begins`) take up the vectors `kept` by the piece before, all but the
    last (`ends`) leave them there, so that a sum in pieces has the bits of a sum in one.
    """

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, x_stride, a, a_stride, k, y, y_stride, kept, begins, ends, scale = arguments
        itemsize = itemsize_bytes(dtype)
        acc = _Accumulators(b, rows * columns)
        places = [offset(b, kept, i64(index * LANES * 4)) for index in range(rows * columns)]
        with b.if_then(b.icmp_signed("==", begins, i64(0))):
            for index, place in enumerate(places):
                acc[index] = emit_load(b, place, DTYPE_F32)
        x_rows = [offset(b, x, b.mul(i64(row), x_stride)) for row in range(rows)]
        a_rows = [offset(b, a, b.mul(i64(column), a_stride)) for column in range(columns)]
        with cgutils.for_range(b, b.sdiv(k, i64(LANES))) as loop:
            xs = [emit_load(b, offset(b, row, b.mul(loop.index, i64(LANES * 4))), DTYPE_F32) for row in x_rows]
            for column in range(columns):
                weights = emit_load(b, offset(b, a_rows[column], b.mul(loop.index, i64(LANES * itemsize))), dtype)
                for row in range(rows):
                    index = row * columns + column
                    acc[index] = emit_fma(b, xs[row], weights, acc[index])
        with b.if_else(b.icmp_signed("!=", ends, i64(0))) as (then, otherwise):
            with then:
                for row in range(rows):
                    for column in range(columns):
                        total = b.fmul(scale, emit_reduce(b, acc[row * columns + column], b.fadd))
                        at = offset(b, offset(b, y, b.mul(i64(row), y_stride)), i64(4 * column))
                        b.store(total, pointer(b, at, F32))
            with otherwise:
                for index, place in enumerate(places):
                    emit_store(b, acc[index], place)

    return _tile_intrinsic(f"dot_tile_{rows}x{columns}_{dtype}", 11, emit, scaled=True)


def dot_row_tile(columns: int, dtype: int) -> Any:
    """Intrinsic `(x, a, a_stride, k, y, scale)`: does what `dot_tile` does for one row and a sum in one piece."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, a, a_stride, k, y, scale = arguments
        acc = _Accumulators(b, columns)
        a_rows = [offset(b, a, b.mul(i64(column), a_stride)) for column in range(columns)]
        with cgutils.for_range(b, b.sdiv(k, i64(LANES))) as loop:
            xs = emit_load(b, offset(b, x, b.mul(loop.index, i64(LANES * 4))), DTYPE_F32)
            for column, a_row in enumerate(a_rows):
                at = offset(b, a_row, b.mul(loop.index, i64(LANES * itemsize_bytes(dtype))))
                acc[column] = emit_fma(b, xs, emit_load(b, at, dtype), acc[column])
        for column in range(columns):
            total = b.fmul(scale, emit_reduce(b, acc[column], b.fadd))
            b.store(total, pointer(b, offset(b, y, i64(4 * column)), F32))

    return _tile_intrinsic(f"dot_row_tile_{columns}_{dtype}", 6, emit, scaled=True)


def scores_tile(rows: int, dtype: int) -> Any:
    """Intrinsic `(q, q_stride, k0, k1, k2, k3, head_dim, out)`, q_stride in bytes.

    Semantics: `out[m, 16·j + t] = Σ_d q[m, d] · k_j[d, t]` for m < rows, four KV blocks j of sixteen tokens t.
    q and out are fp32; each k_j is `[head_dim, 16]` of `dtype`, out is `[rows, 64]`, contiguous.
    """

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        q, q_stride, *keys, head_dim, out = arguments
        acc = _Accumulators(b, rows * 4)
        q_rows = [offset(b, q, b.mul(i64(row), q_stride)) for row in range(rows)]
        with cgutils.for_range(b, head_dim) as loop:
            row_offset = b.mul(loop.index, i64(LANES * itemsize_bytes(dtype)))
            vectors = [emit_load(b, offset(b, key, row_offset), dtype) for key in keys]
            for row in range(rows):
                splat = emit_load_splat(b, offset(b, q_rows[row], b.mul(loop.index, i64(4))))
                for j in range(4):
                    acc[row * 4 + j] = emit_fma(b, splat, vectors[j], acc[row * 4 + j])
        for index in range(rows * 4):
            emit_store(b, acc[index], offset(b, out, i64(index * LANES * 4)))

    return _tile_intrinsic(f"scores_tile_{rows}_{dtype}", 8, emit)


def values_tile(rows: int, vectors: int, dtype: int) -> Any:
    """Intrinsic `(p, v, v_stride, tokens, y, y_stride)`, strides in bytes.

    Semantics: `y[m, :] += Σ_{t < tokens} p[m, t] · v[t, :]` for m < rows, over `16 · vectors` columns.
    v is of `dtype`, the others fp32; p has rows of 64. Sums run over t in order. Tokens past `tokens` are not read:
    they may be unused, and a stale NaN times zero would be a NaN.
    """

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        p, v, v_stride, tokens, y, y_stride = arguments
        acc = _Accumulators(b, rows * vectors)
        places = [
            offset(b, offset(b, y, b.mul(i64(row), y_stride)), i64(vector * LANES * 4))
            for row in range(rows)
            for vector in range(vectors)
        ]
        for index, place in enumerate(places):
            acc[index] = emit_load(b, place, DTYPE_F32)
        with cgutils.for_range(b, tokens) as loop:
            v_row = offset(b, v, b.mul(loop.index, v_stride))
            step = LANES * itemsize_bytes(dtype)
            values = [emit_load(b, offset(b, v_row, i64(j * step)), dtype) for j in range(vectors)]
            for row in range(rows):
                splat = emit_load_splat(b, offset(b, p, b.add(b.mul(loop.index, i64(4)), i64(row * 256))))
                for j in range(vectors):
                    acc[row * vectors + j] = emit_fma(b, splat, values[j], acc[row * vectors + j])
        for index, place in enumerate(places):
            emit_store(b, acc[index], place)

    return _tile_intrinsic(f"values_tile_{rows}x{vectors}_{dtype}", 6, emit)


def _narrowed(b: Any, value: Any, dtype: int) -> Any:
    """Rounds sixteen fp32 to a dtype of KV blocks: fp32 or bfloat16. A NaN stays one."""
    if dtype == DTYPE_F32:
        return value
    assert dtype == DTYPE_BF16
    return b.trunc(b.lshr(round_to_bf16(b, value), ints(16)), VI16)


def _store_narrowed(b: Any, value: Any, address: Any, dtype: int) -> None:
    narrow = _narrowed(b, value, dtype)
    b.store(narrow, pointer(b, address, narrow.type)).align = itemsize_bytes(dtype)


def _transposed(b: Any, rows: Sequence[Any]) -> list[Any]:
    """Returns the columns of sixteen vectors."""
    rows = list(rows)
    for step in (8, 4, 2, 1):  # exchanges the halves of squares of twice the step that are off the diagonal
        kept = [lane if lane & step == 0 else LANES + lane - step for lane in range(LANES)]
        moved = [lane + step if lane & step == 0 else LANES + lane for lane in range(LANES)]
        for row in (row for row in range(LANES) if row & step == 0):
            upper, lower = rows[row], rows[row + step]
            rows[row], rows[row + step] = (
                b.shuffle_vector(upper, lower, ir.Constant(VI, lanes)) for lanes in (kept, moved)
            )
    return rows


def words_transpose(*, swaps_halves: bool = False) -> Any:
    """Intrinsic `(x, x_stride, y, y_stride)`, strides in bytes: writes words of 32 bits, [16, 16], transposed.
    `swaps_halves`: of each word."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, x_stride, y, y_stride = arguments
        rows = [emit_load(b, offset(b, x, b.mul(i64(row), x_stride)), DTYPE_F32) for row in range(LANES)]
        if swaps_halves:
            words = [b.bitcast(row, VI) for row in rows]
            rows = [b.bitcast(b.or_(b.shl(word, ints(16)), b.lshr(word, ints(16))), VF) for word in words]
        for row, value in enumerate(_transposed(b, rows)):
            emit_store(b, value, offset(b, y, b.mul(i64(row), y_stride)))

    return _tile_intrinsic(f"words_transpose_{swaps_halves}", 4, emit)


def value_store(dtype: int) -> Any:
    """Intrinsic `(x, y)`: writes sixteen fp32 at x to y, rounded to `dtype`."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, y = arguments
        _store_narrowed(b, emit_load(b, x, DTYPE_F32), y, dtype)

    return _tile_intrinsic(f"value_store_{dtype}", 2, emit)


def key_store(dtype: int) -> Any:
    """Intrinsic `(x, y)`: writes sixteen fp32 at x, rounded to `dtype`, to a column of y, `[16, 16]`."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, y = arguments
        narrow = _narrowed(b, emit_load(b, x, DTYPE_F32), dtype)
        for lane in range(LANES):
            at = offset(b, y, i64(lane * LANES * itemsize_bytes(dtype)))
            b.store(b.extract_element(narrow, ir.Constant(I32, lane)), pointer(b, at, narrow.type.element))

    return _tile_intrinsic(f"key_store_{dtype}", 2, emit)


def keys_store(dtype: int) -> Any:
    """Intrinsic `(x, x_stride, y)`, x_stride in bytes: writes fp32 `[16, 16]` transposed, rounded to `dtype`."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, x_stride, y = arguments
        rows = [emit_load(b, offset(b, x, b.mul(i64(row), x_stride)), DTYPE_F32) for row in range(LANES)]
        rows = _transposed(b, rows)
        for row, value in enumerate(rows):
            _store_narrowed(b, value, offset(b, y, i64(row * LANES * itemsize_bytes(dtype))), dtype)

    return _tile_intrinsic(f"keys_store_{dtype}", 3, emit)


def call_by_address(num_words: int) -> Any:
    """Makes the intrinsic `(address, ...)`, which calls a C function of `num_words` int64 arguments and no result."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * num_words)
        b.call(b.inttoptr(arguments[0], kind.as_pointer()), list(arguments[1:]))

    return _tile_intrinsic("call_by_address", num_words + 1, emit)


def stack_bytes(num_bytes: int) -> Any:
    """Makes the intrinsic `()`, which returns the address of `num_bytes` on the stack, aligned to a cache line."""
    vectors = num_bytes // (4 * LANES)

    def codegen(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(VF, vectors))
        room.align = 64
        return builder.ptrtoint(room, I64)

    return make_intrinsic("stack_bytes", 0, types.int64(), codegen)
