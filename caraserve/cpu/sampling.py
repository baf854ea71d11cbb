"""Chooses a token from one row of logits, in compiled code.

A draw depends only on the logits, the request's seed and the position, so it is the same in any batch, after any
preemption and on any instance. Nothing is sorted: top-k and top-p bisect the threshold over the bits of a weight, which
are in the order of the weights.
"""

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import SlotSampling
from caraserve.core.request import MAX_LOGIT_BIAS
from caraserve.cpu.jit import kernel, reduction
from caraserve.cpu.simd import bits_to_float

MAX_END_IDS = 32
_GREEDY_BELOW = np.float32(1e-5)
_ALL_TOKENS = np.uint32(0xFFFFFFFF)  # a word of a mask


# Sampling parameters of one request slot.
SLOT_SAMPLING = np.dtype(
    [
        ("seed", np.uint64),
        ("prompt_tokens", np.int64),
        ("min_tokens", np.int64),
        ("top_k", np.int64),
        ("adjusts", np.int64),  # 1: penalties, biases or banned end tokens change the logits
        ("end_count", np.int64),
        ("bias_count", np.int64),
        ("end_ids", np.int64, MAX_END_IDS),
        ("bias_ids", np.int64, MAX_LOGIT_BIAS),
        ("bias", np.float32, MAX_LOGIT_BIAS),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
    ],
    align=True,
)


def write_sampling(table: NDArray[np.void], slot: int, sampling: SlotSampling) -> None:
    """Writes the parameters of one slot to the table (SLOT_SAMPLING [slots])."""
    params = table[slot]
    for name in ("temperature", "top_p", "min_p", "top_k", "prompt_tokens", "min_tokens"):
        params[name] = getattr(sampling, name)
    for name in ("presence", "frequency", "repetition"):
        params[name] = getattr(sampling, f"{name}_penalty")
    params["seed"] = sampling.seed & (2**64 - 1)
    ends, bias = sampling.end_ids[:MAX_END_IDS], sampling.logit_bias
    params["end_count"], params["bias_count"] = len(ends), len(bias)
    params["end_ids"][: len(ends)] = ends
    params["bias_ids"][: len(bias)] = [token for token, _ in bias]
    params["bias"][: len(bias)] = [value for _, value in bias]
    penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)
    params["adjusts"] = penalised or bool(bias) or (sampling.min_tokens > 0 and bool(ends))


@kernel
def argmax(logits):  # type: ignore[no-untyped-def]
    """Returns the first index of the largest value."""
    best, index = logits[0], 0
    for token in range(1, logits.size):
        if logits[token] > best:
            best, index = logits[token], token
    return index


@reduction
def all_finite(logits):  # type: ignore[no-untyped-def]
    """Returns whether all logits are finite: only then every 0 · x is 0."""
    total = np.float32(0.0)
    for token in range(logits.size):
        total += logits[token] * np.float32(0.0)
    return total == np.float32(0.0)


@reduction
def log_sum_exp(logits):  # type: ignore[no-untyped-def]
    """Returns log Σ e^logit."""
    top = logits[argmax(logits)]
    total = 0.0
    for token in range(logits.size):
        total += np.exp(np.float64(logits[token] - top))
    return top + np.log(total)


@kernel
def rank_of(logits, token):  # type: ignore[no-untyped-def]
    """Returns the place of a token among all, best first, from 1 on; of equal ones the first is better."""
    value, better = logits[token], 0
    for other in range(token):
        better += logits[other] >= value
    for other in range(token + 1, logits.size):
        better += logits[other] > value
    return better + 1


@kernel
def best_tokens(logits, count, ids, values):  # type: ignore[no-untyped-def]
    """Writes the `count` largest logits, best first, by insertion: few values displace another one."""
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
    """Returns a number in [0, 1) that depends on (seed, position): two rounds of the SplitMix64 finaliser."""
    state = np.uint64(seed) + np.uint64(position + 1) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(2):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return np.float64(state >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def _adjust(logits, history, position, params, mask, seen):  # type: ignore[no-untyped-def]
    """Applies penalties, biases, the ban of end tokens and the mask in place. `seen` is all zero on entry and on
    return."""
    prompt, end = params.prompt_tokens, position + 1  # tokens [0, end) are known
    repetition = params.repetition
    for index in range(end):
        token = history[index]
        if token < 0:  # a vector of the prompt
            continue
        if seen[token] & 1 == 0 and repetition != np.float32(1.0):
            value = logits[token]
            logits[token] = value / repetition if value > 0 else value * repetition
        seen[token] |= 1
        if index >= prompt:
            logits[token] -= params.frequency
            if seen[token] & 2 == 0:
                logits[token] -= params.presence
            seen[token] |= 2
    for index in range(end):
        if history[index] >= 0:
            seen[history[index]] = 0
    for index in range(params.bias_count):
        logits[params.bias_ids[index]] += params.bias[index]
    if end - prompt < params.min_tokens:
        for index in range(params.end_count):
            logits[params.end_ids[index]] = np.float32(-np.inf)
    for place in range(mask.size):
        if mask[place] != _ALL_TOKENS:
            for token in range(32 * place, min(32 * place + 32, logits.size)):
                if (mask[place] >> np.uint32(token & 31)) & np.uint32(1) == 0:
                    logits[token] = np.float32(-np.inf)


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
    """Returns the largest t for which the weights >= t, in [0, 1], count (or sum to) at least `enough`."""
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
def _draw(weights, position, params):  # type: ignore[no-untyped-def]
    """Samples from logits in `weights`, which it replaces by weights relative to the best token."""
    top = weights[argmax(weights)]
    inverse = np.float32(1.0) / params.temperature
    for token in range(weights.size):
        weights[token] = np.exp((weights[token] - top) * inverse)
    if params.min_p > 0:
        _drop_below(weights, params.min_p)
    if 0 < params.top_k < weights.size:
        _drop_below(weights, _threshold(weights, np.float64(params.top_k), True))
    if params.top_p < np.float32(1.0):
        mass = _mass_from(weights, np.float32(0.0))
        _drop_below(weights, _threshold(weights, mass * np.float64(params.top_p), False))
    target = uniform(params.seed, position) * _mass_from(weights, np.float32(0.0))
    total, chosen = 0.0, 0
    for token in range(weights.size):
        if weights[token] > 0:
            total += np.float64(weights[token])
            chosen = token
            if total > target:
                break
    return chosen


@kernel
def choose(logits, position, history, params, scratch, seen, mask):  # type: ignore[no-untyped-def]
    """Returns the token that follows `position`. `logits` [vocab] is not changed; `scratch` has the same length.
    `mask`: uint32, a bit for each token that may be chosen; empty: all may."""
    greedy = params.temperature < _GREEDY_BELOW
    adjusts = params.adjusts or mask.size > 0
    if greedy and not adjusts:
        return argmax(logits)
    for token in range(logits.size):  # a slice assignment would add 3 s of compilation
        scratch[token] = logits[token]
    if adjusts:
        _adjust(scratch, history, position, params, mask, seen)
    return argmax(scratch) if greedy else _draw(scratch, position, params)
