"""The operations of a decoder layer over register tiles: matmul panels, LoRA, norm, rotary embedding.

They are called inside one compiled function. Addresses are integers, strides are in bytes, activations are fp32. A base
weight `[out, in]` is stored like a LoRA B, as panels of 64 outputs, `[out / 64, in, 64]`, zero-padded.
"""

from typing import Any

import numpy as np

from caraserve.core.lora_layout import PANEL, RANK_STEP
from caraserve.cpu.jit import compiled_separately, kernel, variant
from caraserve.cpu.simd import (
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_F32,
    LANES,
    bits_to_float,
    load_f32,
    load_u16,
    store_f32,
    vadd,
    vdiv,
    vexp,
    vfma,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from caraserve.cpu.structs import word
from caraserve.cpu.tiles import dot_tile, gemm_tile, stack_bytes

K_BLOCK = 2048  # inputs summed before the partial result is stored: keeps a panel's slice inside the L2 cache
# numpy integers: for a literal, Numba would compile each callee once more.
STORE, ADD = np.int64(0), np.int64(1)  # whether a panel replaces its output or adds to it
_K_PIECE = 512  # inputs of which eight rank rows take 16 KiB in fp32
_KEPT_ROWS = 36  # rows of x whose sums are stored between two pieces
RANK_GROUP = RANK_STEP  # rank rows in one dot tile

_KEPT_ROW_BYTES = 4 * LANES * RANK_GROUP
_kept = stack_bytes(_KEPT_ROWS * _KEPT_ROW_BYTES)


def _gemm_rows(dtype: int) -> Any:
    """Makes the row tiles of one dtype: six rows by four vectors fill the 32 vector registers without a spill."""
    tile1, tile2, tile3 = gemm_tile(1, 4, dtype), gemm_tile(2, 4, dtype), gemm_tile(3, 4, dtype)
    tile4, tile5, tile6 = gemm_tile(4, 4, dtype), gemm_tile(5, 4, dtype), gemm_tile(6, 4, dtype)

    @variant(dtype)
    def gemm_rows(x, x_stride, rows, w, k, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
        while rows > 0:
            tiles = (rows + 5) // 6
            taken = (rows + tiles - 1) // tiles  # equal tiles: a tile of one or two rows runs at half speed
            if taken == 6:
                tile6(x, x_stride, w, k, y, y_stride, accumulate)
            elif taken == 5:
                tile5(x, x_stride, w, k, y, y_stride, accumulate)
            elif taken == 4:
                tile4(x, x_stride, w, k, y, y_stride, accumulate)
            elif taken == 3:
                tile3(x, x_stride, w, k, y, y_stride, accumulate)
            elif taken == 2:
                tile2(x, x_stride, w, k, y, y_stride, accumulate)
            else:
                tile1(x, x_stride, w, k, y, y_stride, accumulate)
            x += taken * x_stride
            y += taken * y_stride
            rows -= taken

    return gemm_rows


def _dot_rows(dtype: int) -> Any:
    """Makes the row tiles of the LoRA shrink: three rows by eight rank rows, one piece of k at a time.

    A piece of eight rank rows stays in the L1 cache for all rows of x. Whole rank rows would be read from L2 for every
    tile, which would limit it, because a tile multiplies each weight by three rows of x only.
    """
    tile1, tile2, tile3 = (dot_tile(rows, RANK_GROUP, dtype) for rows in (1, 2, 3))
    itemsize_bytes = 4 if dtype == DTYPE_F32 else 2

    @variant(dtype)
    def dot_piece(x, x_stride, rows, a, a_stride, k, y, y_stride, kept, begins, ends, scale):  # type: ignore[no-untyped-def]
        while rows >= 3:
            tile3(x, x_stride, a, a_stride, k, y, y_stride, kept, begins, ends, scale)
            x += 3 * x_stride
            y += 3 * y_stride
            kept += 3 * _KEPT_ROW_BYTES
            rows -= 3
        if rows == 2:
            tile2(x, x_stride, a, a_stride, k, y, y_stride, kept, begins, ends, scale)
        elif rows == 1:
            tile1(x, x_stride, a, a_stride, k, y, y_stride, kept, begins, ends, scale)

    @variant(dtype)
    def dot_rows(x, x_stride, rows, a, a_stride, k, y, y_stride, scale):  # type: ignore[no-untyped-def]
        kept = _kept()
        for first in range(0, rows, _KEPT_ROWS):
            count, at, out = min(rows - first, _KEPT_ROWS), x + first * x_stride, y + first * y_stride
            # With one tile, each weight is read once in any case.
            piece = k if count <= 3 else _K_PIECE * 4 // itemsize_bytes
            for start in range(0, k, piece):
                depth, begins, ends = min(piece, k - start), np.int64(start == 0), np.int64(start + piece >= k)
                weights = a + start * itemsize_bytes
                dot_piece(
                    at + 4 * start, x_stride, count, weights, a_stride, depth, out, y_stride, kept, begins, ends, scale
                )

    return dot_rows


_gemm_f32, _gemm_bf16, _gemm_f16 = _gemm_rows(DTYPE_F32), _gemm_rows(DTYPE_BF16), _gemm_rows(DTYPE_F16)
_dot_f32, _dot_bf16, _dot_f16 = _dot_rows(DTYPE_F32), _dot_rows(DTYPE_BF16), _dot_rows(DTYPE_F16)


@kernel
def itemsize(dtype):  # type: ignore[no-untyped-def]
    """Returns the bytes of one stored weight."""
    return 4 if dtype == DTYPE_F32 else 2


@compiled_separately(9)
def panel_gemm(dtype, x, x_stride, rows, w, k, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64] (+)= x[rows, k] @ w[k, 64]` for one panel, in the same order of sums for all row counts."""
    for first in range(0, k, K_BLOCK):
        depth = min(K_BLOCK, k - first)
        at = w + first * PANEL * itemsize(dtype)
        add = ADD if first > 0 else accumulate
        if dtype == DTYPE_F32:
            _gemm_f32(x + 4 * first, x_stride, rows, at, depth, y, y_stride, add)
        elif dtype == DTYPE_BF16:
            _gemm_bf16(x + 4 * first, x_stride, rows, at, depth, y, y_stride, add)
        else:
            _gemm_f16(x + 4 * first, x_stride, rows, at, depth, y, y_stride, add)


@compiled_separately(8)
def lora_shrink(entry, row, x, x_stride, rows, k, y, y_stride):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 8] = scale · x[rows, k] @ A[row : row + 8, k]ᵀ` for eight rank rows of a LORA_ENTRY."""
    dtype, k_pad = word(entry, 3), (k + LANES - 1) // LANES * LANES
    a_stride, scale = k_pad * itemsize(dtype), load_f32(entry + 32)
    a = word(entry, 0) + row * a_stride
    if dtype == DTYPE_F32:
        _dot_f32(x, x_stride, rows, a, a_stride, k_pad, y, y_stride, scale)
    elif dtype == DTYPE_BF16:
        _dot_bf16(x, x_stride, rows, a, a_stride, k_pad, y, y_stride, scale)
    else:
        _dot_f16(x, x_stride, rows, a, a_stride, k_pad, y, y_stride, scale)


@compiled_separately(9)
def lora_expand(entry, x, x_stride, rows, first, end, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64 · panel :] (+)= x[rows, rank] @ B[rank, 64]` for the panels [first, end) of a LORA_ENTRY.

    B's panels are contiguous, so one call reads one stream.
    """
    rank, dtype = word(entry, 2), word(entry, 3)
    b_bytes = rank * PANEL * itemsize(dtype)
    for panel in range(first, end):
        b, at = word(entry, 1) + panel * b_bytes, y + 4 * PANEL * panel
        if dtype == DTYPE_F32:
            _gemm_f32(x, x_stride, rows, b, rank, at, y_stride, accumulate)
        elif dtype == DTYPE_BF16:
            _gemm_bf16(x, x_stride, rows, b, rank, at, y_stride, accumulate)
        else:
            _gemm_f16(x, x_stride, rows, b, rank, at, y_stride, accumulate)


@kernel
def add_bias(y, y_stride, rows, bias):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64] += bias[64]`."""
    for row in range(rows):
        for lane in range(0, PANEL, LANES):
            at = y + row * y_stride + 4 * lane
            vstore(at, vadd(vload(at), vload(bias + 4 * lane)))


@kernel
def silu_mul(gate, gate_stride, up, up_stride, rows):  # type: ignore[no-untyped-def]
    """Computes `gate[rows, 64] = silu(gate) · up`."""
    one, zero = vsplat(np.float32(1.0)), vsplat(np.float32(0.0))
    for row in range(rows):
        for lane in range(0, PANEL, LANES):
            at = gate + row * gate_stride + 4 * lane
            value = vload(at)
            sigmoid = vdiv(one, vadd(one, vexp(vsub(zero, value))))
            vstore(at, vmul(vmul(value, sigmoid), vload(up + row * up_stride + 4 * lane)))


@kernel
def rms_norm(x, y, width, padded, weight, eps):  # type: ignore[no-untyped-def]
    """Computes `y = weight · x / sqrt(mean(x²) + eps)` for a row of `width` elements, zero-padded to `padded`.

    Gives NaN if a square overflows: 1 / sqrt(inf) would give a row of zeros and equal logits, which look valid.
    """
    total = vsplat(np.float32(0.0))
    for lane in range(0, padded, LANES):
        value = vload(x + 4 * lane)
        total = vfma(value, value, total)
    mean = vsum(total) / np.float32(width)
    factor = vsplat(np.float32(1.0) / np.sqrt(mean + eps) + mean * np.float32(0.0))
    for lane in range(0, padded, LANES):
        vstore(y + 4 * lane, vmul(vload(weight + 4 * lane), vmul(vload(x + 4 * lane), factor)))


@kernel
def rotate(head, head_dim, cos, sin):  # type: ignore[no-untyped-def]
    """Applies the rotary embedding to one head: halves (x1, x2) → (x1·cos - x2·sin, x2·cos + x1·sin)."""
    half = head_dim // 2
    for d in range(half):
        c, s = load_f32(cos + 4 * d), load_f32(sin + 4 * d)
        x1, x2 = load_f32(head + 4 * d), load_f32(head + 4 * (d + half))
        store_f32(head + 4 * d, x1 * c - x2 * s)
        store_f32(head + 4 * (d + half), x2 * c + x1 * s)


@kernel
def load_weight(address, dtype):  # type: ignore[no-untyped-def]
    """Returns one stored weight as fp32."""
    if dtype == DTYPE_F32:
        return load_f32(address)
    bits = load_u16(address)
    if dtype == DTYPE_F16:
        sign = np.uint32(np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16)
        magnitude = bits_to_float(np.uint32(np.uint32(bits & np.uint16(0x7FFF)) << np.uint32(13)))
        value = magnitude * np.float32(2.0**112)  # rebiases the exponent exactly, subnormals included
        return value if sign == 0 else -value
    return bits_to_float(np.uint32(np.uint32(bits) << np.uint32(16)))


@kernel
def embed(token, table, tied, dtype, hidden, y):  # type: ignore[no-untyped-def]
    """Writes the embedding of `token` to y[hidden]. A tied table consists of the head's panels."""
    size = itemsize(dtype)
    if tied:
        at = table + ((token // PANEL) * hidden * PANEL + token % PANEL) * size
        for d in range(hidden):
            store_f32(y + 4 * d, load_weight(at + d * PANEL * size, dtype))
    else:
        at = table + token * hidden * size
        for d in range(hidden):
            store_f32(y + 4 * d, load_weight(at + d * size, dtype))


@kernel
def copy_vector(x, count, y):  # type: ignore[no-untyped-def]
    """Copies x[count] to y."""
    for d in range(count):
        store_f32(y + 4 * d, load_f32(x + 4 * d))
