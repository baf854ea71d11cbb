"""Weights as codes of 4 bits with a power of two for each 32 inputs (MXFP4).

A panel has 32 bytes for each input: byte j holds the codes of outputs j (low) and j + 32 (high), so that a vector of
sixteen outputs is one half of sixteen bytes. Scales lie as [panel, inputs / 32, 64].
"""

from typing import Any

import numpy as np
from llvmlite import ir

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately, entry
from caraserve.cpu.linear.base import WeightKernels
from caraserve.cpu.linear.expanding import product, row_by_pieces
from caraserve.cpu.simd import (
    LANES,
    VF,
    VI,
    VI16,
    emit_load_bytes,
    emit_widen_half,
    vector_load,
    vmul,
    vstore,
)
from caraserve.cpu.structs import site_at
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Matrix
from caraserve.model.formats.mxfp4 import GROUP
from caraserve.util.units import ceil_div

_HALF_EXPONENT = 14  # 2^14: a code's value over that of the fp16 number that `_emit_codes` makes of its bits
_HALF_PANEL = PANEL // 2


@entry
def _pack(codes, panels):  # type: ignore[no-untyped-def]
    """Packs codes `[out, in / 2]` into panels `[out / 64, in, 32]`."""
    outputs, pairs = codes.shape
    for panel in range(panels.shape[0]):
        for pair in range(pairs):
            for lane in range(panels.shape[2]):
                first, second = 64 * panel + lane, 64 * panel + lane + 32
                low = codes[first, pair] if first < outputs else np.uint8(0)
                high = codes[second, pair] if second < outputs else np.uint8(0)
                panels[panel, 2 * pair, lane] = (low & 15) | ((high & 15) << 4)
                panels[panel, 2 * pair + 1, lane] = (low >> 4) | (high & 240)


def pack(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
    """Packs codes as panels of half bytes, and scales as exponents of fp32."""
    codes = matrix.arrays["codes"].astype(np.uint8, copy=False)
    codes = codes[:, ::2] | codes[:, 1::2] << 4
    panels = np.zeros((ceil_div(len(codes), PANEL), 2 * codes.shape[1], _HALF_PANEL), np.uint8)
    _pack(codes, panels)
    scale = matrix.arrays["scale"].astype(np.uint8) + np.uint8(_HALF_EXPONENT)
    return {"weight": memory.rows(panels), "scale": memory.panels(scale)}


def _codes(shift: int) -> Any:
    """Makes the load of sixteen codes from the low or the high halves of sixteen bytes: shifts exponent and fraction to
    their places in fp16."""

    def emit(b: Any, address: Any) -> Any:
        def const(value: int) -> Any:
            return ir.Constant(VI16, [value] * LANES)

        bits = b.lshr(b.zext(emit_load_bytes(b, address), VI16), const(shift))
        sign = b.shl(b.and_(bits, const(8)), const(12))
        return emit_widen_half(b, b.or_(b.shl(b.and_(bits, const(7)), const(9)), sign))

    return vector_load(emit)


def _emit_scales(b: Any, address: Any) -> Any:
    exponents = b.zext(emit_load_bytes(b, address), VI)
    return b.bitcast(b.shl(exponents, ir.Constant(VI, [23] * LANES)), VF)


_low, _high, _scales = _codes(0), _codes(4), vector_load(_emit_scales)


@compiled_separately(5)
def expand(site_address, panel, first, count, y):  # type: ignore[no-untyped-def]
    """Writes the weights of some inputs of a panel, fp32 [count, 64]: code times scale."""
    site = site_at(site_address)
    for start in range(first, first + count, GROUP):
        codes = site.weight + (panel * site.inputs + start) * _HALF_PANEL
        scales, rows = site.scale + (panel * site.inputs + start) // GROUP * PANEL, y + 4 * PANEL * (start - first)
        for lane in range(0, _HALF_PANEL, LANES):
            upper = lane + _HALF_PANEL
            low, high = _scales(scales + lane), _scales(scales + upper)
            for row in range(GROUP):
                at, to = codes + row * _HALF_PANEL + lane, rows + 4 * PANEL * row
                vstore(to + 4 * lane, vmul(_low(at), low))
                vstore(to + 4 * upper, vmul(_high(at), high))


KERNELS = WeightKernels(pack, product.address, expand.address, row_by_pieces.address)
