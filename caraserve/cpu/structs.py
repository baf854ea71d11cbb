"""The records that compiled code shares with Python, passed as pointers.

`weights.py`, `adapters.py`, `batch.py` and `buffers.py` fill them; `forward.py` and `lora_workers/` read them. A field
is a size in elements or an address (`→`: of what; 0: there is none), unless its comment says otherwise.
"""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from caraserve.cpu.jit import kernel
from caraserve.cpu.simd import I64, load_i32, load_i64

BLOCK_TOKENS = 16  # of a KV block
NO_WINDOW = 1 << 30
# With Python's integers, Numba would compile each callee again.
NO_COLUMN = np.int64(-1)
ATTENTION, MLP, MOE, DELTA_NET = (np.int64(kind) for kind in range(4))  # kinds of BLOCK


def _record(*words: str, floats: tuple[str, ...] = ()) -> np.dtype[np.void]:
    """Returns a record type of int64 fields (sizes, addresses), then float32 fields.

    Compiled calls pass a record as one pointer; tuples of arrays would be passed as hundreds of values and take half a
    minute to compile.
    """
    return np.dtype([(name, np.int64) for name in words] + [(name, np.float32) for name in floats], align=True)


# `_pad`: rounded up to a panel.
MODEL = _record(
    *("layers", "hidden", "hidden_pad", "vocab", "vocab_pad"),
    "most_sites",  # of a layer
    "state_bytes",  # of a request slot, of all layers
    "embed",  # → SITE, that of the head if they are tied
    "positions",  # → fp32 [positions, hidden], added to embeddings
    "layer",  # → LAYER [layers]
    "site",  # → SITE [layers, most_sites]
    "head",  # → SITE
    "final",  # → NORM
    floats=("embed_scale", "logit_scale", "logit_cap"),  # cap 0: none
)

LAYER = _record(
    "blocks",
    "block",  # → BLOCK [blocks]
)

# stream += post(body(rows)) · multiplier, then stream *= scalar, where rows = pre(stream), or those of the block before
BLOCK = _record(
    *("kind", "body"),  # → ATTENTION_BODY, MLP_BODY, MOE_BODY or DELTA_NET_BODY
    *("pre", "post"),  # → NORM
    "adds_directly",  # 1: the last projection adds to the stream; there is no `post`, and multiplier and scalar are 1
    "keeps_rows",  # 1: reads the rows of the layer's first block
    *("group_in", "group_out"),  # → GROUP, before the body's own step and after it; a MOE_BODY may have no second
    floats=("multiplier", "scalar"),
)

# Consecutive sites of a layer that read the same rows, and write one row side by side, each from a panel's start.
GROUP = _record(
    *("layer", "index"),  # index in the layer
    *("first_site", "sites"),
    "inputs",
    "panels",
    "row_bytes",  # of what it writes
)

# Outputs of a linear that play one role, in panels of 64: what a kernel of the weight's format multiplies.
SITE = _record(
    *("product", "expand", "row", "prepare"),  # addresses of the format's kernels
    "prepared_bytes",  # of a row that `prepare` writes; 0: kernels read fp32 rows
    "prepared_offset",  # bytes before it in the prepared row of its group
    *("weight", "scale", "offset"),  # → what the format has packed
    "order",  # → int32 [inputs], the input of each column of the weights; 0: they are in the order of the inputs
    "group",  # inputs with one scale
    *("one_row", "panel_bytes"),  # of grouped codes: the address of their kernel for one row, and a panel's bytes
    "bias",  # → fp32 [panels · 64]
    "dtype",  # of weights that are plain numbers
    "inputs",
    "panels",
    "column",  # bytes before its outputs in a row
)

# Normalises rows of `width`, or each head of a row.
NORM = _record(
    *("weight", "bias"),  # → fp32 [heads, padded], zero-padded; weight: never 0
    "subtracts_mean",
    *("width", "padded"),
    "head_bytes",  # from the weights of one head to those of the next; 0: they share them
    floats=("eps",),
)

# Columns are bytes in a row of what `group_in` writes. The body's outputs replace q, or gate, or up without gate.
ATTENTION_BODY = _record(
    *("heads", "kv_heads", "head_dim"),
    "window",
    "kv_offset",  # numbers before this layer's heads in a KV block
    *("q", "k", "v"),  # columns; v may be k's
    "gate",  # column, or NO_COLUMN
    "rotated",  # pairs of dimensions of a head
    *("cos", "sin"),  # → fp32 [positions, rotated]
    "growth",  # → fp32 [positions], factors of q
    *("q_norm", "k_norm", "v_norm"),  # → NORM
    "norm_after_rope",
    "sinks",  # → fp32 [heads]
    "slopes",  # → fp32 [heads], of ALiBi
    floats=("scale", "cap"),  # cap 0: none
)

MLP_BODY = _record(
    "activation",  # its number in layers.py
    *("gate", "up"),  # columns; gate may be NO_COLUMN
    "panels",  # of gate, and of up
)

# Columns as above. What experts compute adds to what `group_out` of the shared expert has computed, if there is one.
MOE_BODY = _record(
    *("experts", "top_k"),
    *("router", "shared_gate"),  # columns; shared_gate may be NO_COLUMN
    "shared",  # → MLP_BODY of the shared expert
    "own",  # → MLP_BODY of the experts, whose columns are those of ROUTED's `inner`: gate, then up
    "site",  # → SITE [experts, 3]: gate, up, down
    "takes_sigmoids",  # 1: scores are sigmoids; 0: a softmax
    "correction",  # → fp32 [experts], added to scores for choosing
    *("groups", "kept_groups"),  # 0: none
    "adds_second",  # 1: a group is scored by the sum of its two best experts; 0: by its best
    "prepares_down",  # 1: the down of some expert reads prepared rows
    "normalises",  # 1: weights of the chosen experts sum to `scale`
    floats=("scale",),
)

# Columns as above; q, k and v are the first, one after another. The body's outputs replace z. Offsets are bytes in a
# slot's state.
DELTA_NET_BODY = _record(
    *("key_heads", "value_heads"),
    *("key_width", "key_padded", "value_width"),
    *("q", "k", "v", "z", "a", "b"),  # columns
    "kernel",  # inputs of the convolution
    "channel_panels",  # of q, k and v
    "convolution",  # → fp32 [kernel, channel_panels · 64]
    *("negative_rate", "step_bias"),  # → fp32 [value_heads], -e^A and the bias of a
    "norm",  # → NORM
    "inputs_offset",  # of fp32 [kernel - 1, channel_panels · 64], the last inputs of the convolution
    "matrices_offset",  # of fp32 [value_heads, padded value width / 16, key_padded, 16]
    floats=("scale",),  # of q
)

# The rows of experts in one iteration. A pair: a token and one of its `top_k` experts.
ROUTED = _record(
    "chosen",  # → int64 [pairs], experts
    "weight",  # → fp32 [pairs]
    "row",  # → int64 [pairs], places in `rows`
    "first",  # → int64 [experts + 1], first row of each expert
    "next",  # → int64 [experts], scratch
    "active",  # → int64 [experts], those that have rows
    "counters",  # → int64 each on a cache line: active experts, items of gate and up claimed, items of down claimed
    "rows",  # → fp32 [pairs, hidden_pad], what experts read, then what they return
    "inner",  # → fp32 [pairs, gate and up]
)

# Addresses of fp32 activations (one row for each token), of the barrier's words, and of separately compiled kernels.
BUFFERS = _record(
    *("lora_shrink", "lora_expand", "choose_sources", "hand_off", "add_deltas", "attend"),
    *("append", "attend_tile", "normalise", "project", "decoder_layer"),
    *("route", "mix"),  # 0: no layer has experts
    "routed",  # → ROUTED
    *("convolve", "recur"),  # 0: no layer has a delta net
    "hidden",  # [tokens, hidden_pad], the residual stream
    "normed",  # [outputs + embeddings, hidden_pad], the rows that blocks read
    "projected",  # [tokens, widest row], what the first group of a block writes; the body works in place
    "added",  # [tokens, hidden_pad], the output of a block that does not add directly
    "prepared",  # [tokens, outputs or rows of experts, prepared_bytes]: rows as kernels of some formats read them
    "prepared_bytes",
    "shrunk",  # [tokens, sites of the group · largest padded rank in the batch]
    "scratch",  # [threads, scratch_bytes]
    "scratch_bytes",
    "barrier",  # words of barrier.py
    "counters",  # int64 [layers], items of attention or of a delta net claimed by threads
)

# One module of one layer of one adapter slot. Rank 0: not adapted.
LORA_ENTRY = _record(
    "a",  # A, [padded rank, input padded to 16]
    "b",  # B, panels [output / 64, padded rank, 64]
    "rank",  # padded
    "dtype",
    "vectors",  # → fp32 [2, outputs padded to panels]: factors, then biases; 0: there are none
    floats=("scale",),
)
ENTRY_VECTORS, ENTRY_SCALE = np.int64(4), np.int64(40)  # a word's index, and an offset
# The tables of all adapters, and what hand-offs to LoRA workers use.
LORA = _record(
    "entries",  # → LORA_ENTRY [slots, layers, most_sites], weights in the device cache
    "host_entries",  # the same, weights in the host cache; valid while a slot's layers are arriving
    "arrived",  # → int64 [slots], addresses of int64 [2]: arrived layers, and which came first; LOST: the others never
    *("layers", "most_sites"),
    "vocabulary",  # → LORA_ENTRY [slots, 2], of the embedding and the head; see vocabulary.py
    "changed_tokens",  # → int64 [slots, 2, MAX_ROWS], tokens whose rows are replaced, then -1
    "base",  # of the shared region in this process
    "workers",
    *("blocks", "block_bytes"),  # one for each worker
    *("deltas", "delta_bytes"),  # one area for each worker
    *("published", "asked"),  # → int64 [workers]: last number published, and the incarnation that it was for
    "tokens_per_worker",  # → int64 [MAX_RANK / 8 + 1], by padded rank
    "slices",  # → int64 [max slices, PIECE_WORDS], of the hand-off under way
    "segment_slices",  # → int64 [segments, 2]: first slice and their number
    *("redo", "redo_bytes"),  # scratch of each thread, for slices that it computes in place of a worker
    "counters",  # → int64 [segments, COUNTER_WORDS], completion counters, in the shared region
    *("handed", "redone"),  # → int64 counts: slices handed off, modules of slices that the team computed instead
)
LOST = np.int64(-1)

# KV blocks, and what belongs to each request slot.
CACHE = _record(
    "base",  # [num_blocks, for each layer kv_heads · 2 · 16 · head_dim]
    *("block_bytes", "itemsize"),
    "blocks",  # → int64 [slots, max_blocks]
    "max_blocks",
    "history",  # → int64 [slots, max_history] token ids
    "max_history",
    "prompt_embeds",  # → int64 [slots], addresses of fp32 [vectors, hidden]: a token -1 - i is vector i
    *("states", "state_bytes"),  # [slots], of delta nets; a row at position 0 starts from zeros
)

# One iteration: counts, and addresses of int64 arrays. Tokens of a row are consecutive; rows are ordered by adapter
# slot. Segments are runs of rows with the same adapter, without those of the base model.
BATCH = _record(
    *("tokens", "rows", "segments", "outputs", "embeddings"),
    *("first_layer", "end_layer"),  # to compute now; the residual stream between two calls is in `hidden`
    "max_rank",  # largest padded rank in the batch; 0: base model only
    *("slot", "position"),  # [tokens]
    "vocabulary",  # [tokens] adapter slots whose changes of embedding and head apply; 0: no adapter has any
    "row_first",  # [rows + 1] first token of each row
    *("segment_first", "segment_tokens", "segment_adapter", "segment_assist"),  # [segments]
    "padding",  # → LORA_ENTRY [segments, layers, most_sites], zeros that each module computes after its own rank
    "arriving",  # 1: layers of some segment's adapter had not arrived when the batch was built
    "sources",  # [layers, segments] DEVICE, WORKERS or HOST; written by `step` if `arriving`
    "waited_ns",  # [segments] time spent waiting for weights; written by `step` if `arriving`
    "layer_ns",  # [layers + 1] when each layer began, and the last ended; 0: not wanted
    "groups",  # most of a layer
    "worker_ns",  # [layers, groups, workers, 2] when hand-offs were computed; 0: not wanted
    "out_token",  # [outputs + embeddings] index of the token whose logits, or whose hidden state, are used
    "out_kind",  # [outputs] SAMPLE or SCORE
    "out_logprobs",  # [outputs] alternatives to report, -1 for no logprob at all
)


def _record_at(kind: np.dtype[np.void]) -> Any:
    """Returns an intrinsic `(address)` that gives the record of `kind` there, for separately compiled functions."""
    record = numba.from_dtype(kind)

    @intrinsic
    def record_at(typing_context, address):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            return b.inttoptr(arguments[0], context.get_value_type(record))

        return record(types.int64), codegen

    return record_at


model_at, lora_at, batch_at, buffers_at, cache_at = map(_record_at, (MODEL, LORA, BATCH, BUFFERS, CACHE))
layer_at, block_at, group_at, site_at, norm_at = map(_record_at, (LAYER, BLOCK, GROUP, SITE, NORM))
attention_at, mlp_at, moe_at, routed_at = map(_record_at, (ATTENTION_BODY, MLP_BODY, MOE_BODY, ROUTED))
delta_net_at = _record_at(DELTA_NET_BODY)


@intrinsic
def address_of(typing_context, record):  # type: ignore[no-untyped-def]
    """Returns the address of a record."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.ptrtoint(arguments[0], I64)

    return types.int64(record), codegen


def filled(kind: np.dtype[np.void], /, **values: float | np.signedinteger[Any]) -> NDArray[np.void]:
    """Returns a one-element array of `kind` with every field set. Raises KeyError for a missing field."""
    record = np.zeros(1, kind)
    for name in kind.names or ():
        record[name] = values.pop(name)
    if values:
        raise AssertionError(f"no such fields: {sorted(values)}")
    return record


@kernel
def word(address, index):  # type: ignore[no-untyped-def]
    """Returns element `index` of the int64 array at `address`."""
    return load_i64(address + 8 * index)


@kernel
def input_at(site, column):  # type: ignore[no-untyped-def]
    """Returns the input of a column of a site's weights."""
    return np.int64(load_i32(site.order + 4 * column)) if site.order != 0 else column


_SITE_BYTES = np.int64(SITE.itemsize)


@kernel
def site_address(model, layer, index):  # type: ignore[no-untyped-def]
    """Returns the address of a layer's SITE record."""
    return model.site + _SITE_BYTES * (layer * model.most_sites + index)
