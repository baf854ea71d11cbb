"""Requests that a router has sent count until a heartbeat includes them."""

import random
from collections import Counter

from caraserve.cluster.routing.cost import Arrival, Backlog
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.router import Fleet, Instance, SentRequests, apply_quotes

PADDED = PerfModel(0.01, 0.0, 20.0, True, 5.0, 0.1, 0.0)
ARRIVAL = Arrival("a", 8, 100, 50.0, 10_000_000, 30.0)
NAMES = [f"i{index:02d}" for index in range(12)]


def test_sent_requests_count_until_a_heartbeat_includes_them() -> None:
    sent_requests, published = SentRequests(), Backlog(1, 8, 8)
    sent_requests.add("i", ARRIVAL, 10.0)
    sent_requests.add("i", Arrival("b", 64, 10, 5.0), 10.2)
    assert sent_requests.backlog("i", published, 10.2)[:3] == (3, 80, 64)
    assert sent_requests.backlog("other", published, 10.2) == published
    sent_requests.on_heartbeat("i", 10.22)  # sent before the second request arrived
    assert sent_requests.backlog("i", published, 10.25)[:3] == (2, 72, 64)
    assert sent_requests.backlog("i", published, 12.3) == published  # no heartbeat for over 2 s
    sent_requests.on_heartbeat("i", 12.3)
    assert sent_requests._sent == {}


def test_requests_sent_to_instances_that_left_are_forgotten() -> None:
    sent_requests = SentRequests()
    sent_requests.add("i", ARRIVAL, 10.0)
    sent_requests.forget(["i", "unknown"])
    assert sent_requests.backlog("i", Backlog(), 10.0) == Backlog()


def test_a_burst_at_one_instance_spreads_between_two_heartbeats() -> None:
    sent_requests, sent = SentRequests(), Counter[str]()
    for seed in range(60):
        now_s = 5.0 + seed / 1000
        instances = tuple(Instance(name, PADDED, sent_requests.backlog(name, Backlog(), now_s)) for name in NAMES)
        proposal = Policy("rank-aware").propose(ARRIVAL, Fleet.of("elsewhere", instances), random.Random(seed))
        chosen = apply_quotes(proposal, {})[0]
        sent_requests.add(chosen, ARRIVAL, now_s)
        sent[chosen] += 1
    assert max(sent.values()) <= 8
    assert len(sent) == 12
