"""The records that compiled code shares with Python, passed as pointers.

`weights.py`, `adapters.py`, `batch.py` and `buffers.py` fill them; `forward.py` and `lora_workers/` read them.
"""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from caraserve.cpu.jit import kernel
from caraserve.cpu.simd import I64, load_i64

# Columns of `Model.weights`: addresses of one layer's tensors; 0 where the model has none.
ATTN_NORM, WQ, WK, WV, WO, WG, WU, WD, BQ, BK, BV, BO, BG, BU, BD, Q_NORM, K_NORM, MLP_NORM = range(18)
NUM_WEIGHTS = 18
# Indices of SITES; k and v follow q. With Python's integers, Numba would compile each callee again.
SITE_Q, SITE_O, SITE_GATE, SITE_UP, SITE_DOWN = (np.int64(site) for site in (0, 3, 4, 5, 6))
NO_WINDOW = 1 << 30


def _record(*words: str, floats: tuple[str, ...] = ()) -> np.dtype[np.void]:
    """Returns a record type of int64 fields (sizes, addresses), then float32 fields.

    Compiled calls pass a record as one pointer; tuples of arrays would be passed as hundreds of values and take half a
    minute to compile.
    """
    return np.dtype([(name, np.int64) for name in words] + [(name, np.float32) for name in floats], align=True)


# Sizes in elements (`_pad`: rounded up to a panel), addresses of weights, rotary tables `[positions, head_dim / 2]`.
MODEL = _record(
    *("layers", "hidden", "hidden_pad", "heads", "kv_heads", "head_dim", "q_pad", "kv_pad", "inter", "inter_pad"),
    *("vocab", "vocab_pad", "dtype", "tied", "embed", "head", "final_norm", "cos", "sin"),
    "weights",  # → int64 [layers, NUM_WEIGHTS]
    "windows",  # → int64 [layers]
    floats=("eps", "scale"),  # of norms; of attention scores
)

# Addresses of fp32 activations (one row for each token), of the barrier's words, and of separately compiled kernels.
BUFFERS = _record(
    *("panel_gemm", "lora_shrink", "lora_expand", "choose_sources", "hand_off", "add_deltas", "attend"),
    "decoder_layer",
    "hidden",  # [tokens, hidden_pad], the residual stream
    "normed",  # [outputs + embeddings, hidden_pad]
    "qkv",  # [tokens, q_pad + 2 · kv_pad]
    "attended",  # [tokens, q_pad]
    "gate",  # [tokens, inter_pad]
    "up",  # [tokens, inter_pad]
    "shrunk",  # [tokens, 3 · largest padded rank in the batch]
    "scratch",  # [threads, scratch_bytes]
    "scratch_bytes",
    "barrier",  # int64 arrivals, and the generation a cache line later
    "counters",  # int64 [layers], attention items claimed by threads
)

# One module of one layer of one adapter slot. Rank 0: not adapted.
LORA_ENTRY = _record(
    "a",  # A, [padded rank, input padded to 16]
    "b",  # B, panels [output / 64, padded rank, 64]
    "rank",  # padded
    "dtype",
    floats=("scale",),
)
# All adapters, and what
LORA = _record(
    "entries",  # → LORA_ENTRY [slots, layers, 7], weights in the device cache
    "host_entries",  # the same, weights in the host cache; valid while a slot's layers are arriving
    "arrived",  # → int64 [slots], addresses of int64 [2]: arrived layers, and which came first; LOST: the others never
    "layers",
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

# KV blocks, and the state of each request slot.
CACHE = _record(
    "base",  # fp32 [num_blocks, layers, kv_heads, 2 · 16 · head_dim]
    "blocks",  # → int64 [slots, max_blocks]
    "max_blocks",
    "history",  # → int64 [slots, max_history] token ids
    "max_history",
    "prompt_embeds",  # → int64 [slots], addresses of fp32 [vectors, hidden]: a token -1 - i is vector i
)

# One iteration: counts, and addresses of int64 arrays. Tokens of a row are consecutive; rows are ordered by adapter
# slot. Segments are runs of rows with the same adapter, without those of the base model.
BATCH = _record(
    *("tokens", "rows", "segments", "outputs", "embeddings"),
    *("first_layer", "end_layer"),  # to compute now; the residual stream between two calls is in `hidden`
    "max_rank",  # largest padded rank in the batch; 0: base model only
    *("slot", "position"),  # [tokens]
    "row_first",  # [rows + 1] first token of each row
    *("segment_first", "segment_tokens", "segment_adapter", "segment_assist"),  # [segments]
    "padding",  # → LORA_ENTRY [segments, layers, 7], zeros that each module computes after its own rank; 0: none
    "arriving",  # 1: layers of some segment's adapter had not arrived when the batch was built
    "sources",  # [layers, segments] DEVICE, WORKERS or HOST; written by `step` if `arriving`
    "waited_ns",  # [segments] time spent waiting for weights; written by `step` if `arriving`
    "layer_ns",  # [layers + 1] when each layer began, and the last ended; 0: not wanted
    "worker_ns",  # [layers, 4 inputs, workers, 2] when hand-offs were computed; 0: not wanted
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


@intrinsic
def address_of(typing_context, record):  # type: ignore[no-untyped-def]
    """Returns the address of a record."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.ptrtoint(arguments[0], I64)

    return types.int64(record), codegen


def filled(kind: np.dtype[np.void], **values: float) -> NDArray[np.void]:
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
