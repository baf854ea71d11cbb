"""Sixteen fp32 lanes as a Numba scalar type, the register tiles built of it, and atomics. Level 1; CPU only.

LLVM's autovectoriser reaches a third to a half of a core's peak on these loops and depends on the CPU's preferred
width; an explicit `<16 x float>` reaches 80 to 90 % and lowers to whatever the CPU has (one zmm, two ymm, four xmm).
Memory is named by plain integer addresses: one table of addresses then serves any mix of adapters, and a tile needs no
array descriptors in its inner loop. Nothing here checks bounds: callers own the shapes.

Every reduction has one fixed order, whatever the number of rows in a tile, so that a result never depends on what
else is in the batch.
"""

import inspect
import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_X86 = platform.machine().lower() in ("x86_64", "amd64")
DTYPE_F32, DTYPE_BF16, DTYPE_F16 = 0, 1, 2  # the codes of model/layout.py:Dtype

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VF, _VI, _VI16, _VH = (ir.VectorType(t, LANES) for t in (_F32, _I32, _I16, ir.HalfType()))


class V16Type(types.Type):  # type: ignore[misc]
    """A vector of sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="V16")


v16 = V16Type()


@register_model(V16Type)
class _V16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VF)


def _pointer(b: Any, address: Any, pointee: Any) -> Any:
    return b.inttoptr(address, pointee.as_pointer())


def _offset(b: Any, address: Any, by: Any) -> Any:
    return b.add(address, by)


def _bytes(value: int) -> Any:
    return ir.Constant(_I64, value)


def _load(b: Any, address: Any, dtype: int) -> Any:
    """Sixteen weights of a storage dtype as fp32 lanes. Unaligned loads cost nothing when the address is aligned."""
    if dtype == DTYPE_F32:
        value = b.load(_pointer(b, address, _VF))
        value.align = 4
        return value
    if dtype == DTYPE_F16:
        value = b.load(_pointer(b, address, _VH))
        value.align = 2
        return b.fpext(value, _VF)
    value = b.load(_pointer(b, address, _VI16))
    value.align = 2
    sixteen = ir.Constant(_VI, [16] * LANES)
    return b.bitcast(b.shl(b.zext(value, _VI), sixteen), _VF)


def _store(b: Any, value: Any, address: Any) -> None:
    b.store(value, _pointer(b, address, _VF)).align = 4


def _splat(b: Any, scalar: Any) -> Any:
    first = b.insert_element(ir.Constant(_VF, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, ir.Constant(_VF, ir.Undefined), ir.Constant(_VI, [0] * LANES))


def _load_splat(b: Any, address: Any) -> Any:
    scalar = b.load(_pointer(b, address, _F32))
    scalar.align = 4
    return _splat(b, scalar)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VF, [_VF] * 3), "llvm.fma.v16f32")
    return b.call(function, [x, y, z])


def _reduce(b: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines the lanes pairwise, halves first: the same tree everywhere."""
    width = LANES // 2
    while width:
        lanes = [lane + width if lane < width else lane for lane in range(LANES)]
        value = combine(value, b.shuffle_vector(value, value, ir.Constant(_VI, lanes)))
        width //= 2
    return b.extract_element(value, ir.Constant(_I32, 0))


class _Accumulators:
    """Named registers of a tile: allocas that LLVM promotes to vector registers."""

    def __init__(self, b: Any, count: int) -> None:
        self._b = b
        self._slots = [cgutils.alloca_once_value(b, ir.Constant(_VF, [0.0] * LANES)) for _ in range(count)]
        for slot in self._slots:  # alloca_once_value stores in the entry block only; the tile may be inside a loop
            b.store(ir.Constant(_VF, [0.0] * LANES), slot)

    def __getitem__(self, index: int) -> Any:
        return self._b.load(self._slots[index])

    def __setitem__(self, index: int, value: Any) -> None:
        self._b.store(value, self._slots[index])


def _intrinsic(name: str, num_args: int, signature: Any, codegen: Callable[..., Any]) -> Any:
    def typing(_context: Any, *_arguments: Any) -> Any:
        return signature, codegen

    names = ["typing_context", *(f"a{index}" for index in range(num_args))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typing.__name__ = name
    typing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Numba reads the arity here
    return intrinsic(typing)


def _tile_intrinsic(
    name: str, num_args: int, emit: Callable[[Any, Sequence[Any]], None], *, scaled: bool = False
) -> Any:
    """An intrinsic of int64 arguments (and a last float32 if `scaled`), whose code `emit(builder, arguments)` writes."""

    def codegen(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit(builder, arguments)
        return _context.get_dummy_value()

    kinds = [types.int64] * num_args
    signature = types.void(*(kinds[:-1] + [types.float32] if scaled else kinds))
    return _intrinsic(name, num_args, signature, codegen)


def gemm_tile(rows: int, vectors: int, dtype: int) -> Any:
    """Intrinsic `(x, x_stride, w, k, y, y_stride, accumulate)`, strides in bytes.

    Semantics: `y[m, :] = (y[m, :] if accumulate else 0) + Σ_k x[m, k] · w[k, :]` for m < rows.
    x, y are fp32; w is `[k, 16 · vectors]` of `dtype`, contiguous. Sums run over k in order.
    """

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, x_stride, w, k, y, y_stride, accumulate = arguments
        itemsize = 4 if dtype == DTYPE_F32 else 2
        acc = _Accumulators(b, rows * vectors)
        x_rows = [_offset(b, x, b.mul(_bytes(row), x_stride)) for row in range(rows)]
        with cgutils.for_range(b, k) as loop:
            w_row = _offset(b, w, b.mul(loop.index, _bytes(LANES * vectors * itemsize)))
            weights = [_load(b, _offset(b, w_row, _bytes(v * LANES * itemsize)), dtype) for v in range(vectors)]
            x_offset = b.mul(loop.index, _bytes(4))
            for row in range(rows):
                splat = _load_splat(b, _offset(b, x_rows[row], x_offset))
                for v in range(vectors):
                    acc[row * vectors + v] = _fma(b, splat, weights[v], acc[row * vectors + v])
        with b.if_then(b.icmp_signed("!=", accumulate, _bytes(0))):
            for row in range(rows):
                for v in range(vectors):
                    at = _offset(b, _offset(b, y, b.mul(_bytes(row), y_stride)), _bytes(v * LANES * 4))
                    acc[row * vectors + v] = b.fadd(_load(b, at, DTYPE_F32), acc[row * vectors + v])
        for row in range(rows):
            for v in range(vectors):
                at = _offset(b, _offset(b, y, b.mul(_bytes(row), y_stride)), _bytes(v * LANES * 4))
                _store(b, acc[row * vectors + v], at)

    return _tile_intrinsic(f"gemm_tile_{rows}x{vectors}_{dtype}", 7, emit)


def dot_tile(rows: int, columns: int, dtype: int) -> Any:
    """Intrinsic `(x, x_stride, a, a_stride, k, y, y_stride, scale)`, strides in bytes, k a multiple of 16.

    Semantics: `y[m, j] = scale · Σ_k x[m, k] · a[j, k]` for m < rows, j < columns. x, y fp32; a of `dtype`.
    """

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        x, x_stride, a, a_stride, k, y, y_stride, scale = arguments
        itemsize = 4 if dtype == DTYPE_F32 else 2
        acc = _Accumulators(b, rows * columns)
        x_rows = [_offset(b, x, b.mul(_bytes(row), x_stride)) for row in range(rows)]
        a_rows = [_offset(b, a, b.mul(_bytes(column), a_stride)) for column in range(columns)]
        with cgutils.for_range(b, b.sdiv(k, _bytes(LANES))) as loop:
            xs = [_load(b, _offset(b, row, b.mul(loop.index, _bytes(LANES * 4))), DTYPE_F32) for row in x_rows]
            for column in range(columns):
                weights = _load(b, _offset(b, a_rows[column], b.mul(loop.index, _bytes(LANES * itemsize))), dtype)
                for row in range(rows):
                    index = row * columns + column
                    acc[index] = _fma(b, xs[row], weights, acc[index])
        for row in range(rows):
            for column in range(columns):
                total = b.fmul(scale, _reduce(b, acc[row * columns + column], b.fadd))
                at = _offset(b, _offset(b, y, b.mul(_bytes(row), y_stride)), _bytes(4 * column))
                b.store(total, _pointer(b, at, _F32))

    return _tile_intrinsic(f"dot_tile_{rows}x{columns}_{dtype}", 8, emit, scaled=True)


def scores_tile(rows: int) -> Any:
    """Intrinsic `(q, q_stride, k0, k1, k2, k3, head_dim, out)`, q_stride in bytes.

    Semantics: `out[m, 16·j + t] = Σ_d q[m, d] · k_j[d, t]` for m < rows, four KV blocks j of sixteen tokens t.
    All fp32; each k_j is `[head_dim, 16]`, out is `[rows, 64]`, contiguous.
    """

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        q, q_stride, *keys, head_dim, out = arguments
        acc = _Accumulators(b, rows * 4)
        q_rows = [_offset(b, q, b.mul(_bytes(row), q_stride)) for row in range(rows)]
        with cgutils.for_range(b, head_dim) as loop:
            row_offset = b.mul(loop.index, _bytes(LANES * 4))
            vectors = [_load(b, _offset(b, key, row_offset), DTYPE_F32) for key in keys]
            for row in range(rows):
                splat = _load_splat(b, _offset(b, q_rows[row], b.mul(loop.index, _bytes(4))))
                for j in range(4):
                    acc[row * 4 + j] = _fma(b, splat, vectors[j], acc[row * 4 + j])
        for index in range(rows * 4):
            _store(b, acc[index], _offset(b, out, _bytes(index * LANES * 4)))

    return _tile_intrinsic(f"scores_tile_{rows}", 8, emit)


def values_tile(rows: int, vectors: int) -> Any:
    """Intrinsic `(p, v, v_stride, tokens, y, y_stride)`, strides in bytes.

    Semantics: `y[m, :] += Σ_{t < tokens} p[m, t] · v[t, :]` for m < rows, over `16 · vectors` columns.
    All fp32; p has rows of 64. Sums run over t in order. Tokens past `tokens` are not read: they may belong to
    nobody, and a stale NaN times zero would be a NaN.
    """

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        p, v, v_stride, tokens, y, y_stride = arguments
        acc = _Accumulators(b, rows * vectors)
        places = [
            _offset(b, _offset(b, y, b.mul(_bytes(row), y_stride)), _bytes(vector * LANES * 4))
            for row in range(rows)
            for vector in range(vectors)
        ]
        for index, place in enumerate(places):
            acc[index] = _load(b, place, DTYPE_F32)
        with cgutils.for_range(b, tokens) as loop:
            v_row = _offset(b, v, b.mul(loop.index, v_stride))
            values = [_load(b, _offset(b, v_row, _bytes(j * LANES * 4)), DTYPE_F32) for j in range(vectors)]
            for row in range(rows):
                splat = _load_splat(b, _offset(b, p, b.add(b.mul(loop.index, _bytes(4)), _bytes(row * 256))))
                for j in range(vectors):
                    acc[row * vectors + j] = _fma(b, splat, values[j], acc[row * vectors + j])
        for index, place in enumerate(places):
            _store(b, acc[index], place)

    return _tile_intrinsic(f"values_tile_{rows}x{vectors}", 6, emit)


def _vector_op(num_args: int, emit: Callable[..., Any], result: Any = v16, last: Any = v16) -> Any:
    """An intrinsic over V16 arguments (`last`: the type of the last one)."""

    def codegen(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(builder, *arguments)

    return _intrinsic("vector_op", num_args, result(*[v16] * (num_args - 1), last), codegen)


def _emit_maximum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _emit_keep_below(b: Any, x: Any, limit: Any) -> Any:
    lanes = ir.Constant(_VI, list(range(LANES)))
    first = b.insert_element(ir.Constant(_VI, ir.Undefined), b.trunc(limit, _I32), ir.Constant(_I32, 0))
    limits = b.shuffle_vector(first, ir.Constant(_VI, ir.Undefined), ir.Constant(_VI, [0] * LANES))
    return b.select(b.icmp_signed("<", lanes, limits), x, ir.Constant(_VF, [float("-inf")] * LANES))


def _emit_keep_from(b: Any, x: Any, limit: Any) -> Any:
    lanes = ir.Constant(_VI, list(range(LANES)))
    first = b.insert_element(ir.Constant(_VI, ir.Undefined), b.trunc(limit, _I32), ir.Constant(_I32, 0))
    limits = b.shuffle_vector(first, ir.Constant(_VI, ir.Undefined), ir.Constant(_VI, [0] * LANES))
    return b.select(b.icmp_signed(">=", lanes, limits), x, ir.Constant(_VF, [float("-inf")] * LANES))


def _emit_exp(b: Any, x: Any) -> Any:
    """e^x to about 2 ulp: 2^n · e^r with |r| <= ln 2 / 2, Taylor to the seventh power. Exactly 0 below -87.3."""

    def const(value: float) -> Any:
        return ir.Constant(_VF, [value] * LANES)

    low = b.fcmp_ordered("<", x, const(-87.25))
    clamped = b.select(low, const(-87.25), x)
    clamped = b.select(b.fcmp_ordered(">", clamped, const(88.0)), const(88.0), clamped)
    magic = const(12582912.0)  # 1.5 · 2^23: adding it rounds to an integer without an SSE4.1 instruction
    n = b.fsub(_fma(b, clamped, const(1.4426950216293335), magic), magic)
    r = _fma(b, n, const(-0.693359375), clamped)
    r = _fma(b, n, const(2.12194440e-4), r)
    poly = const(1.0 / 5040)
    for term in (1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
        poly = _fma(b, poly, r, const(term))
    exponent = b.shl(b.add(b.fptosi(n, _VI), ir.Constant(_VI, [127] * LANES)), ir.Constant(_VI, [23] * LANES))
    value = b.fmul(poly, b.bitcast(exponent, _VF))
    return b.select(low, const(0.0), value)


vadd = _vector_op(2, lambda b, x, y: b.fadd(x, y))
vsub = _vector_op(2, lambda b, x, y: b.fsub(x, y))
vmul = _vector_op(2, lambda b, x, y: b.fmul(x, y))
vdiv = _vector_op(2, lambda b, x, y: b.fdiv(x, y))
vmax = _vector_op(2, _emit_maximum)
vfma = _vector_op(3, _fma)  # x · y + z
vexp = _vector_op(1, _emit_exp)
vsum = _vector_op(1, lambda b, x: _reduce(b, x, b.fadd), result=types.float32)
vmaximum = _vector_op(1, lambda b, x: _reduce(b, x, lambda p, q: _emit_maximum(b, p, q)), result=types.float32)
vsplat = _vector_op(1, _splat, last=types.float32)
keep_below = _vector_op(2, _emit_keep_below, last=types.int64)  # lanes >= limit become -inf
keep_from = _vector_op(2, _emit_keep_from, last=types.int64)  # lanes < limit become -inf


@intrinsic
def vload(typing_context, address):  # type: ignore[no-untyped-def]
    """Sixteen fp32 from an address."""
    return v16(types.int64), lambda context, b, sig, args: _load(b, args[0], DTYPE_F32)


@intrinsic
def vstore(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Sixteen fp32 to an address."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        _store(b, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, v16), codegen


def _scalar_load(numba_type: Any, llvm_type: Any) -> Any:
    @intrinsic
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        return numba_type(types.int64), lambda context, b, sig, args: b.load(_pointer(b, args[0], llvm_type))

    return load


def _scalar_store(numba_type: Any, llvm_type: Any) -> Any:
    @intrinsic
    def store(typing_context, address, value):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            b.store(arguments[1], _pointer(b, arguments[0], llvm_type))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store


load_f32, store_f32 = _scalar_load(types.float32, _F32), _scalar_store(types.float32, _F32)
load_u16, load_i64 = _scalar_load(types.uint16, _I16), _scalar_load(types.int64, _I64)


@intrinsic
def half_to_float(typing_context, bits):  # type: ignore[no-untyped-def]
    """fp16 bits (uint16) as float32."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.fpext(b.bitcast(arguments[0], ir.HalfType()), _F32)

    return types.float32(types.uint16), codegen


@intrinsic
def bits_to_float(typing_context, bits):  # type: ignore[no-untyped-def]
    """The float32 whose representation is the uint32 `bits`."""
    return types.float32(types.uint32), lambda context, b, sig, args: b.bitcast(args[0], _F32)


@intrinsic
def load_acquire(typing_context, address):  # type: ignore[no-untyped-def]
    """An int64 that other threads release. A plain load in a poll loop would be hoisted out of it by LLVM."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.load_atomic(_pointer(b, arguments[0], _I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Publishes an int64: all writes before it are seen by who acquires it."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        b.store_atomic(arguments[1], _pointer(b, arguments[0], _I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Atomically adds to an int64 and returns what it was (acquire and release)."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.atomic_rmw("add", _pointer(b, arguments[0], _I64), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def spin_pause(typing_context):  # type: ignore[no-untyped-def]
    """Tells an x86 core that this is a spin wait; elsewhere nothing."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        if _X86:
            pause = cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause")
            b.call(pause, [])
        return context.get_dummy_value()

    return types.void(), codegen


def call_by_address(num_words: int) -> Any:
    """Intrinsic `(address, ...)`: calls a C function of `num_words` int64 arguments that returns nothing."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * num_words)
        b.call(b.inttoptr(arguments[0], kind.as_pointer()), list(arguments[1:]))

    return _tile_intrinsic("call_by_address", num_words + 1, emit)
