"""Candidates are ranked by cost, then latency, then at random."""

import random

from caraserve.cluster.routing.cost import Arrival, Backlog, LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.router import Fleet, Instance, rank_candidates

MODEL = PerfModel(0, 0, 20.0, False, 5.0, 0.1, 0.0)


def test_ties_of_cost_are_decided_by_latency_and_then_at_random() -> None:
    requests = {"a": 0, "b": 0, "past the SLO": 9, "further past the SLO": 10}
    padded = PerfModel(0.0, 10.0, 20.0, True, 5.0, 0.1, 0.0)
    instances = {name: Instance(name, padded, Backlog(count, 8 * count, 8)) for name, count in requests.items()}
    orders = set()
    for seed in range(20):
        found = rank_candidates(
            instances, Arrival(None, 0, 10, 5.0, slo_ms=50.0), Fleet("a", instances), 0.0, random.Random(seed)
        )
        orders.add(tuple(one.name for one in found))
    last = ("past the SLO", "further past the SLO")
    assert orders == {("a", "b", *last), ("b", "a", *last)}


def test_the_base_model_is_downloaded_by_no_instance() -> None:
    links = LinkSpeeds(fetch_latency_ms=1000.0)
    instances = {name: Instance(name, MODEL, links=links) for name in "ab"}
    found = rank_candidates(instances, Arrival(None, 0, 10, 5.0), Fleet("a", instances), 0.0, random.Random(0))
    assert found[1].estimate.cost == 0
