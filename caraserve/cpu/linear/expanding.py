"""The product and the rows of formats whose weights are expanded: a piece of a panel becomes fp32 in the L1 cache.

Weights are read from memory as they are stored. Their sums have the order of those of plain fp32 weights, and so the
same bits, for any number of rows.
"""

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately, kernel
from caraserve.cpu.kernels import CONTINUE, STORE, gemm_f32
from caraserve.cpu.linear.base import K_BLOCK, PIECE_INPUTS
from caraserve.cpu.simd import LANES, load_f32, store_f32, vadd, vload, vstore
from caraserve.cpu.structs import input_at, site_at
from caraserve.cpu.tiles import call_by_address, stack_bytes

_PIECE = np.int64(PIECE_INPUTS)
_piece = stack_bytes(4 * PIECE_INPUTS * PANEL)  # 16 KiB, half of an L1 cache
_K_BLOCK, _ROWS = np.int64(K_BLOCK), np.int64(128)  # rows for which a piece is expanded once
_sums = stack_bytes(4 * PANEL * int(_ROWS))
_call5, _call6 = call_by_address(5), call_by_address(6)


@kernel
def add_sums(sums, rows, y, y_stride, add):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64] = sums`, or `y += sums`."""
    for row in range(rows):
        for lane in range(0, 4 * PANEL, 4 * LANES):
            at, value = y + row * y_stride + lane, vload(sums + 4 * PANEL * row + lane)
            vstore(at, vadd(vload(at), value) if add else value)


@kernel
def _multiply(site_address, x, x_stride, rows, panel, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes the product of some rows and one panel."""
    site, weights, sums = site_at(site_address), _piece(), _sums()
    for block in range(0, site.inputs, _K_BLOCK):
        end = min(block + _K_BLOCK, site.inputs)
        for first in range(block, end, _PIECE):
            count = min(_PIECE, end - first)
            _call5(site.expand, site_address, panel, first, count, weights)
            begins = STORE if first == block else CONTINUE
            gemm_f32(x + 4 * first, x_stride, rows, weights, count, sums, np.int64(4 * PANEL), begins)
        add_sums(sums, rows, y, y_stride, accumulate != 0 or block > 0)


@kernel
def multiply_expanded(site_address, x, x_stride, rows, panel, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64] (+)= x[rows, inputs] @ w[inputs, 64]` for one panel."""
    for row in range(0, rows, _ROWS):
        count, at = min(_ROWS, rows - row), y + row * y_stride
        _multiply(site_address, x + row * x_stride, x_stride, count, panel, at, y_stride, accumulate)


@compiled_separately(9)
def product(site_address, x, x_stride, rows, first_panel, end_panel, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64 · panel :] (+)= x[rows, inputs] @ w[inputs, 64]` for panels of expanded weights."""
    site = site_at(site_address)
    if rows == 1 and site.one_row != 0:
        _call6(site.one_row, site_address, x, first_panel, end_panel, y, accumulate)
        return
    for panel in range(first_panel, end_panel):
        multiply_expanded(site_address, x, x_stride, rows, panel, y + 4 * PANEL * panel, y_stride, accumulate)


@compiled_separately(6)
def gather(site_address, x, x_stride, rows, to, to_stride):  # type: ignore[no-untyped-def]
    """Writes rows of fp32 in the order of a site's columns."""
    site = site_at(site_address)
    for row in range(rows):
        for column in range(site.inputs):
            value = load_f32(x + row * x_stride + 4 * input_at(site, column))
            store_f32(to + row * to_stride + 4 * column, value)


@compiled_separately(3)
def row_by_pieces(site_address, output, y):  # type: ignore[no-untyped-def]
    """Writes the weights of one output, fp32 [inputs], in the order of the inputs."""
    site, weights = site_at(site_address), _piece()
    for first in range(0, site.inputs, _PIECE):
        count = min(_PIECE, site.inputs - first)
        _call5(site.expand, site_address, output // PANEL, first, count, weights)
        for index in range(count):
            value = load_f32(weights + 4 * (index * PANEL + output % PANEL))
            store_f32(y + 4 * input_at(site, first + index), value)
