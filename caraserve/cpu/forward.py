"""One iteration of the decoder over a mixed batch, fused into one compiled function.

Each thread of the team calls `step` with the same arguments and its own index; they split each phase and meet at a
barrier after it. No Python runs inside, so the event loop has the interpreter lock meanwhile.

What is computed are the records of `structs.py`: layers of blocks, and blocks of two groups of projections around a
body. Phases of a block (| is a barrier): [choose sources] the block before to the stream, norm | [LoRA shrink |]
project + LoRA expand, activation | rotate, append KV | attend | [shrink |] project + expand, to the stream or apart |
A delta net convolves before the barrier of its projection, and has recurrence | in place of attention's phases.
A mixture of experts has route | before the second projection, if it has one, and after it experts.py's own phases.
The bracketed phases run only when the batch has an adapter, so base-only traffic pays nothing for LoRA. Weights in
bfloat16, and some formats, read prepared rows: those of a norm are prepared with it, those of a second projection
before a barrier, which is that of the shrink if there is one. So a layer of attention and MLP has 8 barriers, 10 with
prepared rows, and 12 with adapters. While an
adapter is arriving, its hand-off to CPU workers takes the place of its shrink, and adding their results that of its
expand; see compute_side.py.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL
from caraserve.core.outputs import NOT_FINITE, SAMPLE_MASKED, SCORE, VERIFY
from caraserve.cpu.barrier import meet
from caraserve.cpu.jit import compiled_separately, entry, kernel
from caraserve.cpu.kernels import ADD, RANK_GROUP, STORE
from caraserve.cpu.layers import (
    activate,
    add_scaled,
    add_vector,
    apply_vectors,
    cap_logits,
    copy_vector,
    embed,
    move_panels,
)
from caraserve.cpu.libc import sched_yield
from caraserve.cpu.lora_workers.compute_side import DEVICE, host_entry, note_workers, source_of, stamp
from caraserve.cpu.products import prepare_rows, project_panels, wants_prepared
from caraserve.cpu.sampling import all_finite, best_tokens, choose, log_sum_exp, rank_of
from caraserve.cpu.simd import load_acquire, store_release
from caraserve.cpu.structs import (
    ATTENTION,
    BLOCK,
    DELTA_NET,
    ENTRY_VECTORS,
    LAYER,
    LORA_ENTRY,
    MLP,
    MOE,
    NO_COLUMN,
    address_of,
    attention_at,
    batch_at,
    block_at,
    buffers_at,
    delta_net_at,
    group_at,
    layer_at,
    lora_at,
    mlp_at,
    model_at,
    moe_at,
    site_address,
    site_at,
    word,
)
from caraserve.cpu.tiles import call_by_address
from caraserve.cpu.vocabulary import change_embedding, change_logits, multiply_by_head

LORA_ENTRY_BYTES, _LAYER_BYTES, _BLOCK_BYTES = (np.int64(kind.itemsize) for kind in (LORA_ENTRY, LAYER, BLOCK))
_call3, _call4, _call6, _call7 = (call_by_address(count) for count in (3, 4, 6, 7))
_call8, _call9, _call14 = (call_by_address(count) for count in (8, 9, 14))
_SHRINK_TOKENS = 24  # tokens of one item of shrink work, so that the team shares long prompts


# --- LoRA ---


@kernel
def device_entry(lora, adapter, layer, site):  # type: ignore[no-untyped-def]
    """Returns the address of a site's LORA_ENTRY in the adapter table."""
    return lora.entries + LORA_ENTRY_BYTES * ((adapter * lora.layers + layer) * lora.most_sites + site)


@kernel
def padding_entry(lora, batch, segment, layer, site):  # type: ignore[no-untyped-def]
    """Returns the address of the LORA_ENTRY of zeros that pads a site; the batch has padding."""
    return batch.padding + LORA_ENTRY_BYTES * ((segment * lora.layers + layer) * lora.most_sites + site)


@kernel
def _shrink_site(thread, team, buffers, batch, segment, entry, x, x_stride, inputs, y, y_stride, item):  # type: ignore[no-untyped-def]
    """Computes the thread's items of one site's shrink for a segment. Returns the number of items dealt so far."""
    first, tokens = word(batch.segment_first, segment), word(batch.segment_tokens, segment)
    for start in range(0, tokens, _SHRINK_TOKENS):
        rows = min(_SHRINK_TOKENS, tokens - start)
        at, out = x + (first + start) * x_stride, y + (first + start) * y_stride
        for row in range(0, word(entry, 2), RANK_GROUP):
            item += 1
            if item % team == thread:
                _call8(buffers.lora_shrink, entry, row, at, x_stride, rows, inputs, out + 4 * row, y_stride)
    return item


@kernel
def _shrink(thread, team, model, buffers, lora, batch, group, x, x_stride):  # type: ignore[no-untyped-def]
    """`shrunk[token, site · max_rank + j] = scale · A[j] · x[token]`, items dealt round robin over the team; layers
    that have not arrived are handed off instead."""
    if batch.arriving != 0 and thread == 0:
        _call6(
            buffers.hand_off,
            *(address_of(model), address_of(lora), address_of(batch)),
            *(address_of(group), x, x_stride),
        )
    layer = group.layer
    item, y_stride = np.int64(0), 4 * group.sites * batch.max_rank
    for segment in range(batch.segments):
        if source_of(batch, layer, segment) != DEVICE:
            continue
        for which in range(group.sites):
            site = group.first_site + which
            entry = device_entry(lora, word(batch.segment_adapter, segment), layer, site)
            y = buffers.shrunk + 4 * which * batch.max_rank
            item = _shrink_site(
                thread, team, buffers, batch, segment, entry, x, x_stride, group.inputs, y, y_stride, item
            )
            if batch.padding != 0:
                y += 4 * word(entry, 2)
                entry = padding_entry(lora, batch, segment, layer, site)
                item = _shrink_site(
                    thread, team, buffers, batch, segment, entry, x, x_stride, group.inputs, y, y_stride, item
                )


@kernel
def _set_aside(buffers, lora, batch, group, which, first, end, y, y_stride):  # type: ignore[no-untyped-def]
    """Moves the residual stream at the output panels [first, end) of a site to `added`, for segments whose adapter has
    vectors: their factors are for the module's own outputs, which are then added to zeros."""
    for segment in range(batch.segments):
        adapter = word(batch.segment_adapter, segment)
        if word(device_entry(lora, adapter, group.layer, group.first_site + which), ENTRY_VECTORS) != 0:
            at, rows = y + word(batch.segment_first, segment) * y_stride, word(batch.segment_tokens, segment)
            move_panels(at, first, end, y_stride, rows, at - buffers.hidden + buffers.added)


@kernel
def _apply_vectors(buffers, lora, batch, group, which, segment, panels, first, end, y, y_stride, add):  # type: ignore[no-untyped-def]
    """Applies the factors and biases of a segment's adapter to the output panels [first, end) of a site, and adds the
    residual stream that was set aside."""
    adapter, layer, site = word(batch.segment_adapter, segment), group.layer, group.first_site + which
    entry = device_entry(lora, adapter, layer, site)
    if word(entry, ENTRY_VECTORS) == 0:
        return
    if source_of(batch, layer, segment) != DEVICE:
        entry = host_entry(lora, adapter, layer, site)
    at = y + word(batch.segment_first, segment) * y_stride
    residual = at - buffers.hidden + buffers.added if add == ADD else np.int64(0)
    rows, vectors = word(batch.segment_tokens, segment), word(entry, ENTRY_VECTORS)
    apply_vectors(vectors, PANEL * panels, first, end, at, y_stride, rows, residual)


@kernel
def _expand(thread, model, buffers, lora, batch, group, which, x, x_stride, panels, first, end, y, y_stride, add):  # type: ignore[no-untyped-def]
    """Adds `x A B` to the output panels [first, end) of a site, segment by segment, and applies adapters' vectors.
    `panels`: of the site; `add`: whether y is the residual stream."""
    layer, site, stride = group.layer, group.first_site + which, 4 * group.sites * batch.max_rank
    for segment in range(batch.segments):
        entry = device_entry(lora, word(batch.segment_adapter, segment), layer, site)
        if word(entry, 2) == 0:
            continue
        if source_of(batch, layer, segment) != DEVICE:
            _call14(
                buffers.add_deltas,
                *(thread, address_of(model), address_of(buffers), address_of(lora), address_of(batch)),
                *(address_of(group), which, segment, x, x_stride, first, end, y, y_stride),
            )
        else:
            at = word(batch.segment_first, segment)
            shrunk = buffers.shrunk + at * stride + 4 * which * batch.max_rank
            rows, out = word(batch.segment_tokens, segment), y + at * y_stride
            _call9(buffers.lora_expand, entry, shrunk, stride, rows, first, end, out, y_stride, ADD)
            if batch.padding != 0:
                shrunk += 4 * word(entry, 2)
                entry = padding_entry(lora, batch, segment, layer, site)
                _call9(buffers.lora_expand, entry, shrunk, stride, rows, first, end, out, y_stride, ADD)
        _apply_vectors(buffers, lora, batch, group, which, segment, panels, first, end, y, y_stride, add)


# --- projections ---


@kernel
def _prepare(thread, team, buffers, sites, count, x, x_stride, rows):  # type: ignore[no-untyped-def]
    """Prepares the thread's part of x[rows] for `count` SITE records at `sites`."""
    first, end = thread * rows // team, (thread + 1) * rows // team
    stride = buffers.prepared_bytes
    prepare_rows(sites, count, x + first * x_stride, x_stride, end - first, buffers.prepared + first * stride, stride)


@compiled_separately(14)
def project(  # type: ignore[no-untyped-def]
    thread, team, model_address, buffers_address, lora_address, batch_address, group_address,
    kind, x, x_stride, y, y_stride, add, prepares,
):  # fmt: skip
    """Computes a group of projections of all tokens, with their adapters. Each thread computes as many panels as
    others: of the group, or of each site in a block of kind MLP. `prepares`: whether x has not been prepared yet."""
    model, buffers, lora = model_at(model_address), buffers_at(buffers_address), lora_at(lora_address)
    batch, group = batch_at(batch_address), group_at(group_address)
    prepared, prepared_stride = buffers.prepared, buffers.prepared_bytes
    sites = site_address(model, group.layer, group.first_site)
    is_preparing = prepares != 0 and wants_prepared(sites, group.sites)
    if is_preparing:
        _prepare(thread, team, buffers, sites, group.sites, x, x_stride, batch.tokens)
    if batch.max_rank > 0:
        _shrink(thread, team, model, buffers, lora, batch, group, x, x_stride)
    if is_preparing or batch.max_rank > 0:
        meet(buffers.barrier, team)
    before = np.int64(0)  # panels of the preceding sites
    for which in range(group.sites):
        address = site_address(model, group.layer, group.first_site + which)
        site = site_at(address)
        panels, start = (site.panels, np.int64(0)) if kind == MLP else (group.panels, before)
        first = max(thread * panels // team - start, 0)
        end = min((thread + 1) * panels // team - start, site.panels)
        out = y + site.column
        if batch.max_rank > 0 and add == ADD:
            _set_aside(buffers, lora, batch, group, which, first, end, out, y_stride)
        rows = batch.tokens
        project_panels(address, x, x_stride, prepared, prepared_stride, rows, first, end, out, y_stride, add)
        if batch.max_rank > 0 and first < end:
            _expand(
                *(thread, model, buffers, lora, batch, group, which, x, x_stride),
                *(site.panels, first, end, out, y_stride, add),
            )
        before += site.panels


# --- blocks ---


@kernel
def _update_rows(thread, team, model, buffers, batch, before, block):  # type: ignore[no-untyped-def]
    """Adds the output of the block before to the stream, and normalises the stream to the rows that a block reads,
    which are prepared at once for its first projections.

    `before`, `block`: addresses of BLOCK records; 0: nothing to add, or no rows wanted.
    """
    stride = 4 * model.hidden_pad
    for token in range(thread, batch.tokens, team):
        stream = buffers.hidden + token * stride
        if before != 0:
            done = block_at(before)
            added = buffers.added + token * stride
            if done.adds_directly == 0:
                if done.post != 0:
                    _call4(buffers.normalise, done.post, added, added, 0)
                add_scaled(added, model.hidden_pad, done.multiplier, done.scalar, stream)
        if block != 0:
            rows, pre = buffers.normed + token * stride, block_at(block).pre
            if pre != 0:
                _call4(buffers.normalise, pre, stream, rows, 0)
            else:
                copy_vector(stream, model.hidden, rows)
            group, prepared = group_at(block_at(block).group_in), buffers.prepared + token * buffers.prepared_bytes
            sites = site_address(model, group.layer, group.first_site)
            prepare_rows(sites, group.sites, rows, stride, 1, prepared, buffers.prepared_bytes)


@kernel
def _is_pending(block):  # type: ignore[no-untyped-def]
    """Returns whether the output of the block at an address, or 0, has not been added to the stream."""
    return block != 0 and block_at(block).adds_directly == 0


@kernel
def _last_block(model, layer):  # type: ignore[no-untyped-def]
    """Returns the address of a layer's last BLOCK record."""
    record = layer_at(model.layer + _LAYER_BYTES * layer)
    return record.block + _BLOCK_BYTES * (record.blocks - 1)


@compiled_separately(8)
def decoder_layer(  # type: ignore[no-untyped-def]
    thread, team, model_address, buffers_address, lora_address, cache_address, batch_address, layer
):  # fmt: skip
    """Computes one layer as member `thread` of `team`. What its last block adds may be left to the next layer."""
    model, buffers, lora = model_at(model_address), buffers_at(buffers_address), lora_at(lora_address)
    batch, barrier = batch_at(batch_address), buffers.barrier
    if thread == 0:
        stamp(lora, batch, layer)
        if batch.arriving != 0:
            _call3(buffers.choose_sources, lora_address, batch_address, layer)
    record = layer_at(model.layer + _LAYER_BYTES * layer)
    before = _last_block(model, layer - 1) if layer > batch.first_layer else np.int64(0)
    stride = 4 * model.hidden_pad
    for index in range(record.blocks):
        address = record.block + _BLOCK_BYTES * index
        block = block_at(address)
        reader = np.int64(0) if block.keeps_rows else address
        if reader != 0 or _is_pending(before):
            _update_rows(thread, team, model, buffers, batch, before, reader)
            meet(barrier, team)
        rows, row_bytes = buffers.projected, group_at(block.group_in).row_bytes
        _call14(
            buffers.project,
            *(thread, team, model_address, buffers_address, lora_address, batch_address, block.group_in),
            *(block.kind, buffers.normed, stride, rows, row_bytes, STORE, block.keeps_rows),
        )
        if block.kind == ATTENTION:
            meet(barrier, team)
            note_workers(thread, lora, batch, group_at(block.group_in))
            places = buffers_address, cache_address, batch_address, block.body
            _call7(buffers.append, thread, team, *places, row_bytes)
            meet(barrier, team)
            _call7(buffers.attend, thread, *places, row_bytes, layer)
            meet(barrier, team)
            x = rows + attention_at(block.body).q
        elif block.kind == MOE:
            meet(barrier, team)
            note_workers(thread, lora, batch, group_at(block.group_in))
            _call6(buffers.route, thread, team, buffers_address, batch_address, block.body, row_bytes)
            shared = moe_at(block.body).shared
            x = rows if shared == 0 else rows + mlp_at(shared).gate
        elif block.kind == DELTA_NET:  # each thread convolves the panels that it has projected
            given = thread, team, buffers_address, cache_address, batch_address, block.body
            _call8(buffers.convolve, *given, group_at(block.group_in).panels, row_bytes)
            meet(barrier, team)
            note_workers(thread, lora, batch, group_at(block.group_in))
            _call8(buffers.recur, *given, row_bytes, layer)
            meet(barrier, team)
            x = rows + delta_net_at(block.body).z
        else:  # each thread has the same panels of gate and up, so that it needs no barrier before the activation
            mlp = mlp_at(block.body)
            panels = mlp.panels
            for panel in range(thread * panels // team, (thread + 1) * panels // team):
                activate(mlp, rows, row_bytes, batch.tokens, panel)
            meet(barrier, team)
            note_workers(thread, lora, batch, group_at(block.group_in))
            x = rows + (mlp.up if mlp.gate == NO_COLUMN else mlp.gate)
        y, add = (buffers.hidden, ADD) if block.adds_directly else (buffers.added, STORE)
        if block.group_out != 0:
            _call14(
                buffers.project,
                *(thread, team, model_address, buffers_address, lora_address, batch_address, block.group_out),
                *(block.kind, x, row_bytes, y, stride, add, 1),
            )
            add = ADD
        meet(barrier, team)
        if block.group_out != 0:
            note_workers(thread, lora, batch, group_at(block.group_out))
        if block.kind == MOE:
            _call8(buffers.mix, thread, team, model_address, buffers_address, batch_address, block.body, y, add)
        before = address


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
    kind, chosen = word(batch.out_kind, index), history[position + 1]
    if kind != SCORE:
        mask_size = 0
        if kind == SAMPLE_MASKED:
            mask_size = sampler.masks.shape[1]
            while load_acquire(sampler.masks_written.ctypes.data) == 0:
                sched_yield()
        chosen = choose(
            logits,
            position,
            history,
            sampler.table[slot],
            sampler.copies[thread],
            sampler.seen[thread],
            sampler.masks[slot, :mask_size],
        )
        if kind != VERIFY:  # its draft is there, which other threads may be reading
            history[position + 1] = chosen  # always a valid token: the next iteration is launched already and reads it
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
def _logits(thread, team, model, buffers, lora, batch, logits):  # type: ignore[no-untyped-def]
    """Computes the logits of the batch's outputs: final norm, then the head's panels. Embeddings are normed only."""
    stride, y_stride = 4 * model.hidden_pad, 4 * model.vocab_pad
    for index in range(thread, batch.outputs + batch.embeddings, team):
        x = buffers.hidden + word(batch.out_token, index) * stride
        row = buffers.normed + index * stride
        _call4(buffers.normalise, model.final, x, row, 0)
        if index < batch.outputs:
            prepared = buffers.prepared + index * buffers.prepared_bytes
            prepare_rows(model.head, 1, row, stride, 1, prepared, buffers.prepared_bytes)
    meet(buffers.barrier, team)
    if batch.vocabulary != 0:
        multiply_by_head(thread, team, model, buffers, lora, batch, buffers.normed, stride)
        meet(buffers.barrier, team)
    panels = model.vocab_pad // PANEL
    first, end = thread * panels // team, (thread + 1) * panels // team
    project_panels(
        *(model.head, buffers.normed, stride, buffers.prepared, buffers.prepared_bytes, batch.outputs),
        *(first, end, logits, y_stride, STORE),
    )
    if batch.vocabulary != 0:
        change_logits(model, buffers, lora, batch, first, end, logits, y_stride)
    if model.logit_scale != np.float32(1.0) or model.logit_cap != np.float32(0.0):
        for row in range(batch.outputs):
            at = logits + row * y_stride + 4 * PANEL * first
            cap_logits(at, PANEL * (end - first), model.logit_scale, model.logit_cap)
    meet(buffers.barrier, team)


@kernel
def _embed_tokens(thread, team, model, buffers, lora, cache, batch):  # type: ignore[no-untyped-def]
    if batch.first_layer == 0:
        for token in range(thread, batch.tokens, team):
            slot, position = word(batch.slot, token), word(batch.position, token)
            y = buffers.hidden + 4 * model.hidden_pad * token
            token_id = word(cache.history, cache.max_history * slot + position)
            if token_id >= 0:
                embed(token_id, model, y)
                if batch.vocabulary != 0:
                    change_embedding(model, buffers, lora, batch, token, token_id, y)
            else:  # taken as it is, without the embedding's factor
                vectors = word(cache.prompt_embeds, slot)
                copy_vector(vectors + 4 * model.hidden * (-1 - token_id), model.hidden, y)
            if model.positions != 0:
                add_vector(model.positions + 4 * model.hidden * position, model.hidden, y)
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
    _embed_tokens(thread, team, model, buffers, lora, cache, batch)
    for layer in range(first_layer, end_layer):
        _call8(
            buffers.decoder_layer,
            *(thread, team, address_of(model), address_of(buffers), address_of(lora)),
            *(address_of(cache), address_of(batch), layer),
        )
    if end_layer > first_layer and _is_pending(_last_block(model, end_layer - 1)):
        _update_rows(thread, team, model, buffers, batch, _last_block(model, end_layer - 1), np.int64(0))
        meet(buffers.barrier, team)
    if thread == 0:
        stamp(lora, batch, end_layer)
    if end_layer == model.layers:
        _logits(thread, team, model, buffers, lora, batch, sampler.logits.ctypes.data)
        for index in range(thread, batch.outputs, team):
            _output(thread, model, sampler, batch, index)
    meet(buffers.barrier, team)
