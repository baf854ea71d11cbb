"""Attention in Triton: split-KV for decoding rows, tiles of queries for prompt chunks.

Softmax is computed online, in base 2, over tiles of keys at aligned positions. A split covers `SPLIT_TOKENS` positions,
whatever the context's length, and splits are merged in an order that the context alone decides. A tile without a
visible key changes no bit, and neither do masks on a tile that is seen whole, so a query's result does not depend on
its chunk or batch.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.attention.base import Attention, LayerAttention
from caraserve.gpu.kernels.capability import SMALL_SHARED_MEMORY, compute_capability
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.util.units import ceil_div

SPLIT_TOKENS = 256  # short enough that one long request fills a GPU, long enough that merging is cheap
_MERGED_AT_ONCE = 16  # splits: a context of 32768 tokens takes 8 steps, each as long as one access to memory
_MOST_PROGRAMS = 2048  # of `decode_kernel`, unless there are more rows; a small multiple of what runs at once on a GPU
_LOG2_E = 1.4426950408889634
_BASE_2 = tl.constexpr(_LOG2_E)  # what makes a score one for `exp2`


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Results of the splits of each context, before they are merged."""

    sums: Tensor  # float32 [rows, heads, splits, head dim]
    best: Tensor  # float32 [rows, heads, splits] largest score
    mass: Tensor  # sum of the softmax weights

    def rows_at(self, max_context: int) -> int:
        """Returns the most rows whose contexts may have `max_context` tokens."""
        return self.best.numel() // (self.best.shape[1] * ceil_div(max_context, SPLIT_TOKENS))

    def within(self, rows: int, max_context: int) -> "SplitScratch":
        """Returns views of the same memory for fewer rows and shorter contexts: fewer programs, bit-identical
        results."""
        shape = (rows, self.best.shape[1], ceil_div(max_context, SPLIT_TOKENS))
        count, dim = math.prod(shape), self.sums.shape[3]
        best, mass = (part.view(-1)[:count].view(shape) for part in (self.best, self.mass))
        return SplitScratch(self.sums.view(-1)[: count * dim].view(*shape, dim), best, mass)


@triton.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
    queries, position, slopes, keys, values, blocks, start, end, whole_start, whole_end, scale, cap, window,
    block_stride, token_stride,
    HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes online softmax of queries [BM, DIM_PAD] at `position` [BM] over keys [start, end).

    Returns weighted sums of values [BM, DIM_PAD], best scores and masses [BM]. `start` is a multiple of BN; all queries
    see all keys [whole_start, whole_end). `scale` and `cap`: see `_factors`; slopes: [BM], of scores in the same unit.
    """
    tl.static_assert(BN % BLOCK == 0, "a tile has whole blocks")
    column, lane = tl.arange(0, DIM_PAD), tl.arange(0, BN)
    is_column = column < DIM
    keys += lane % BLOCK * token_stride
    values += lane % BLOCK * token_stride
    blocks += start // BLOCK + lane // BLOCK
    best = tl.full((BM,), float("-inf"), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, DIM_PAD), tl.float32)
    block = tl.load(blocks, mask=start + lane < end, other=0)
    for first in range(start, end, BN):
        at = first + lane
        inside = at < end
        place = block.to(tl.int64) * block_stride
        # The next tile's blocks are known before this tile is computed, so that its keys and values arrive meanwhile.
        blocks += BN // BLOCK
        block = tl.load(blocks, mask=at + BN < end, other=0)
        key_at, value_at = (keys + place)[None, :] + column[:, None], (values + place)[:, None] + column[None, :]
        key = tl.load(key_at, mask=inside[None, :] & is_column[:, None], other=0.0)
        value = tl.load(value_at, mask=inside[:, None] & is_column[None, :], other=0.0)
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if HAS_SLOPES:
            scores += slopes[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
        if HAS_CAP:
            scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)  # cap · tanh
        if (first < whole_start) | (first + BN > whole_end):
            seen = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window) & inside[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # no visible key yet: -inf minus -inf would be NaN
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(best - shift)
        mass = mass * rescale + tl.sum(weights, 1)
        total = tl.dot(weights.to(value.dtype), value, total * rescale[:, None], input_precision="ieee")
        best = higher
    return total, best, mass


@triton.jit(do_not_specialize=["splits"])  # otherwise a new context length would compile again while requests wait
def decode_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, block_table, row_token, token_slot, token_position, slopes, sums, best, mass,
    scale, slope_unit, cap, window, q_stride, table_stride, block_stride, token_stride, head_stride, splits,
    GROUP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program attends with the query heads of one row that share a key-value head, over every n-th split of the
    context, n programs per row and head. A split's result does not depend on the program that computes it."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(row_token + row).to(tl.int64)
    position = tl.load(token_position + token, mask=token >= 0, other=-1)
    low = tl.maximum(position - window + 1, 0)
    split = low // SPLIT + tl.program_id(2)
    if split * SPLIT <= position:
        member, column = tl.arange(0, BM), tl.arange(0, DIM_PAD)
        query_head = head * GROUP + member
        inside = (member < GROUP)[:, None] & (column < DIM)[None, :]
        queries = tl.load(q + token * q_stride + query_head[:, None] * DIM + column[None, :], mask=inside, other=0.0)
        slope = tl.zeros((BM,), tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes + query_head, mask=member < GROUP, other=0.0) * slope_unit
        blocks = block_table + tl.load(token_slot + token).to(tl.int64) * table_stride
        places = (tl.cast(row, tl.int64) * tl.num_programs(1) * GROUP + query_head) * splits  # [BM]
        while split * SPLIT <= position:
            total, top, weight = _attend_tiles(
                queries, tl.full((BM,), 0, tl.int32) + position, slope,
                keys + head * head_stride, values + head * head_stride, blocks,
                tl.maximum(split * SPLIT, low // BN * BN), tl.minimum((split + 1) * SPLIT, position + 1),
                low, position + 1, scale, cap, window, block_stride, token_stride,
                HAS_SLOPES, HAS_CAP, DIM, DIM_PAD, BLOCK, BM, BN,
            )  # fmt: skip
            place = places + split
            tl.store(sums + place[:, None] * DIM + column[None, :], total, mask=inside)
            tl.store(best + place, top, mask=member < GROUP)
            tl.store(mass + place, weight, mask=member < GROUP)
            split += tl.num_programs(2)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(  # type: ignore[no-untyped-def]
    sums, best, mass, out, row_token, token_position, sinks, window, out_stride, splits,
    HAS_SINKS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLIT: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One program merges the splits of one head of a row: PLACES splits at once, each with its place's earlier ones,
    and the places last. The order depends on the row's position and window alone."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(row_token + row).to(tl.int64)
    if token >= 0:
        position = tl.load(token_position + token)
        lane, column = tl.arange(0, PLACES), tl.arange(0, DIM_PAD)
        place = (tl.cast(row, tl.int64) * tl.num_programs(1) + head) * splits
        top = tl.full((PLACES,), float("-inf"), tl.float32)
        weight = tl.zeros((PLACES,), tl.float32)
        total = tl.zeros((PLACES, DIM_PAD), tl.float32)
        end = position // SPLIT + 1
        for first in range(tl.maximum(position - window + 1, 0) // SPLIT, end, PLACES):
            split, inside = place + first + lane, first + lane < end
            part_at = sums + split[:, None] * DIM + column[None, :]
            part = tl.load(part_at, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
            split_top = tl.load(best + split, mask=inside, other=float("-inf"))
            split_weight = tl.load(mass + split, mask=inside, other=0.0)
            higher = tl.maximum(top, split_top)
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # no split at this place: -inf minus -inf is NaN
            ours, theirs = tl.exp2(top - shift), tl.exp2(split_top - shift)
            total = total * ours[:, None] + part * theirs[:, None]
            weight = weight * ours + split_weight * theirs
            top = higher
        highest = tl.max(top, 0)
        share = tl.exp2(top - highest)
        masses = tl.sum(weight * share, 0)
        if HAS_SINKS:
            masses += tl.exp2(tl.load(sinks + head) * _BASE_2 - highest)
        result = tl.sum(total * share[:, None], 0) / masses
        tl.store(out + token * out_stride + head * DIM + column, result.to(out.dtype.element_ty), mask=column < DIM)


@triton.jit
def prefill_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, block_table, tile_first, tile_tokens, token_slot, token_position, sinks, slopes, out,
    scale, slope_unit, cap, window, q_stride, out_stride, table_stride,
    block_stride, token_stride, head_stride,
    GROUP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program attends with one head of a tile of consecutive tokens of one request."""
    # Later tiles of a prompt read more keys, so they start first: otherwise the longest would run alone at the end.
    tile, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    tokens = tl.load(tile_tokens + tile)
    if tokens > 0:
        lane, column = tl.arange(0, BM), tl.arange(0, DIM_PAD)
        first = tl.load(tile_first + tile).to(tl.int64)
        position = tl.load(token_position + first)
        inside = (lane < tokens)[:, None] & (column < DIM)[None, :]
        place = first + lane
        queries = tl.load(q + place[:, None] * q_stride + head * DIM + column[None, :], mask=inside, other=0.0)
        blocks = block_table + tl.load(token_slot + first).to(tl.int64) * table_stride
        start = tl.maximum(position - window + 1, 0) // BN * BN
        end, shared = position + tokens, head // GROUP
        slope = tl.zeros((BM,), tl.float32)
        if HAS_SLOPES:
            slope += tl.load(slopes + head) * slope_unit
        total, best, weight = _attend_tiles(
            queries, position + lane, slope, keys + shared * head_stride, values + shared * head_stride,
            blocks, start, end, end - window, position + 1, scale, cap, window, block_stride, token_stride,
            HAS_SLOPES, HAS_CAP, DIM, DIM_PAD, BLOCK, BM, BN,
        )  # fmt: skip
        if HAS_SINKS:
            weight += tl.exp2(tl.load(sinks + head) * _BASE_2 - best)
        weight = tl.where(lane < tokens, weight, 1.0)  # lanes past the tile may have no visible key
        result = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * out_stride + head * DIM + column[None, :], result, mask=inside)


def decode_shape(dtype: torch.dtype, group: int, head_dim: int, capability: int) -> dict[str, Any]:
    """Returns tile sizes and launch options for decoding rows. Tensor cores need at least 16 rows."""
    rows = max(16, triton.next_power_of_2(group))
    if dtype is torch.float32:
        return _float32_shape(rows, head_dim)
    is_small = capability in SMALL_SHARED_MEMORY or head_dim > 128
    return _shape(rows, 32 if is_small else 64, num_warps=4, num_stages=3)


def prefill_shape(dtype: torch.dtype, head_dim: int, capability: int) -> dict[str, Any]:
    """Returns tile sizes and launch options for prompt chunks: the largest without register spills."""
    rows = _tile_tokens(dtype, head_dim)
    if dtype is torch.float32:
        return _float32_shape(rows, head_dim)
    is_small = capability in SMALL_SHARED_MEMORY
    if head_dim > 128:
        return _shape(rows, 32, num_warps=8, num_stages=2 if is_small else 3)
    if is_small or capability < 90:  # the products' operands take registers, of which 64 keys need more than there are
        keys = 32
    elif capability >= 100 and 32 < head_dim <= 64:  # with 64 keys Triton 3.5 and 3.6 leave too few registers
        keys = 128
    else:
        keys = 64
    return _shape(rows, keys, num_warps=8, num_stages=3)


def _tile_tokens(dtype: torch.dtype, head_dim: int) -> int:
    """Returns the number of tokens in a tile, on every device."""
    if dtype is torch.float32:
        return 16
    return 128 if head_dim <= 128 else 64


def _float32_shape(rows: int, head_dim: int) -> dict[str, Any]:
    return _shape(rows, 32, num_warps=8, num_stages=3 if head_dim <= 128 else 2)


def _shape(rows: int, keys: int, num_warps: int, num_stages: int) -> dict[str, Any]:
    """Three stages load the next tile of keys and values while one is computed, two before. Without fusion, products
    and sums round alike in tiles with and without masks."""
    return {"BM": rows, "BN": keys, "num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def decode_programs(rows: int, kv_heads: int, splits: int) -> int:
    """Returns the number of programs that share the splits of a row's context: as many as fill a GPU and no more,
    because a captured graph starts them for the longest context, and most would have nothing to do."""
    return min(splits, max(1, _MOST_PROGRAMS // (rows * kv_heads)))


def _factors(how: LayerAttention) -> tuple[float, float, float]:
    """Returns what a product of a query and a key is multiplied by, what a slope is, and the cap, all for scores in
    base 2; scores become the exponent of `exp2` in tanh where there is a cap."""
    if how.cap is None:
        return _LOG2_E * how.scale, _LOG2_E, 0.0
    return 2.0 * _LOG2_E * how.scale / how.cap, 2.0 * _LOG2_E / how.cap, _LOG2_E * how.cap


class TritonDecode:
    """Implements DecodeAttention."""

    def scratch_bytes(self, heads: int, head_dim: int, max_context: int) -> int:
        return torch.float32.itemsize * heads * ceil_div(max_context, SPLIT_TOKENS) * (head_dim + 2)

    def scratch(self, rows: int, heads: int, head_dim: int, max_context: int, device: torch.device) -> SplitScratch:
        shape = (rows, heads, ceil_div(max_context, SPLIT_TOKENS))
        best, mass = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        return SplitScratch(torch.empty((*shape, head_dim), dtype=torch.float32, device=device), best, mass)

    def attend(
        self,
        q: Tensor,
        cache: PagedCache,
        tokens: TokenTables,
        row_token: Tensor,
        out: Tensor,
        scratch: SplitScratch,
        how: LayerAttention,
    ) -> None:
        kv_heads, dim = cache.keys.shape[2:]
        group = q.shape[1] // dim // kv_heads
        _, heads, splits, _ = scratch.sums.shape
        rows = row_token.shape[0]
        decode_kernel[(rows, kv_heads, decode_programs(rows, kv_heads, splits))](
            q, cache.keys, cache.values, cache.block_table, row_token, tokens.slot, tokens.position,
            q if how.slopes is None else how.slopes, scratch.sums, scratch.best, scratch.mass,
            *_factors(how), how.window, q.stride(0), cache.block_table.stride(0), *cache.keys.stride()[:3], splits,
            GROUP=group, HAS_SLOPES=how.slopes is not None, HAS_CAP=how.cap is not None,
            DIM=dim, DIM_PAD=triton.next_power_of_2(dim), BLOCK=cache.keys.shape[1], SPLIT=SPLIT_TOKENS,
            **decode_shape(q.dtype, group, dim, compute_capability(q.device)),
        )  # fmt: skip
        merge_kernel[(rows, heads)](
            scratch.sums, scratch.best, scratch.mass, out, row_token, tokens.position,
            q if how.sinks is None else how.sinks, how.window, out.stride(0), splits,
            HAS_SINKS=how.sinks is not None, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), SPLIT=SPLIT_TOKENS,
            PLACES=_MERGED_AT_ONCE, num_warps=4,
        )  # fmt: skip


class TritonPrefill:
    """Implements PrefillAttention."""

    def tile_tokens(self, dtype: torch.dtype, head_dim: int) -> int:
        return _tile_tokens(dtype, head_dim)

    def attend(
        self,
        q: Tensor,
        cache: PagedCache,
        tokens: TokenTables,
        tile_first: Tensor,
        tile_tokens: Tensor,
        out: Tensor,
        how: LayerAttention,
    ) -> None:
        kv_heads, dim = cache.keys.shape[2:]
        heads = q.shape[1] // dim
        prefill_kernel[(heads, tile_first.shape[0])](
            q, cache.keys, cache.values, cache.block_table, tile_first, tile_tokens, tokens.slot, tokens.position,
            q if how.sinks is None else how.sinks, q if how.slopes is None else how.slopes, out,
            *_factors(how), how.window, q.stride(0), out.stride(0), cache.block_table.stride(0),
            *cache.keys.stride()[:3],
            GROUP=heads // kv_heads, HAS_SINKS=how.sinks is not None, HAS_SLOPES=how.slopes is not None,
            HAS_CAP=how.cap is not None, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), BLOCK=cache.keys.shape[1],
            **prefill_shape(q.dtype, dim, compute_capability(q.device)),
        )  # fmt: skip


ATTENTION = Attention(TritonDecode(), TritonPrefill())
