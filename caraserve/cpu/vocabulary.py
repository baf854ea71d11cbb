"""What adapters change in the embedding and the head: LoRA is added, or rows are replaced.

A LORA_ENTRY has A and B of LoRA, or the new rows as A; then the tokens of the rows are listed beside it. The
embedding's A is transposed. A batch names the adapter of each token, because the runs of rows that layers compute
together are neither complete while an adapter is merged nor in the order of the logits.
"""

import numpy as np

from caraserve.core.lora_layout import A_COLUMNS, MAX_RANK, MAX_ROWS, PANEL
from caraserve.cpu.jit import kernel
from caraserve.cpu.kernels import ADD, RANK_GROUP, itemsize, load_weight
from caraserve.cpu.simd import load_f32, store_f32
from caraserve.cpu.structs import ENTRY_SCALE, LORA_ENTRY, site_at, word
from caraserve.cpu.tiles import call_by_address

EMBEDDING, HEAD = np.int64(0), np.int64(1)
_ENTRY_BYTES = np.int64(LORA_ENTRY.itemsize)
_call8, _call9 = call_by_address(8), call_by_address(9)


@kernel
def _entry(lora, slot, side):  # type: ignore[no-untyped-def]
    return lora.vocabulary + _ENTRY_BYTES * (2 * slot + side)


@kernel
def _tokens(lora, slot, side):  # type: ignore[no-untyped-def]
    """Returns the address of the tokens whose rows are replaced; the first is -1 if there are none."""
    return lora.changed_tokens + 8 * MAX_ROWS * (2 * slot + side)


@kernel
def change_embedding(model, buffers, lora, batch, token, token_id, y):  # type: ignore[no-untyped-def]
    """Changes the embedding of `token_id` in y[hidden] by the adapter of the batch's token number `token`."""
    slot = word(batch.vocabulary, token)
    entry, tokens = _entry(lora, slot, EMBEDDING), _tokens(lora, slot, EMBEDDING)
    rank, dtype = word(entry, 2), word(entry, 3)
    if rank == 0:
        return
    size = itemsize(dtype)
    if word(tokens, 0) < 0:
        at, factor = word(entry, 0) + token_id * rank * size, load_f32(entry + ENTRY_SCALE) * model.embed_scale
        column = buffers.shrunk + 4 * MAX_RANK * token
        for row in range(rank):
            store_f32(column + 4 * row, load_weight(at + row * size, dtype) * factor)
        panels, stride = model.hidden_pad // PANEL, 4 * model.hidden_pad
        _call9(buffers.lora_expand, entry, column, 4 * MAX_RANK, 1, 0, panels, y, stride, ADD)
        return
    row_bytes = (model.hidden + A_COLUMNS - 1) // A_COLUMNS * A_COLUMNS * size
    for row in range(MAX_ROWS):
        changed = word(tokens, row)
        if changed < 0:
            return
        if changed == token_id:
            at = word(entry, 0) + row * row_bytes
            for d in range(model.hidden):
                store_f32(y + 4 * d, load_weight(at + d * size, dtype) * model.embed_scale)


@kernel
def multiply_by_head(thread, team, model, buffers, lora, batch, x, x_stride):  # type: ignore[no-untyped-def]
    """Multiplies the batch's outputs, x[outputs, hidden], by A or the new rows, for `change_logits`."""
    for index in range(thread, batch.outputs, team):
        entry = _entry(lora, word(batch.vocabulary, word(batch.out_token, index)), HEAD)
        for row in range(0, word(entry, 2), RANK_GROUP):
            y = buffers.shrunk + 4 * (MAX_RANK * index + row)
            _call8(buffers.lora_shrink, entry, row, x + index * x_stride, x_stride, 1, model.hidden, y, 4 * MAX_RANK)


@kernel
def change_logits(model, buffers, lora, batch, first, end, logits, stride):  # type: ignore[no-untyped-def]
    """Changes the panels [first, end) of logits[outputs, vocab] by the adapter of each output."""
    index = np.int64(0)
    while index < batch.outputs:
        slot = word(batch.vocabulary, word(batch.out_token, index))
        after = index + 1
        while after < batch.outputs and word(batch.vocabulary, word(batch.out_token, after)) == slot:
            after += 1
        entry, tokens = _entry(lora, slot, HEAD), _tokens(lora, slot, HEAD)
        products, y = buffers.shrunk + 4 * MAX_RANK * index, logits + index * stride
        if word(entry, 2) != 0 and word(tokens, 0) < 0:
            rows = after - index
            _call9(buffers.lora_expand, entry, products, 4 * MAX_RANK, rows, first, end, y, stride, ADD)
        elif word(entry, 2) != 0:
            _replace_logits(site_at(model.head).bias, tokens, products, after - index, first, end, y, stride)
        index = after


@kernel
def _replace_logits(bias, tokens, products, rows, first, end, y, stride):  # type: ignore[no-untyped-def]
    for row in range(MAX_ROWS):
        token = word(tokens, row)
        if token < 0:
            return
        if first <= token // PANEL < end:
            offset = load_f32(bias + 4 * token) if bias != 0 else np.float32(0.0)
            for output in range(rows):
                product = load_f32(products + 4 * (MAX_RANK * output + row))
                store_f32(y + output * stride + 4 * token, product + offset)
