"""Weights as fp8 codes (E4M3 without infinities) with a scale for each output."""

from typing import Any

from llvmlite import ir

from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.linear.base import WeightKernels
from caraserve.cpu.linear.codes import code_expansion, pack_codes
from caraserve.cpu.linear.expanding import product, row_by_pieces
from caraserve.cpu.simd import LANES, VI16, emit_load_bytes, emit_widen_half, vector_load
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Code, Dtype
from caraserve.model.formats import Matrix

_HALF_FACTOR = 2.0**8  # of a code's value over that of the fp16 number that `_emit` makes of its bits


def pack(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
    """Packs codes as panels of bytes, and their scales."""
    return pack_codes(matrix.arrays["codes"], matrix.arrays["scale"], Code.F8_E4M3, memory, _HALF_FACTOR)


def _emit(b: Any, address: Any) -> Any:
    """Shifts exponent and fraction to their places in fp16, whose exponent has one bit more and a bias of 15, not 7."""

    def const(value: int) -> Any:
        return ir.Constant(VI16, [value] * LANES)

    bits = b.zext(emit_load_bytes(b, address), VI16)
    sign = b.shl(b.and_(bits, const(0x80)), const(8))
    return emit_widen_half(b, b.or_(b.shl(b.and_(bits, const(0x7F)), const(10 - 3)), sign))


_expand = code_expansion("fp8", vector_load(_emit))


@compiled_separately(5)
def expand(site_address, panel, first, count, y):  # type: ignore[no-untyped-def]
    """Writes the weights of some inputs of a panel, fp32 [count, 64]: code times scale."""
    _expand(site_address, panel, first, count, y)


KERNELS = WeightKernels(pack, product.address, expand.address, row_by_pieces.address)
