"""What a router has sent counts before any beat shows it; and its draws are fair."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.cluster.routing.cost import Arrival, Backlog
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.policies import policy
from caraserve.cluster.routing.router import Fleet, Instance, SentRequests, apply_quotes, drawn, propose, shuffled

PADDED = PerfModel(0.01, 0.0, 20.0, True, 5.0, 0.1, 0.0)
ARRIVAL = Arrival("a", 8, 100, 50.0, 10_000_000, 30.0)
NAMES = [f"i{index:02d}" for index in range(12)]


def test_what_was_sent_counts_until_a_beat_shows_it() -> None:
    ledger, published = SentRequests(transit_s=0.05, most_s=2.0), Backlog(1, 8, 8)
    ledger.sent("i", ARRIVAL, 10.0)
    ledger.sent("i", Arrival("b", 64, 10, 5.0), 10.2)
    assert ledger.backlog("i", published, 10.2)[:3] == (3, 80, 64)
    assert ledger.backlog("other", published, 10.2) == published
    ledger.beat("i", 10.22)  # the second was still on its way when the beat was written
    assert ledger.backlog("i", published, 10.25)[:3] == (2, 72, 64)
    assert ledger.backlog("i", published, 12.3) == published  # a beat that never comes
    ledger.beat("i", 12.3)
    assert ledger._sent == {}


def test_the_sent_to_those_who_left_is_forgotten() -> None:
    ledger = SentRequests()
    ledger.sent("i", ARRIVAL, 10.0)
    ledger.forget(["i", "unknown"])
    assert ledger.backlog("i", Backlog(), 10.0) == Backlog()


def test_a_burst_at_one_entry_spreads_between_two_beats() -> None:
    ledger, sent = SentRequests(), Counter[str]()
    for seed in range(60):
        now_s = 5.0 + seed / 1000
        instances = tuple(Instance(name, PADDED, ledger.backlog(name, Backlog(), now_s)) for name in NAMES)
        proposal = propose(policy("rank-aware"), ARRIVAL, Fleet.of("elsewhere", instances), random.Random(seed))
        chosen = apply_quotes(proposal, {})[0]
        ledger.sent(chosen, ARRIVAL, now_s)
        sent[chosen] += 1
    assert max(sent.values()) <= 8
    assert len(sent) == 12


@given(st.lists(st.integers(), max_size=20), st.integers(0, 99))
def test_shuffling_loses_nothing(items: list[int], seed: int) -> None:
    assert sorted(shuffled(items, random.Random(seed))) == sorted(items)


def test_drawing_from_nothing_but_zeros_is_even() -> None:
    chance = random.Random(0)
    assert Counter(drawn([("a", 0.0), ("b", 0.0)], chance) for _ in range(200))["a"] == pytest.approx(100, abs=30)


class Edge:
    """The largest number that chance may give."""

    def random(self) -> float:
        return math.nextafter(1.0, 0.0)


def test_drawing_at_the_edge_still_draws() -> None:
    assert drawn([("a", 0.1)] * 3 + [("b", 0.7)], Edge()) == "b"
    assert sorted(shuffled(range(5), Edge())) == [0, 1, 2, 3, 4]
