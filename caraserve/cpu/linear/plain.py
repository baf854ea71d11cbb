"""Weights stored as numbers: float32, bfloat16 or float16."""

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.kernels import ADD, gemm_f16, gemm_f32, itemsize, load_weight
from caraserve.cpu.linear.base import K_BLOCK, WeightKernels
from caraserve.cpu.linear.expanding import multiply_expanded
from caraserve.cpu.linear.pairs import (
    MOST_DIRECT_ROWS,
    expand_pairs,
    multiply_pairs,
    prepared_bytes,
    round_rows,
    row_of_pairs,
)
from caraserve.cpu.simd import DTYPE_BF16, DTYPE_F16, DTYPE_F32, LANES, store_f32, vload, vstore, weight_ops
from caraserve.cpu.structs import site_at
from caraserve.cpu.weight_memory import WeightMemory, convert
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Matrix

_K_BLOCK = np.int64(K_BLOCK)  # their weights stay in the L2 cache
_load_f16, _ = weight_ops(DTYPE_F16)


def preparation(dtype: Dtype, inputs: int) -> dict[str, int]:
    """Returns the fields of a SITE record about rows: those for bfloat16 are rounded."""
    if dtype is not Dtype.BF16:
        return {"prepare": 0, "prepared_bytes": 0}
    return {"prepare": round_rows.address, "prepared_bytes": prepared_bytes(inputs)}


def panel_inputs(dtype: Dtype, inputs: int) -> int:
    """Returns the inputs of a panel, padded to pairs in bfloat16."""
    return inputs + (inputs % 2 if dtype is Dtype.BF16 else 0)


def pack(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
    """Packs weights as panels of numbers of `dtype`."""
    assert matrix.dtype is not None
    weights = convert(matrix.arrays["weight"], matrix.dtype, dtype)
    address = memory.pairs(weights) if dtype is Dtype.BF16 else memory.panels(weights)
    return {"weight": address, "dtype": dtype.value, **preparation(dtype, weights.shape[1])}


def pack_table(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
    """Keeps weights as rows of numbers of `dtype`."""
    assert matrix.dtype is not None
    return {"weight": memory.rows(convert(matrix.arrays["weight"], matrix.dtype, dtype)), "dtype": dtype.value}


@compiled_separately(9)
def product(site_address, x, x_stride, rows, first_panel, end_panel, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64 · panel :] (+)= x[rows, inputs] @ w[inputs, 64]` for some panels, in the same order of sums
    for all row counts."""
    site = site_at(site_address)
    dtype, inputs = site.dtype, site.inputs
    for panel in range(first_panel, end_panel):
        w, to = site.weight + panel * inputs * PANEL * itemsize(dtype), y + 4 * PANEL * panel
        if dtype == DTYPE_BF16:
            if rows <= MOST_DIRECT_ROWS:
                multiply_pairs(site.weight, inputs, panel, x, x_stride, rows, to, y_stride, accumulate)
            else:
                multiply_expanded(site_address, x, x_stride, rows, panel, to, y_stride, accumulate)
            continue
        for first in range(0, inputs, _K_BLOCK):
            depth = min(_K_BLOCK, inputs - first)
            at, add = w + first * PANEL * itemsize(dtype), ADD if first > 0 else accumulate
            if dtype == DTYPE_F32:
                gemm_f32(x + 4 * first, x_stride, rows, at, depth, to, y_stride, add)
            else:
                gemm_f16(x + 4 * first, x_stride, rows, at, depth, to, y_stride, add)


@compiled_separately(5)
def expand(site_address, panel, first, count, y):  # type: ignore[no-untyped-def]
    """Writes the weights of some inputs of a panel, fp32 [count, 64]."""
    site = site_at(site_address)
    if site.dtype == DTYPE_BF16:
        expand_pairs(site.weight, site.inputs, panel, first, count, y)
        return
    w = site.weight + (panel * site.inputs + first) * PANEL * itemsize(site.dtype)
    for at in range(0, count * PANEL, LANES):
        if site.dtype == DTYPE_F32:
            vstore(y + 4 * at, vload(w + 4 * at))
        else:
            vstore(y + 4 * at, _load_f16(w + 2 * at))


@compiled_separately(3)
def row(site_address, output, y):  # type: ignore[no-untyped-def]
    """Writes the weights of one output of panels, fp32 [inputs]."""
    site = site_at(site_address)
    if site.dtype == DTYPE_BF16:
        row_of_pairs(site.weight, site.inputs, output, y)
        return
    at = site.weight + (output // PANEL * site.inputs * PANEL + output % PANEL) * itemsize(site.dtype)
    for index in range(site.inputs):
        store_f32(y + 4 * index, load_weight(at + index * PANEL * itemsize(site.dtype), site.dtype))


@compiled_separately(3)
def row_of_table(site_address, output, y):  # type: ignore[no-untyped-def]
    """Writes one row of a table, fp32 [inputs]."""
    site = site_at(site_address)
    at = site.weight + output * site.inputs * itemsize(site.dtype)
    for index in range(site.inputs):
        store_f32(y + 4 * index, load_weight(at + index * itemsize(site.dtype), site.dtype))


KERNELS = WeightKernels(pack, product.address, expand.address, row.address)
TABLE = WeightKernels(pack_table, 0, 0, row_of_table.address)  # of an embedding that is no head, whose rows are read
