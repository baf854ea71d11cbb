"""Many candidates at once cost what each of them costs alone, to the last bit."""

import random
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from caraserve.cluster.routing import ranking
from caraserve.cluster.routing.cost import Arrival, Backlog, LinkSpeeds, Tier
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.ranking import estimates, ranked
from caraserve.cluster.routing.router import Fleet, Instance
from caraserve.cpu import jit

MS = st.floats(0, 50)
RATES = st.floats(0.01, 1e7) | st.just(float("inf"))
COUNTS = st.integers(0, 40)
TOKENS = st.integers(0, 20_000)
INSTANCES = st.builds(
    Instance,
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
    st.just("a"),
    st.sampled_from([0, 8, 64, 128]),
    st.integers(1, 8000),
    st.floats(1, 1000),
    st.sampled_from([0, 10**7]),
    st.sampled_from([1.0, 40.0, 400.0, float("inf")]),
)
CANDIDATES = st.lists(st.tuples(INSTANCES, st.sampled_from(Tier)), max_size=8)


@given(CANDIDATES, ARRIVALS, st.sampled_from([0.0, 0.5, 1.0]))
def test_compiled_the_formula_has_the_same_bits(
    candidates: list[tuple[Instance, Tier]], arrival: Arrival, weight: float
) -> None:
    found = estimates([one for one, _ in candidates], [tier for _, tier in candidates], arrival, weight)
    assert found == [one.estimate(arrival, tier, weight) for one, tier in candidates]


@given(CANDIDATES, ARRIVALS, st.integers(0, 9))
def test_the_order_is_by_cost_then_latency_then_chance(
    candidates: list[tuple[Instance, Tier]], arrival: Arrival, seed: int
) -> None:
    instances = {f"i{index}": one for index, (one, _) in enumerate([*candidates, *candidates[:2]])}  # some alike
    tiers = {f"i{index}": tier for index, (_, tier) in enumerate(candidates) if index % 2}
    found = ranked(instances, arrival, Fleet("i0", instances, {"a": tiers}), 1.0, random.Random(seed))
    draw = random.Random(seed).random
    alone = {name: one.estimate(arrival, tiers.get(name, Tier.ABSENT), 1.0) for name, one in instances.items()}
    expected = sorted(instances, key={name: (alone[name], draw()) for name in instances}.__getitem__)
    assert found.names() == expected
    assert [found.name(place) for place in range(len(found))] == expected
    assert [found.estimate(place) for place in range(len(found))] == [alone[name] for name in expected]
    assert [found.cost(place) for place in range(len(found))] == [alone[name].cost for name in expected]


def test_the_base_model_is_with_everybody() -> None:
    links = LinkSpeeds(fetch_latency_ms=1000.0)
    instances = {name: Instance(name, PerfModel(0, 0, 20.0, False, 5.0, 0.1, 0.0), links=links) for name in "ab"}
    found = ranked(instances, Arrival(None, 0, 10, 5.0), Fleet("a", instances), 0.0, random.Random(0))
    assert found.cost(1) == 0


def test_an_edited_formula_is_compiled_anew() -> None:
    assert {Path(function.__code__.co_filename) for function in ranking.FORMULA} <= set(jit.sources())


def test_it_is_compiled_before_the_first_request() -> None:
    code = (
        "from caraserve.cluster import ranking\n"
        "from caraserve.cluster.routing.cost import Arrival\n"
        "before = [len(one.signatures) for one in (ranking._worths, ranking._ranked)]\n"
        "from random import Random\n"
        "from caraserve.cluster.routing.router import Fleet\n"
        "from caraserve.cluster.routing.cost import Tier\n"
        "from caraserve.cluster.routing.perf_model import PerfModel\n"
        "from caraserve.cluster.routing.router import Instance\n"
        "one = Instance('i', PerfModel(0, 0, 20, True, 5, 1, 0))\n"
        "arrival, fleet = Arrival('a', 8, 10, 5, 100, 40), Fleet.of('', [one])\n"
        "ranking.ranked(fleet.able, arrival, fleet, 1.0, Random(0)).names()\n"
        "ranking.estimates([one], [Tier.HOST], arrival, 0.0)\n"
        "print(before, [len(one.signatures) for one in (ranking._worths, ranking._ranked)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[1, 1] [1, 1]"
