"""Weights in bfloat16, as pairs of inputs, and rows that are rounded to bfloat16 for them.

A panel is `[inputs / 2, 64, 2]`, padded to an even number of inputs; of a pair, the later input is first: the
instruction for pairs adds the product of a word's upper half before that of the lower, so sums have the order of the
inputs, as in fp32. A product of two bfloat16 is exact in fp32, so a CPU without the instruction gets the same bits from
fused operations (but for denormals, which the instruction takes as 0).
"""

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.bfloat16_pairs import load_first, load_second, store_rounded
from caraserve.cpu.jit import compiled_separately, kernel
from caraserve.cpu.kernels import ADD, gemm_pairs, load_weight
from caraserve.cpu.layers import copy_vector
from caraserve.cpu.linear.base import K_BLOCK
from caraserve.cpu.simd import (
    DTYPE_BF16,
    HAS_PAIR_PRODUCTS,
    LANES,
    store_f32,
    vload,
    vsplat,
    vstore,
)
from caraserve.cpu.structs import site_at
from caraserve.cpu.tiles import stack_bytes
from caraserve.util.units import align_up

ROW_ITEMSIZE = np.int64(2 if HAS_PAIR_PRODUCTS else 4)  # bytes of an input in a prepared row
_BLOCK = 2 * LANES  # inputs rounded at once
_block = stack_bytes(4 * _BLOCK)
_K_BLOCK = np.int64(K_BLOCK)
# Rows for which weights are widened in registers. Tiles with both numbers of a pair have room for four rows in those of
# AVX2; for more, widened pieces in the L1 cache are faster.
MOST_DIRECT_ROWS = np.int64(1 << 30 if HAS_PAIR_PRODUCTS else 4)


def prepared_bytes(inputs: int) -> int:
    """Returns the bytes of a row that `round_rows` writes."""
    return int(ROW_ITEMSIZE) * align_up(inputs, _BLOCK)


@kernel
def _round_block(x, to):  # type: ignore[no-untyped-def]
    store_rounded(to, vload(x), vload(x + 4 * LANES))


@compiled_separately(6)
def round_rows(site_address, x, x_stride, rows, to, to_stride):  # type: ignore[no-untyped-def]
    """Rounds rows to bfloat16: to pairs where there is the instruction, elsewhere to fp32 that hold such values."""
    inputs, last = site_at(site_address).inputs, _block()
    for row in range(rows):
        at, out = x + row * x_stride, to + row * to_stride
        whole = inputs // _BLOCK * _BLOCK
        for first in range(0, whole, _BLOCK):
            _round_block(at + 4 * first, out + ROW_ITEMSIZE * first)
        if whole < inputs:
            vstore(last, vsplat(np.float32(0.0)))
            vstore(last + 4 * LANES, vsplat(np.float32(0.0)))
            copy_vector(at + 4 * whole, inputs - whole, last)
            _round_block(last, out + ROW_ITEMSIZE * whole)


@kernel
def expand_pairs(weight, inputs, panel, first, count, y):  # type: ignore[no-untyped-def]
    """Writes the weights of some inputs of a panel, fp32 [count, 64]; `first` is even."""
    pairs = weight + 4 * PANEL * (panel * ((inputs + 1) // 2) + first // 2)
    for index in range(count):
        at, to = pairs + 4 * PANEL * (index // 2), y + 4 * PANEL * index
        for lane in range(0, 4 * PANEL, 4 * LANES):
            vstore(to + lane, load_first(at + lane) if index % 2 == 0 else load_second(at + lane))


@kernel
def multiply_pairs(weight, inputs, panel, x, x_stride, rows, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64] (+)= x[rows, inputs] @ w[inputs, 64]` for one panel and prepared rows."""
    padded = inputs + inputs % 2
    for first in range(0, padded, _K_BLOCK):
        w, add = weight + 2 * PANEL * (panel * padded + first), ADD if first > 0 else accumulate
        depth = min(_K_BLOCK, padded - first)
        gemm_pairs(x + ROW_ITEMSIZE * first, x_stride, rows, w, depth // 2, y, y_stride, add)


@kernel
def row_of_pairs(weight, inputs, output, y):  # type: ignore[no-untyped-def]
    """Writes the weights of one output, fp32 [inputs]."""
    at = weight + 4 * PANEL * (output // PANEL * ((inputs + 1) // 2)) + 4 * (output % PANEL)
    for index in range(inputs):
        place = at + 4 * PANEL * (index // 2) + 2 * (1 - index % 2)
        store_f32(y + 4 * index, load_weight(place, DTYPE_BF16))
