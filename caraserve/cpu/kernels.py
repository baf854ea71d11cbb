"""Products over register tiles: panels of weights, and the two products of a LoRA adapter.

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
    HAS_WIDE_REGISTERS,
    LANES,
    bits_to_float,
    load_f32,
    load_u16,
)
from caraserve.cpu.structs import ENTRY_SCALE, word
from caraserve.cpu.tiles import PAIRS, dot_row_tile, dot_tile, gemm_tile, stack_bytes

# numpy integers: for a literal, Numba would compile each callee once more.
# Whether a panel replaces its output, adds to it, or continues the sum there.
STORE, ADD, CONTINUE = np.int64(0), np.int64(1), np.int64(2)
_K_PIECE = 512  # inputs of which eight rank rows take 16 KiB in fp32
_KEPT_ROWS = 36  # rows of x whose sums are stored between two pieces
RANK_GROUP = RANK_STEP  # rank rows in one dot tile
# Rank rows that one row of x is multiplied by at once. One after another they are one stream of memory: in 16 bits 16
# adapters take a fifth less time so on Zen 3, in fp32 as much. A core with wide registers reads faster than one sum
# can be added up.
_RANKS_AT_ONCE = np.int64(RANK_GROUP if HAS_WIDE_REGISTERS else 1)

_KEPT_ROW_BYTES = 4 * LANES * RANK_GROUP
_kept = stack_bytes(_KEPT_ROWS * _KEPT_ROW_BYTES)


def _gemm_tile(rows: int, dtype: int) -> Any:
    """Makes the product of some rows and a panel: in tiles that fill the vector registers without a spill, six rows by
    four vectors where there are 32 registers of a whole vector. Others have 16 of half a vector, or 32 of a quarter."""
    vectors = 4 if HAS_WIDE_REGISTERS or rows == 1 else 2 if rows <= 3 and dtype != PAIRS else 1
    tile, step, panel_vectors = gemm_tile(rows, vectors, dtype), np.int64(vectors), np.int64(PANEL // LANES)
    size = np.int64(4 if dtype in (DTYPE_F32, PAIRS) else 2)

    @variant(f"{rows}_{dtype}")
    def gemm_panel(x, x_stride, w, k, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
        for vector in range(0, panel_vectors, step):
            tile(x, x_stride, w + vector * LANES * size, k, y + 4 * LANES * vector, y_stride, accumulate)

    return gemm_panel


def _gemm_rows(dtype: int) -> Any:
    """Makes the product of rows and a panel, in tiles of up to six rows."""
    tile1, tile2, tile3, tile4, tile5, tile6 = (_gemm_tile(rows, dtype) for rows in (1, 2, 3, 4, 5, 6))

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


def _dot_row(dtype: int) -> Any:
    """Makes the LoRA shrink of one row: without the pieces and the stack of that of several rows, the shrink of 16
    adapters takes a tenth less time."""
    tile = dot_row_tile(int(_RANKS_AT_ONCE), dtype)

    @variant(dtype)
    def dot_row(x, a, a_stride, k, y, scale):  # type: ignore[no-untyped-def]
        for rank in range(0, RANK_GROUP, _RANKS_AT_ONCE):
            tile(x, a + rank * a_stride, a_stride, k, y + 4 * rank, scale)

    return dot_row


gemm_f32, gemm_bf16, gemm_f16 = _gemm_rows(DTYPE_F32), _gemm_rows(DTYPE_BF16), _gemm_rows(DTYPE_F16)
gemm_pairs = _gemm_rows(PAIRS)
_dot_f32, _dot_bf16, _dot_f16 = _dot_rows(DTYPE_F32), _dot_rows(DTYPE_BF16), _dot_rows(DTYPE_F16)
_dot_row_f32, _dot_row_bf16, _dot_row_f16 = _dot_row(DTYPE_F32), _dot_row(DTYPE_BF16), _dot_row(DTYPE_F16)


@kernel
def itemsize(dtype):  # type: ignore[no-untyped-def]
    """Returns the bytes of one stored weight."""
    return 4 if dtype == DTYPE_F32 else 2


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
def _shrink_rows(dtype, x, x_stride, rows, a, a_stride, k, y, y_stride, scale):  # type: ignore[no-untyped-def]
    if dtype == DTYPE_F32:
        _dot_f32(x, x_stride, rows, a, a_stride, k, y, y_stride, scale)
    elif dtype == DTYPE_BF16:
        _dot_bf16(x, x_stride, rows, a, a_stride, k, y, y_stride, scale)
    else:
        _dot_f16(x, x_stride, rows, a, a_stride, k, y, y_stride, scale)


@compiled_separately(8)
def lora_shrink(entry, row, x, x_stride, rows, k, y, y_stride):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 8] = scale · x[rows, k] @ A[row : row + 8, k]ᵀ` for eight rank rows of a LORA_ENTRY."""
    dtype, k_pad = word(entry, 3), (k + LANES - 1) // LANES * LANES
    a_stride, scale = k_pad * itemsize(dtype), load_f32(entry + ENTRY_SCALE)
    a = word(entry, 0) + row * a_stride
    if rows == 1:
        if dtype == DTYPE_F32:
            _dot_row_f32(x, a, a_stride, k_pad, y, scale)
        elif dtype == DTYPE_BF16:
            _dot_row_bf16(x, a, a_stride, k_pad, y, scale)
        else:
            _dot_row_f16(x, a, a_stride, k_pad, y, scale)
    else:
        _shrink_rows(dtype, x, x_stride, rows, a, a_stride, k_pad, y, y_stride, scale)


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
            gemm_f32(x, x_stride, rows, b, rank, at, y_stride, accumulate)
        elif dtype == DTYPE_BF16:
            gemm_bf16(x, x_stride, rows, b, rank, at, y_stride, accumulate)
        else:
            gemm_f16(x, x_stride, rows, b, rank, at, y_stride, accumulate)
