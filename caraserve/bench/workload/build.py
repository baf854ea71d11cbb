"""Builds the requests of a workload from its specification. The same seed gives the same workload."""

import math
from dataclasses import dataclass, field

import numpy as np

from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.workload.arrivals import Arrivals, parse_arrivals
from caraserve.bench.workload.lengths import Lengths, Pair, parse_lengths, shorten
from caraserve.bench.workload.popularity import Popularity, parse_popularity
from caraserve.bench.workload.presets import Preset
from caraserve.bench.workload.traces import RateTrace, Trace, included_trace
from caraserve.errors import ConfigError

_MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors that shrink a workload to fit a smaller machine; 1 leaves a quantity as it is."""

    rate: float = 1.0
    requests: float = 1.0  # scales the number of requests, or the duration
    adapters: float = 1.0


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The specification from which `build` makes a workload.

    Exactly one of `num_requests` and `duration_s` is given. `adapters` 0 means the base model alone. `rate` None means
    the natural rate of the arrivals; arrivals without one need a rate.
    """

    lengths: Lengths
    arrivals: Arrivals
    rate: float | None
    popularity: Popularity
    adapters: int
    ranks: tuple[int, ...]  # adapter i has rank ranks[i % len(ranks)]
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0
    scale: Scale = field(default_factory=Scale)
    max_context: int | None = None  # tokens of prompt and output together; None: no limit
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.num_requests is None) == (self.duration_s is None):
            raise ConfigError("a workload has either a number of requests or a duration")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"a workload has at least one request, not {self.num_requests}")
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise ConfigError(f"a workload's duration must be above 0 s, not {self.duration_s:g}")
        if self.adapters < 0 or (self.adapters and not self.ranks) or any(rank < 1 for rank in self.ranks):
            raise ConfigError("a workload needs a number of adapters and, for them, ranks of at least 1")
        if self.seed < 0:
            raise ConfigError(f"a seed is at least 0, not {self.seed}")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError(f"a context of {self.max_context} tokens holds no prompt and answer")
        for name in Scale.__slots__:
            share = getattr(self.scale, name)
            if not 0 < share < math.inf:
                raise ConfigError(f"the scale of {name} must be above 0, not {share:g}")


def build(spec: WorkloadSpec) -> Workload:
    """Builds the workload. Lengths, arrivals and popularity use separate seeds: changing one keeps the other two."""
    seeds = np.random.SeedSequence(spec.seed).spawn(3)
    for_lengths, for_arrivals, for_popularity = (np.random.Generator(np.random.PCG64(seed)) for seed in seeds)
    rate = spec.arrivals.rate(spec.rate) * spec.scale.rate
    count = _count(spec, rate)
    adapters = max(1, round(spec.adapters * spec.scale.adapters)) if spec.adapters else 0
    ranks = tuple(spec.ranks[index % len(spec.ranks)] for index in range(adapters))

    as_recorded = spec.rate is None and spec.scale.rate == 1.0
    at_s = spec.arrivals.times(for_arrivals, None if as_recorded else rate, count)
    (prompts, outputs), shortened = _lengths(spec, for_lengths, count)
    dealt: list[int] | list[None] = [None] * count
    if ranks:
        # When all requests arrive at once, the position in the list stands for the time.
        at_share = at_s * (rate / count) if at_s[-1] > 0 else np.arange(count) / count
        dealt = spec.popularity.deal(for_popularity, count, np.minimum(at_share, 1.0), ranks).tolist()
    rows = zip(at_s.tolist(), dealt, prompts.tolist(), outputs.tolist(), strict=True)
    requests = tuple(PlannedRequest(index, *row) for index, row in enumerate(rows))
    return Workload(requests, ranks, (*spec.notes, *_scale_notes(spec, rate, count, adapters), *shortened))


def spec_from_preset(
    preset: Preset, *, trace: Trace | None = None, seed: int = 0, adapters: int | None = None
) -> WorkloadSpec:
    """Returns the preset's default values as a specification; use `dataclasses.replace` to change any of them but the
    number of adapters, which decides what is taken of a trace of rates.

    A trace replaces the preset's arrivals, lengths and adapters as far as the trace has them; the preset's rate stays.
    """
    adapters, lengths = adapters or preset.adapters.default, preset.lengths.default
    arrivals, popularity = preset.arrivals.default, preset.popularity.default
    notes = preset.notes
    of_arrivals: Trace | None = None
    of_popularity: Trace | None = None
    if arrivals == "trace":
        of_arrivals = of_popularity = server_share(included_trace(), adapters, seed)
    if isinstance(trace, RateTrace):
        arrivals = popularity = "trace"
        of_arrivals = of_popularity = server_share(trace, adapters, seed)
        notes = (*notes, f"Arrivals and adapters are those of {trace.source}.")
    elif trace is not None:
        lengths = "trace"
        if trace.at_s is not None:
            arrivals, of_arrivals = "trace", trace
        if trace.adapters is not None:
            popularity, of_popularity = "trace", trace
        notes = (*notes, f"Lengths, and arrivals and adapters if it has them, are those of {trace.source}.")
    return WorkloadSpec(
        lengths=parse_lengths(lengths, trace),
        arrivals=parse_arrivals(arrivals, of_arrivals),
        rate=None if preset.rates is None else preset.rates.default,
        popularity=parse_popularity(popularity, of_popularity),
        adapters=adapters,
        ranks=preset.ranks.default,
        num_requests=preset.requests,
        duration_s=preset.duration_s,
        seed=seed,
        notes=notes,
    )


def server_share(trace: RateTrace, adapters: int, seed: int) -> RateTrace:
    """Returns `adapters` random functions of the trace, chosen by the seed: one server's share in the papers."""
    return trace.group(np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))), adapters)


def _count(spec: WorkloadSpec, rate: float) -> int:
    if spec.num_requests is not None:
        requested: float = spec.num_requests
    elif math.isinf(rate):
        raise ConfigError(f"arrivals {spec.arrivals.text!r} have no rate: give a number of requests, not a duration")
    else:
        assert spec.duration_s is not None
        requested = rate * spec.duration_s
    # The epsilon is for products such as 0.1 · 30, which can fall just short of a whole number.
    count = max(1, math.floor(requested * spec.scale.requests + 1e-6))
    if count > _MOST_REQUESTS:
        raise ConfigError(f"{count} requests are more than the {_MOST_REQUESTS} that a workload may have")
    return count


def _lengths(spec: WorkloadSpec, rng: np.random.Generator, count: int) -> tuple[Pair, tuple[str, ...]]:
    prompts, outputs = spec.lengths.sample(rng, count)
    if spec.max_context is None:
        return (prompts, outputs), ()
    longer = int((prompts + outputs > spec.max_context).sum())
    note = (
        f"{longer} of {count} requests were longer than {spec.max_context} tokens and were cut to that, prompt and "
        "answer in proportion."
    )
    return shorten(prompts, outputs, spec.max_context), (note,) if longer else ()


def _scale_notes(spec: WorkloadSpec, rate: float, count: int, adapters: int) -> tuple[str, ...]:
    scale = spec.scale
    notes = []
    if scale.rate != 1:
        notes.append(f"The rate is {scale.rate:g} times the setting's: {rate:g} requests/s.")
    if scale.requests != 1:
        notes.append(f"The run is {scale.requests:g} times as long as the setting's: {count} requests.")
    if scale.adapters != 1 and spec.adapters:
        notes.append(f"There are {scale.adapters:g} times the setting's adapters: {adapters}.")
    return tuple(notes)
