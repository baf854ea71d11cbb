"""Chooses tokens on the device: penalties, temperature, min-p, top-k, top-p, seeded draws, log-probabilities.

Computes what `cpu/sampling.py` does, from the same parameter records and in the same steps: a draw depends only on the
logits, the request's seed and the position, and a seed gives the same text on both backends. Weights are summed as
integers in units of 2^-44 of the best token's weight, so sums are exact in any order. Only exp rounds, so the backends
can differ only where a draw falls within some millionths of a boundary.

Nothing is sorted: top-k and top-p find their threshold by radix selection. Three passes over a row of weights, which
the L2 cache holds, make histograms of 11, 11 and 8 bits of the weights in shared memory. The best tokens to report, up
to 32, are kept in each warp's registers during the pass that finds the largest logit; for each 32 more, which only
tokens of prompts may have, there is another pass.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from caraserve.cpu.sampling import SLOT_SAMPLING
from caraserve.gpu.driver.launch import Launch, ints, pointers
from caraserve.gpu.kernels.paged_cache import TokenTables

_THREAD_LOGITS = 16  # that a thread has in flight
_LEAST_THREADS, _MOST_THREADS = 32, 1024


@dataclass(frozen=True, slots=True)
class SamplerState:
    """State of the requests between iterations, and buffers of the blocks."""

    table: Tensor  # uint8 [slots, bytes of SLOT_SAMPLING], one record per slot
    history: Tensor  # int32 [slots, positions + 1]
    weights: Tensor  # float32 [blocks, vocab]
    counts: Tensor  # int32 [blocks, vocab], zero between launches


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tokens whose logits are wanted, and their results."""

    token: Tensor  # int32 [outputs] row in the batch, -1: none
    kind: Tensor  # int32 [outputs] SAMPLE or SCORE
    wanted: Tensor  # int32 [outputs] alternatives to report; 0: the token's log-probability only, -1: nothing
    chosen: Tensor  # int32 [outputs], NOT_FINITE where no token can be chosen
    logprob: Tensor  # float32 [outputs]
    rank: Tensor  # int32 [outputs] of the chosen token, 1 for the best one
    top_ids: Tensor  # int32 [outputs, most alternatives]
    top_logprobs: Tensor  # float32 [outputs, most alternatives], with the strides of `top_ids`


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The outputs of kind SAMPLE_MASKED."""

    outputs: Tensor  # int32 [rows] rows of logits
    masks: Tensor  # int32 [rows, mask_words(vocab)], a bit for each token that may be chosen

    def between(self, start: int, end: int) -> "MaskedRows":
        """Returns places [start, end)."""
        return MaskedRows(self.outputs[start:end], self.masks[start:end])


def sample(
    logits: Tensor, outputs: Outputs, tokens: TokenTables, state: SamplerState, masked: MaskedRows | None = None
) -> Launch:
    """Returns the launch that chooses the token after each SAMPLE row and writes it to `chosen` and the history, which
    already has those of SCORE rows. With `masked`, it does so for these rows instead.

    logits: [outputs, vocab] in the activations' dtype, not modified.
    """
    vocab, rows = logits.shape[1], len(logits) if masked is None else len(masked.outputs)
    if state.table.shape[1] != SLOT_SAMPLING.itemsize:
        raise AssertionError(f"records of {state.table.shape[1]} bytes are not SLOT_SAMPLING")
    only, masks, mask_stride = (0, 0, 0)
    if masked is not None:
        only, masks, mask_stride = masked.outputs.data_ptr(), masked.masks.data_ptr(), masked.masks.stride(0)
    arguments = (
        *(*_row_pointer(logits), *_addresses(outputs.token, outputs.kind, tokens.slot, tokens.position)),
        *(*_addresses(state.table), *_row_pointer(state.history)),
        *_addresses(state.weights, state.counts, outputs.chosen),
        *(*pointers(only, masks), *ints(mask_stride, rows, vocab)),
    )
    return Launch("sampling", "sample_tokens", min(rows, len(state.weights)), _threads(vocab), arguments)


def score(logits: Tensor, outputs: Outputs, masked: MaskedRows | None = None) -> Launch:
    """Returns the launch that writes log-probabilities and ranks of `outputs.chosen`, and the best alternatives, where
    wanted; with `masked`, for these rows only."""
    vocab, rows = logits.shape[1], len(logits) if masked is None else len(masked.outputs)
    arguments = (
        *(*_row_pointer(logits), *_addresses(outputs.token, outputs.wanted, outputs.chosen, outputs.logprob)),
        *_addresses(outputs.rank, outputs.top_ids, outputs.top_logprobs),
        *ints(*outputs.top_ids.stride()),
        *(*pointers(0 if masked is None else masked.outputs.data_ptr()), *ints(vocab)),
    )
    return Launch("sampling", "score_tokens", rows, _threads(vocab), arguments)


def _threads(vocab: int) -> int:
    """Returns the threads of a block, a power of two: lists of warps are merged in pairs."""
    wanted = 1 << (max(vocab // _THREAD_LOGITS, 1) - 1).bit_length()
    return min(max(wanted, _LEAST_THREADS), _MOST_THREADS)


def _addresses(*tensors: Tensor) -> tuple[np.generic, ...]:
    return pointers(*(tensor.data_ptr() for tensor in tensors))


def _row_pointer(rows: Tensor) -> tuple[np.generic, ...]:
    """Returns the address of a matrix and the numbers between its rows."""
    return (*_addresses(rows), *ints(rows.stride(0)))
