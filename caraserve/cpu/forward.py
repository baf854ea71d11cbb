"""One iteration of the decoder over a mixed batch, fused into one compiled function.

Each thread of the team calls `step` with the same arguments and its own index; they split each phase and meet at a
barrier after it. No Python runs inside, so the event loop has the interpreter lock meanwhile.

Phases of a layer (| is a barrier): [choose sources] norm | [LoRA shrink |] q, k, v + LoRA expand | rotate, append KV |
attend | [shrink |] o + expand + residual | norm | [shrink |] gate, up + expand, silu·mul | [shrink |] down + expand +
residual |
The bracketed phases run only when the batch has an adapter, so base-only traffic pays nothing for LoRA. While an
adapter is arriving, its hand-off to CPU workers takes the place of its shrink, and adding their results that of its
expand; see compute_side.py.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL
from caraserve.core.outputs import NOT_FINITE, SAMPLE_MASKED, SCORE
from caraserve.cpu.attention import rotate_and_append
from caraserve.cpu.jit import compiled_separately, entry, kernel
from caraserve.cpu.kernels import ADD, RANK_GROUP, STORE, add_bias, copy_vector, embed, itemsize, rms_norm, silu_mul
from caraserve.cpu.libc import sched_yield
from caraserve.cpu.lora_workers.compute_side import DEVICE, note_workers, source_of, stamp
from caraserve.cpu.sampling import all_finite, best_tokens, choose, log_sum_exp, rank_of
from caraserve.cpu.simd import fetch_add, load_acquire, spin_pause, store_release
from caraserve.cpu.structs import (
    ATTN_NORM,
    BQ,
    LORA_ENTRY,
    MLP_NORM,
    NUM_WEIGHTS,
    SITE_DOWN,
    SITE_GATE,
    SITE_O,
    SITE_Q,
    SITE_UP,
    WQ,
    address_of,
    batch_at,
    buffers_at,
    cache_at,
    lora_at,
    model_at,
    word,
)
from caraserve.cpu.tiles import call_by_address

LORA_ENTRY_BYTES = LORA_ENTRY.itemsize
_call3, _call6, _call8, _call9, _call15 = (call_by_address(count) for count in (3, 6, 8, 9, 15))
_SHRINK_TOKENS = 24  # tokens of one item of shrink work, so that the team shares long prompts
_SPINS = 500  # about 12 µs of pauses before a waiting thread yields its core


@kernel
def meet(barrier, team):  # type: ignore[no-untyped-def]
    """Waits until all members of the team have called. Spins, then yields: free cores may be fewer than members."""
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
def device_entry(lora, adapter, layer, site):  # type: ignore[no-untyped-def]
    """Returns the address of a module's LORA_ENTRY in the adapter table."""
    return lora.entries + LORA_ENTRY_BYTES * ((adapter * lora.layers + layer) * 7 + site)


@kernel
def _group(site):  # type: ignore[no-untyped-def]
    """Returns the first site that reads the same input as `site`, and how many do: q, k, v | o | gate, up | down."""
    if site < SITE_O:
        return SITE_Q, 3
    if site == SITE_O:
        return SITE_O, 1
    if site < SITE_DOWN:
        return SITE_GATE, 2
    return SITE_DOWN, 1


@kernel
def padding_entry(lora, batch, segment, layer, site):  # type: ignore[no-untyped-def]
    """Returns the address of the LORA_ENTRY of zeros that pads a module; the batch has padding."""
    return batch.padding + LORA_ENTRY_BYTES * ((segment * lora.layers + layer) * 7 + site)


@kernel
def _shrink_module(thread, team, buffers, batch, segment, entry, x, x_stride, k, y, y_stride, item):  # type: ignore[no-untyped-def]
    """Computes the thread's items of one module's shrink for a segment. Returns the number of items dealt so far."""
    first, tokens = word(batch.segment_first, segment), word(batch.segment_tokens, segment)
    for start in range(0, tokens, _SHRINK_TOKENS):
        rows = min(_SHRINK_TOKENS, tokens - start)
        at, out = x + (first + start) * x_stride, y + (first + start) * y_stride
        for row in range(0, word(entry, 2), RANK_GROUP):
            item += 1
            if item % team == thread:
                _call8(buffers.lora_shrink, entry, row, at, x_stride, rows, k, out + 4 * row, y_stride)
    return item


@kernel
def _shrink(thread, team, model, buffers, lora, batch, layer, site, x, x_stride, k):  # type: ignore[no-untyped-def]
    """`shrunk[token, site · max_rank + j] = scale · A[j] · x[token]`, items dealt round robin over the team; layers
    that have not arrived are handed off instead."""
    _, sites = _group(site)
    if batch.arriving != 0 and thread == 0:
        _call9(
            buffers.hand_off,
            *(address_of(model), address_of(lora), address_of(batch)),
            *(layer, site, sites, x, x_stride, k),
        )
    item, y_stride = np.int64(0), 4 * sites * batch.max_rank
    for segment in range(batch.segments):
        if source_of(batch, layer, segment) != DEVICE:
            continue
        for which in range(sites):
            entry = device_entry(lora, word(batch.segment_adapter, segment), layer, site + which)
            y = buffers.shrunk + 4 * which * batch.max_rank
            item = _shrink_module(thread, team, buffers, batch, segment, entry, x, x_stride, k, y, y_stride, item)
            if batch.padding != 0:
                y += 4 * word(entry, 2)
                entry = padding_entry(lora, batch, segment, layer, site + which)
                item = _shrink_module(thread, team, buffers, batch, segment, entry, x, x_stride, k, y, y_stride, item)


@kernel
def _expand(thread, model, buffers, lora, batch, layer, site, x, x_stride, k, first, end, y, y_stride):  # type: ignore[no-untyped-def]
    """Adds `x A B` to the output panels [first, end) of a module, segment by segment."""
    group, sites = _group(site)
    stride = 4 * sites * batch.max_rank
    for segment in range(batch.segments):
        entry = device_entry(lora, word(batch.segment_adapter, segment), layer, site)
        if word(entry, 2) == 0:
            continue
        if source_of(batch, layer, segment) != DEVICE:
            _call15(
                buffers.add_deltas,
                *(thread, address_of(model), address_of(buffers), address_of(lora), address_of(batch)),
                *(layer, site, segment, x, x_stride, k, first, end, y, y_stride),
            )
        else:
            at = word(batch.segment_first, segment)
            shrunk = buffers.shrunk + at * stride + 4 * (site - group) * batch.max_rank
            rows, out = word(batch.segment_tokens, segment), y + at * y_stride
            _call9(buffers.lora_expand, entry, shrunk, stride, rows, first, end, out, y_stride, ADD)
            if batch.padding != 0:
                shrunk += 4 * word(entry, 2)
                entry = padding_entry(lora, batch, segment, layer, site)
                _call9(buffers.lora_expand, entry, shrunk, stride, rows, first, end, out, y_stride, ADD)


@kernel
def _project(thread, model, buffers, lora, batch, layer, site, first, end, x, x_stride, k, y, y_stride, add):  # type: ignore[no-untyped-def]
    """Computes the output panels [first, end) of one linear module for all tokens: base weight, bias, then adapters."""
    weight = word(model.weights, NUM_WEIGHTS * layer + WQ + site)
    bias = word(model.weights, NUM_WEIGHTS * layer + BQ + site)
    for panel in range(first, end):
        w, at = weight + panel * k * PANEL * itemsize(model.dtype), y + 4 * PANEL * panel
        _call9(buffers.panel_gemm, model.dtype, x, x_stride, batch.tokens, w, k, at, y_stride, add)
        if bias != 0:
            add_bias(at, y_stride, batch.tokens, bias + 4 * panel * PANEL)
    if batch.max_rank > 0 and first < end:
        _expand(thread, model, buffers, lora, batch, layer, site, x, x_stride, k, first, end, y, y_stride)


@kernel
def _project_qkv(thread, team, model, buffers, lora, batch, layer):  # type: ignore[no-untyped-def]
    x, x_stride = buffers.normed, 4 * model.hidden_pad
    if batch.max_rank > 0:
        _shrink(thread, team, model, buffers, lora, batch, layer, SITE_Q, x, x_stride, model.hidden)
        meet(buffers.barrier, team)
    q_panels, kv_panels = model.q_pad // PANEL, model.kv_pad // PANEL
    panels = q_panels + 2 * kv_panels
    y_stride = 4 * PANEL * panels
    before = np.int64(0)  # panels of the preceding modules
    for site in range(SITE_Q, SITE_O):
        count = q_panels if site == SITE_Q else kv_panels
        first, end = max(thread * panels // team - before, 0), min((thread + 1) * panels // team - before, count)
        y = buffers.qkv + 4 * PANEL * before
        _project(
            thread,
            model,
            buffers,
            lora,
            batch,
            layer,
            site,
            first,
            end,
            x,
            x_stride,
            model.hidden,
            y,
            y_stride,
            STORE,
        )
        before += count


@kernel
def _project_add(thread, team, model, buffers, lora, batch, layer, site, x, x_stride, k):  # type: ignore[no-untyped-def]
    """Adds the projection of x, by o or down, to the residual stream."""
    if batch.max_rank > 0:
        _shrink(thread, team, model, buffers, lora, batch, layer, site, x, x_stride, k)
        meet(buffers.barrier, team)
    panels, y, y_stride = model.hidden_pad // PANEL, buffers.hidden, 4 * model.hidden_pad
    first, end = thread * panels // team, (thread + 1) * panels // team
    _project(thread, model, buffers, lora, batch, layer, site, first, end, x, x_stride, k, y, y_stride, ADD)


@kernel
def _project_gate_up(thread, team, model, buffers, lora, batch, layer):  # type: ignore[no-untyped-def]
    x, x_stride, k = buffers.normed, 4 * model.hidden_pad, model.hidden
    if batch.max_rank > 0:
        _shrink(thread, team, model, buffers, lora, batch, layer, SITE_GATE, x, x_stride, k)
        meet(buffers.barrier, team)
    panels, stride = model.inter_pad // PANEL, 4 * model.inter_pad
    first, end = thread * panels // team, (thread + 1) * panels // team
    _project(
        thread, model, buffers, lora, batch, layer, SITE_GATE, first, end, x, x_stride, k, buffers.gate, stride, STORE
    )
    _project(thread, model, buffers, lora, batch, layer, SITE_UP, first, end, x, x_stride, k, buffers.up, stride, STORE)
    for panel in range(first, end):
        silu_mul(buffers.gate + 4 * PANEL * panel, stride, buffers.up + 4 * PANEL * panel, stride, batch.tokens)


@compiled_separately(8)
def decoder_layer(  # type: ignore[no-untyped-def]
    thread, team, model_address, buffers_address, lora_address, cache_address, batch_address, layer
):  # fmt: skip
    """Computes one layer as member `thread` of `team`."""
    model, buffers, lora = model_at(model_address), buffers_at(buffers_address), lora_at(lora_address)
    cache, batch = cache_at(cache_address), batch_at(batch_address)
    barrier = buffers.barrier
    if thread == 0:
        stamp(lora, batch, layer)
        if batch.arriving != 0:
            _call3(buffers.choose_sources, address_of(lora), address_of(batch), layer)
    _norm_rows(
        thread, team, model, batch, buffers.hidden, word(model.weights, NUM_WEIGHTS * layer + ATTN_NORM), buffers.normed
    )
    meet(barrier, team)
    _project_qkv(thread, team, model, buffers, lora, batch, layer)
    meet(barrier, team)
    note_workers(thread, lora, batch, layer, 0)
    rotate_and_append(thread, team, model, buffers, cache, batch, layer)
    meet(barrier, team)
    _call6(buffers.attend, thread, model_address, buffers_address, cache_address, batch_address, layer)
    meet(barrier, team)
    q_dim = model.heads * model.head_dim
    _project_add(thread, team, model, buffers, lora, batch, layer, SITE_O, buffers.attended, 4 * model.q_pad, q_dim)
    meet(barrier, team)
    note_workers(thread, lora, batch, layer, 1)
    _norm_rows(
        thread, team, model, batch, buffers.hidden, word(model.weights, NUM_WEIGHTS * layer + MLP_NORM), buffers.normed
    )
    meet(barrier, team)
    _project_gate_up(thread, team, model, buffers, lora, batch, layer)
    meet(barrier, team)
    note_workers(thread, lora, batch, layer, 2)
    _project_add(
        thread, team, model, buffers, lora, batch, layer, SITE_DOWN, buffers.gate, 4 * model.inter_pad, model.inter
    )
    meet(barrier, team)
    note_workers(thread, lora, batch, layer, 3)


class Sampler(NamedTuple):
    """The inputs and results of choosing tokens. Arrays and not addresses, because few functions take it."""

    table: NDArray[np.void]  # SLOT_SAMPLING [slots]
    masks: NDArray[np.uint32]  # [slots, mask words], of rows with a matcher; another thread writes them meanwhile
    masks_written: NDArray[np.int64]  # [1] 1 once they are written
    logits: NDArray[np.float32]  # [outputs, vocab_pad]
    copies: NDArray[np.float32]  # [threads, vocab]
    seen: NDArray[np.uint8]  # [threads, vocab]
    history: NDArray[np.int64]  # [slots, max_history]
    chosen: NDArray[np.int64]  # [outputs] token drawn or scored, or NOT_FINITE
    logprob: NDArray[np.float32]  # [outputs]
    rank: NDArray[np.int64]  # [outputs], of scored tokens
    top_ids: NDArray[np.int64]  # [outputs, most alternatives]
    top_logprobs: NDArray[np.float32]  # [outputs, most alternatives]


@kernel
def _output(thread, model, sampler, batch, index):  # type: ignore[no-untyped-def]
    """Draws or scores one output row and records it."""
    logits = sampler.logits[index, : model.vocab]
    token = word(batch.out_token, index)
    slot, position = word(batch.slot, token), word(batch.position, token)
    history = sampler.history[slot]
    kind = word(batch.out_kind, index)
    if kind != SCORE:
        mask_size = 0
        if kind == SAMPLE_MASKED:
            mask_size = sampler.masks.shape[1]
            while load_acquire(sampler.masks_written.ctypes.data) == 0:
                sched_yield()
        history[position + 1] = choose(
            logits,
            position,
            history,
            sampler.table[slot],
            sampler.copies[thread],
            sampler.seen[thread],
            sampler.masks[slot, :mask_size],
        )
    chosen = history[position + 1]  # always a valid token: the next iteration is launched already and reads it
    if not all_finite(logits):
        sampler.chosen[index] = NOT_FINITE
        return
    sampler.chosen[index] = chosen
    wanted = word(batch.out_logprobs, index)
    if wanted >= 0:
        norm = log_sum_exp(logits)
        sampler.logprob[index] = logits[chosen] - norm
        if kind == SCORE:
            sampler.rank[index] = rank_of(logits, chosen)
        if wanted > 0:
            best_tokens(logits, wanted, sampler.top_ids[index], sampler.top_logprobs[index])
            for rank in range(wanted):
                sampler.top_logprobs[index, rank] -= norm


@kernel
def _logits(thread, team, model, buffers, batch, logits):  # type: ignore[no-untyped-def]
    """Computes the logits of the batch's outputs: final norm, then the head's panels. Embeddings are normed only."""
    stride = 4 * model.hidden_pad
    for index in range(thread, batch.outputs + batch.embeddings, team):
        x = buffers.hidden + word(batch.out_token, index) * stride
        rms_norm(x, buffers.normed + index * stride, model.hidden, model.hidden_pad, model.final_norm, model.eps)
    meet(buffers.barrier, team)
    panels = model.vocab_pad // PANEL
    for panel in range(thread * panels // team, (thread + 1) * panels // team):
        w = model.head + panel * model.hidden * PANEL * itemsize(model.dtype)
        y = logits + 4 * PANEL * panel
        _call9(
            buffers.panel_gemm,
            model.dtype,
            buffers.normed,
            stride,
            batch.outputs,
            w,
            model.hidden,
            y,
            4 * model.vocab_pad,
            STORE,
        )
    meet(buffers.barrier, team)


@kernel
def _embed_tokens(thread, team, model, buffers, cache, batch):  # type: ignore[no-untyped-def]
    if batch.first_layer == 0:
        for token in range(thread, batch.tokens, team):
            place = cache.max_history * word(batch.slot, token) + word(batch.position, token)
            y = buffers.hidden + 4 * model.hidden_pad * token
            token_id = word(cache.history, place)
            if token_id >= 0:
                embed(token_id, model.embed, model.tied, model.dtype, model.hidden, y)
            else:
                vectors = word(cache.prompt_embeds, word(batch.slot, token))
                copy_vector(vectors + 4 * model.hidden * (-1 - token_id), model.hidden, y)
    for layer in range(thread, model.layers, team):
        store_release(buffers.counters + 8 * layer, 0)
    meet(buffers.barrier, team)


@entry
def step(thread, team, models, buffer_sets, loras, caches, batches, sampler):  # type: ignore[no-untyped-def]
    """Runs one iteration, or the layers of it that the batch names, as member `thread` of `team`.

    Tokens are chosen after the last layer. The module's docstring lists the phases.
    """
    model, buffers, lora = models[0], buffer_sets[0], loras[0]
    cache, batch = caches[0], batches[0]
    first_layer, end_layer = batch.first_layer, batch.end_layer
    _embed_tokens(thread, team, model, buffers, cache, batch)
    for layer in range(first_layer, end_layer):
        _call8(
            buffers.decoder_layer,
            *(thread, team, address_of(model), address_of(buffers), address_of(lora)),
            *(address_of(cache), address_of(batch), layer),
        )
    if thread == 0:
        stamp(lora, batch, end_layer)
    if end_layer == model.layers:
        _logits(thread, team, model, buffers, batch, sampler.logits.ctypes.data)
        for index in range(thread, batch.outputs, team):
            _output(thread, model, sampler, batch, index)
    meet(buffers.barrier, team)
