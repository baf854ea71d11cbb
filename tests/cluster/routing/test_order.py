"""Orders are completed only after refusals; plans have several classes only where kernels pad to the largest rank."""

import random

import pytest

from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan, Server
from caraserve.cluster.placement.shares import Share
from caraserve.cluster.routing.cost import Arrival, Backlog, Tier
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.policies import ROUTINGS, policy
from caraserve.cluster.routing.router import (
    Fleet,
    Instance,
    LazyOrder,
    RoutingTarget,
    apply_quotes,
    next_target,
)

MODEL = PerfModel(0.01, 0.0, 20.0, True, 5.0, 0.1, 0.0)
NAMES = [f"i{index:02d}" for index in range(12)]


def test_the_rest_of_an_order_is_computed_only_when_it_is_read() -> None:
    asked: list[int] = []

    def rest() -> list[str]:
        asked.append(1)
        return ["b", "a", "c"]

    order = LazyOrder(["a"], rest)
    assert (order[0], bool(order), next(iter(order)), asked) == ("a", True, "a", [])
    assert [*order] == ["a", "b", "c"]
    assert (len(order), order[-1], order[1:], order == ("a", "b", "c"), asked) == (3, "c", ("b", "c"), True, [1])
    assert not LazyOrder([], list)
    assert LazyOrder([], lambda: ["a"])[0] == "a"


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_first_choice_is_made_without_ordering_the_others(name: str) -> None:
    plan = PlacementPlan.made(1, {"a": (Share("i01", 0.5), Share("i02", 0.5))}, dict.fromkeys(NAMES, 8))
    instances = tuple(Instance(one, MODEL, Backlog(3, 24, 8)) for one in NAMES)
    seen = Fleet.of("i00", instances, {"a": dict.fromkeys(NAMES, Tier.DEVICE)}, plan)
    proposal = policy(name).propose(Arrival("a", 8, 100, 50.0), seen, random.Random(0))
    first = apply_quotes(proposal, {})[0]
    assert next_target(apply_quotes(proposal, {}), [], 0.0, 100.0) == RoutingTarget(first)
    assert isinstance(proposal.order, LazyOrder)
    assert proposal.order._rest is not None


def test_where_nothing_is_padded_auto_has_one_class() -> None:
    adapters = [AdapterDemand(f"a{rank}", rank, rank, 10.0) for rank in (8, 64)]
    servers = [Server(name, 10**6) for name in NAMES[:4]]
    points = {8: 40.0, 64: 10.0}
    apart = make_plan("auto", adapters, servers, points, 1)
    together = make_plan("auto", adapters, servers, points, 1, padded=False)
    theirs = make_plan("loraserve", adapters, servers, points, 1, padded=False)
    assert apart is not None
    assert together is not None
    assert theirs is not None
    assert set(apart.classes.values()) == set(theirs.classes.values()) == {8, 64}
    assert set(together.classes.values()) == {64}
    assert together.peak == pytest.approx(1.0, abs=0.05)  # demand counts by each rank's own operating point
