"""What a decoder computes between its matmuls: embedding, norms, residual sums, rotation, KV append, SiLU.

Arithmetic is fp32 for all tensor dtypes, and each result is rounded once. A program computes whole rows or heads, so no
result depends on their number.
"""

import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.util.units import ceil_div

_COLUMNS = 1024  # per program of the elementwise kernels
_HEADS = 4  # heads in a program of `rotate_and_append`


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    history, weight, token_slot, token_position, hidden, history_stride, weight_stride, hidden_stride, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program embeds BLOCK columns of one token, unless it stands for a vector, which `hidden` already has."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(token_position + token)
    slot = tl.load(token_slot + token, mask=position >= 0, other=0).to(tl.int64)
    known = tl.load(history + slot * history_stride + position, mask=position >= 0, other=0).to(tl.int64)
    inside = (column < width) & (known >= 0)
    row = tl.load(weight + known * weight_stride + column, mask=inside & (position >= 0), other=0.0)
    tl.store(hidden + token * hidden_stride + column, row.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    hidden, delta, weight, out, rows, eps, hidden_stride, delta_stride, out_stride, width,
    HAS_DELTA: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program norms one row of `out`. A square that overflows gives NaN: 1 / sqrt(inf) would give a row of
    zeros."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row).to(tl.int64)
    if source >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(hidden + source * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_DELTA:
            added = tl.load(delta + source * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
            # The norm reads the rounded sum, as later layers do.
            rounded = (value + added).to(hidden.dtype.element_ty)
            tl.store(hidden + source * hidden_stride + column, rounded, mask=inside)
            value = rounded.to(tl.float32)
        squares = tl.sum(value * value, 0)
        factor = 1.0 / tl.sqrt(squares / width + eps) + squares * 0.0
        result = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * (value * factor)
        tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads(low, high, weight, column, inside, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMS norm of heads split into two halves, [heads, half] each; NaN if a square overflows."""
    squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    factor = (1.0 / tl.sqrt(squares / (2 * HALF) + eps) + squares * 0.0)[:, None]
    low_weight = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    high_weight = tl.load(weight + HALF + column, mask=inside, other=0.0).to(tl.float32)
    return low_weight[None, :] * (low * factor), high_weight[None, :] * (high * factor)


@triton.jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    qkv, cos, sin, token_slot, token_position, block_table, keys, values, q_norm, k_norm, eps,
    qkv_stride, table_stride, key_block, key_token, key_head, value_block, value_token, value_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One program rotates some query heads of one token in place, or rotates and appends some of its key-value
    heads."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_tiles: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    is_query = tile < q_tiles
    position = tl.load(token_position + token)
    if position >= 0:
        head = tl.where(is_query, tile, tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        count = tl.where(is_query, Q_HEADS, KV_HEADS)
        column = tl.arange(0, HALF_PAD)
        is_column = column < HALF
        inside = (head < count)[:, None] & is_column[None, :]
        row = qkv + token * qkv_stride
        at = row + (tl.where(is_query, 0, Q_HEADS) + head)[:, None] * (2 * HALF) + column[None, :]
        low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            if is_query:
                low, high = _norm_heads(low, high, q_norm, column, is_column, eps, HALF)
            else:
                low, high = _norm_heads(low, high, k_norm, column, is_column, eps, HALF)
        c = tl.load(cos + position.to(tl.int64) * HALF + column, mask=is_column, other=0.0)[None, :]
        s = tl.load(sin + position.to(tl.int64) * HALF + column, mask=is_column, other=0.0)[None, :]
        new_low = (low * c - high * s).to(qkv.dtype.element_ty)
        new_high = (high * c + low * s).to(qkv.dtype.element_ty)
        if is_query:
            tl.store(at, new_low, mask=inside)
            tl.store(at + HALF, new_high, mask=inside)
        else:
            table = block_table + tl.load(token_slot + token).to(tl.int64) * table_stride
            block = tl.load(table + position // BLOCK).to(tl.int64)
            key = keys + block * key_block + position % BLOCK * key_token + head[:, None] * key_head + column[None, :]
            tl.store(key, new_low.to(keys.dtype.element_ty), mask=inside)
            tl.store(key + HALF, new_high.to(keys.dtype.element_ty), mask=inside)
            value = values + block * value_block + position % BLOCK * value_token
            value = value + head[:, None] * value_head + column[None, :]
            v_at = at + KV_HEADS * (2 * HALF)
            tl.store(value, tl.load(v_at, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)
            v_high = tl.load(v_at + HALF, mask=inside, other=0.0)
            tl.store(value + HALF, v_high.to(values.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, in_stride, out_stride, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program computes BLOCK columns of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up + row * in_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    result = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


def norm_warps(width: int) -> int:
    """Returns the number of warps for a row of `width` numbers: about 16 numbers per thread."""
    return int(min(16, max(1, triton.next_power_of_2(width) // 512)))


def embed(history: Tensor, weight: Tensor, tokens: TokenTables, hidden: Tensor) -> None:
    """Writes the embedding of each token, read from the history at its slot and position; position -1 gives zeros.
    Where the history has a negative token, `hidden` has its vector already and is left as it is.

    history: int32 [slots, positions + 1], also written by sampling; weight: [vocab, width]; hidden: [tokens, width].
    """
    count, width = hidden.shape
    embed_kernel[(count, ceil_div(width, _COLUMNS))](
        history, weight, tokens.slot, tokens.position, hidden,
        history.stride(0), weight.stride(0), hidden.stride(0), width, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


def rms_norm(
    hidden: Tensor, weight: Tensor, out: Tensor, eps: float, delta: Tensor | None = None, rows: Tensor | None = None
) -> None:
    """Computes `out = weight · hidden / sqrt(mean(hidden²) + eps)`, rows of `[tokens, width]`.

    With `delta`, first adds it to `hidden` in place. With `rows`, int32 [rows of out], row i of `out` is that of token
    rows[i], or is skipped if rows[i] is -1; with both, no token may be named twice.
    """
    width = hidden.shape[1]
    norm_kernel[(out.shape[0] if rows is None else rows.shape[0],)](
        hidden, hidden if delta is None else delta, weight, out, hidden if rows is None else rows, eps,
        hidden.stride(0), 0 if delta is None else delta.stride(0), out.stride(0), width,
        HAS_DELTA=delta is not None, HAS_ROWS=rows is not None,
        BLOCK=triton.next_power_of_2(width), num_warps=norm_warps(width),
    )  # fmt: skip


def rotate_and_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    tokens: TokenTables,
    cache: PagedCache,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Rotates q in place, and rotates k and appends k and v to the cache. Norms the heads of q and k first, by `norms`
    if given.

    qkv: [tokens, (heads + 2 · kv heads) · head dim]; cos, sin: float32 [positions, head dim / 2]; tokens at position -1
    are skipped.
    """
    block, kv_heads, dim = cache.keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q_norm, k_norm = norms or (qkv, qkv)
    rotate_kernel[(qkv.shape[0], ceil_div(heads, _HEADS) + ceil_div(kv_heads, _HEADS))](
        qkv, cos, sin, tokens.slot, tokens.position, cache.block_table, cache.keys, cache.values, q_norm, k_norm, eps,
        qkv.stride(0), cache.block_table.stride(0), *cache.keys.stride()[:3], *cache.values.stride()[:3],
        Q_HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, HALF_PAD=triton.next_power_of_2(dim // 2),
        BLOCK=block, HEADS=_HEADS, HAS_NORM=norms is not None, num_warps=1,
    )  # fmt: skip


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Computes `out = silu(gate) · up`; gate_up: [tokens, 2 · width], gate first; out: [tokens, width]."""
    width = out.shape[1]
    silu_mul_kernel[(out.shape[0], ceil_div(width, _COLUMNS))](
        gate_up, out, gate_up.stride(0), out.stride(0), width, BLOCK=_COLUMNS, num_warps=4
    )
