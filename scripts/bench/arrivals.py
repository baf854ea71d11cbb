"""Requests that come by the clock, whether or not earlier ones are done: when, how long, for which adapter.

Neither torch nor the server is imported here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POPULARITIES = ("uniform", "zipf")
_SPREAD = 0.5  # lengths lie within this share of their mean


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals. Lengths are uniform around their means; `popularity` is one of POPULARITIES."""

    requests: int
    rps: float
    prompt_tokens: int
    output_tokens: int
    popularity: str
    zipf_exponent: float

    @property
    def most_tokens(self) -> int:
        """Of the longest prompt and the longest output."""
        return longest(self.prompt_tokens) + longest(self.output_tokens)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, due `at_s` after the start."""

    at_s: float
    prompt_ids: tuple[int, ...]
    output_tokens: int
    adapter: str


def longest(mean_tokens: int) -> int:
    """The most tokens of a length with this mean."""
    return round((1 + _SPREAD) * mean_tokens)


def arrivals(load: Load, adapters: Sequence[str], vocab: int, seed: int) -> tuple[Arrival, ...]:
    """The same for the same seed. No two prompts share a beginning, so that no prefix cache helps. Of skewed
    popularity, the first adapter is the most popular."""
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1 / load.rps, load.requests))
    chosen = rng.choice(len(adapters), load.requests, p=_weights(load, len(adapters)))
    prompts = _lengths(rng, load.prompt_tokens, load.requests)
    outputs = _lengths(rng, load.output_tokens, load.requests)
    return tuple(
        Arrival(float(at_s), tuple(rng.integers(2, vocab, prompt).tolist()), int(output), adapters[index])
        for at_s, prompt, output, index in zip(times_s, prompts, outputs, chosen, strict=True)
    )


def _weights(load: Load, count: int) -> NDArray[np.float64]:
    exponent = load.zipf_exponent if load.popularity == "zipf" else 0.0
    weights: NDArray[np.float64] = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    weights /= weights.sum()
    return weights


def _lengths(rng: np.random.Generator, mean_tokens: int, count: int) -> NDArray[np.int64]:
    most = longest(mean_tokens)
    return rng.integers(max(1, 2 * mean_tokens - most), most, count, endpoint=True)
