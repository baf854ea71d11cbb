"""How the scales and offsets of a group become fp32 in registers: vector code for sixteen outputs, as LLVM IR."""

from typing import Any

from llvmlite import ir

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.linear.grouped_layout import Layout
from caraserve.cpu.simd import (
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_F32,
    LANES,
    VF,
    VI,
    VI16,
    emit_load,
    emit_load_bytes,
    emit_widen_half,
    i64,
    offset,
)
from caraserve.model.formats.grouped import GroupedCodes, Offset, Scale

_DTYPES = {Scale.F32: DTYPE_F32, Scale.F16: DTYPE_F16, Scale.BF16: DTYPE_BF16}
_SUBNORMAL = 0x00400000  # bits of 2^-127, the lowest power that an exponent byte stands for
_HALF_FACTOR = 2.0**8  # of an E4M3 value over that of the fp16 number with its exponent and fraction


class Scales:
    """Emits the scale and the offset of a group for one kind of codes. Addresses are those of output 0 of a panel;
    `lane`: the first of sixteen outputs."""

    def __init__(self, kind: GroupedCodes) -> None:
        self._kind, self._layout = kind, Layout.of(kind)

    def scale(self, b: Any, panel: Any, above: Any, group: Any, lane: Any) -> Any:
        """Returns the scale. `panel`, `above`, `group`: addresses of a panel, of a super group and of a group."""
        kind = self._kind.scale
        if kind in _DTYPES:
            return _numbers(b, group, lane, _DTYPES[kind])
        codes = emit_load_bytes(b, offset(b, group, lane))
        if kind is Scale.E8M0:
            bits = b.shl(b.zext(codes, VI), ir.Constant(VI, [23] * LANES))
            least = ir.Constant(VI, [_SUBNORMAL] * LANES)
            return b.bitcast(b.select(b.icmp_unsigned("<", bits, least), least, bits), VF)
        if kind is Scale.E4M3:
            return b.fdiv(_small_floats(b, codes), _numbers(b, panel, lane, DTYPE_F32))
        widened = b.sext(codes, VI)  # unsigned ones have six bits
        return b.fmul(_numbers(b, above, lane, DTYPE_F16), b.sitofp(widened, VF))

    def offset(self, b: Any, above: Any, group: Any, lane: Any, scale: Any) -> Any | None:
        """Returns the offset, None if there is none."""
        at, kind = offset(b, group, i64(self._layout.scales)), self._kind.offset
        if kind is Offset.NONE:
            return None
        if kind is Offset.ADDED:
            return _numbers(b, at, lane, _DTYPES[self._kind.scale])
        number = b.uitofp(b.zext(emit_load_bytes(b, offset(b, at, lane)), VI), VF)
        if kind is Offset.ZERO:
            return b.fmul(_negated(b, scale), number)
        offsets_above = offset(b, above, i64(self._layout.above - 2 * PANEL))
        return b.fmul(_negated(b, _numbers(b, offsets_above, lane, DTYPE_F16)), number)


def _numbers(b: Any, address: Any, lane: Any, dtype: int) -> Any:
    return emit_load(b, offset(b, address, b.mul(lane, i64(4 if dtype == DTYPE_F32 else 2))), dtype)


def _negated(b: Any, value: Any) -> Any:
    return b.fsub(ir.Constant(VF, [-0.0] * LANES), value)


def _small_floats(b: Any, codes: Any) -> Any:
    """Returns the values of E4M3 codes: exponent and fraction are shifted to their places in fp16."""

    def const(value: int) -> Any:
        return ir.Constant(VI16, [value] * LANES)

    bits = b.zext(codes, VI16)
    sign = b.shl(b.and_(bits, const(0x80)), const(8))
    half = b.or_(b.shl(b.and_(bits, const(0x7F)), const(7)), sign)
    return b.fmul(emit_widen_half(b, half), ir.Constant(VF, [_HALF_FACTOR] * LANES))
