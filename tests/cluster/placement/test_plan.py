"""The order of planners, which of two plans is in force, and the demand that a plan is made for."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.cluster.placement.loraserve import place
from caraserve.cluster.placement.plan import AdapterDemand, Server, extrapolated, planners, random_plan
from caraserve.cluster.routing.placement_plan import PlacementPlan, Share, rendezvous


def test_the_plan_of_the_later_epoch_or_greater_digest_is_in_force() -> None:
    shares: Mapping[str, tuple[Share, ...]] = {"a": (Share("s", 1.0),)}
    first, second = PlacementPlan.made(1, shares, {"s": 8}), PlacementPlan.made(2, shares, {"s": 8})
    other = PlacementPlan.made(1, shares, {"s": 16})
    assert first.holds_over(None)
    assert second.holds_over(first)
    assert not first.holds_over(second)
    assert first.holds_over(other) != other.holds_over(first)
    assert not first.holds_over(first)
    assert first.digest == second.digest != other.digest


@given(st.sets(st.sampled_from([f"s{index}" for index in range(20)]), min_size=2), st.integers(0, 50))
def test_the_order_of_planners_stays_when_the_first_leaves(members: set[str], epoch: int) -> None:
    order = planners(epoch, members)
    assert set(order) == members
    assert planners(epoch, members - {order[0]}) == order[1:]


def test_epochs_are_planned_by_all_members_about_equally() -> None:
    members = [f"s{index}" for index in range(5)]
    counts = Counter(planners(epoch, members)[0] for epoch in range(1000))
    assert min(counts.values()) > 140
    assert len({tuple(rendezvous(f"key {index}", members)) for index in range(2000)}) == 120  # all the orders there are


def test_the_order_of_planners_is_the_same_in_all_versions() -> None:
    assert planners(7, [f"s{index}" for index in range(5)]) == ["s4", "s1", "s0", "s2", "s3"]


@given(st.sets(st.sampled_from([f"s{index}" for index in range(20)]), min_size=1), st.text(max_size=5))
def test_a_random_plan_places_an_adapter_on_the_first_of_its_order(names: set[str], adapter: str) -> None:
    order = rendezvous(adapter, names)
    plan = random_plan([AdapterDemand(adapter, 8, 10)], [Server(name, 100) for name in names])
    assert plan.instances(adapter) == (order[0],)


@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 3))
def test_a_random_plan_places_as_many_adapters_on_each_server_give_or_take_one(
    servers: int, adapters: int, seed: int
) -> None:
    names = [f"s{index}" for index in range(servers)]
    demand = [AdapterDemand(f"a{index}", 8, 10) for index in range(adapters)]
    plan = random_plan(demand, [Server(name, 100) for name in names], seed=seed)
    counts = Counter(shares[0].instance for shares in plan.shares.values())
    assert {counts[name] for name in names} <= {adapters // servers, adapters // servers + 1}
    assert counts.total() == adapters


def test_random_plans_of_different_seeds_differ_and_a_new_adapter_moves_few_others() -> None:
    servers = [Server(f"s{index}", 100) for index in range(4)]
    demand = [AdapterDemand(f"a{index}", 8, 10) for index in range(40)]
    plan = random_plan(demand, servers)
    assert plan.shares != random_plan(demand, servers, seed=1).shares
    assert plan.shares == random_plan(demand[::-1], servers).shares  # in whatever order they are told
    grown = random_plan([*demand, AdapterDemand("another", 8, 10)], servers)
    assert sum(plan.instances(one.name) != grown.instances(one.name) for one in demand) <= 4


@pytest.mark.parametrize(
    ("previous", "latest", "expected"),
    [
        (None, 50.0, 50.0),
        (40.0, 50.0, 60.0),
        (10.0, 50.0, 90.0),
        (0.0, 50.0, 100.0),
        (200.0, 50.0, 25.0),
        (5.0, 0.0, 0.0),
    ],
)
def test_demand_is_extrapolated_within_a_factor_of_two(previous: float | None, latest: float, expected: float) -> None:
    assert extrapolated(previous, latest) == expected


def test_a_kept_plan_has_the_digest_of_its_content() -> None:
    adapters = [AdapterDemand(f"a{number:02}", 8, 1, 10.0 / (number + 1)) for number in range(40)]
    servers = [Server(f"s{number}", 100) for number in range(4)]
    points = {8: 20.0}
    before = place(adapters, servers, points, 1)
    kept = place(adapters, servers, points, 2, before)
    longer = place([*adapters, AdapterDemand("new", 8, 1)], servers, points, 3, kept)
    assert kept.digest == before.digest != longer.digest
    for plan in (kept, longer):
        assert plan.digest == PlacementPlan.made(9, dict(plan.shares), dict(plan.classes)).digest
