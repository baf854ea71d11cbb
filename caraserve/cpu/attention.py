"""Paged attention over fp32 KV blocks, in tiles of up to four queries.

A KV block holds sixteen tokens of one layer and one key-value head: K as `[head_dim, 16]`, so that a token is a lane
and no score needs a horizontal sum, then V as `[16, head_dim]`. The online softmax runs over aligned spans of 64
positions in order, so a query's result is the same in any chunk, batch or tile.
"""

import numpy as np

from caraserve.cpu.jit import compiled_separately, kernel
from caraserve.cpu.kernels import rms_norm, rotate
from caraserve.cpu.simd import (
    LANES,
    fetch_add,
    keep_below,
    keep_from,
    load_f32,
    store_f32,
    vexp,
    vload,
    vmax,
    vmaximum,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from caraserve.cpu.structs import K_NORM, NUM_WEIGHTS, Q_NORM, batch_at, buffers_at, cache_at, model_at, word
from caraserve.cpu.tiles import scores_tile, values_tile

BLOCK_TOKENS = 16
SPAN = 64  # positions in one step of the online softmax: four blocks
TILE = 4  # queries computed together
_ITEM_TOKENS = 16  # tokens in one item of attention work

_scores1, _scores2, _scores3, _scores4 = (scores_tile(rows) for rows in (1, 2, 3, 4))
_values1x4, _values2x4, _values3x4, _values4x4 = (values_tile(rows, 4) for rows in (1, 2, 3, 4))
_values1x1, _values2x1, _values3x1, _values4x1 = (values_tile(rows, 1) for rows in (1, 2, 3, 4))


def scratch_bytes(head_dim: int) -> int:
    """Returns the bytes of scratch of `attend_tile`: queries, scores and outputs of a tile."""
    return 4 * TILE * (2 * head_dim + SPAN)


@kernel
def append_kv(block, position, head_dim, key, value):  # type: ignore[no-untyped-def]
    """Writes the key and value of one token, `[head_dim]` each, to its block."""
    token = position % BLOCK_TOKENS
    values = block + 4 * head_dim * BLOCK_TOKENS + 4 * token * head_dim
    for d in range(head_dim):
        store_f32(block + 4 * (d * BLOCK_TOKENS + token), load_f32(key + 4 * d))
        store_f32(values + 4 * d, load_f32(value + 4 * d))


@kernel
def _softmax(scores, low, high, scale, best, total):  # type: ignore[no-untyped-def]
    """Turns the scores[64] of one span into weights in place; lanes outside [low, high) become exactly 0.

    Returns the new running maximum, the new running sum and the factor for earlier sums.
    """
    factor = vsplat(scale)
    top = vsplat(np.float32(-np.inf))
    for j in range(0, SPAN, LANES):
        value = vmul(vload(scores + 4 * j), factor)
        value = keep_from(keep_below(value, high - j), low - j)
        vstore(scores + 4 * j, value)
        top = vmax(value, top)
    new_best = max(best, vmaximum(top))
    sums = vsplat(np.float32(0.0))
    if new_best == -np.inf:  # no position is visible yet: -inf minus -inf would be a NaN
        for j in range(0, SPAN, LANES):
            vstore(scores + 4 * j, sums)
        return best, total, np.float32(1.0)
    shift = vsplat(new_best)
    added = np.float32(0.0)
    for j in range(0, SPAN, LANES):
        weights = vexp(vsub(vload(scores + 4 * j), shift))
        vstore(scores + 4 * j, weights)
        added += vsum(weights)
    rescale = np.float32(vsum(vexp(vsplat(best - new_best)))) / np.float32(LANES)
    return new_best, total * rescale + added, rescale


@kernel
def _scale_row(row, head_dim, factor):  # type: ignore[no-untyped-def]
    by = vsplat(factor)
    for d in range(0, head_dim, LANES):
        vstore(row + 4 * d, vmul(vload(row + 4 * d), by))


@kernel
def _add_values(rows, weights, block, head_dim, tokens, out):  # type: ignore[no-untyped-def]
    """Computes `out[rows, head_dim] += weights[rows, tokens] @ V[tokens, head_dim]` for one block."""
    stride = 4 * head_dim
    values = block + stride * BLOCK_TOKENS
    d = 0
    while d + 64 <= head_dim:
        if rows == 1:
            _values1x4(weights, values + 4 * d, stride, tokens, out + 4 * d, stride)
        elif rows == 2:
            _values2x4(weights, values + 4 * d, stride, tokens, out + 4 * d, stride)
        elif rows == 3:
            _values3x4(weights, values + 4 * d, stride, tokens, out + 4 * d, stride)
        else:
            _values4x4(weights, values + 4 * d, stride, tokens, out + 4 * d, stride)
        d += 64
    while d < head_dim:
        if rows == 1:
            _values1x1(weights, values + 4 * d, stride, tokens, out + 4 * d, stride)
        elif rows == 2:
            _values2x1(weights, values + 4 * d, stride, tokens, out + 4 * d, stride)
        elif rows == 3:
            _values3x1(weights, values + 4 * d, stride, tokens, out + 4 * d, stride)
        else:
            _values4x1(weights, values + 4 * d, stride, tokens, out + 4 * d, stride)
        d += LANES


@kernel
def _scores(rows, queries, head_dim, k0, k1, k2, k3, out):  # type: ignore[no-untyped-def]
    stride = 4 * head_dim
    if rows == 1:
        _scores1(queries, stride, k0, k1, k2, k3, head_dim, out)
    elif rows == 2:
        _scores2(queries, stride, k0, k1, k2, k3, head_dim, out)
    elif rows == 3:
        _scores3(queries, stride, k0, k1, k2, k3, head_dim, out)
    else:
        _scores4(queries, stride, k0, k1, k2, k3, head_dim, out)


@kernel
def attend_tile(rows, positions, blocks, head_base, block_stride, head_dim, window, scale, scratch):  # type: ignore[no-untyped-def]
    """Computes the attention of up to four queries of one request over the same key-value head.

    `scratch` holds the queries `[rows, head_dim]` on entry and the results on return. `positions`: of the queries,
    ascending. `blocks`: address of the request's row of the block table; block b of this layer and head is at
    `head_base + b · block_stride`. `window`: positions that a query sees, including its own.
    """
    queries = scratch
    scores = queries + 4 * TILE * head_dim
    out = scores + 4 * TILE * SPAN
    best = (np.float32(-np.inf), np.float32(-np.inf), np.float32(-np.inf), np.float32(-np.inf))
    total = (np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0))
    for row in range(rows):
        for d in range(0, head_dim, LANES):
            vstore(out + 4 * (row * head_dim + d), vsplat(np.float32(0.0)))
    last = positions[rows - 1]
    for span in range(max(0, positions[0] - window + 1) // SPAN, last // SPAN + 1):
        first = span * SPAN
        block = first // BLOCK_TOKENS
        seen = (last - first) // BLOCK_TOKENS  # blocks after the first that hold visible tokens
        k0 = head_base + word(blocks, block) * block_stride
        k1 = head_base + word(blocks, block + min(1, seen)) * block_stride
        k2 = head_base + word(blocks, block + min(2, seen)) * block_stride
        k3 = head_base + word(blocks, block + min(3, seen)) * block_stride
        _scores(rows, queries, head_dim, k0, k1, k2, k3, scores)
        for row in range(rows):
            low, high = positions[row] - window + 1 - first, positions[row] + 1 - first
            top, mass, rescale = _softmax(scores + 4 * SPAN * row, low, high, scale, best[row], total[row])
            best = _with(best, row, top)
            total = _with(total, row, mass)
            if rescale != np.float32(1.0):
                _scale_row(out + 4 * row * head_dim, head_dim, rescale)
        for j in range(min(3, seen) + 1):
            at = head_base + word(blocks, block + j) * block_stride
            tokens = min(BLOCK_TOKENS, last + 1 - first - j * BLOCK_TOKENS)
            _add_values(rows, scores + 4 * BLOCK_TOKENS * j, at, head_dim, tokens, out)
    for row in range(rows):
        by = vsplat(np.float32(1.0) / total[row])
        for d in range(0, head_dim, LANES):
            at = 4 * (row * head_dim + d)
            vstore(queries + at, vmul(vload(out + at), by))


@kernel
def _with(values, index, value):  # type: ignore[no-untyped-def]
    """Returns the 4-tuple with one element replaced."""
    return (
        value if index == 0 else values[0],
        value if index == 1 else values[1],
        value if index == 2 else values[2],
        value if index == 3 else values[3],
    )


@kernel
def _head_address(model, cache, layer, kv_head):  # type: ignore[no-untyped-def]
    """Returns the address of block 0 of a layer and key-value head; block b is `b · _block_stride` further."""
    return cache.base + 8 * BLOCK_TOKENS * model.head_dim * (layer * model.kv_heads + kv_head)


@kernel
def _block_stride(model):  # type: ignore[no-untyped-def]
    return 8 * BLOCK_TOKENS * model.head_dim * model.layers * model.kv_heads


@kernel
def rotate_and_append(thread, team, model, buffers, cache, batch, layer):  # type: ignore[no-untyped-def]
    """Normalises q and k heads if the model has norms for them, rotates them, and writes k and v to their blocks."""
    dim, stride = model.head_dim, 4 * (model.q_pad + 2 * model.kv_pad)
    q_norm, k_norm = (
        word(model.weights, NUM_WEIGHTS * layer + Q_NORM),
        word(model.weights, NUM_WEIGHTS * layer + K_NORM),
    )
    for token in range(thread, batch.tokens, team):
        row = buffers.qkv + token * stride
        position = word(batch.position, token)
        cos, sin = model.cos + 2 * dim * position, model.sin + 2 * dim * position
        for head in range(model.heads):
            q = row + 4 * dim * head
            if q_norm != 0:
                rms_norm(q, q, dim, dim, q_norm, model.eps)
            rotate(q, dim, cos, sin)
        block = word(cache.blocks, cache.max_blocks * word(batch.slot, token) + position // BLOCK_TOKENS)
        for head in range(model.kv_heads):
            k = row + 4 * (model.q_pad + dim * head)
            if k_norm != 0:
                rms_norm(k, k, dim, dim, k_norm, model.eps)
            rotate(k, dim, cos, sin)
            at = _head_address(model, cache, layer, head) + block * _block_stride(model)
            append_kv(at, position, dim, k, row + 4 * (model.q_pad + model.kv_pad + dim * head))


@kernel
def _attend_item(thread, model, buffers, cache, batch, layer, kv_head, first, end):  # type: ignore[no-untyped-def]
    """Computes the attention of the query heads of `kv_head`, for tokens [first, end) of one row."""
    dim, group = model.head_dim, model.heads // model.kv_heads
    q_stride, out_stride = 4 * (model.q_pad + 2 * model.kv_pad), 4 * model.q_pad
    scratch = buffers.scratch + thread * buffers.scratch_bytes
    base = _head_address(model, cache, layer, kv_head)
    blocks = cache.blocks + 8 * cache.max_blocks * word(batch.slot, first)
    count = (end - first) * group
    for query in range(0, count, TILE):
        rows = min(TILE, count - query)
        positions = (
            word(batch.position, first + query // group),
            word(batch.position, first + min(query + 1, count - 1) // group),
            word(batch.position, first + min(query + 2, count - 1) // group),
            word(batch.position, first + min(query + 3, count - 1) // group),
        )
        for row in range(rows):
            token, head = first + (query + row) // group, kv_head * group + (query + row) % group
            for d in range(0, dim, LANES):
                vstore(scratch + 4 * (row * dim + d), vload(buffers.qkv + token * q_stride + 4 * (head * dim + d)))
        attend_tile(
            rows, positions, blocks, base, _block_stride(model), dim, word(model.windows, layer), model.scale, scratch
        )
        for row in range(rows):
            token, head = first + (query + row) // group, kv_head * group + (query + row) % group
            for d in range(0, dim, LANES):
                vstore(
                    buffers.attended + token * out_stride + 4 * (head * dim + d),
                    vload(scratch + 4 * (row * dim + d)),
                )


@compiled_separately(6)
def attend(thread, model_address, buffers_address, cache_address, batch_address, layer):  # type: ignore[no-untyped-def]
    """Computes attention. Threads claim items (row, key-value head, 16 tokens), because costs vary with the context."""
    model, buffers = model_at(model_address), buffers_at(buffers_address)
    cache, batch = cache_at(cache_address), batch_at(batch_address)
    counter = buffers.counters + 8 * layer
    taken = fetch_add(counter, 1)
    item = 0
    for row in range(batch.rows):
        for first in range(word(batch.row_first, row), word(batch.row_first, row + 1), _ITEM_TOKENS):
            end = min(first + _ITEM_TOKENS, word(batch.row_first, row + 1))
            for kv_head in range(model.kv_heads):
                if item == taken:
                    _attend_item(thread, model, buffers, cache, batch, layer, kv_head, first, end)
                    taken = fetch_add(counter, 1)
                item += 1
