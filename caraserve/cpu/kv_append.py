"""KV blocks, and what writes keys and values to them.

A KV block holds sixteen tokens of each layer and key-value head: K as `[head_dim, 16]`, so that a token is a lane and
no score needs a horizontal sum, then V as `[16, head_dim]`. Keys and values are rounded to the dtype of the blocks
once, here.
"""

import numpy as np

from caraserve.cpu.jit import kernel, unset
from caraserve.cpu.layers import rotate, scale_row
from caraserve.cpu.simd import LANES, load_f32
from caraserve.cpu.structs import BLOCK_TOKENS, attention_at, batch_at, buffers_at, cache_at, norm_at, word
from caraserve.cpu.tiles import call_by_address

_call4 = call_by_address(4)


# Names that `made_for` replaces for each dtype of KV blocks; see kv_kernels.py.
_store_value = _store_key = _store_keys = _append_values = _append_keys = _append_run = unset
_ITEMSIZE = np.int64(0)


@kernel
def head_address(cache, body, kv_head):  # type: ignore[no-untyped-def]
    """Returns the address of a key-value head of a layer in block 0; the next block is `block_bytes` further."""
    return cache.base + cache.itemsize * (body.kv_offset + 2 * BLOCK_TOKENS * body.head_dim * kv_head)


@kernel
def _normalise_heads(buffers, norm, row, width):  # type: ignore[no-untyped-def]
    """Normalises row[width] in place, as one or each head of it, by the NORM record at address `norm`."""
    step = norm_at(norm).width
    for head in range(width // step):
        at = row + 4 * step * head
        _call4(buffers.normalise, norm, at, at, head)


@kernel
def _norm_and_rotate(buffers, row, heads, body, norm, position):  # type: ignore[no-untyped-def]
    """Normalises the heads of q or k if `norm`, the address of a NORM record, is not 0, and rotates them."""
    dim, pairs, at = body.head_dim, body.rotated, 4 * body.rotated * position
    if norm != 0 and body.norm_after_rope == 0:
        _normalise_heads(buffers, norm, row, dim * heads)
    for head in range(heads if pairs > 0 else 0):
        rotate(row + 4 * dim * head, pairs, body.cos + at, body.sin + at)
    if norm != 0 and body.norm_after_rope != 0:
        _normalise_heads(buffers, norm, row, dim * heads)


def append_values(buffers, cache, body, row, block, lane, scratch):  # type: ignore[no-untyped-def]
    """Writes the values of one token to a block, normalised if the layer has a norm for them.

    `block`: bytes before it in a cache. `scratch`: room for a head."""
    dim = body.head_dim
    for head in range(body.kv_heads):
        value = row + body.v + 4 * dim * head
        if body.v_norm != 0:
            _call4(buffers.normalise, body.v_norm, value, scratch, head)
            value = scratch
        place = head_address(cache, body, head) + block + _ITEMSIZE * dim * (BLOCK_TOKENS + lane)
        for d in range(0, dim, LANES):
            _store_value(value + 4 * d, place + _ITEMSIZE * d)


def append_keys(cache, body, rows, row_bytes, block, lane, tokens):  # type: ignore[no-untyped-def]
    """Writes the keys of `tokens` rows to a block, from `lane` on."""
    dim = body.head_dim
    for head in range(body.kv_heads):
        keys, place = rows + body.k + 4 * dim * head, head_address(cache, body, head) + block
        for d in range(0, dim, LANES):
            x, to = keys + 4 * d, place + _ITEMSIZE * BLOCK_TOKENS * d
            if tokens == BLOCK_TOKENS:
                _store_keys(x, row_bytes, to)
            else:
                for token in range(tokens):
                    _store_key(x + token * row_bytes, to + _ITEMSIZE * (lane + token))


def append_run(thread, buffers, cache, batch, body, row_bytes, first, end):  # type: ignore[no-untyped-def]
    """Normalises, rotates and writes tokens [first, end) of one row, which belong to one block."""
    start, rows = word(batch.position, first), buffers.projected + first * row_bytes
    lane, dim = start % BLOCK_TOKENS, body.head_dim
    block = cache.block_bytes * word(cache.blocks, cache.max_blocks * word(batch.slot, first) + start // BLOCK_TOKENS)
    scratch = buffers.scratch + thread * buffers.scratch_bytes
    for token in range(end - first):
        row, position = rows + token * row_bytes, start + token
        # Before k is rotated, whose columns may be those of v.
        _append_values(buffers, cache, body, row, block, lane + token, scratch)
        _norm_and_rotate(buffers, row + body.q, body.heads, body, body.q_norm, position)
        if body.growth != 0:
            scale_row(row + body.q, dim * body.heads, load_f32(body.growth + 4 * position))
        _norm_and_rotate(buffers, row + body.k, body.kv_heads, body, body.k_norm, position)
    _append_keys(cache, body, rows, row_bytes, block, lane, end - first)


def append(thread, team, buffers_address, cache_address, batch_address, body_address, row_bytes):  # type: ignore[no-untyped-def]
    """Normalises q and k as the layer's ATTENTION_BODY says, rotates them, and writes k and v to their blocks.

    `row_bytes`: of a row of `projected`. A block belongs to one thread: tokens are lanes, so several would write the
    same cache lines.
    """
    buffers, cache = buffers_at(buffers_address), cache_at(cache_address)
    batch, body = batch_at(batch_address), attention_at(body_address)
    item = 0
    for row in range(batch.rows):
        first, last = word(batch.row_first, row), word(batch.row_first, row + 1)
        while first < last:
            end = min(last, first + BLOCK_TOKENS - word(batch.position, first) % BLOCK_TOKENS)
            if item % team == thread:
                _append_run(thread, buffers, cache, batch, body, row_bytes, first, end)
            item += 1
            first = end
