"""Chooses tokens on the device: penalties, temperature, min-p, top-k, top-p, seeded draws, log-probabilities.

Computes what `cpu/sampling.py` does, from the same parameter records and in the same steps: a draw depends only on the
logits, the request's seed and the position, and a seed gives the same text on both backends. Weights are summed as
integers in units of 2^-44 of the best token's weight, so sums are exact in any order. Only exp rounds, so the backends
can differ only where a draw falls within some millionths of a boundary.

Nothing is sorted: thresholds are found by bisecting over the bits of a weight, in passes over one row of logits, which
the L2 cache holds.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from caraserve.core.outputs import NOT_FINITE, SAMPLE, SCORE
from caraserve.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS
from caraserve.cpu.sampling import MAX_END_IDS, SLOT_SAMPLING
from caraserve.gpu.kernels.attention import TokenTables


def _at(name: str) -> tl.constexpr:
    """Returns the index of a field in a slot's record, in items of the field's size."""
    assert SLOT_SAMPLING.fields is not None
    dtype, offset = SLOT_SAMPLING.fields[name][:2]
    return tl.constexpr(offset // dtype.base.itemsize)


_SEED, _PROMPT_TOKENS, _MIN_TOKENS = _at("seed"), _at("prompt_tokens"), _at("min_tokens")
_TOP_K, _ADJUSTS = _at("top_k"), _at("adjusts")
_END_COUNT, _END_IDS = _at("end_count"), _at("end_ids")
_BIAS_COUNT, _BIAS_IDS, _BIAS = _at("bias_count"), _at("bias_ids"), _at("bias")
_TEMPERATURE, _TOP_P, _MIN_P = _at("temperature"), _at("top_p"), _at("min_p")
_PRESENCE, _FREQUENCY, _REPETITION = _at("presence"), _at("frequency"), _at("repetition")
_MOST_ENDS = tl.constexpr(triton.next_power_of_2(MAX_END_IDS))
_MOST_BIASES = tl.constexpr(triton.next_power_of_2(MAX_LOGIT_BIAS))
_SAMPLE, _SCORE = tl.constexpr(SAMPLE), tl.constexpr(SCORE)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_GREEDY_BELOW = tl.constexpr(1e-5)
_UNIT = tl.constexpr(float(1 << 44))
_ONE_BITS = tl.constexpr(0x3F800000)  # bits of 1.0, the best token's weight


@dataclass(frozen=True, slots=True)
class SamplerState:
    """State of the requests between iterations, and buffers of the programs."""

    table: Tensor  # uint8 [slots, bytes of SLOT_SAMPLING], one record per slot
    history: Tensor  # int32 [slots, positions + 1]
    weights: Tensor  # float32 [programs, vocab]
    counts: Tensor  # int32 [programs, vocab], zero between launches


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tokens whose logits are wanted, and their results."""

    token: Tensor  # int32 [outputs] row in the batch, -1: none
    kind: Tensor  # int32 [outputs] SAMPLE or SCORE
    wanted: Tensor  # int32 [outputs] alternatives to report; 0: the token's log-probability only, -1: nothing
    chosen: Tensor  # int32 [outputs], NOT_FINITE where no token can be chosen
    logprob: Tensor  # float32 [outputs]
    top_ids: Tensor  # int32 [outputs, MAX_LOGPROBS]
    top_logprobs: Tensor  # float32 [outputs, MAX_LOGPROBS]


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The outputs of kind SAMPLE_MASKED."""

    outputs: Tensor  # int32 [rows] rows of logits
    masks: Tensor  # int32 [rows, mask_words(vocab)], a bit for each token that may be chosen

    def between(self, start: int, end: int) -> "MaskedRows":
        """Returns places [start, end)."""
        return MaskedRows(self.outputs[start:end], self.masks[start:end])


@triton.jit
def _best(values, vocab, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the largest value, its first index, and whether all values are finite."""
    top, index = tl.load(values).to(tl.float32), 0
    finite = tl.zeros((TILE,), tl.int32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        tile = tl.load(values + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        finite += (tl.abs(tile) < float("inf")).to(tl.int32)  # False past the row's end and for NaN
        value, place = tl.max(tile, 0, return_indices=True)  # ties: the first
        index = tl.where(value > top, start + place, index)
        top = tl.maximum(value, top)
    return top, index, tl.sum(finite, 0) == vocab


@triton.jit
def _tally(counts, history, end, prompt, clear, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sets counts to 2 · (times generated) + (in the prompt) for all tokens of the history, or back to 0. Vectors of
    the prompt, which are negative there, count nothing."""
    for start in range(0, end, TILE):
        at = start + tl.arange(0, TILE)
        token = tl.load(history + at, mask=at < end, other=-1)
        if clear:
            tl.store(counts + token, tl.zeros((TILE,), tl.int32), mask=token >= 0)
        else:
            tl.atomic_or(counts + token, 1, mask=(at < prompt) & (token >= 0), sem="relaxed")
            tl.atomic_add(counts + token, 2, mask=(at >= prompt) & (token >= 0), sem="relaxed")


@triton.jit
def _adjust(  # type: ignore[no-untyped-def]
    logits, adjusted, counts, history, position, words, floats, mask, has_mask, vocab,
    TILE: tl.constexpr,
):  # fmt: skip
    """Applies penalties, biases, the ban of end tokens and the mask. Barriers separate writes from reads by other
    threads."""
    prompt = tl.load(words + _PROMPT_TOKENS).to(tl.int32)
    repetition, frequency = tl.load(floats + _REPETITION), tl.load(floats + _FREQUENCY)
    presence = tl.load(floats + _PRESENCE)
    end = position + 1
    _tally(counts, history, end, prompt, False, TILE)
    tl.debug_barrier()
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(logits + at, mask=at < vocab, other=0.0).to(tl.float32)
        count = tl.load(counts + at, mask=at < vocab, other=0, cache_modifier=".cg")  # atomics bypass the L1 cache
        penalised = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where(count > 0, penalised, value)
        generated = count // 2
        value = tl.where(generated > 0, value - frequency - presence, value)
        # Subtracts one at a time, as on a CPU: a product would round differently, and greedy choices could differ.
        for times in range(1, tl.where(frequency == 0, 1, tl.max(generated, 0))):
            value = tl.where(generated > times, value - frequency, value)
        if has_mask:  # before biases, which are finite
            bits = tl.load(mask + (at >> 5), mask=at < vocab, other=0)
            value = tl.where((bits >> (at & 31)) & 1 == 0, float("-inf"), value)
        tl.store(adjusted + at, value, mask=at < vocab)
    tl.debug_barrier()
    _tally(counts, history, end, prompt, True, TILE)
    lane = tl.arange(0, _MOST_BIASES)
    is_bias = lane < tl.load(words + _BIAS_COUNT)
    token = tl.load(words + _BIAS_IDS + lane, mask=is_bias, other=0)
    bias = tl.load(floats + _BIAS + lane, mask=is_bias, other=0.0)
    tl.store(adjusted + token, tl.load(adjusted + token, mask=is_bias, other=0.0) + bias, mask=is_bias)
    tl.debug_barrier()
    lane = tl.arange(0, _MOST_ENDS)
    is_end = (lane < tl.load(words + _END_COUNT)) & (end - prompt < tl.load(words + _MIN_TOKENS))
    token = tl.load(words + _END_IDS + lane, mask=is_end, other=0)
    tl.store(adjusted + token, tl.full((_MOST_ENDS,), float("-inf"), tl.float32), mask=is_end)
    tl.debug_barrier()


@triton.jit
def _reach(weights, vocab, floor, BY_MASS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns how many weights are at least `floor`, and with BY_MASS their sum in units of 2^-44."""
    count = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        weight = tl.load(weights + at, mask=at < vocab, other=-1.0)
        count += (weight >= floor).to(tl.int32)
        if BY_MASS:
            mass += (tl.where(weight >= floor, weight, 0.0) * _UNIT).to(tl.int64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _threshold(weights, vocab, floor, enough, BY_MASS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns t >= `floor` such that the weights >= t are the fewest whose number, or sum with BY_MASS, is >=
    `enough`."""
    low, high = floor.to(tl.int32, bitcast=True), tl.full((), _ONE_BITS, tl.int32)
    from_low, _ = _reach(weights, vocab, floor, False, TILE)
    above = tl.full((), 0, tl.int32)
    # With one weight left between the bounds, all thresholds between them keep the same tokens.
    while (low < high) & (from_low - above > 1):
        middle = high - (high - low) // 2
        count, mass = _reach(weights, vocab, middle.to(tl.float32, bitcast=True), BY_MASS, TILE)
        if BY_MASS:
            enough_here = mass.to(tl.float64) >= enough
        else:
            enough_here = count.to(tl.float64) >= enough
        low = tl.where(enough_here, middle, low)
        from_low = tl.where(enough_here, count, from_low)
        high = tl.where(enough_here, high, middle - 1)
        above = tl.where(enough_here, above, count)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def random_bits(seed, position):  # type: ignore[no-untyped-def]
    """Returns the highest 53 of 64 random bits from (seed, position): two rounds of the SplitMix64 finaliser."""
    state = seed + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    for _ in tl.static_range(2):
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB
        state = state ^ (state >> 31)
    return (state >> 11) << 11


@triton.jit
def _tile_masses(weights, start, vocab, floor, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = start + tl.arange(0, TILE)
    weight = tl.load(weights + at, mask=at < vocab, other=-1.0)
    return (tl.where(weight >= floor, weight, 0.0) * _UNIT).to(tl.int64)


@triton.jit
def _draw(values, weights, top, position, words, floats, vocab, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Samples from logits in `values`. Writes weights relative to the best token to `weights`, which may be
    `values`."""
    inverse = tl.div_rn(1.0, tl.load(floats + _TEMPERATURE))
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(values + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        tl.store(weights + at, tl.exp((value - top) * inverse), mask=at < vocab)
    tl.debug_barrier()
    floor = tl.maximum(tl.load(floats + _MIN_P), 0.0)
    top_k, top_p = tl.load(words + _TOP_K), tl.load(floats + _TOP_P)
    if (top_k > 0) & (top_k < vocab):
        floor = _threshold(weights, vocab, floor, top_k.to(tl.float64), False, TILE)
    _, mass = _reach(weights, vocab, floor, True, TILE)
    if top_p < 1.0:
        floor = _threshold(weights, vocab, floor, mass.to(tl.float64) * top_p.to(tl.float64), True, TILE)
        _, mass = _reach(weights, vocab, floor, True, TILE)
    bits = random_bits(tl.load(words + _SEED).to(tl.uint64), position)
    target = tl.umulhi(bits, mass.to(tl.uint64)).to(tl.int64)  # ⌊uniform · mass⌋, below mass
    start, before = 0, tl.full((), 0, tl.int64)
    here = tl.sum(_tile_masses(weights, 0, vocab, floor, TILE), 0)
    # The second condition is false only if no weight is a number: it then ends the loop, with nothing to draw from.
    while (before + here <= target) & (start + TILE < vocab):
        before += here
        start += TILE
        here = tl.sum(_tile_masses(weights, start, vocab, floor, TILE), 0)
    running = before + tl.cumsum(_tile_masses(weights, start, vocab, floor, TILE), 0)
    drawn = tl.min(tl.where(running > target, start + tl.arange(0, TILE), vocab), 0)
    return tl.where(drawn < vocab, drawn, 0)


# Otherwise the first batch of 16, or the first masks, would compile again while requests wait.
@triton.jit(
    do_not_specialize=["outputs", "has_masks", "mask_stride"], do_not_specialize_on_alignment=["masked", "masks"]
)
def sample_kernel(  # type: ignore[no-untyped-def]
    logits, out_token, out_kind, token_slot, token_position, words, floats, history, weights, counts, chosen,
    masked, masks, outputs, has_masks, vocab, logits_stride, record_words, history_stride, mask_stride,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program handles output rows in turn: draws each token, or looks it up if it is known. With `has_masks` only
    the rows in `masked`, without it all others."""
    program = tl.program_id(0)
    weights += program.to(tl.int64) * vocab
    counts += program.to(tl.int64) * vocab
    for row_number in range(program, outputs, tl.num_programs(0)):
        output = row_number
        if has_masks != 0:
            output = tl.load(masked + row_number)
        token = tl.load(out_token + output)
        if token >= 0:
            slot, position = tl.load(token_slot + token).to(tl.int64), tl.load(token_position + token)
            past = history + slot * history_stride
            kind = tl.load(out_kind + output)
            if (kind == _SAMPLE) | (has_masks != 0):
                record, numbers = words + slot * record_words, floats + slot * record_words * 2
                row = logits + tl.cast(output, tl.int64) * logits_stride
                adjusts = (tl.load(record + _ADJUSTS) != 0) | (has_masks != 0)
                top, index, is_finite = _best(row, vocab, TILE)
                if adjusts:
                    mask = masks + tl.cast(row_number, tl.int64) * mask_stride
                    _adjust(row, weights, counts, past, position, record, numbers, mask, has_masks != 0, vocab, TILE)
                    top, index, _ = _best(weights, vocab, TILE)
                if tl.load(numbers + _TEMPERATURE) >= _GREEDY_BELOW:
                    if adjusts:
                        index = _draw(weights, weights, top, position, record, numbers, vocab, TILE)
                    else:
                        index = _draw(row, weights, top, position, record, numbers, vocab, TILE)
                tl.store(past + position + 1, index)  # written in any case: the next iteration reads it
                tl.store(chosen + output, tl.where(is_finite, index, _NOT_FINITE))
                tl.debug_barrier()  # the next row uses the same buffers
            elif kind == _SCORE:
                tl.store(chosen + output, tl.load(past + position + 1))
            else:
                tl.store(chosen + output, _NOT_FINITE)  # until its mask is there: `score` skips it


@triton.jit(do_not_specialize=["has_masks"], do_not_specialize_on_alignment=["masked"])
def score_kernel(  # type: ignore[no-untyped-def]
    logits, out_token, wanted, chosen, logprob, top_ids, top_logprobs, masked, has_masks, vocab, logits_stride,
    MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program scores one row: log-probabilities under the unmodified distribution."""
    output = tl.program_id(0)
    if has_masks != 0:
        output = tl.load(masked + output)
    count, token = tl.load(wanted + output), tl.load(chosen + output)
    if (tl.load(out_token + output) >= 0) & (count >= 0) & (token >= 0):
        row = logits + output.to(tl.int64) * logits_stride
        top, _, is_finite = _best(row, vocab, TILE)
        total = tl.zeros((TILE,), tl.float32)
        for start in range(0, vocab, TILE):
            at = start + tl.arange(0, TILE)
            total += tl.exp(tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32) - top)
        norm = top + tl.log(tl.sum(total, 0))
        tl.store(chosen + output, tl.where(is_finite, token, _NOT_FINITE))  # also for a token that was known before
        tl.store(logprob + output, tl.load(row + token).to(tl.float32) - norm)
        value, index = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
        for place in range(count):
            # The best after (value, index); equal values are in order of index.
            best, best_index = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
            for start in range(0, vocab, TILE):
                at = start + tl.arange(0, TILE)
                tile = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
                follows = (tile < value) | ((tile == value) & (at > index))
                here, lane = tl.max(tl.where(follows, tile, float("-inf")), 0, return_indices=True)
                best_index = tl.where(here > best, start + lane, best_index)
                best = tl.maximum(here, best)
            value, index = best, best_index
            tl.store(top_ids + output * MOST + place, index)
            tl.store(top_logprobs + output * MOST + place, value - norm)


def sample_shape(vocab: int) -> dict[str, int]:
    """Returns tile size and warps: rows are read many times over, with enough threads to hide the L2 cache's
    latency."""
    tile = min(4096, max(128, triton.next_power_of_2(vocab)))
    return {"TILE": tile, "num_warps": max(1, tile // 256)}


def sample(
    logits: Tensor, outputs: Outputs, tokens: TokenTables, state: SamplerState, masked: MaskedRows | None = None
) -> None:
    """Chooses the token after each SAMPLE row and writes it to `chosen` and the history, which already has those of
    SCORE rows. With `masked`, does so for these rows instead.

    logits: [outputs, vocab], any float type, not modified.
    """
    vocab, count, rows, masks = logits.shape[1], len(logits), outputs.token, outputs.token  # the latter two are unused
    if masked is not None:
        count, rows, masks = len(masked.outputs), masked.outputs, masked.masks
    sample_kernel[(min(count, state.weights.shape[0]),)](
        logits, outputs.token, outputs.kind, tokens.slot, tokens.position,
        state.table.view(torch.int64), state.table.view(torch.float32), state.history, state.weights, state.counts,
        outputs.chosen, rows, masks, count, int(masked is not None),
        vocab, logits.stride(0), state.table.shape[1] // 8, state.history.stride(0), masks.stride(0),
        **sample_shape(vocab),
    )  # fmt: skip


def score(logits: Tensor, outputs: Outputs, masked: MaskedRows | None = None) -> None:
    """Writes log-probabilities of `outputs.chosen` and of the best alternatives, where wanted; with `masked`, for these
    rows only."""
    vocab, rows = logits.shape[1], outputs.token if masked is None else masked.outputs
    score_kernel[(len(logits) if masked is None else len(rows),)](
        logits, outputs.token, outputs.wanted, outputs.chosen, outputs.logprob, outputs.top_ids, outputs.top_logprobs,
        rows, int(masked is not None), vocab, logits.stride(0), MOST=MAX_LOGPROBS, **sample_shape(vocab),
    )  # fmt: skip
