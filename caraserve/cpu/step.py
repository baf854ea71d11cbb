"""One iteration of the decoder over a mixed batch, fused into one compiled function that a team of threads runs. Level 1.

Every thread of the team calls `step` with the same arguments and its own index; they split each phase and meet at a
barrier after it. Nothing of Python runs inside, so the event loop has the interpreter to itself meanwhile.

Phases of a layer (| is a barrier): norm | [LoRA shrink |] q, k, v + LoRA expand | rotate, append KV | attend |
[shrink |] o + expand + residual | norm | [shrink |] gate, up + expand, silu·mul | [shrink |] down + expand + residual |
The bracketed ones run only when the batch has an adapter: base-only traffic pays nothing for LoRA.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.attention import TILE, append_kv, attend_tile
from caraserve.cpu.jit import entry, kernel
from caraserve.cpu.kernels import (
    PANEL,
    RANK_GROUP,
    add_bias,
    embed,
    itemsize,
    lora_shrink,
    panel_gemm,
    rms_norm,
    rotate,
    silu_mul,
)
from caraserve.cpu.sampling import best_tokens, choose, log_sum_exp
from caraserve.cpu.simd import (
    LANES,
    fetch_add,
    load_acquire,
    spin_pause,
    store_release,
    vload,
    vstore,
)
from caraserve.cpu.yielding import sched_yield

# Columns of `Model.weights`: addresses of one layer's tensors; 0 where the model has none.
ATTN_NORM, WQ, WK, WV, WO, WG, WU, WD, BQ, BK, BV, BO, BG, BU, BD, Q_NORM, K_NORM, MLP_NORM = range(18)
NUM_WEIGHTS = 18
NO_WINDOW = 1 << 30
SAMPLE, SCORE = 0, 1  # kinds of output rows: draw a token, or score the prompt token that follows
_SHRINK_TOKENS = 24  # tokens in one item of shrink work, so that long prompts split over the team
_ATTEND_TOKENS = 16  # tokens in one item of attention work
_SPINS = 500  # about 12 µs of pauses before a waiting thread gives its core away


class Model(NamedTuple):
    """Sizes in elements (`_pad`: rounded up to a panel) and addresses of the weights."""

    layers: int
    hidden: int
    hidden_pad: int
    heads: int
    kv_heads: int
    head_dim: int
    q_pad: int
    kv_pad: int
    inter: int
    inter_pad: int
    vocab: int
    vocab_pad: int
    dtype: int
    tied: bool
    eps: np.float32
    scale: np.float32  # of attention scores
    embed: int
    head: int
    final_norm: int
    cos: int  # [positions, head_dim / 2]
    sin: int
    weights: NDArray[np.int64]  # [layers, NUM_WEIGHTS]
    windows: NDArray[np.int64]  # [layers]


class Buffers(NamedTuple):
    """Addresses of fp32 activations, rows of a token each, and of the words the team meets at."""

    hidden: int  # [tokens, hidden_pad], the residual stream
    normed: int  # [tokens, hidden_pad]
    qkv: int  # [tokens, q_pad + 2 · kv_pad]
    attended: int  # [tokens, q_pad]
    gate: int  # [tokens, inter_pad]
    up: int  # [tokens, inter_pad]
    shrunk: int  # [tokens, 3 · largest padded rank in the batch]
    logits: NDArray[np.float32]  # [outputs, vocab_pad]
    scratch: int  # [threads, scratch_stride bytes]
    scratch_stride: int
    weights: NDArray[np.float32]  # [threads, vocab], the sampler's copy of a row of logits
    seen: NDArray[np.uint8]  # [threads, vocab]
    barrier: int  # arrivals, and the generation a cache line later
    counters: NDArray[np.int64]  # [layers], attention items taken


class Lora(NamedTuple):
    """The device adapter table: per adapter slot, layer and site. Rank 0: not adapted."""

    a: NDArray[np.int64]  # [slots, layers, 7] addresses of A, [padded rank, input padded to 16]
    b: NDArray[np.int64]  # [slots, layers, 7] addresses of B, panels [output / 64, padded rank, 64]
    rank: NDArray[np.int64]  # [slots, layers, 7] padded ranks
    scale: NDArray[np.float32]  # [slots, layers, 7]
    dtype: NDArray[np.int64]  # [slots]


class Cache(NamedTuple):
    """KV blocks and what the device knows of each request slot."""

    base: int  # blocks [num_blocks, layers, kv_heads, 2 · 16 · head_dim] fp32
    blocks: NDArray[np.int64]  # [slots, blocks of the longest context]
    history: NDArray[np.int64]  # [slots, context + 1] token ids


class Batch(NamedTuple):
    """One iteration's metadata. Tokens of a row are consecutive; rows are ordered by adapter slot."""

    tokens: int
    slot: NDArray[np.int64]  # [tokens]
    position: NDArray[np.int64]  # [tokens]
    row_first: NDArray[np.int64]  # [rows + 1] first token of each row
    segments: int  # runs of rows that share an adapter, the base model's run left out
    segment_first: NDArray[np.int64]  # [segments]
    segment_tokens: NDArray[np.int64]  # [segments]
    segment_adapter: NDArray[np.int64]  # [segments]
    max_rank: int  # largest padded rank among them, 0 for a base-only batch
    outputs: int
    out_token: NDArray[np.int64]  # [outputs] index of the token whose logits are wanted
    out_kind: NDArray[np.int64]  # [outputs] SAMPLE or SCORE
    out_logprobs: NDArray[np.int64]  # [outputs] alternatives wanted, -1 for no logprob at all
    chosen: NDArray[np.int64]  # [outputs] result: token drawn or scored
    logprob: NDArray[np.float32]  # [outputs] result
    top_ids: NDArray[np.int64]  # [outputs, MAX_LOGPROBS] result
    top_logprobs: NDArray[np.float32]  # [outputs, MAX_LOGPROBS] result


@kernel
def meet(barrier, team):  # type: ignore[no-untyped-def]
    """Waits until the whole team is here. Spins briefly, then yields: the team may be larger than the free cores."""
    if team == 1:
        return
    generation = load_acquire(barrier + 64)
    if fetch_add(barrier, 1) == team - 1:
        store_release(barrier, 0)
        store_release(barrier + 64, generation + 1)
        return
    spins = 0
    while load_acquire(barrier + 64) == generation:
        spins += 1
        if spins < _SPINS:
            spin_pause()
        else:
            sched_yield()


@kernel
def _norm_rows(thread, team, model, batch, x, weight, y):  # type: ignore[no-untyped-def]
    stride = 4 * model.hidden_pad
    for token in range(thread, batch.tokens, team):
        rms_norm(x + token * stride, y + token * stride, model.hidden, model.hidden_pad, weight, model.eps)


@kernel
def _shrink(thread, team, buffers, lora, batch, layer, site, sites, x, x_stride, k):  # type: ignore[no-untyped-def]
    """`shrunk[token, site · max_rank + j] = scale · A[j] · x[token]`, items dealt round robin over the team."""
    stride = 4 * sites * batch.max_rank
    k_pad = (k + LANES - 1) // LANES * LANES
    item = 0
    for segment in range(batch.segments):
        adapter = batch.segment_adapter[segment]
        end = batch.segment_first[segment] + batch.segment_tokens[segment]
        size = itemsize(lora.dtype[adapter])
        for which in range(sites):
            rank = lora.rank[adapter, layer, site + which]
            for first in range(batch.segment_first[segment], end, _SHRINK_TOKENS):
                for row in range(0, rank, RANK_GROUP):
                    item += 1
                    if item % team != thread:
                        continue
                    a = lora.a[adapter, layer, site + which] + row * k_pad * size
                    y = buffers.shrunk + first * stride + 4 * (which * batch.max_rank + row)
                    rows = min(_SHRINK_TOKENS, end - first)
                    scale = lora.scale[adapter, layer, site + which]
                    lora_shrink(lora.dtype[adapter], x + first * x_stride, x_stride, rows, a, k_pad, y, stride, scale)


@kernel
def _expand(buffers, lora, batch, layer, site, which, sites, panel, y, y_stride):  # type: ignore[no-untyped-def]
    """Adds `shrunk @ B` to one panel of outputs, segment by segment."""
    stride = 4 * sites * batch.max_rank
    for segment in range(batch.segments):
        adapter = batch.segment_adapter[segment]
        rank = lora.rank[adapter, layer, site]
        if rank == 0:
            continue
        dtype = lora.dtype[adapter]
        b = lora.b[adapter, layer, site] + panel * rank * PANEL * itemsize(dtype)
        first = batch.segment_first[segment]
        x = buffers.shrunk + first * stride + 4 * which * batch.max_rank
        panel_gemm(dtype, x, stride, batch.segment_tokens[segment], b, rank, y + first * y_stride, y_stride, True)


@kernel
def _project(model, buffers, lora, batch, layer, site, which, sites, panel, x, x_stride, k, y, y_stride, add):  # type: ignore[no-untyped-def]
    """One panel of one linear module for all tokens: base weight, bias, then the adapters."""
    w = model.weights[layer, WQ + site] + panel * k * PANEL * itemsize(model.dtype)
    panel_gemm(model.dtype, x, x_stride, batch.tokens, w, k, y, y_stride, add)
    bias = model.weights[layer, BQ + site]
    if bias != 0:
        add_bias(y, y_stride, batch.tokens, bias + 4 * panel * PANEL)
    if batch.max_rank > 0:
        _expand(buffers, lora, batch, layer, site, which, sites, panel, y, y_stride)


@kernel
def _project_qkv(thread, team, model, buffers, lora, batch, layer):  # type: ignore[no-untyped-def]
    x, x_stride = buffers.normed, 4 * model.hidden_pad
    if batch.max_rank > 0:
        _shrink(thread, team, buffers, lora, batch, layer, 0, 3, x, x_stride, model.hidden)
        meet(buffers.barrier, team)
    q_panels, kv_panels = model.q_pad // PANEL, model.kv_pad // PANEL
    panels = q_panels + 2 * kv_panels
    y_stride = 4 * PANEL * panels
    for index in range(thread * panels // team, (thread + 1) * panels // team):
        site, panel = 0, index
        if index >= q_panels:
            site, panel = 1 + (index - q_panels) // kv_panels, (index - q_panels) % kv_panels
        y = buffers.qkv + 4 * PANEL * index
        _project(
            model, buffers, lora, batch, layer, site, site, 3, panel, x, x_stride, model.hidden, y, y_stride, False
        )


@kernel
def _project_add(thread, team, model, buffers, lora, batch, layer, site, x, x_stride, k):  # type: ignore[no-untyped-def]
    """o or down: the projection of x is added to the residual stream."""
    if batch.max_rank > 0:
        _shrink(thread, team, buffers, lora, batch, layer, site, 1, x, x_stride, k)
        meet(buffers.barrier, team)
    panels = model.hidden_pad // PANEL
    for panel in range(thread * panels // team, (thread + 1) * panels // team):
        y = buffers.hidden + 4 * PANEL * panel
        _project(
            model, buffers, lora, batch, layer, site, 0, 1, panel, x, x_stride, k, y, 4 * model.hidden_pad, True
        )


@kernel
def _project_gate_up(thread, team, model, buffers, lora, batch, layer):  # type: ignore[no-untyped-def]
    x, x_stride, k = buffers.normed, 4 * model.hidden_pad, model.hidden
    if batch.max_rank > 0:
        _shrink(thread, team, buffers, lora, batch, layer, 4, 2, x, x_stride, k)
        meet(buffers.barrier, team)
    panels, stride = model.inter_pad // PANEL, 4 * model.inter_pad
    for panel in range(thread * panels // team, (thread + 1) * panels // team):
        gate, up = buffers.gate + 4 * PANEL * panel, buffers.up + 4 * PANEL * panel
        _project(model, buffers, lora, batch, layer, 4, 0, 2, panel, x, x_stride, k, gate, stride, False)
        _project(model, buffers, lora, batch, layer, 5, 1, 2, panel, x, x_stride, k, up, stride, False)
        silu_mul(gate, stride, up, stride, batch.tokens)


@kernel
def _head_address(model, cache, layer, kv_head):  # type: ignore[no-untyped-def]
    """Where block 0 of a layer and key-value head lies; later blocks are `_block_stride` further each."""
    return cache.base + 4 * 32 * model.head_dim * (layer * model.kv_heads + kv_head)


@kernel
def _block_stride(model):  # type: ignore[no-untyped-def]
    return 4 * 32 * model.head_dim * model.layers * model.kv_heads


@kernel
def _rotate_and_append(thread, team, model, buffers, cache, batch, layer):  # type: ignore[no-untyped-def]
    """Norms q and k heads where the model does, rotates them, and writes k and v to their blocks."""
    dim, stride = model.head_dim, 4 * (model.q_pad + 2 * model.kv_pad)
    q_norm, k_norm = model.weights[layer, Q_NORM], model.weights[layer, K_NORM]
    for token in range(thread, batch.tokens, team):
        row = buffers.qkv + token * stride
        position = batch.position[token]
        cos, sin = model.cos + 2 * dim * position, model.sin + 2 * dim * position
        for head in range(model.heads):
            q = row + 4 * dim * head
            if q_norm != 0:
                rms_norm(q, q, dim, dim, q_norm, model.eps)
            rotate(q, dim, cos, sin)
        block = cache.blocks[batch.slot[token], position // 16]
        for head in range(model.kv_heads):
            k = row + 4 * (model.q_pad + dim * head)
            if k_norm != 0:
                rms_norm(k, k, dim, dim, k_norm, model.eps)
            rotate(k, dim, cos, sin)
            at = _head_address(model, cache, layer, head) + block * _block_stride(model)
            append_kv(at, position, dim, k, row + 4 * (model.q_pad + model.kv_pad + dim * head))


@kernel
def _attend_item(thread, model, buffers, cache, batch, layer, kv_head, first, end):  # type: ignore[no-untyped-def]
    """Attention of the query heads that share `kv_head`, for tokens [first, end) of one row."""
    dim, group = model.head_dim, model.heads // model.kv_heads
    q_stride, out_stride = 4 * (model.q_pad + 2 * model.kv_pad), 4 * model.q_pad
    scratch = buffers.scratch + thread * buffers.scratch_stride
    base = _head_address(model, cache, layer, kv_head)
    blocks = cache.blocks[batch.slot[first]]
    count = (end - first) * group
    for query in range(0, count, TILE):
        rows = min(TILE, count - query)
        positions = (
            batch.position[first + query // group],
            batch.position[first + min(query + 1, count - 1) // group],
            batch.position[first + min(query + 2, count - 1) // group],
            batch.position[first + min(query + 3, count - 1) // group],
        )
        for row in range(rows):
            token, head = first + (query + row) // group, kv_head * group + (query + row) % group
            for d in range(0, dim, LANES):
                vstore(
                    scratch + 4 * (row * dim + d), vload(buffers.qkv + token * q_stride + 4 * (head * dim + d))
                )
        attend_tile(
            rows, positions, blocks, base, _block_stride(model), dim, model.windows[layer], model.scale, scratch
        )
        for row in range(rows):
            token, head = first + (query + row) // group, kv_head * group + (query + row) % group
            for d in range(0, dim, LANES):
                vstore(
                    buffers.attended + token * out_stride + 4 * (head * dim + d),
                    vload(scratch + 4 * (row * dim + d)),
                )


@kernel
def _attend(thread, model, buffers, cache, batch, layer):  # type: ignore[no-untyped-def]
    """Items (row, key-value head, run of tokens) go to whoever is free: their costs differ by the context length."""
    counter = buffers.counters.ctypes.data + 8 * layer
    taken = fetch_add(counter, 1)
    item = 0
    for row in range(batch.row_first.size - 1):
        for first in range(batch.row_first[row], batch.row_first[row + 1], _ATTEND_TOKENS):
            end = min(first + _ATTEND_TOKENS, batch.row_first[row + 1])
            for kv_head in range(model.kv_heads):
                if item == taken:
                    _attend_item(thread, model, buffers, cache, batch, layer, kv_head, first, end)
                    taken = fetch_add(counter, 1)
                item += 1


@kernel
def _layer(thread, team, model, buffers, lora, cache, batch, layer):  # type: ignore[no-untyped-def]
    barrier = buffers.barrier
    _norm_rows(thread, team, model, batch, buffers.hidden, model.weights[layer, ATTN_NORM], buffers.normed)
    meet(barrier, team)
    _project_qkv(thread, team, model, buffers, lora, batch, layer)
    meet(barrier, team)
    _rotate_and_append(thread, team, model, buffers, cache, batch, layer)
    meet(barrier, team)
    _attend(thread, model, buffers, cache, batch, layer)
    meet(barrier, team)
    q_dim = model.heads * model.head_dim
    _project_add(
        thread, team, model, buffers, lora, batch, layer, 3, buffers.attended, 4 * model.q_pad, q_dim
    )
    meet(barrier, team)
    _norm_rows(thread, team, model, batch, buffers.hidden, model.weights[layer, MLP_NORM], buffers.normed)
    meet(barrier, team)
    _project_gate_up(thread, team, model, buffers, lora, batch, layer)
    meet(barrier, team)
    _project_add(
        thread, team, model, buffers, lora, batch, layer, 6, buffers.gate, 4 * model.inter_pad, model.inter
    )
    meet(barrier, team)


@kernel
def _output(thread, model, buffers, cache, table, batch, index):  # type: ignore[no-untyped-def]
    """Draws or scores one output row and records it."""
    logits = buffers.logits[index, : model.vocab]
    token = batch.out_token[index]
    slot, position = batch.slot[token], batch.position[token]
    if batch.out_kind[index] == SAMPLE:
        chosen = choose(
            logits, slot, position, cache.history[slot], table, buffers.weights[thread], buffers.seen[thread]
        )
        cache.history[slot, position + 1] = chosen
    else:
        chosen = cache.history[slot, position + 1]
    batch.chosen[index] = chosen
    wanted = batch.out_logprobs[index]
    if wanted >= 0:
        norm = log_sum_exp(logits)
        batch.logprob[index] = logits[chosen] - norm
        if wanted > 0:
            ids, values = batch.top_ids[index], batch.top_logprobs[index]
            best_tokens(logits, wanted, ids, values)
            for rank in range(wanted):
                values[rank] -= norm


@kernel
def _outputs(thread, team, model, buffers, cache, table, batch):  # type: ignore[no-untyped-def]
    """Final norm of the wanted tokens, the head's panels, then one token a row."""
    stride = 4 * model.hidden_pad
    for index in range(thread, batch.outputs, team):
        x = buffers.hidden + batch.out_token[index] * stride
        rms_norm(x, buffers.normed + index * stride, model.hidden, model.hidden_pad, model.final_norm, model.eps)
    meet(buffers.barrier, team)
    panels, y_stride = model.vocab_pad // PANEL, 4 * model.vocab_pad
    for panel in range(thread * panels // team, (thread + 1) * panels // team):
        w = model.head + panel * model.hidden * PANEL * itemsize(model.dtype)
        y = buffers.logits.ctypes.data + 4 * PANEL * panel
        panel_gemm(model.dtype, buffers.normed, stride, batch.outputs, w, model.hidden, y, y_stride, False)
    meet(buffers.barrier, team)
    for index in range(thread, batch.outputs, team):
        _output(thread, model, buffers, cache, table, batch, index)


@entry
def step(thread, team, model, buffers, lora, cache, table, batch):  # type: ignore[no-untyped-def]
    """Runs one iteration as member `thread` of `team`; see the module's text for the phases."""
    for token in range(thread, batch.tokens, team):
        word = cache.history[batch.slot[token], batch.position[token]]
        y = buffers.hidden + 4 * model.hidden_pad * token
        embed(word, model.embed, model.tied, model.dtype, model.hidden, y)
    if thread == 0:
        buffers.counters[:] = 0
    meet(buffers.barrier, team)
    for layer in range(model.layers):
        _layer(thread, team, model, buffers, lora, cache, batch, layer)
    _outputs(thread, team, model, buffers, cache, table, batch)
    meet(buffers.barrier, team)
