"""Tests that compiled ranking gives bitwise the same results as plain Python."""

import random

from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.simulator.compiled_ranking import PackedInstance, estimates, rank_compiled
from caraserve.cluster.routing.cost import Arrival, Backlog, LinkSpeeds, Tier
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.router import Fleet, rank_candidates

MS = st.floats(0, 50)
RATES = st.floats(0.01, 1e7) | st.just(float("inf"))
COUNTS = st.integers(0, 40)
TOKENS = st.integers(0, 20_000)
INSTANCES = st.builds(
    PackedInstance,
    st.just(""),
    st.builds(PerfModel, MS, MS, st.floats(1e-3, 50), st.booleans(), st.floats(1e-3, 50), MS, st.floats(0, 0.01)),
    st.builds(
        Backlog,
        COUNTS,
        st.integers(0, 2000),
        st.sampled_from([0, 8, 64, 128]),
        TOKENS,
        st.integers(0, 10**6),
        st.floats(0, 1e5) | st.just(float("inf")),
        st.floats(-1e4, 1e5),
        st.integers(-1, 9),
    ),
    st.builds(LinkSpeeds, MS, RATES, RATES, MS, RATES, st.booleans()),
)
ARRIVALS = st.builds(
    Arrival,
    st.sampled_from(["a", None]),
    st.sampled_from([0, 8, 64, 128]),
    st.integers(1, 8000),
    st.floats(1, 1000),
    st.sampled_from([0, 10**7]),
    st.sampled_from([1.0, 40.0, 400.0, float("inf")]),
)
CANDIDATES = st.lists(st.tuples(INSTANCES, st.sampled_from(Tier)), max_size=8)


@given(CANDIDATES, ARRIVALS, st.sampled_from([0.0, 0.5, 1.0]))
def test_compiled_estimates_are_bitwise_equal_to_plain_ones(
    candidates: list[tuple[PackedInstance, Tier]], arrival: Arrival, weight: float
) -> None:
    found = estimates([one for one, _ in candidates], [tier for _, tier in candidates], arrival, weight)
    assert found == [one.estimate(arrival, tier, weight) for one, tier in candidates]


@given(CANDIDATES, ARRIVALS, st.integers(0, 9))
def test_compiled_ranking_equals_the_plain_one(
    candidates: list[tuple[PackedInstance, Tier]], arrival: Arrival, seed: int
) -> None:
    instances = {f"i{index}": one for index, (one, _) in enumerate([*candidates, *candidates[:2]])}  # some alike
    tiers = {f"i{index}": tier for index, (_, tier) in enumerate(candidates) if index % 2}
    fleet = Fleet("i0", instances, {"a": tiers})
    found = rank_compiled(instances, arrival, fleet, 1.0, random.Random(seed))
    plain = rank_candidates(instances, arrival, fleet, 1.0, random.Random(seed))
    assert [*found] == plain
    assert found[:3] == plain[:3]
