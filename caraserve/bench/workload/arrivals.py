"""Named arrival processes: they give each request's arrival time, at one request per second scaled to the chosen rate.

`poisson`   exponential gaps
`gamma:B`   Gamma gaps of shape B, the burstiness: 1 is Poisson, lower is burstier; the gaps' coefficient of variation
            is 1/√B
`uniform`   equal gaps
`burst`     all requests arrive at once
`trace`     the times of a trace, stretched to the rate; a trace that is too short is repeated from its start. A trace
            of calls per minute is stretched so that it covers the run once, with Poisson arrivals inside each minute
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.workload.forms import Form, Parameter, parse_form
from caraserve.bench.workload.traces import MINUTE_S, RateTrace, RequestTrace, Trace, needs_trace
from caraserve.errors import ConfigError

Times: TypeAlias = NDArray[np.float64]
Draw: TypeAlias = Callable[[np.random.Generator, int], Times]

FORMS = {
    "poisson": Form(),
    "gamma": Form((Parameter("BURSTINESS", low=0.0, above=True),)),
    "uniform": Form(),
    "burst": Form(),
    "trace": Form(),
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process: when requests arrive."""

    text: str  # parse_arrivals(text) gives an equal process
    draw: Draw = field(repr=False)  # ascending times in s, at a mean rate of one request per second
    natural_rate: float | None = None  # requests per second if no rate is requested; None: a rate is required
    recorded: Callable[[int], Times] | None = field(default=None, repr=False)  # a trace's own times in s, unscaled

    def rate(self, requested: float | None) -> float:
        """Returns the requested rate, or else the process's natural rate, in requests per second.

        Raises ConfigError when there is neither, or when the rate is not above 0.
        """
        if requested is None and self.natural_rate is None:
            raise ConfigError(f"arrivals {self.text!r} need a rate")
        rate = self.natural_rate if requested is None else requested
        assert rate is not None
        if not rate > 0:
            raise ConfigError(f"the rate must be above 0, not {rate:g}")
        return rate

    def times(self, rng: np.random.Generator, rate: float | None, count: int) -> Times:
        """Returns the arrival times of `count` requests, ascending, in s from the run's start."""
        if rate is None and self.recorded is not None:
            return self.recorded(count)
        return self.draw(rng, count) / self.rate(rate)


def parse_arrivals(text: str, trace: Trace | None = None) -> Arrivals:
    """Parses an arrival process such as `gamma:0.5`; `trace` supplies the times of the process `trace`."""
    name, values = parse_form("arrivals", text, FORMS)
    shown = text.strip()
    if name == "gamma":
        return Arrivals(shown, _gamma(values[0]))
    if name == "burst":
        return Arrivals(shown, lambda _, count: np.zeros(count), natural_rate=math.inf)
    if name == "uniform":
        return Arrivals(shown, lambda _, count: np.arange(count, dtype=np.float64))
    if name == "trace":
        return _from_trace(shown, trace)
    return Arrivals(shown, _gamma(1.0))


def _gamma(shape: float) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Times:
        return np.cumsum(rng.gamma(shape, 1 / shape, count))

    return draw


def _from_trace(text: str, trace: Trace | None) -> Arrivals:
    trace = needs_trace("arrivals", trace)
    if isinstance(trace, RateTrace):
        return Arrivals(text, _by_minute(trace), float(trace.calls.sum()) / (trace.calls.shape[1] * MINUTE_S))
    if trace.at_s is None:
        raise ConfigError(f"arrivals 'trace': {trace.source} has no times")
    period_s = _period_s(trace.at_s)
    rate = len(trace.at_s) / period_s if period_s > 0 else math.inf
    return Arrivals(text, _replay(trace), rate, lambda count: _recorded(trace, count)[:-1])


def _period_s(at_s: Times) -> float:
    """Returns the period after which a repeated trace begins again: its last arrival time plus one mean gap, in s."""
    count = len(at_s)
    return float(at_s[-1]) * count / (count - 1) if count > 1 else 0.0


def _recorded(trace: RequestTrace, count: int) -> Times:
    """Returns the trace's first `count` + 1 arrival times; a trace that is too short is repeated."""
    assert trace.at_s is not None
    index = np.arange(count + 1)
    return trace.at_s[index % len(trace.at_s)] + index // len(trace.at_s) * _period_s(trace.at_s)


def _replay(trace: RequestTrace) -> Draw:
    def draw(_: np.random.Generator, count: int) -> Times:
        # The run ends when request `count` + 1 would arrive: that makes its mean rate exactly 1 request per second.
        times_s = _recorded(trace, count)
        return times_s[:-1] * (count / times_s[-1]) if times_s[-1] > 0 else times_s[:-1]

    return draw


def _by_minute(trace: RateTrace) -> Draw:
    totals = trace.calls.sum(axis=0, dtype=np.float64)
    share_of_calls = np.concatenate([[0.0], np.cumsum(totals) / totals.sum()])
    share_of_time = np.linspace(0.0, 1.0, len(share_of_calls))

    def draw(rng: np.random.Generator, count: int) -> Times:
        # Given their number, the arrivals of an inhomogeneous Poisson process are independent draws from its rate.
        return np.interp(np.sort(rng.random(count)), share_of_calls, share_of_time) * count

    return draw
