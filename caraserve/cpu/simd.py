"""Sixteen fp32 lanes as a Numba scalar type, and the vector operations, loads, stores and atomics on it. CPU only.

LLVM's autovectoriser reaches a third to a half of a core's peak on these loops and depends on the CPU's preferred
width; an explicit `<16 x float>` reaches 80 to 90 % and lowers to the CPU's own vectors (one zmm, two ymm, four xmm).
Memory is addressed by plain integers: one table of addresses then serves any mix of adapters, and a tile needs no array
descriptors in its inner loop. Nothing here checks bounds; callers guarantee the shapes.

Every reduction has one fixed order for any number of rows in a tile, so a result never depends on the rest of the
batch.
"""

import inspect
import platform
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_ARM = platform.machine().lower() in ("aarch64", "arm64")


def _x86_cpu_has(feature: str) -> bool:
    if numba.config.CPU_NAME:  # compiling for another CPU than this one
        return f"+{feature}" in (numba.config.CPU_FEATURES or "")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


# If a CPU does not convert fp16, LLVM would call a missing library function and end the process.
_CONVERTS_HALF = not _X86 or _x86_cpu_has("f16c")
HAS_WIDE_REGISTERS = _X86 and _x86_cpu_has("avx512f")  # 32 registers of sixteen fp32 each
HAS_PERMUTES = _X86 and _x86_cpu_has("avx2")  # of lanes and bytes in registers of eight fp32
HAS_PAIR_PRODUCTS = HAS_WIDE_REGISTERS and _x86_cpu_has("avx512bf16")  # of two pairs of bfloat16, added to fp32
# Sums of four products of bytes, added to int32: in sixteen lanes, or in eight at least.
HAS_WIDE_BYTE_PRODUCTS = HAS_WIDE_REGISTERS and all(map(_x86_cpu_has, ("avx512bw", "avx512vnni")))
HAS_BYTE_PRODUCTS = HAS_WIDE_BYTE_PRODUCTS or (HAS_PERMUTES and _x86_cpu_has("avxvnni"))
DTYPE_F32, DTYPE_BF16, DTYPE_F16 = 0, 1, 2  # the codes of `Dtype`

_I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VF, VI, VI16, VI8, _VH = (ir.VectorType(t, LANES) for t in (F32, I32, _I16, ir.IntType(8), ir.HalfType()))


class V16Type(types.Type):  # type: ignore[misc]
    """A vector of sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="V16")


v16 = V16Type()


@register_model(V16Type)
class _V16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VF)


def pointer(b: Any, address: Any, pointee: Any) -> Any:
    return b.inttoptr(address, pointee.as_pointer())


def offset(b: Any, address: Any, by: Any) -> Any:
    return b.add(address, by)


def i64(value: int) -> Any:
    return ir.Constant(I64, value)


def emit_load(b: Any, address: Any, dtype: int) -> Any:
    """Loads sixteen weights of a storage dtype as fp32. Unaligned loads cost nothing at an aligned address."""
    if dtype == DTYPE_F32:
        value = b.load(pointer(b, address, VF))
        value.align = 4
        return value
    bits = b.load(pointer(b, address, VI16))
    bits.align = 2
    if dtype == DTYPE_F16:
        return emit_widen_half(b, bits)
    return b.bitcast(b.shl(b.zext(bits, VI), ints(16)), VF)


def emit_prefetch(b: Any, address: Any) -> None:
    """Fetches a cache line that will be read soon. Any address may be given."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    read, nearest, data = (ir.Constant(I32, value) for value in (0, 3, 1))
    b.call(function, [b.inttoptr(address, byte), read, nearest, data])


def emit_load_bytes(b: Any, address: Any) -> Any:
    """Loads sixteen bytes."""
    value = b.load(pointer(b, address, VI8))
    value.align = 1
    return value


def emit_widen_half(b: Any, bits: Any) -> Any:
    """Converts finite fp16 bits to fp32, exactly."""
    if _CONVERTS_HALF:
        return b.fpext(b.bitcast(bits, _VH), VF)
    return _widen_half(b, b.zext(bits, VI))


def ints(value: int) -> Any:
    return ir.Constant(VI, [value] * LANES)


def _widen_half(b: Any, bits: Any) -> Any:
    """Converts finite fp16 bits (in 32-bit lanes) to fp32, exactly: shifts the magnitude into place and rebiases its
    exponent by a multiplication, which is right for subnormals too; then adds the sign."""
    magnitude = b.bitcast(b.shl(b.and_(bits, ints(0x7FFF)), ints(13)), VF)
    rebiased = b.fmul(magnitude, ir.Constant(VF, [2.0**112] * LANES))
    sign = b.shl(b.and_(bits, ints(0x8000)), ints(16))
    return b.bitcast(b.or_(b.bitcast(rebiased, VI), sign), VF)


def _narrow_half(b: Any, value: Any) -> Any:
    """Converts fp32 to fp16 bits (in 32-bit lanes), to nearest even: by integers for normal results; for smaller ones,
    adding 0.5 leaves the bits of a subnormal at the end of the sum."""
    bits = b.bitcast(value, VI)
    magnitude = b.and_(bits, ints(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, ints(13)), ints(1))
    rebiased = b.sub(b.add(magnitude, ints(0xFFF)), ints(112 << 23))
    normal = b.lshr(b.add(rebiased, odd), ints(13))
    summed = b.fadd(b.bitcast(magnitude, VF), ir.Constant(VF, [0.5] * LANES))
    subnormal = b.sub(b.bitcast(summed, VI), ints(0x3F000000))
    narrow = b.select(b.icmp_unsigned("<", magnitude, ints(0x38800000)), subnormal, normal)
    narrow = b.select(b.icmp_unsigned(">=", magnitude, ints(0x477FF000)), ints(0x7C00), narrow)
    return b.or_(narrow, b.and_(b.lshr(bits, ints(16)), ints(0x8000)))


def emit_narrow(b: Any, value: Any, dtype: int) -> Any:
    """Rounds sixteen fp32 lanes to bits of a 16-bit storage dtype, to nearest even. Values must be finite."""
    if dtype == DTYPE_F16 and _CONVERTS_HALF:
        return b.bitcast(b.fptrunc(value, _VH), VI16)
    if dtype == DTYPE_F16:
        bits = _narrow_half(b, value)
    else:
        bits = b.lshr(emit_nearest_bf16(b, b.bitcast(value, VI)), ints(16))
    return b.trunc(bits, VI16)


def emit_nearest_bf16(b: Any, bits: Any) -> Any:
    """Rounds bits of finite fp32 to those of bfloat16, the upper halves, to nearest even; the lower halves are void."""
    odd = b.and_(b.lshr(bits, ints(16)), ints(1))
    return b.add(b.add(bits, ints(0x7FFF)), odd)


def emit_rounded(b: Any, value: Any, dtype: int) -> Any:
    """Rounds sixteen fp32 lanes to values of a 16-bit storage dtype, to nearest even. Values must be finite."""
    if dtype == DTYPE_F16:
        return emit_widen_half(b, emit_narrow(b, value, dtype))
    return b.bitcast(b.and_(emit_nearest_bf16(b, b.bitcast(value, VI)), ints(-0x10000)), VF)


def emit_narrow_store(b: Any, value: Any, address: Any, dtype: int) -> None:
    """Stores sixteen fp32 lanes as weights of a storage dtype, rounded to nearest even. Values must be finite."""
    if dtype == DTYPE_F32:
        emit_store(b, value, address)
        return
    b.store(emit_narrow(b, value, dtype), pointer(b, address, VI16)).align = 2


def emit_store(b: Any, value: Any, address: Any) -> None:
    b.store(value, pointer(b, address, VF)).align = 4


def emit_splat(b: Any, scalar: Any) -> Any:
    first = b.insert_element(ir.Constant(VF, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, ir.Constant(VF, ir.Undefined), ir.Constant(VI, [0] * LANES))


def emit_load_splat(b: Any, address: Any) -> Any:
    scalar = b.load(pointer(b, address, F32))
    scalar.align = 4
    return emit_splat(b, scalar)


def emit_fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(VF, [VF] * 3), "llvm.fma.v16f32")
    return b.call(function, [x, y, z])


def emit_reduce(b: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines the lanes pairwise, halves first: the same tree everywhere.

    Each half is a vector of its own: for AVX-512, LLVM 22 gets some shuffles of all sixteen lanes wrong, of which only
    lower ones are used (sums of int8 rows had lanes 0 and 1 twice)."""
    width = LANES
    while width > 1:
        width //= 2
        starts = (ir.Constant(ir.VectorType(I32, width), list(range(start, start + width))) for start in (0, width))
        value = combine(*[b.shuffle_vector(value, value, lanes) for lanes in starts])
    return b.extract_element(value, ir.Constant(I32, 0))


def make_intrinsic(name: str, num_args: int, signature: Any, codegen: Callable[..., Any]) -> Any:
    def typing(_context: Any, *_arguments: Any) -> Any:
        return signature, codegen

    names = ["typing_context", *(f"a{index}" for index in range(num_args))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typing.__name__ = name
    typing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Numba reads the arity here
    return intrinsic(typing)


def make_void_intrinsic(name: str, num_args: int, emit: Callable[[Any, Sequence[Any]], None]) -> Any:
    """Makes an intrinsic of int64 arguments; `emit(builder, arguments)` emits it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit(builder, arguments)
        return context.get_dummy_value()

    return make_intrinsic(name, num_args, types.void(*[types.int64] * num_args), codegen)


def _vector_op(num_args: int, emit: Callable[..., Any], result: Any = v16, last: Any = v16) -> Any:
    """Makes an intrinsic over V16 arguments (`last`: the type of the last one)."""

    def codegen(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(builder, *arguments)

    return make_intrinsic("vector_op", num_args, result(*[v16] * (num_args - 1), last), codegen)


def vector_load(emit: Callable[[Any, Any], Any]) -> Any:
    """Makes the intrinsic `(address)`, which returns the sixteen fp32 that `emit(builder, address)` loads."""
    return _vector_op(1, emit, last=types.int64)


def _emit_maximum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _emit_minimum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _emit_from_lane(b: Any, x: Any) -> Any:
    return b.fadd(emit_splat(b, x), ir.Constant(VF, [float(lane) for lane in range(LANES)]))


def _emit_keep_below(b: Any, x: Any, limit: Any) -> Any:
    lanes = ir.Constant(VI, list(range(LANES)))
    first = b.insert_element(ir.Constant(VI, ir.Undefined), b.trunc(limit, I32), ir.Constant(I32, 0))
    limits = b.shuffle_vector(first, ir.Constant(VI, ir.Undefined), ir.Constant(VI, [0] * LANES))
    return b.select(b.icmp_signed("<", lanes, limits), x, ir.Constant(VF, [float("-inf")] * LANES))


def _emit_keep_from(b: Any, x: Any, limit: Any) -> Any:
    lanes = ir.Constant(VI, list(range(LANES)))
    first = b.insert_element(ir.Constant(VI, ir.Undefined), b.trunc(limit, I32), ir.Constant(I32, 0))
    limits = b.shuffle_vector(first, ir.Constant(VI, ir.Undefined), ir.Constant(VI, [0] * LANES))
    return b.select(b.icmp_signed(">=", lanes, limits), x, ir.Constant(VF, [float("-inf")] * LANES))


def _emit_exp(b: Any, x: Any) -> Any:
    """Computes e^x to ~2 ulp: 2^n · e^r with |r| <= ln 2 / 2, Taylor to the seventh power. Exactly 0 below -87.3."""

    def const(value: float) -> Any:
        return ir.Constant(VF, [value] * LANES)

    low = b.fcmp_ordered("<", x, const(-87.25))
    clamped = b.select(low, const(-87.25), x)
    clamped = b.select(b.fcmp_ordered(">", clamped, const(88.0)), const(88.0), clamped)
    magic = const(12582912.0)  # 1.5 · 2^23: adding it rounds to an integer without an SSE4.1 instruction
    n = b.fsub(emit_fma(b, clamped, const(1.4426950216293335), magic), magic)
    r = emit_fma(b, n, const(-0.693359375), clamped)
    r = emit_fma(b, n, const(2.12194440e-4), r)
    poly = const(1.0 / 5040)
    for term in (1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
        poly = emit_fma(b, poly, r, const(term))
    exponent = b.shl(b.add(b.fptosi(n, VI), ir.Constant(VI, [127] * LANES)), ir.Constant(VI, [23] * LANES))
    value = b.fmul(poly, b.bitcast(exponent, VF))
    return b.select(low, const(0.0), value)


def _emit_tanh(b: Any, x: Any) -> Any:
    """Computes tanh x to ~2 ulp: below 0.625 a polynomial of Cephes, above 1 - 2 / (e^2|x| + 1) with the sign of x."""

    def const(value: float) -> Any:
        return ir.Constant(VF, [value] * LANES)

    square = b.fmul(x, x)
    poly = const(-5.70498872745e-3)
    for term in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        poly = emit_fma(b, poly, square, const(term))
    small = emit_fma(b, b.fmul(poly, square), x, x)
    sign = b.and_(b.bitcast(x, VI), ints(-0x80000000))
    magnitude = b.bitcast(b.xor(b.bitcast(x, VI), sign), VF)
    power = _emit_exp(b, b.fadd(magnitude, magnitude))
    large = b.fsub(const(1.0), b.fdiv(const(2.0), b.fadd(power, const(1.0))))
    signed = b.bitcast(b.or_(b.bitcast(large, VI), sign), VF)
    return b.select(b.fcmp_ordered("<", magnitude, const(0.625)), small, signed)


vload = vector_load(lambda b, address: emit_load(b, address, DTYPE_F32))
vadd = _vector_op(2, lambda b, x, y: b.fadd(x, y))
vsub = _vector_op(2, lambda b, x, y: b.fsub(x, y))
vmul = _vector_op(2, lambda b, x, y: b.fmul(x, y))
vdiv = _vector_op(2, lambda b, x, y: b.fdiv(x, y))
vmax = _vector_op(2, _emit_maximum)
vmin = _vector_op(2, _emit_minimum)
vfma = _vector_op(3, emit_fma)  # x · y + z
vexp = _vector_op(1, _emit_exp)
vtanh = _vector_op(1, _emit_tanh)
vsum = _vector_op(1, lambda b, x: emit_reduce(b, x, b.fadd), result=types.float32)
vmaximum = _vector_op(1, lambda b, x: emit_reduce(b, x, lambda p, q: _emit_maximum(b, p, q)), result=types.float32)
vsplat = _vector_op(1, emit_splat, last=types.float32)
from_lane = _vector_op(1, _emit_from_lane, last=types.float32)  # x, x + 1, … x + 15
keep_below = _vector_op(2, _emit_keep_below, last=types.int64)  # lanes >= limit become -inf
keep_from = _vector_op(2, _emit_keep_from, last=types.int64)  # lanes < limit become -inf


@intrinsic
def vstore(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Stores sixteen fp32."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        emit_store(b, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, v16), codegen


def weight_ops(dtype: int) -> tuple[Any, Any]:
    """Makes the intrinsics load `(address)`, of sixteen weights as fp32, and store `(address, value)`, which rounds."""

    @intrinsic
    def store(typing_context, address, value):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            emit_narrow_store(b, arguments[1], arguments[0], dtype)
            return context.get_dummy_value()

        return types.void(types.int64, v16), codegen

    return vector_load(lambda b, address: emit_load(b, address, dtype)), store


def _scalar_load(numba_type: Any, llvm_type: Any) -> Any:
    @intrinsic
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        return numba_type(types.int64), lambda context, b, sig, args: b.load(pointer(b, args[0], llvm_type))

    return load


def _scalar_store(numba_type: Any, llvm_type: Any) -> Any:
    @intrinsic
    def store(typing_context, address, value):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            b.store(arguments[1], pointer(b, arguments[0], llvm_type))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store


load_f32, store_f32 = _scalar_load(types.float32, F32), _scalar_store(types.float32, F32)
load_u16, store_u16 = _scalar_load(types.uint16, _I16), _scalar_store(types.uint16, _I16)
load_i32 = _scalar_load(types.int32, I32)
store_u32, store_u8 = _scalar_store(types.uint32, I32), _scalar_store(types.uint8, ir.IntType(8))
load_i64 = _scalar_load(types.int64, I64)
load_u64, store_i64 = _scalar_load(types.uint64, I64), _scalar_store(types.int64, I64)


@intrinsic
def bits_to_float(typing_context, bits):  # type: ignore[no-untyped-def]
    """Returns the float32 with the bits of a uint32."""
    return types.float32(types.uint32), lambda context, b, sig, args: b.bitcast(args[0], F32)


@intrinsic
def load_acquire(typing_context, address):  # type: ignore[no-untyped-def]
    """Loads an int64 that other threads release. LLVM would hoist a plain load out of a poll loop."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.load_atomic(pointer(b, arguments[0], I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Stores an int64; a thread that acquires it sees all writes before it."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        b.store_atomic(arguments[1], pointer(b, arguments[0], I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Adds to an int64 atomically (acquire and release). Returns the old value."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.atomic_rmw("add", pointer(b, arguments[0], I64), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def spin_pause(typing_context):  # type: ignore[no-untyped-def]
    """Emits the instruction for spin waits of x86, or of Arm."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        if _X86:
            pause = cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause")
            b.call(pause, [])
        elif _ARM:
            kind = ir.FunctionType(ir.VoidType(), [I32])
            hint = cgutils.get_or_insert_function(b.module, kind, "llvm.aarch64.hint")
            b.call(hint, [I32(1)])  # yield
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def fence(typing_context):  # type: ignore[no-untyped-def]
    """Orders all accesses before it before all accesses after it. A store and a later load need it even on x86."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
