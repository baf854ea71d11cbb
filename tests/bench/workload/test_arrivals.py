"""Tests of arrival processes: all have the requested rate, and differ in how their gaps vary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.workload.arrivals import Times, parse_arrivals
from caraserve.bench.workload.traces import RateTrace, RequestTrace
from caraserve.errors import ConfigError


def times(text: str, rate: float | None, count: int, trace: RequestTrace | RateTrace | None = None) -> Times:
    return parse_arrivals(text, trace).times(np.random.default_rng(3), rate, count)


def recorded(*at_s: float) -> RequestTrace:
    some = np.ones(len(at_s), np.int64)
    return RequestTrace("t.csv", some, some, np.array(at_s))


@pytest.mark.parametrize(
    ("text", "variation"), [("poisson", 1), ("gamma:1", 1), ("gamma:0.25", 2), ("gamma:4", 0.5), ("uniform", 0)]
)
def test_gaps_have_the_rate_and_the_variation_of_their_process(text: str, variation: float) -> None:
    gaps_s = np.diff(times(text, 20, 50_000))
    assert gaps_s.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.03, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "rate", "trace", "expected"),
    [
        ("burst", None, (), [0, 0, 0, 0]),
        ("burst", 5, (), [0, 0]),
        ("uniform", 4, (), [0, 0.25, 0.5]),
        ("trace", 1, (0, 1, 3, 6), [0, 0.5, 1.5, 3]),  # the next would come after one more mean gap, at 8
        ("trace", 2, (0, 1, 3, 6), [0, 0.25, 0.75, 1.5]),
        ("trace", None, (0, 1, 3, 6), [0, 1, 3, 6]),
        ("trace", 1, (0, 1, 4, 6), [0, 0.5]),
        ("trace", 0.5, (0, 1, 3, 6), [0, 1, 3, 6, 8, 9, 11, 14]),
        ("trace", 3, (0, 0), [0, 0, 0]),
        ("trace", None, (0,), [0, 0]),
    ],
    ids=[
        *("a burst", "a burst at a rate", "from the start", "stretched to a rate", "to another one", "at its own rate"),
        *("a part has the rate", "a short one is repeated", "of one moment", "of one request"),
    ],
)
def test_times_without_chance(text: str, rate: float | None, trace: tuple[float, ...], expected: list[float]) -> None:
    assert times(text, rate, len(expected), recorded(*trace)).tolist() == pytest.approx(expected)


def test_arrivals_follow_the_calls_per_minute_of_a_trace() -> None:
    trace = RateTrace("m.csv", np.array([[6, 0, 2, 0], [0, 0, 1, 1]], np.int32))
    at_s = times("trace", 10, 10_000, trace)  # 1,000 s: the whole trace, 250 s a minute
    by_minute, _ = np.histogram(at_s, bins=[0, 250, 500, 750, 1000])
    assert by_minute / 10_000 == pytest.approx([0.6, 0, 0.3, 0.1], abs=0.02)
    assert parse_arrivals("trace", trace).natural_rate == pytest.approx(10 / 240)


@given(
    st.sampled_from(["poisson", "gamma:0.1", "uniform", "burst", "trace"]),
    st.floats(0.01, 1e4),
    st.integers(1, 50),
    st.lists(st.floats(0, 100), min_size=1, max_size=9),
)
def test_arrival_times_are_ascending(text: str, rate: float, count: int, gaps_s: list[float]) -> None:
    at_s = np.cumsum(gaps_s)
    drawn = times(text, rate, count, recorded(*(at_s - at_s[0])))
    assert drawn.shape == (count,)
    assert drawn[0] >= 0
    assert (np.diff(drawn) >= 0).all()
    assert np.isfinite(drawn).all()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pareto", "arrivals 'pareto' is not known; there are poisson, gamma:BURSTINESS, uniform, burst, trace"),
        ("gamma", "write gamma:BURSTINESS"),
        ("gamma:0", "BURSTINESS must be above 0"),
        ("gamma:nan", "BURSTINESS must be above 0"),
        ("gamma:x", "'x' is not a number"),
        ("poisson:2", "write poisson"),
        ("trace", r"need a trace: azure-llm:PATH, mooncake:PATH, maf2019\[:PATH\]"),
    ],
)
def test_invalid_texts_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_arrivals(text)


def test_a_process_needs_a_rate_and_a_trace_times() -> None:
    with pytest.raises(ConfigError, match="'poisson' need a rate"):
        times("poisson", None, 1)
    with pytest.raises(ConfigError, match="must be above 0, not 0"):
        times("poisson", 0, 1)
    some = np.ones(1, np.int64)
    with pytest.raises(ConfigError, match=r"lengths\.csv has no times"):
        parse_arrivals("trace", RequestTrace("lengths.csv", some, some))
