"""The product and the rows of formats whose weights are expanded: a piece of a panel becomes fp32 in the L1 cache.

Weights are read from memory as they are stored. A piece is expanded once for all rows, and its values do not depend on
them, so a row has the same bits in any batch.
"""

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.kernels import ADD, gemm_f32
from caraserve.cpu.linear.base import PIECE_INPUTS
from caraserve.cpu.simd import load_f32, store_f32
from caraserve.cpu.structs import input_at, site_at
from caraserve.cpu.tiles import call_by_address, stack_bytes

_PIECE = np.int64(PIECE_INPUTS)
_piece = stack_bytes(4 * PIECE_INPUTS * PANEL)  # 16 KiB, half of an L1 cache
_call5 = call_by_address(5)


@compiled_separately(9)
def product(site_address, x, x_stride, rows, first_panel, end_panel, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64 · panel :] (+)= x[rows, inputs] @ w[inputs, 64]` for panels of expanded weights."""
    site, weights = site_at(site_address), _piece()
    for panel in range(first_panel, end_panel):
        at = y + 4 * PANEL * panel
        for first in range(0, site.inputs, _PIECE):
            count = min(_PIECE, site.inputs - first)
            _call5(site.expand, site_address, panel, first, count, weights)
            gemm_f32(x + 4 * first, x_stride, rows, weights, count, at, y_stride, ADD if first > 0 else accumulate)


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
