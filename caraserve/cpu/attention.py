"""Paged attention over KV blocks, in tiles of up to four queries. kv_append.py says what a block holds.

The online softmax runs in fp32 over aligned spans of 64 positions in order, so a query's result is the same in any
chunk, batch or tile.
"""

import numpy as np

from caraserve.cpu.jit import compiled_separately, kernel, unset
from caraserve.cpu.kv_append import head_address
from caraserve.cpu.layers import scale_row, sigmoid, soft_cap
from caraserve.cpu.simd import (
    LANES,
    fetch_add,
    from_lane,
    keep_below,
    keep_from,
    load_f32,
    vadd,
    vexp,
    vfma,
    vload,
    vmax,
    vmaximum,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from caraserve.cpu.structs import (
    BLOCK_TOKENS,
    NO_COLUMN,
    attention_at,
    batch_at,
    buffers_at,
    cache_at,
    word,
)
from caraserve.cpu.tiles import call_by_address

SPAN = 64  # positions in one step of the online softmax: four blocks
TILE = 4  # queries computed together
_ITEM_TOKENS = 16  # tokens in one item of attention work

_call9 = call_by_address(9)


# Names that `made_for` replaces for each dtype of KV blocks; see kv_kernels.py.
_scores1 = _scores2 = _scores3 = _scores4 = _scores = unset
_values1x4 = _values2x4 = _values3x4 = _values4x4 = _add_values = unset
_values1x1 = _values2x1 = _values3x1 = _values4x1 = unset
_ITEMSIZE = np.int64(0)


def scratch_bytes(head_dim: int) -> int:
    """Returns the bytes of scratch of `attend_tile`: queries, scores and outputs of a tile."""
    return 4 * TILE * (2 * head_dim + SPAN)


@kernel
def _softmax(scores, low, high, scale, cap, slope, distance, best, total):  # type: ignore[no-untyped-def]
    """Turns the scores[64] of one span into weights in place; lanes outside [low, high) become exactly 0.

    `distance`: of the span's first position from the query's, times which `slope` is added to the score.
    Returns the new running maximum, the new running sum and the factor for earlier sums.
    """
    factor = vsplat(scale)
    top = vsplat(np.float32(-np.inf))
    for j in range(0, SPAN, LANES):
        value = vmul(vload(scores + 4 * j), factor)
        if slope != np.float32(0.0):
            value = vfma(vsplat(slope), from_lane(np.float32(distance + j)), value)
        value = keep_from(keep_below(soft_cap(value, cap), high - j), low - j)
        vstore(scores + 4 * j, value)
        top = vmax(value, top)
    new_best = max(best, vmaximum(top))
    sums = vsplat(np.float32(0.0))
    if new_best == -np.inf:  # no position is visible yet: -inf minus -inf would be a NaN
        for j in range(0, SPAN, LANES):
            vstore(scores + 4 * j, sums)
        return best, total, np.float32(1.0)
    shift = vsplat(new_best)
    for j in range(0, SPAN, LANES):
        weights = vexp(vsub(vload(scores + 4 * j), shift))
        vstore(scores + 4 * j, weights)
        sums = vadd(sums, weights)
    rescale = np.float32(vsum(vexp(vsplat(best - new_best)))) / np.float32(LANES)
    return new_best, total * rescale + vsum(sums), rescale


def add_values(rows, weights, block, head_dim, tokens, out):  # type: ignore[no-untyped-def]
    """Computes `out[rows, head_dim] += weights[rows, tokens] @ V[tokens, head_dim]` for one block."""
    stride, v_stride = 4 * head_dim, _ITEMSIZE * head_dim
    values = block + v_stride * BLOCK_TOKENS
    d = 0
    while d + 64 <= head_dim:
        if rows == 1:
            _values1x4(weights, values + _ITEMSIZE * d, v_stride, tokens, out + 4 * d, stride)
        elif rows == 2:
            _values2x4(weights, values + _ITEMSIZE * d, v_stride, tokens, out + 4 * d, stride)
        elif rows == 3:
            _values3x4(weights, values + _ITEMSIZE * d, v_stride, tokens, out + 4 * d, stride)
        else:
            _values4x4(weights, values + _ITEMSIZE * d, v_stride, tokens, out + 4 * d, stride)
        d += 64
    while d < head_dim:
        if rows == 1:
            _values1x1(weights, values + _ITEMSIZE * d, v_stride, tokens, out + 4 * d, stride)
        elif rows == 2:
            _values2x1(weights, values + _ITEMSIZE * d, v_stride, tokens, out + 4 * d, stride)
        elif rows == 3:
            _values3x1(weights, values + _ITEMSIZE * d, v_stride, tokens, out + 4 * d, stride)
        else:
            _values4x1(weights, values + _ITEMSIZE * d, v_stride, tokens, out + 4 * d, stride)
        d += LANES


def scores(rows, queries, head_dim, k0, k1, k2, k3, out):  # type: ignore[no-untyped-def]
    """Computes `out[rows, 64] = queries[rows, head_dim] @ K[head_dim, 16]` for four blocks."""
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
def _with(values, index, value):  # type: ignore[no-untyped-def]
    """Returns the 4-tuple with one element replaced."""
    return (
        value if index == 0 else values[0],
        value if index == 1 else values[1],
        value if index == 2 else values[2],
        value if index == 3 else values[3],
    )


def attend_tile(body_address, query, count, positions_at, first_head, blocks, head_base, block_stride, scratch):  # type: ignore[no-untyped-def]
    """Computes the attention of up to four queries of one request over the same key-value head.

    Queries are numbered token by token, head by head, from `first_head` on; these are `query` and the following, of
    `count`. `scratch` holds them, `[rows, head_dim]`, on entry and the results on return. `positions_at`: address of
    the tokens' positions. `blocks`: address of the request's row of the block table; block b of this layer and
    key-value head is at `head_base + b · block_stride`. `body_address`: of ATTENTION_BODY.
    """
    body = attention_at(body_address)
    rows, head_dim, window, group = min(TILE, count - query), body.head_dim, body.window, body.heads // body.kv_heads
    last = count - 1
    numbers = query, min(query + 1, last), min(query + 2, last), min(query + 3, last)
    positions = (
        word(positions_at, numbers[0] // group),
        word(positions_at, numbers[1] // group),
        word(positions_at, numbers[2] // group),
        word(positions_at, numbers[3] // group),
    )
    queries = scratch
    scores = queries + 4 * TILE * head_dim
    out = scores + 4 * TILE * SPAN
    best = (np.float32(-np.inf), np.float32(-np.inf), np.float32(-np.inf), np.float32(-np.inf))
    total = (np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0))
    if body.sinks != 0:  # a score like that of a position, without a value
        sinks = body.sinks + 4 * first_head
        best = (
            load_f32(sinks + 4 * (numbers[0] % group)),
            load_f32(sinks + 4 * (numbers[1] % group)),
            load_f32(sinks + 4 * (numbers[2] % group)),
            load_f32(sinks + 4 * (numbers[3] % group)),
        )
        total = (np.float32(1.0), np.float32(1.0), np.float32(1.0), np.float32(1.0))
    for row in range(rows):
        for d in range(0, head_dim, LANES):
            vstore(out + 4 * (row * head_dim + d), vsplat(np.float32(0.0)))
    end = positions[rows - 1] + 1
    for span in range(max(0, positions[0] - window + 1) // SPAN, (end - 1) // SPAN + 1):
        first = span * SPAN
        block = first // BLOCK_TOKENS
        seen = (end - 1 - first) // BLOCK_TOKENS  # blocks after the first that hold visible tokens
        k0 = head_base + word(blocks, block) * block_stride
        k1 = head_base + word(blocks, block + min(1, seen)) * block_stride
        k2 = head_base + word(blocks, block + min(2, seen)) * block_stride
        k3 = head_base + word(blocks, block + min(3, seen)) * block_stride
        _scores(rows, queries, head_dim, k0, k1, k2, k3, scores)
        for row in range(rows):
            low, high = positions[row] - window + 1 - first, positions[row] + 1 - first
            slope = np.float32(0.0)
            if body.slopes != 0:
                slope = load_f32(body.slopes + 4 * (first_head + numbers[row] % group))
            top, mass, rescale = _softmax(
                scores + 4 * SPAN * row,
                *(low, high, body.scale, body.cap, slope, first - positions[row], best[row], total[row]),
            )
            best = _with(best, row, top)
            total = _with(total, row, mass)
            if rescale != np.float32(1.0):
                scale_row(out + 4 * row * head_dim, head_dim, rescale)
        for j in range(min(3, seen) + 1):
            at = head_base + word(blocks, block + j) * block_stride
            tokens = min(BLOCK_TOKENS, end - first - j * BLOCK_TOKENS)
            _add_values(rows, scores + 4 * BLOCK_TOKENS * j, at, head_dim, tokens, out)
    for row in range(rows):
        by = vsplat(np.float32(1.0) / total[row])
        for d in range(0, head_dim, LANES):
            at = 4 * (row * head_dim + d)
            vstore(queries + at, vmul(vload(out + at), by))


@kernel
def _attend_item(thread, buffers, cache, batch, body_address, row_bytes, kv_head, first, end):  # type: ignore[no-untyped-def]
    """Computes the attention of the query heads of `kv_head`, for tokens [first, end) of one row, in place of q."""
    body = attention_at(body_address)
    dim, group = body.head_dim, body.heads // body.kv_heads
    scratch = buffers.scratch + thread * buffers.scratch_bytes
    base = head_address(cache, body, kv_head)
    blocks = cache.blocks + 8 * cache.max_blocks * word(batch.slot, first)
    first_head = kv_head * group
    q_rows = buffers.projected + first * row_bytes + body.q + 4 * dim * first_head
    is_gated, gate_offset = body.gate != NO_COLUMN, body.gate - body.q
    count = (end - first) * group
    positions = batch.position + 8 * first
    for query in range(0, count, TILE):
        rows = min(TILE, count - query)
        for row in range(rows):
            q = q_rows + (query + row) // group * row_bytes + 4 * dim * ((query + row) % group)
            for d in range(0, dim, LANES):
                vstore(scratch + 4 * (row * dim + d), vload(q + 4 * d))
        _call9(
            buffers.attend_tile,
            *(body_address, query, count, positions, first_head, blocks, base, cache.block_bytes, scratch),
        )
        for row in range(rows):
            q = q_rows + (query + row) // group * row_bytes + 4 * dim * ((query + row) % group)
            for d in range(0, dim, LANES):
                value = vload(scratch + 4 * (row * dim + d))
                if is_gated:
                    value = vmul(value, sigmoid(vload(q + gate_offset + 4 * d)))
                vstore(q + 4 * d, value)


@compiled_separately(7)
def attend(thread, buffers_address, cache_address, batch_address, body_address, row_bytes, layer):  # type: ignore[no-untyped-def]
    """Computes attention. Threads claim items (row, key-value head, 16 tokens), because costs vary with the context."""
    buffers, cache = buffers_at(buffers_address), cache_at(cache_address)
    batch, body = batch_at(batch_address), attention_at(body_address)
    counter = buffers.counters + 8 * layer
    taken = fetch_add(counter, 1)
    item = 0
    for row in range(batch.rows):
        for first in range(word(batch.row_first, row), word(batch.row_first, row + 1), _ITEM_TOKENS):
            end = min(first + _ITEM_TOKENS, word(batch.row_first, row + 1))
            for kv_head in range(body.kv_heads):
                if item == taken:
                    _attend_item(thread, buffers, cache, batch, body_address, row_bytes, kv_head, first, end)
                    taken = fetch_add(counter, 1)
                item += 1
