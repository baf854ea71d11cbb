"""The data that compiled code shares with Python: one record a subject, passed as a pointer. Level 1.

`weights.py`, `adapters.py`, `batch.py` and `backend.py` fill these; `step.py` reads them.
"""

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.jit import kernel
from caraserve.cpu.simd import load_i64

# Columns of `Model.weights`: addresses of one layer's tensors; 0 where the model has none.
ATTN_NORM, WQ, WK, WV, WO, WG, WU, WD, BQ, BK, BV, BO, BG, BU, BD, Q_NORM, K_NORM, MLP_NORM = range(18)
NUM_WEIGHTS = 18
NO_WINDOW = 1 << 30
SAMPLE, SCORE = 0, 1  # kinds of output rows: draw a token, or score the prompt token that follows


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
    *("panel_gemm", "lora_shrink", "lora_expand"),
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

# One module of one layer of one adapter slot; `LORA` points to them as [slots, layers, 7]. Rank 0: not adapted.
LORA_ENTRY = _record(
    "a",  # A, [padded rank, input padded to 16]
    "b",  # B, panels [output / 64, padded rank, 64]
    "rank",  # padded
    "dtype",
    floats=("scale",),
)
LORA = _record("entries", "layers")

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
    "max_rank",  # largest padded rank in the batch; 0: base model only
    *("slot", "position"),  # [tokens]
    "row_first",  # [rows + 1] first token of each row
    *("segment_first", "segment_tokens", "segment_adapter"),  # [segments]
    "out_token",  # [outputs] index of the token whose logits are wanted
    "out_kind",  # [outputs] SAMPLE or SCORE
    "out_logprobs",  # [outputs] alternatives wanted, -1 for no logprob at all
)


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
