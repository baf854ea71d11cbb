"""LoRA on tensor cores, of prompts and of adapters with many decoding rows: a gather matmul over segments of tokens of
one adapter.

A segment is up to `SEGMENT_ROWS` tokens of one adapter, anywhere in the batch; the host cuts the segments. Three
launches serve all projections that read the same input: shrink computes x Aᵀ in planes of K, fold adds the planes and
rounds the sums to the activations' dtype, expand adds `scale · shrunk B` and applies adapters' vectors. They read
weights' addresses, ranks and scales from device tables and stop at a slot's own rank, so one captured graph serves any
mix of adapters, and a small rank costs no more in a batch with a large one.

Parts of one module are projections that share A, by which shrink multiplies for each of them: six products for a fused
q, k and v, where four would do.

K is always cut into the same four planes, whose sums are added in the same order: a token's result does not depend on
which other tokens are in segments, and no buffer has to be zeroed.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, PANEL, RANK_STEP
from caraserve.cpu.handoff import MOST_SITES
from caraserve.gpu.kernels.bgmv_work import by_adapter
from caraserve.model.dtype import Dtype
from caraserve.util.units import ceil_div

PLANES = 4
SEGMENT_ROWS = 64
_FOLD = {"BM": 16, "BR": 64, "num_warps": 4}  # tile sizes and launch options of the fold

_PLANES = tl.constexpr(PLANES)
_PANEL = tl.constexpr(PANEL)
_A_COLUMNS = tl.constexpr(A_COLUMNS)
_RANK_STEP = tl.constexpr(RANK_STEP)
_F32 = tl.constexpr(Dtype.F32.value)
_BF16 = tl.constexpr(Dtype.BF16.value)

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a batch, in device memory. Segments of 0 rows pad a captured graph's grid."""

    order: Tensor  # int32 [tokens] rows of x, grouped by segment
    first: Tensor  # int32 [segments] index in `order` at which a segment starts
    rows: Tensor  # int32 [segments] at most SEGMENT_ROWS
    slot: Tensor  # int32 [segments] adapter slot


@dataclass(frozen=True, slots=True)
class SiteTables:
    """Device tables for the projections of one layer that read the same input, the same tables as for decoding rows."""

    a: Tensor  # int64 [projections, slots] addresses of matrices laid out as in core/lora_layout.py
    b: Tensor  # int64 [projections, slots]
    rank: Tensor  # int32 [projections, slots] 0: not adapted
    scale: Tensor  # float32 [projections, slots]
    dtype: Tensor  # int32 [slots] value of the adapter's `Dtype`
    vectors: Tensor  # int64 [projections, slots] addresses, 0: the adapter has none
    gate: Tensor | None = None  # int32 [1], the outcome of a hand-off: not 0: nothing is computed here


def cut_segments(slots: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns order, first, rows and slot of the segments of tokens with adapter `slots`. Base model tokens are in
    none."""
    order, adapters, starts, counts = by_adapter(slots)
    segments = -(-counts // SEGMENT_ROWS)
    # Each segment's number among those of its adapter: 0, 1, … | 0, 1, …
    number = np.arange(segments.sum()) - np.repeat(np.cumsum(segments) - segments, segments)
    first = np.repeat(starts, segments) + SEGMENT_ROWS * number
    rows = np.minimum(np.repeat(counts, segments) - SEGMENT_ROWS * number, SEGMENT_ROWS)
    slot = np.repeat(adapters, segments)
    return order.astype(np.int32), first.astype(np.int32), rows.astype(np.int32), slot


def most_segments(tokens: int, adapters: int) -> int:
    """Returns the most segments that `tokens` tokens of up to `adapters` adapters can have."""
    return min(tokens, adapters + tokens // SEGMENT_ROWS)


@triton.jit
def _rank(rank_table, gate, entry, HAS_GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    rank = tl.load(rank_table + entry)
    if HAS_GATE:
        rank = tl.where(tl.load(gate) != 0, 0, rank)
    return rank


@triton.jit
def _shrink_tile(  # type: ignore[no-untyped-def]
    x, token, is_row, address, rank, first, start, end, stride, k,
    WEIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes x[token] · A[first : first + BN]ᵀ over the columns [start, end): [BM, BN]."""
    # Every A starts at a cache line; without this hint loads would be per element.
    a = tl.multiple_of(address.to(tl.pointer_type(WEIGHT)), 64)
    row = first + tl.arange(0, BN)
    column = tl.arange(0, BK)
    x_at = x + token[:, None] * stride + column[None, :]  # [BM, BK]
    a_at = a + row[None, :] * (tl.cdiv(k, _A_COLUMNS) * _A_COLUMNS) + column[:, None]  # [BK, BN]
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(start, end, BK):
        inside = at + column < k
        xs = tl.load(x_at + at, mask=is_row[:, None] & inside[None, :], other=0.0)
        weights = tl.load(a_at + at, mask=inside[:, None] & (row < rank)[None, :], other=0.0)
        total = tl.dot(xs, weights.to(xs.dtype), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])  # otherwise a new batch size would compile again while requests wait
def shrink_kernel(  # type: ignore[no-untyped-def]
    x, part, order, segment_first, segment_rows, segment_slot, a_table, rank_table, dtype_table, gate,
    stride, k, slots, tokens,
    PROJECTIONS: tl.constexpr, RANKS: tl.constexpr, HAS_GATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program computes one plane of K of a segment, for one projection at all its rank rows."""
    segment, projection, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, slot = tl.load(segment_rows + segment), tl.load(segment_slot + segment)
    entry = projection * slots + slot
    rank = _rank(rank_table, gate, entry, HAS_GATE)
    if rows > 0:
        lane = tl.arange(0, BM)
        is_row = lane < rows
        token = tl.load(order + tl.load(segment_first + segment) + lane, mask=is_row, other=0).to(tl.int64)
        width = tl.cdiv(tl.cdiv(k, _PLANES), BK) * BK
        start, end = plane * width, tl.minimum((plane + 1) * width, k)
        address, code = tl.load(a_table + entry), tl.load(dtype_table + slot)
        to = part + ((plane * tokens + token) * PROJECTIONS + projection)[:, None] * RANKS
        for first in range(0, rank, BN):
            # The branch is outside the loop over K, because Triton pipelines only loops without branches.
            if code == _F32:
                total = _shrink_tile(
                    x, token, is_row, address, rank, first, start, end, stride, k, tl.float32, BM, BN, BK
                )
            elif code == _BF16:
                total = _shrink_tile(
                    x, token, is_row, address, rank, first, start, end, stride, k, tl.bfloat16, BM, BN, BK
                )
            else:
                total = _shrink_tile(
                    x, token, is_row, address, rank, first, start, end, stride, k, tl.float16, BM, BN, BK
                )
            row = first + tl.arange(0, BN)
            tl.store(to + row[None, :], total, mask=is_row[:, None] & (row < rank)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def fold_kernel(  # type: ignore[no-untyped-def]
    part, shrunk, order, segment_first, segment_rows, segment_slot, rank_table, gate, slots, tokens,
    PROJECTIONS: tl.constexpr, RANKS: tl.constexpr, HAS_GATE: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One program adds the planes of a few rows of a segment, for one projection. Writes zeros from the rank to the
    next multiple of RANK_STEP."""
    segment, projection, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BM
    rows, slot = tl.load(segment_rows + segment), tl.load(segment_slot + segment)
    rank = _rank(rank_table, gate, projection * slots + slot, HAS_GATE)
    if first < rows:
        lane = first + tl.arange(0, BM)
        is_row = lane < rows
        token = tl.load(order + tl.load(segment_first + segment) + lane, mask=is_row, other=0).to(tl.int64)
        at = ((token * PROJECTIONS + projection) * RANKS)[:, None]
        plane_stride = tl.cast(tokens, tl.int64) * PROJECTIONS * RANKS
        padded = tl.cdiv(rank, _RANK_STEP) * _RANK_STEP
        for start in range(0, padded, BR):
            row = (start + tl.arange(0, BR))[None, :]
            is_part = is_row[:, None] & (row < rank)
            sums = tl.load(part + at + row, mask=is_part, other=0.0)
            for plane in tl.static_range(1, _PLANES):
                sums += tl.load(part + at + row + plane * plane_stride, mask=is_part, other=0.0)
            tl.store(shrunk + at + row, sums.to(shrunk.dtype.element_ty), mask=is_row[:, None] & (row < padded))


@triton.jit
def _expand_tile(  # type: ignore[no-untyped-def]
    shrunk_at, is_row, address, rank, first, width,
    WEIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Computes shrunk · B[:, first : first + BN]: [BM, BN]. `shrunk_at`: [BM] addresses of the tokens' rank rows."""
    b = tl.multiple_of(address.to(tl.pointer_type(WEIGHT)), 64)
    padded = tl.cdiv(rank, _RANK_STEP) * _RANK_STEP
    column, row = first + tl.arange(0, BN), tl.arange(0, BR)
    b_at = b + (column // _PANEL * padded * _PANEL + column % _PANEL)[None, :]  # 64 columns × `padded` rank rows each
    in_panel = (column // _PANEL < tl.cdiv(width, _PANEL))[None, :]  # panels are full of zeros past the width
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, padded, BR):
        inside = start + row < padded
        part = tl.load(shrunk_at[:, None] + (start + row)[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        weights = tl.load(b_at + (start + row)[:, None] * _PANEL, mask=inside[:, None] & in_panel, other=0.0)
        total = tl.dot(part, weights.to(part.dtype), total, input_precision="ieee")
    return total


@triton.jit
def _choose(projection, v0, v1, v2, v3, v4, v5):  # type: ignore[no-untyped-def]
    last = tl.where(projection == 3, v3, tl.where(projection == 4, v4, v5))
    return tl.where(projection == 0, v0, tl.where(projection == 1, v1, tl.where(projection == 2, v2, last)))


@triton.jit
def expand_kernel(  # type: ignore[no-untyped-def]
    y, shrunk, order, segment_first, segment_rows, segment_slot, b_table, rank_table, scale_table, dtype_table,
    vectors_table, gate, y_stride, column0, column1, column2, column3, column4, column5,
    width0, width1, width2, width3, width4, width5, slots,
    PROJECTIONS: tl.constexpr, RANKS: tl.constexpr, HAS_GATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One program adds a segment's result to a tile of columns of one projection, and applies its adapter's vectors."""
    segment, first, projection = tl.program_id(0), tl.program_id(1) * BN, tl.program_id(2)
    width = _choose(projection, width0, width1, width2, width3, width4, width5)
    before = _choose(projection, column0, column1, column2, column3, column4, column5)
    rows, slot = tl.load(segment_rows + segment), tl.load(segment_slot + segment)
    entry = projection * slots + slot
    rank = _rank(rank_table, gate, entry, HAS_GATE)
    if (rows > 0) & (rank > 0) & (first < width):
        lane = tl.arange(0, BM)
        is_row = lane < rows
        token = tl.load(order + tl.load(segment_first + segment) + lane, mask=is_row, other=0).to(tl.int64)
        at = shrunk + (token * PROJECTIONS + projection) * RANKS
        address, code = tl.load(b_table + entry), tl.load(dtype_table + slot)
        column = first + tl.arange(0, BN)
        to = y + token[:, None] * y_stride + (before + column)[None, :]
        inside = is_row[:, None] & (column < width)[None, :]
        base = tl.load(to, mask=inside, other=0.0)  # on its way during the products
        if code == _F32:
            total = _expand_tile(at, is_row, address, rank, first, width, tl.float32, BM, BN, BR)
        elif code == _BF16:
            total = _expand_tile(at, is_row, address, rank, first, width, tl.bfloat16, BM, BN, BR)
        else:
            total = _expand_tile(at, is_row, address, rank, first, width, tl.float16, BM, BN, BR)
        result = base.to(tl.float32) + total * tl.load(scale_table + entry)
        vectors = tl.load(vectors_table + entry)
        if vectors != 0:
            factor_at = vectors.to(tl.pointer_type(tl.float32)) + column
            factor = tl.load(factor_at, mask=column < width, other=0.0)
            bias = tl.load(factor_at + tl.cdiv(width, _PANEL) * _PANEL, mask=column < width, other=0.0)
            result = result * factor[None, :] + bias[None, :]
        tl.store(to, result.to(y.dtype.element_ty), mask=inside)


def shrink_shape(dtype: torch.dtype, max_rank: int) -> dict[str, int]:
    """Returns tile sizes and launch options of the shrink: the largest without register spills on any architecture."""
    ranks = max(16, triton.next_power_of_2(max_rank))
    if dtype is torch.float32:
        return {"BM": SEGMENT_ROWS, "BN": min(32, ranks), "BK": 16, "num_warps": 8, "num_stages": 3}
    return {"BM": SEGMENT_ROWS, "BN": min(64, ranks), "BK": 64, "num_warps": 4, "num_stages": 3}


def expand_shape(dtype: torch.dtype) -> dict[str, int]:
    """Returns tile sizes and launch options of the expand: all rank rows of most adapters are on their way at once, in
    fp32 as many as fit in registers."""
    if dtype is torch.float32:
        return {"BM": SEGMENT_ROWS, "BN": PANEL, "BR": 16, "num_warps": 8, "num_stages": 2}
    return {"BM": SEGMENT_ROWS, "BN": 2 * PANEL, "BR": 32, "num_warps": 8, "num_stages": 3}


def lora_shrink(x: Tensor, part: Tensor, shrunk: Tensor, segments: Segments, tables: SiteTables) -> None:
    """Writes x Aᵀ to `shrunk[token, projection, :rank]` for every token of a segment.

    x: [tokens, in]; part: float32 [PLANES, tokens, projections, max_rank], overwritten; shrunk: [tokens, projections,
    max_rank] in the dtype of x.
    """
    _, tokens, projections, ranks = part.shape
    count, gate = segments.rows.shape[0], tables.rank if tables.gate is None else tables.gate
    rows = segments.order, segments.first, segments.rows, segments.slot
    constants = {"PROJECTIONS": projections, "RANKS": ranks, "HAS_GATE": tables.gate is not None}
    shrink_kernel[(count, projections, PLANES)](
        x, part, *rows, tables.a, tables.rank, tables.dtype, gate,
        x.stride(0), x.shape[1], tables.rank.shape[1], tokens, **constants, **shrink_shape(x.dtype, ranks),
    )  # fmt: skip
    fold_kernel[(count, projections, SEGMENT_ROWS // _FOLD["BM"])](
        part, shrunk, *rows, tables.rank, gate, tables.rank.shape[1], tokens, **constants, **_FOLD
    )


def lora_expand(
    y: Tensor,
    shrunk: Tensor,
    segments: Segments,
    tables: SiteTables,
    columns: tuple[int, ...],
    outputs: tuple[int, ...],
) -> None:
    """Adds the adapters' result to y, [tokens, …], and applies their vectors. Projection p has `outputs[p]` columns,
    from column `columns[p]` on."""
    _, projections, ranks = shrunk.shape
    shape = expand_shape(y.dtype)
    unused = [0] * (MOST_SITES - projections)
    places = ((*numbers, *unused) for numbers in (columns, outputs))
    grid = (segments.rows.shape[0], ceil_div(max(outputs), shape["BN"]), projections)
    expand_kernel[grid](
        y, shrunk, segments.order, segments.first, segments.rows, segments.slot,
        tables.b, tables.rank, tables.scale, tables.dtype, tables.vectors,
        tables.rank if tables.gate is None else tables.gate,
        y.stride(0), *(number for place in places for number in place), tables.rank.shape[1],
        PROJECTIONS=projections, RANKS=ranks, HAS_GATE=tables.gate is not None, **shape,
    )  # fmt: skip
