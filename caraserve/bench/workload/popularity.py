"""Named popularity distributions: they assign an adapter to each request of a workload.

Distributions over all adapters (in skewed ones the adapter with index 0 is the most popular):
`uniform`            each request draws any adapter with equal probability, independently of other requests
`distinct`           a random permutation of the adapters, repeated: two uses of one adapter are always N requests
                     apart. The papers unload each adapter after its request, so that every request is a cold start
`round-robin`        adapters in order of their index, repeated
`identical`          the first adapter only
`zipf:S`             share ∝ i^-S, i = 1, 2, …
`mandelbrot:S,Q`     share ∝ (i + Q)^-S
`slora:A`            S-LoRA's generator: index ⌊N·X⌋, X with density A·x^(A-1). A = 1 is uniform; below 1, low indices
                     are popular. A is not a Zipf exponent
`geometric:R`        Punica's generator ("zipf:1.5" there): adapters get ⌊R^k⌋ requests, k = 0, 1, …; the last one gets
                     the remaining requests; shuffled. The number of adapters used follows from the request count
`maf`                Azure Functions 2019: each adapter's calls per day are drawn from a fitted log-normal distribution,
                     clipped at the largest number in the data
`top5`               five adapters share 70 % of the requests equally; all others share 30 % equally
`sticky:P[,W]`       with probability P one of the W most recently used adapters, otherwise any adapter

Distributions over ranks (adapters of equal rank have equal shares, except in `production`):
`shifting-skew`      the largest rank's share falls from one half at the start of the run, linearly; the smallest rank's
                     share rises to one half at its end; the other ranks share the rest equally
`exponential[:C]`    share of the k-th smallest rank ∝ exp(-C·k)
`rank-skew:A`        share of the k-th smallest rank ∝ k^-A, k = 1, 2, …
`production[:A]`     all ranks have equal shares; within a rank the k-th adapter's share ∝ k^-A

`trace`              the adapters that the trace names; with a trace of calls per minute, each adapter's share of the
                     calls in the minute of the request
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from caraserve.bench.workload.forms import Form, Parameter, distributions, parse_form
from caraserve.bench.workload.traces import RateTrace, Trace, needs_trace
from caraserve.errors import ConfigError

Indices: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Ranks: TypeAlias = NDArray[np.int64]
# (generator, each request's time as a fraction of the run [requests], ranks [adapters]) → adapter indices [requests]
Dealer: TypeAlias = Callable[[np.random.Generator, Floats, Ranks], Indices]

_TOP, _TOP_SHARE = 5, 0.7
_MOST_WINDOW = 100_000


@dataclass(frozen=True, slots=True)
class Popularity:
    """A distribution that assigns adapters to requests."""

    text: str  # parse_popularity(text) gives an equal distribution
    dealer: Dealer = field(repr=False)

    @property
    def drops_after_use(self) -> bool:
        """True for `distinct`: in the papers' setting an adapter leaves the device after each request."""
        return self.text == "distinct"

    def deal(self, rng: np.random.Generator, count: int, at_share: ArrayLike, ranks: Sequence[int]) -> Indices:
        """Returns the adapter index of each request, int64 [count].

        `at_share` [count] is the arrival time of each request as a fraction of the run, 0 to 1; `ranks` [adapters].
        Raises ConfigError when there is no adapter, or when a trace names more adapters than there are.
        """
        shares = np.broadcast_to(np.asarray(at_share, dtype=np.float64), (count,))
        if not ranks:
            raise ConfigError(f"popularity {self.text!r} needs at least one adapter")
        return self.dealer(rng, shares, np.asarray(ranks, dtype=np.int64))


def parse_popularity(text: str, trace: Trace | None = None) -> Popularity:
    """Parses a distribution such as `zipf:0.9`; `trace` supplies the data of the distribution `trace`."""
    name, values = parse_form("popularity", text, FORMS)
    return Popularity(text.strip(), _as_in(trace) if name == "trace" else partial(_DEALERS[name][1], *values))


def _draw(uniform: Floats, shares: Floats) -> Indices:
    """Maps uniform numbers in [0, 1) to indices, each with a probability ∝ its share; `shares` need not sum to 1."""
    upper = np.cumsum(shares)
    return np.searchsorted(upper[:-1] / upper[-1], uniform, side="right").astype(np.int64)


def _power(base: Floats, exponent: float) -> Floats:
    """Returns base^exponent, scaled so that the largest value is 1."""
    return _exp(exponent * np.log(base))


def _exp(logs: Floats) -> Floats:
    """Returns e^logs, scaled so that the largest value is 1 and none overflows."""
    powers: Floats = np.exp(logs - logs.max())
    return powers


def _counted(count: int) -> Floats:
    return np.arange(1, count + 1, dtype=np.float64)


# --- over all adapters: parameters, then those of a dealer ---


def _uniform(rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    return rng.integers(len(ranks), size=len(at_share))


def _distinct(rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    return rng.permutation(len(ranks))[np.arange(len(at_share)) % len(ranks)]


def _round_robin(_: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    return np.arange(len(at_share)) % len(ranks)


def _identical(_: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    return np.zeros(len(at_share), dtype=np.int64)


def _zipf(exponent: float, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    return _mandelbrot(exponent, 0.0, rng, at_share, ranks)


def _mandelbrot(exponent: float, shift: float, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    return _draw(rng.random(len(at_share)), _power(shift + _counted(len(ranks)), -exponent))


def _slora(alpha: float, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    indices = (len(ranks) * rng.power(alpha, len(at_share))).astype(np.int64)
    return np.minimum(indices, len(ranks) - 1)  # X may round up to 1


def _geometric(ratio: float, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    counts: list[int] = []
    left = len(at_share)
    while left:
        counts.append(min(int(ratio ** len(counts)), left) if len(counts) < len(ranks) - 1 else left)
        left -= counts[-1]
    counts.sort(reverse=True)
    return rng.permutation(np.repeat(np.arange(len(counts)), counts))


def _maf(rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    fit = distributions()["popularity"]["maf"]
    calls = np.exp(rng.normal(fit["mu"], fit["sigma"], len(ranks)))
    return _draw(rng.random(len(at_share)), np.minimum(calls, fit["most"]))


def _top5(rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    shares = np.ones(len(ranks))
    if len(ranks) > _TOP:
        shares[:_TOP], shares[_TOP:] = _TOP_SHARE / _TOP, (1 - _TOP_SHARE) / (len(ranks) - _TOP)
    return _draw(rng.random(len(at_share)), shares)


def _sticky(again: float, window: float, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    count = len(at_share)
    fresh = rng.integers(len(ranks), size=count).tolist()
    repeats, picks = (rng.random(count) < again).tolist(), rng.random(count).tolist()
    last: list[int] = []  # at most `window` different adapters, the most recently used at the end
    dealt = np.empty(count, dtype=np.int64)
    for index in range(count):
        adapter = last[int(picks[index] * len(last))] if repeats[index] and last else fresh[index]
        if adapter in last:
            last.remove(adapter)
        elif len(last) == window:
            del last[0]
        last.append(adapter)
        dealt[index] = adapter
    return dealt


# --- over ranks ---


def _among_ranks(ranks: Ranks, share_of_rank: Floats) -> Floats:
    """Splits each rank's share equally among its adapters; `share_of_rank` begins with the smallest rank."""
    _, which, adapters = np.unique(ranks, return_inverse=True, return_counts=True)
    return (share_of_rank / adapters)[which]


def _places(ranks: Ranks) -> Floats:
    """Returns 1, 2, …, K for K different ranks."""
    return _counted(len(np.unique(ranks)))


def _exponential(constant: float, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    return _draw(rng.random(len(at_share)), _among_ranks(ranks, _exp(-constant * _places(ranks))))


def _rank_skew(exponent: float, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    return _draw(rng.random(len(at_share)), _among_ranks(ranks, _power(_places(ranks), -exponent)))


def _shifting_skew(rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    kinds = len(np.unique(ranks))
    others = 0.5 / (kinds - 1) if kinds > 1 else 0.0
    first, last = np.full(kinds, others), np.full(kinds, others)
    first[-1] = last[0] = 0.5
    # A request at the fraction t of the run uses the shares of the run's end with probability t, else those of its
    # start: the expected shares change linearly.
    early, late = (_draw(rng.random(len(at_share)), _among_ranks(ranks, shares)) for shares in (first, last))
    return np.where(rng.random(len(at_share)) < at_share, late, early)


def _production(exponent: float, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    shares = np.empty(len(ranks))
    for rank in np.unique(ranks):
        same = ranks == rank
        inside = _power(_counted(int(same.sum())), -exponent)
        shares[same] = inside / inside.sum()
    return _draw(rng.random(len(at_share)), shares)


# --- of a trace ---


def _as_in(trace: Trace | None) -> Dealer:
    trace = needs_trace("popularity", trace)
    if isinstance(trace, RateTrace):
        return partial(_by_minute, trace)
    if trace.adapters is None:
        raise ConfigError(f"popularity 'trace': {trace.source} does not name adapters")
    return partial(_by_row, trace.source, trace.adapters)


def _by_row(source: str, adapters: Indices, _: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    if (named := int(adapters.max()) + 1) > len(ranks):
        raise ConfigError(f"{source} names {named} adapters; the run has {len(ranks)}")
    return adapters[np.arange(len(at_share)) % len(adapters)]


def _by_minute(trace: RateTrace, rng: np.random.Generator, at_share: Floats, ranks: Ranks) -> Indices:
    minutes, by_adapter = trace.calls.shape[1], trace.group(rng, len(ranks)).calls
    uniform = rng.random(len(at_share))
    minute_of = np.minimum((at_share * minutes).astype(np.int64), minutes - 1)
    dealt = np.empty(len(at_share), dtype=np.int64)
    for minute in np.unique(minute_of):
        calls = by_adapter[:, minute]
        # The selected functions may have no call in this minute: use their totals over the whole trace.
        shares = calls if calls.any() else by_adapter.sum(axis=1, dtype=np.int64)
        now = minute_of == minute
        dealt[now] = _draw(uniform[now], shares.astype(np.float64))
    return dealt


_EXPONENT = Parameter("S", low=-100.0, high=100.0)
_WINDOW = Parameter("W", 8.0, 1.0, _MOST_WINDOW, whole=True)
_DEALERS: dict[str, tuple[Form, Callable[..., Indices]]] = {
    "uniform": (Form(), _uniform),
    "distinct": (Form(), _distinct),
    "round-robin": (Form(), _round_robin),
    "identical": (Form(), _identical),
    "zipf": (Form((_EXPONENT,)), _zipf),
    "mandelbrot": (Form((_EXPONENT, Parameter("Q", low=-1.0, above=True))), _mandelbrot),
    "slora": (Form((Parameter("ALPHA", low=0.0, above=True),)), _slora),
    "geometric": (Form((Parameter("R", low=1.0, high=1e6, above=True),)), _geometric),
    "maf": (Form(), _maf),
    "top5": (Form(), _top5),
    "sticky": (Form((Parameter("P", low=0.0, high=1.0), _WINDOW)), _sticky),
    "shifting-skew": (Form(), _shifting_skew),
    "exponential": (Form((Parameter("C", 1.0, -100.0, 100.0),)), _exponential),
    "rank-skew": (Form((Parameter("A", low=-100.0, high=100.0),)), _rank_skew),
    "production": (Form((Parameter("A", 1.0, -100.0, 100.0),)), _production),
}
FORMS = {**{name: form for name, (form, _) in _DEALERS.items()}, "trace": Form()}
