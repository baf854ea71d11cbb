"""The data that compiled code shares with Python: one record a subject, passed as a pointer.

`weights.py`, `adapters.py`, `batch.py` and `backend.py` fill these; `forward.py` reads them.
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
NO_WINDOW = 1 << 30


def _record(*words: str, floats: tuple[str, ...] = ()) -> np.dtype[np.void]:
    """int64 fields (sizes, addresses), then float32 ones. A record travels through compiled calls as one pointer;
    tuples of arrays would travel as hundreds of values and take half a minute to compile."""
    return np.dtype([(name, np.int64) for name in words] + [(name, np.float32) for name in floats], align=True)


# Sizes in elements (`_pad`: rounded up to a panel), addresses of weights, rotary tables `[positions, head_dim / 2]`.
MODEL = _record(
    *("layers", "hidden", "hidden_pad", "heads", "kv_heads", "head_dim", "q_pad", "kv_pad", "inter", "inter_pad"),
    *("vocab", "vocab_pad", "dtype", "tied", "embed", "head", "final_norm", "cos", "sin"),
    "weights",  # → int64 [layers, NUM_WEIGHTS]
    "windows",  # → int64 [layers]
    floats=("eps", "scale"),  # of norms; of attention scores
)

# Addresses of fp32 activations (rows of a token each), of the words that the team meets at, and of kernels that are
# compiled apart.
BUFFERS = _record(
    *("panel_gemm", "lora_shrink", "lora_expand", "choose_sources", "hand_off", "add_deltas", "attend"),
    "decoder_layer",
    "hidden",  # [tokens, hidden_pad], the residual stream
    "normed",  # [outputs, hidden_pad]
    "qkv",  # [tokens, q_pad + 2 · kv_pad]
    "attended",  # [tokens, q_pad]
    "gate",  # [tokens, inter_pad]
    "up",  # [tokens, inter_pad]
    "shrunk",  # [tokens, 3 · largest padded rank in the batch]
    "scratch",  # [threads, scratch_bytes]
    "scratch_bytes",
    "barrier",  # int64 arrivals, and the generation a cache line later
    "counters",  # int64 [layers], attention items taken
)

# One module of one layer of one adapter slot. Rank 0: not adapted.
LORA_ENTRY = _record(
    "a",  # A, [padded rank, input padded to 16]
    "b",  # B, panels [output / 64, padded rank, 64]
    "rank",  # padded
    "dtype",
    floats=("scale",),
)
# All adapters, and what the team needs to hand layers over to CPU LoRA workers (blocks and slices as in handoff.py).
LORA = _record(
    "entries",  # → LORA_ENTRY [slots, layers, 7], weights in the device tier
    "host_entries",  # the same, weights in the host tier; valid while a slot's layers are arriving
    "arrived",  # → int64 [slots], addresses of the counts of layers that have arrived; LOST: the rest never will
    "layers",
    "base",  # of the shared region in this process
    "workers",
    *("blocks", "block_bytes"),  # one for each worker
    *("deltas", "delta_bytes"),  # one area for each worker
    *("published", "asked"),  # → int64 [workers]: last number published, and the incarnation that it was asked of
    "tokens_per_worker",  # → int64 [MAX_RANK / 8 + 1], by padded rank
    "slices",  # → int64 [max slices, PIECE_WORDS], of the hand-off under way
    "segment_slices",  # → int64 [segments, 2]: first slice and their number
    *("redo", "redo_bytes"),  # scratch of each thread for slices that it computes itself
    *("handed", "redone"),  # → int64 counts: slices handed off, modules of slices that the team redid
)
LOST = np.int64(-1)

# KV blocks and what the device knows of each request slot.
CACHE = _record(
    "base",  # fp32 [num_blocks, layers, kv_heads, 2 · 16 · head_dim]
    "blocks",  # → int64 [slots, max_blocks]
    "max_blocks",
    "history",  # → int64 [slots, max_history] token ids
    "max_history",
)

# One iteration's metadata: counts, and addresses of int64 arrays unless said. Tokens of a row are consecutive; rows are
# ordered by adapter slot. Segments are runs of rows that share an adapter, the base model's left out.
BATCH = _record(
    *("tokens", "rows", "segments", "outputs"),
    *("first_layer", "end_layer"),  # to be computed now; what comes between is in `Buffers.hidden`
    "max_rank",  # largest padded rank in the batch; 0: base model only
    *("slot", "position"),  # [tokens]
    "row_first",  # [rows + 1] first token of each row
    *("segment_first", "segment_tokens", "segment_adapter", "segment_assist"),  # [segments]
    "arriving",  # 1: some segment's adapter had not wholly arrived when the batch was made
    "sources",  # [layers, segments] whence each layer's LoRA came; written by the step, if `arriving`
    "waited_ns",  # [segments] time spent waiting for weights; written by the step, if `arriving`
    "layer_ns",  # [layers + 1] when each layer began, and the last ended; 0: not wanted
    "worker_ns",  # [layers, 4 inputs, workers, 2] when hand-offs were computed; 0: not wanted
    "out_token",  # [outputs] index of the token whose logits are wanted
    "out_kind",  # [outputs] SAMPLE or SCORE
    "out_logprobs",  # [outputs] alternatives wanted, -1 for no logprob at all
)


def _record_at(kind: np.dtype[np.void]) -> Any:
    """Intrinsic `(address)`: the record of `kind` there, for functions that are compiled apart."""
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
    """Where a record lies."""

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.ptrtoint(arguments[0], I64)

    return types.int64(record), codegen


def filled(kind: np.dtype[np.void], **values: float) -> NDArray[np.void]:
    """A one-element array of `kind` with every field set."""
    record = np.zeros(1, kind)
    for name in kind.names or ():
        record[name] = values.pop(name)
    if values:
        raise AssertionError(f"no such fields: {sorted(values)}")
    return record


@kernel
def word(address, index):  # type: ignore[no-untyped-def]
    """Element `index` of an int64 array."""
    return load_i64(address + 8 * index)
