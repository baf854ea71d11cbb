"""Choosing a token from one row of logits, in compiled code. Level 1.

A draw depends on the logits, the request's seed and the position alone, so that it is the same in any batch, after
any preemption and on any instance. Nothing is sorted: top-k and top-p are found by bisecting the threshold over the
bits of a weight, which order like the weights themselves.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.jit import kernel, reduction
from caraserve.cpu.simd import bits_to_float
from caraserve.request import MAX_LOGIT_BIAS

MAX_END_IDS = 32
_GREEDY_BELOW = np.float32(1e-5)


class SamplingTable(NamedTuple):
    """Per-slot sampling parameters; row s belongs to slot s."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    seed: NDArray[np.uint64]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    repetition: NDArray[np.float32]
    prompt_tokens: NDArray[np.int64]
    min_tokens: NDArray[np.int64]
    adjusts: NDArray[np.bool_]  # whether anything but temperature and cuts changes the logits
    end_count: NDArray[np.int64]
    end_ids: NDArray[np.int64]  # [slots, MAX_END_IDS]
    bias_count: NDArray[np.int64]
    bias_ids: NDArray[np.int64]  # [slots, MAX_LOGIT_BIAS]
    bias: NDArray[np.float32]  # [slots, MAX_LOGIT_BIAS]


def sampling_table(num_slots: int) -> SamplingTable:
    """All-zero parameters for `num_slots` slots."""

    def zeros(dtype: type, *more: int) -> NDArray[np.generic]:
        return np.zeros((num_slots, *more), dtype)

    return SamplingTable(
        *(zeros(np.float32) for _ in range(3)),
        zeros(np.int64),
        zeros(np.uint64),
        *(zeros(np.float32) for _ in range(3)),
        zeros(np.int64),
        zeros(np.int64),
        zeros(np.bool_),
        zeros(np.int64),
        zeros(np.int64, MAX_END_IDS),
        zeros(np.int64),
        zeros(np.int64, MAX_LOGIT_BIAS),
        zeros(np.float32, MAX_LOGIT_BIAS),
    )  # type: ignore[arg-type]


@kernel
def argmax(logits):  # type: ignore[no-untyped-def]
    """The first index of the largest value."""
    best, index = logits[0], 0
    for token in range(1, logits.size):
        if logits[token] > best:
            best, index = logits[token], token
    return index


@reduction
def log_sum_exp(logits):  # type: ignore[no-untyped-def]
    """log Σ e^logit."""
    top = logits[argmax(logits)]
    total = 0.0
    for token in range(logits.size):
        total += np.exp(np.float64(logits[token] - top))
    return top + np.log(total)


@kernel
def best_tokens(logits, count, ids, values):  # type: ignore[no-untyped-def]
    """Writes the `count` largest logits, best first, by insertion: few rows ask, and few values displace another."""
    kept = 0
    for token in range(logits.size):
        value = logits[token]
        if kept == count and value <= values[count - 1]:
            continue
        place = min(kept, count - 1)
        while place > 0 and values[place - 1] < value:
            values[place], ids[place] = values[place - 1], ids[place - 1]
            place -= 1
        values[place], ids[place] = value, token
        kept = min(kept + 1, count)


@kernel
def uniform(seed, position):  # type: ignore[no-untyped-def]
    """A number in [0, 1) from (seed, position): two rounds of the SplitMix64 finaliser."""
    state = np.uint64(seed) + np.uint64(position + 1) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(2):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return np.float64(state >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def _adjust(logits, slot, history, position, table, seen):  # type: ignore[no-untyped-def]
    """Penalties, biases and the ban of end tokens, in place. `seen` is all zero on entry and on return."""
    prompt, end = table.prompt_tokens[slot], position + 1  # tokens [0, end) are known
    repetition = table.repetition[slot]
    for index in range(end):
        token = history[index]
        if seen[token] & 1 == 0 and repetition != np.float32(1.0):
            value = logits[token]
            logits[token] = value / repetition if value > 0 else value * repetition
        seen[token] |= 1
        if index >= prompt:
            logits[token] -= table.frequency[slot]
            if seen[token] & 2 == 0:
                logits[token] -= table.presence[slot]
            seen[token] |= 2
    for index in range(end):
        seen[history[index]] = 0
    for index in range(table.bias_count[slot]):
        logits[table.bias_ids[slot, index]] += table.bias[slot, index]
    if end - prompt < table.min_tokens[slot]:
        for index in range(table.end_count[slot]):
            logits[table.end_ids[slot, index]] = np.float32(-np.inf)


@reduction
def _count_from(weights, threshold):  # type: ignore[no-untyped-def]
    count = 0
    for token in range(weights.size):
        count += 1 if weights[token] >= threshold else 0
    return count


@reduction
def _mass_from(weights, threshold):  # type: ignore[no-untyped-def]
    total = 0.0
    for token in range(weights.size):
        total += np.float64(weights[token]) if weights[token] >= threshold else 0.0
    return total


@kernel
def _threshold(weights, enough, by_count):  # type: ignore[no-untyped-def]
    """The largest t for which the weights >= t number (or sum to) at least `enough`; weights lie in [0, 1]."""
    low, high = np.uint32(0), np.uint32(0x3F800000)  # the bits of 0.0 and of 1.0
    while low < high:
        middle = np.uint32(high - (high - low) // np.uint32(2))
        value = bits_to_float(middle)
        reached = _count_from(weights, value) >= enough if by_count else _mass_from(weights, value) >= enough
        if reached:
            low = middle
        else:
            high = np.uint32(middle - np.uint32(1))
    return bits_to_float(low)


@kernel
def _drop_below(weights, threshold):  # type: ignore[no-untyped-def]
    for token in range(weights.size):
        if weights[token] < threshold:
            weights[token] = np.float32(0.0)


@kernel
def _draw(weights, slot, position, table):  # type: ignore[no-untyped-def]
    """Samples from logits in `weights`, which become weights relative to the best token."""
    top = weights[argmax(weights)]
    inverse = np.float32(1.0) / table.temperature[slot]
    for token in range(weights.size):
        weights[token] = np.exp((weights[token] - top) * inverse)
    if table.min_p[slot] > 0:
        _drop_below(weights, table.min_p[slot])
    if 0 < table.top_k[slot] < weights.size:
        _drop_below(weights, _threshold(weights, np.float64(table.top_k[slot]), True))
    if table.top_p[slot] < np.float32(1.0):
        mass = _mass_from(weights, np.float32(0.0))
        _drop_below(weights, _threshold(weights, mass * np.float64(table.top_p[slot]), False))
    target = uniform(table.seed[slot], position) * _mass_from(weights, np.float32(0.0))
    total, chosen = 0.0, 0
    for token in range(weights.size):
        if weights[token] > 0:
            total += np.float64(weights[token])
            chosen = token
            if total > target:
                break
    return chosen


@kernel
def choose(logits, slot, position, history, table, scratch, seen):  # type: ignore[no-untyped-def]
    """The token that follows `position` in `slot`. `logits` [vocab] is left as it was; `scratch` is as long."""
    greedy = table.temperature[slot] < _GREEDY_BELOW
    if greedy and not table.adjusts[slot]:
        return argmax(logits)
    scratch[:] = logits
    if table.adjusts[slot]:
        _adjust(scratch, slot, history, position, table, seen)
    return argmax(scratch) if greedy else _draw(scratch, slot, position, table)
