"""The caller's side of hand-offs to CPU LoRA workers: layers whose weights have not arrived yet. Toppings §4.

The team decides when it reaches a layer, not when the iteration was launched, between waiting for the weights and
handing the layer off; a layer that has arrived by then is computed on the device. Member 0 decides and hands off; all
members add the results.
"""

import numpy as np
from numba import types

from caraserve.core.lora_layout import MAX_RANK, PANEL
from caraserve.cpu import handoff as shared
from caraserve.cpu.jit import compiled_separately, kernel
from caraserve.cpu.kernels import ADD, RANK_GROUP
from caraserve.cpu.libc import now_ns, sched_yield, wake
from caraserve.cpu.simd import (
    DTYPE_F32,
    LANES,
    fence,
    fetch_add,
    load_acquire,
    spin_pause,
    store_i64,
    store_release,
    vadd,
    vload,
    vstore,
)
from caraserve.cpu.structs import (
    LORA_ENTRY,
    LOST,
    batch_at,
    buffers_at,
    group_at,
    lora_at,
    model_at,
    site_address,
    site_at,
    word,
)
from caraserve.cpu.tiles import call_by_address

DEVICE, WORKERS, HOST = (
    np.int64(0),
    np.int64(1),
    np.int64(2),
)  # where a layer's LoRA is computed; HOST: by the team, from the host cache, because the load failed

# A slice of the current hand-off, for the members that wait: worker, number, incarnation, first token, tokens, deltas.
PIECE_WORDS = 6
NOT_SENT = np.int64(-1)  # number and incarnation of a slice that its worker never got
_PIECE_BYTES = np.int64(8 * PIECE_WORDS)
_TIMEOUT_NS = np.int64(10_000_000)  # without progress; then the caller computes the slice itself
_PAUSES, _YIELDS, _SLEEP_US = 400, 100, np.uint32(40)
_ENTRY_BYTES = np.int64(LORA_ENTRY.itemsize)
_SITE_BYTES, _SLICE_BYTES = np.int64(shared.SITE_BYTES), np.int64(shared.SLICE_BYTES)
_COUNTER_BYTES = np.int64(8 * shared.COUNTER_WORDS)
REDO_BYTES = 4 * shared.BLOCK_TOKENS * MAX_RANK + 64  # and a timespec
_call8, _call9 = call_by_address(8), call_by_address(9)
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@kernel
def host_entry(lora, adapter, layer, site):  # type: ignore[no-untyped-def]
    """Returns the address of a site's LORA_ENTRY over the host cache."""
    return lora.host_entries + _ENTRY_BYTES * ((adapter * lora.layers + layer) * lora.most_sites + site)


@kernel
def source_of(batch, layer, segment):  # type: ignore[no-untyped-def]
    """Returns where the LoRA of a segment is computed in a layer: DEVICE, WORKERS or HOST."""
    if batch.arriving == 0:
        return DEVICE
    return word(batch.sources, layer * batch.segments + segment)


@kernel
def clock(lora, thread):  # type: ignore[no-untyped-def]
    return lora.redo + (thread + 1) * lora.redo_bytes - 64


@kernel
def stamp(lora, batch, layer):  # type: ignore[no-untyped-def]
    """Records when a layer begins. For member 0."""
    if batch.layer_ns != 0:
        store_i64(batch.layer_ns + 8 * layer, now_ns(clock(lora, 0)))


@kernel
def _is_free(lora, worker):  # type: ignore[no-untyped-def]
    """Returns whether a worker runs and has finished all hand-offs of its present process."""
    block = lora.blocks + worker * lora.block_bytes
    incarnation = load_acquire(block + shared.INCARNATION)
    if incarnation == 0:
        return False
    return incarnation != word(lora.asked, worker) or load_acquire(block + shared.DONE) == word(lora.published, worker)


@kernel
def _free_workers(lora):  # type: ignore[no-untyped-def]
    count = 0
    for worker in range(lora.workers):
        if _is_free(lora, worker):
            count += 1
    return count


@kernel
def _adapts(lora, adapter, layer):  # type: ignore[no-untyped-def]
    for site in range(lora.most_sites):  # noqa: SIM110  # compiled: no generators
        if word(host_entry(lora, adapter, layer, site), 2) > 0:
            return True
    return False


@compiled_separately(3)
def choose_sources(lora_address, batch_address, layer):  # type: ignore[no-untyped-def]
    """Decides for every segment where this layer's LoRA is computed; waits for weights if no worker may help.
    For member 0, before a barrier."""
    lora, batch = lora_at(lora_address), batch_at(batch_address)
    for segment in range(batch.segments):
        adapter = word(batch.segment_adapter, segment)
        arrived, source, looks = word(lora.arrived, adapter), DEVICE, 0
        started = np.int64(0)
        place = (layer - word(arrived, 1) + lora.layers) % lora.layers  # among the copied layers
        while _adapts(lora, adapter, layer):
            count = load_acquire(arrived)
            if count > place:
                break
            if count == LOST:
                source = HOST
                break
            if word(batch.segment_assist, segment) != 0 and _free_workers(lora) > 0:
                source = WORKERS
                break
            if looks == 0:
                started = now_ns(clock(lora, 0))
            looks += 1
            if looks < _PAUSES:
                spin_pause()
            elif looks < _PAUSES + _YIELDS:
                sched_yield()
            else:
                _usleep(_SLEEP_US)
        if looks > 0:
            waited = batch.waited_ns + 8 * segment
            store_i64(waited, word(waited, 0) + now_ns(clock(lora, 0)) - started)
        store_i64(batch.sources + 8 * (layer * batch.segments + segment), source)


@kernel
def _write_slice(model, lora, piece, segment, adapter, group, x, x_stride, rows, y):  # type: ignore[no-untyped-def]
    """Writes the description of a slice: positions as offsets, and the modules that the adapter has. Deltas have the
    columns of the group's output."""
    store_i64(piece + 8 * shared.SLICE_X, x - lora.base)
    store_i64(piece + 8 * shared.SLICE_X_STRIDE, x_stride)
    store_i64(piece + 8 * shared.SLICE_K, group.inputs)
    store_i64(piece + 8 * shared.SLICE_ROWS, rows)
    store_i64(piece + 8 * shared.SLICE_Y, y - lora.base)
    store_i64(piece + 8 * shared.SLICE_Y_STRIDE, group.row_bytes)
    count = 0
    for which in range(group.sites):
        entry = host_entry(lora, adapter, group.layer, group.first_site + which)
        if word(entry, 2) > 0:
            site = site_at(site_address(model, group.layer, group.first_site + which))
            at = piece + shared.SLICE_HEAD_BYTES + count * _SITE_BYTES
            store_i64(at, word(entry, 0) - lora.base)
            store_i64(at + 8, word(entry, 1) - lora.base)
            for index in range(2, _ENTRY_BYTES // 8):
                store_i64(at + 8 * index, word(entry, index))
            store_i64(at + 8 * shared.SITE_PANELS, site.panels)
            store_i64(at + 8 * shared.SITE_COLUMN_BYTES, site.column)
            count += 1
    store_i64(piece + 8 * shared.SLICE_SITES, count)
    store_i64(piece + 8 * shared.SLICE_DTYPE, DTYPE_F32)
    store_i64(piece + 8 * shared.SLICE_WIDE_X, 0)
    store_i64(piece + 8 * shared.SLICE_COUNTER, lora.counters + _COUNTER_BYTES * segment - lora.base)


@kernel
def _largest_rank(lora, adapter, group):  # type: ignore[no-untyped-def]
    rank = np.int64(0)
    for which in range(group.sites):
        rank = max(rank, word(host_entry(lora, adapter, group.layer, group.first_site + which), 2))
    return rank


@kernel
def _publish(lora):  # type: ignore[no-untyped-def]
    """Publishes the slices of each worker and wakes sleeping workers. A worker that has just died gets none."""
    for worker in range(lora.workers):
        block = lora.blocks + worker * lora.block_bytes
        if not _is_free(lora, worker):
            store_i64(block + shared.COUNT, 0)
        elif word(block, shared.COUNT // 8) > 0:
            number = word(lora.published, worker) + 1
            store_i64(lora.published + 8 * worker, number)
            store_i64(lora.asked + 8 * worker, load_acquire(block + shared.INCARNATION))
            store_release(block + shared.REQUEST, number)
            fence()  # either `asleep` is seen here, or the worker sees the request
            if load_acquire(block + shared.ASLEEP) != 0:
                store_release(block + shared.ASLEEP, 0)
                wake(block + shared.ASLEEP)


@kernel
def _add_slice(model, lora, segment, adapter, group, x, x_stride, first, rows, worker, index):  # type: ignore[no-untyped-def]
    """Appends a slice to a worker's block and to the table of awaited slices. Rows of deltas have the places of rows of
    x."""
    block = lora.blocks + worker * lora.block_bytes
    count = word(block, shared.COUNT // 8)
    y = lora.deltas + worker * lora.delta_bytes + first * group.row_bytes
    piece = block + shared.SLICES + count * _SLICE_BYTES
    _write_slice(model, lora, piece, segment, adapter, group, x + first * x_stride, x_stride, rows, y)
    store_i64(block + shared.COUNT, count + 1)
    at = lora.slices + _PIECE_BYTES * index
    store_i64(at, worker)
    store_i64(at + 24, first)
    store_i64(at + 32, rows)
    store_i64(at + 40, y)


@compiled_separately(6)
def hand_off(model_address, lora_address, batch_address, group_address, x, x_stride):  # type: ignore[no-untyped-def]
    """Cuts the tokens of segments with source WORKERS into slices of at most c tokens, and publishes them.

    c is `tokens_per_worker` of the rank; the record GROUP says which sites read x. For member 0, after x is complete
    and before a barrier. Without a free worker a segment gets no slice; the members that would wait compute it.
    """
    model, lora = model_at(model_address), lora_at(lora_address)
    batch, group = batch_at(batch_address), group_at(group_address)
    free = _free_workers(lora)
    slices, turn = 0, 0
    for worker in range(lora.workers):
        if _is_free(lora, worker):  # a late worker may still read its slices
            store_i64(lora.blocks + worker * lora.block_bytes + shared.COUNT, 0)
    for segment in range(batch.segments):
        store_i64(lora.segment_slices + 16 * segment, slices)
        store_i64(lora.segment_slices + 16 * segment + 8, 0)
        adapter = word(batch.segment_adapter, segment)
        rank = _largest_rank(lora, adapter, group)
        if source_of(batch, group.layer, segment) != WORKERS or free == 0 or rank == 0:
            continue
        first, tokens = word(batch.segment_first, segment), word(batch.segment_tokens, segment)
        most = word(lora.tokens_per_worker, rank // 8)
        parts = min((tokens + most - 1) // most, free)
        for part in range(parts):
            start, end = tokens * part // parts, tokens * (part + 1) // parts
            while not _is_free(lora, turn % lora.workers):
                turn += 1  # `free` workers are there; if one dies now, the members that wait compute its slices
                if turn > 4 * lora.workers + slices:
                    break
            worker, rows = turn % lora.workers, end - start
            _add_slice(model, lora, segment, adapter, group, x, x_stride, first + start, rows, worker, slices)
            turn += 1
            slices += 1
        store_i64(lora.segment_slices + 16 * segment + 8, parts)
    store_i64(lora.handed, word(lora.handed, 0) + slices)
    _publish(lora)
    for index in range(slices):
        piece = lora.slices + _PIECE_BYTES * index
        worker = word(piece, 0)
        is_sent = word(lora.blocks + worker * lora.block_bytes, shared.COUNT // 8) > 0
        store_i64(piece + 8, word(lora.published, worker) if is_sent else NOT_SENT)
        store_i64(piece + 16, word(lora.asked, worker) if is_sent else NOT_SENT)


@kernel
def await_slice(lora, thread, piece):  # type: ignore[no-untyped-def]
    """Waits for a slice's deltas. Returns False when its worker has died or made no progress for 10 ms."""
    block = lora.blocks + word(piece, 0) * lora.block_bytes
    number, incarnation = word(piece, 1), word(piece, 2)
    looks = 0
    progress, since = np.int64(-1), np.int64(0)
    while load_acquire(block + shared.DONE) != number:
        if load_acquire(block + shared.INCARNATION) != incarnation:
            return False
        looks += 1
        if looks < _PAUSES:
            spin_pause()
            continue
        sched_yield()
        now = now_ns(clock(lora, thread))
        if load_acquire(block + shared.PROGRESS) != progress:
            progress, since = load_acquire(block + shared.PROGRESS), now
        elif now - since > _TIMEOUT_NS:
            return False
    return True


@kernel
def _redo(buffers, lora, thread, entry, x, x_stride, k, rows, first, end, y, y_stride):  # type: ignore[no-untyped-def]
    """Adds `x A B` to the output panels [first, end) from the host cache, with the same bits as a worker."""
    shrunk, rank = lora.redo + thread * lora.redo_bytes, word(entry, 2)
    for start in range(0, rows, shared.BLOCK_TOKENS):
        count = min(rows - start, shared.BLOCK_TOKENS)
        for row in range(0, rank, RANK_GROUP):
            _call8(
                buffers.lora_shrink, entry, row, x + start * x_stride, x_stride, count, k, shrunk + 4 * row, 4 * rank
            )
        _call9(buffers.lora_expand, entry, shrunk, 4 * rank, count, first, end, y + start * y_stride, y_stride, ADD)


@kernel
def _add_rows(deltas, stride, rows, first, end, y, y_stride):  # type: ignore[no-untyped-def]
    for row in range(rows):
        for lane in range(4 * PANEL * first, 4 * PANEL * end, 4 * LANES):
            at = y + row * y_stride + lane
            vstore(at, vadd(vload(at), vload(deltas + row * stride + lane)))


@compiled_separately(14)
def add_deltas(  # type: ignore[no-untyped-def]
    thread, model_address, buffers_address, lora_address, batch_address, group_address,
    which, segment, x, x_stride, first, end, y, y_stride,
):  # fmt: skip
    """Adds the workers' results for a segment to the output panels [first, end) of a group's site number `which`;
    computes missing slices."""
    model, buffers, lora = model_at(model_address), buffers_at(buffers_address), lora_at(lora_address)
    batch, group = batch_at(batch_address), group_at(group_address)
    entry = host_entry(lora, word(batch.segment_adapter, segment), group.layer, group.first_site + which)
    from_slice, slices = word(lora.segment_slices, 2 * segment), word(lora.segment_slices, 2 * segment + 1)
    at, rows = word(batch.segment_first, segment), word(batch.segment_tokens, segment)
    for index in range(max(slices, 1)):
        piece, is_done = lora.slices + _PIECE_BYTES * (from_slice + index), False
        if slices > 0:
            at, rows = word(piece, 3), word(piece, 4)
            is_done = await_slice(lora, thread, piece)
        if is_done:
            deltas = word(piece, 5) + site_at(site_address(model, group.layer, group.first_site + which)).column
            _add_rows(deltas, group.row_bytes, rows, first, end, y + at * y_stride, y_stride)
            continue
        if first == 0:  # so that each module is counted once
            fetch_add(lora.redone, 1)
        x_at, y_at = x + at * x_stride, y + at * y_stride
        _redo(buffers, lora, thread, entry, x_at, x_stride, group.inputs, rows, first, end, y_at, y_stride)


@kernel
def note_workers(thread, lora, batch, group):  # type: ignore[no-untyped-def]
    """Records when the workers computed the last hand-off; called after the barrier that follows it."""
    if thread != 0 or batch.worker_ns == 0 or batch.arriving == 0:
        return
    for worker in range(lora.workers):
        block = lora.blocks + worker * lora.block_bytes
        if word(block, shared.COUNT // 8) > 0 and load_acquire(block + shared.DONE) == word(lora.published, worker):
            at = batch.worker_ns + 16 * ((group.layer * batch.groups + group.index) * lora.workers + worker)
            store_i64(at, word(block, shared.STARTED_NS // 8))
            store_i64(at + 8, word(block, shared.ENDED_NS // 8))
