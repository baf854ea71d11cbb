"""Tests that the simulator's compiled policies decide as the server's do, with the same random numbers."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.setting import ClusterSetting, SimulatedMachine
from caraserve.bench.simulator.simulation import Simulation
from caraserve.cluster.routing.cost import Arrival, Backlog, LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.placement_plan import PlacementPlan, Share
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.router import Attempt, Fleet, Instance, apply_quotes, check_acceptance, next_target
from caraserve.cluster.state.replicated_map import Tier
from caraserve.config import ROUTINGS
from tests.bench.simulator.compiled_steps import CHOOSE_NEXT, DECIDE, REFUSES, route

MILLISECONDS = st.floats(0, 50)
RATES = st.floats(0.01, 1e7) | st.just(float("inf"))
RANKS = (8, 16, 64, 128)
MODELS = st.builds(
    PerfModel,
    MILLISECONDS,
    MILLISECONDS,
    st.floats(1e-3, 50),
    st.booleans(),
    st.floats(1e-3, 50),
    MILLISECONDS,
    st.floats(0, 0.01),
    st.sampled_from([0.0, 0.01]),
)
LINKS = st.builds(LinkSpeeds, MILLISECONDS, RATES, RATES, MILLISECONDS, RATES, st.booleans())
MACHINES = st.builds(SimulatedMachine, MODELS, LINKS)
BACKLOGS = st.builds(
    Backlog,
    st.integers(0, 60),
    st.integers(0, 2000),
    st.sampled_from((0, *RANKS)),
    st.integers(0, 20_000),
    st.integers(0, 10**6),
    st.floats(0, 1e5) | st.just(float("inf")),
    st.floats(-1e4, 1e5),
    st.integers(-1, 9),
)
TIERS = st.sampled_from((Tier.DEVICE, Tier.HOST, Tier.ABSENT))
NODES = st.lists(st.tuples(MACHINES, BACKLOGS, TIERS), min_size=1, max_size=6)


class Case:
    """A decision, as the simulator's arrays and as the server's objects. The router's view of itself is its state."""

    def __init__(self, routing_name: str, nodes: Any, arrival: Arrival, plan: PlacementPlan | None, seed: int) -> None:
        machines = tuple(machine for machine, _, _ in nodes)
        request = PlannedRequest(0, 0.0, None if arrival.adapter is None else 0, arrival.prompt_tokens, 1)
        rank_of = (arrival.rank or RANKS[0],)
        setting = ClusterSetting(machines, routing_name, arrival.slo_ms, seed=seed)
        simulation = Simulation(setting, Workload((request,), rank_of))
        self.names, self.rng = simulation.names, simulation._rng
        self.fleet = simulation.fleet
        if plan is not None:
            self.fleet = self.fleet._replace(plan=simulation.planner._arrays(plan))
        self.policy, self.random, self.arrival = Policy(routing_name), Random(seed), arrival
        self.exact: dict[str, Instance] = {}
        seen, tiers = {}, {}
        for number, (name, (machine, backlog, tier)) in enumerate(zip(self.names, nodes, strict=True)):
            self._load(number, machine)
            state = Backlog(
                2 * number, 8 * number, 8 * (number > 0), 0, 0, machine.kv_tokens, 5000 - 900 * number, 1024
            )
            self.exact[name] = Instance(name, machine.model, state, machine.links)
            seen[name] = self.exact[name] if number == 0 else replace(self.exact[name], backlog=backlog)
            self.fleet.published[number] = tuple(backlog)
            self.fleet.tiers[:, number] = tier
            if tier is not Tier.ABSENT:
                tiers[name] = tier
        named = {} if arrival.adapter is None else {arrival.adapter: tiers}
        self.view = Fleet(self.names[0], seen, named, plan)
        route = self.fleet.routes[0]
        route["request"], route["router"], route["rank"] = 0, 0, arrival.rank
        route["prompt_tokens"], route["output_tokens"] = arrival.prompt_tokens, arrival.output_tokens
        route["adapter_bytes"] = arrival.adapter_bytes

    def _load(self, number: int, machine: SimulatedMachine) -> None:
        """Gives an instance decoding requests that never end."""
        one = self.fleet.batches.instances[number]
        one["num_decoding"], one["rank_sum"], one["rank_max"] = 2 * number, 8 * number, 8 * (number > 0)
        one["kv_free"] = 5000 - 900 * number

    def order(self) -> list[str]:
        """Returns the server's order by its exact quotes."""
        proposal = self.policy.propose(self.arrival, self.view, self.random)
        weight = self.policy.own_weight
        tier = Tier.DEVICE if self.arrival.adapter is None else Tier.ABSENT
        quotes = {name: self.exact[name].estimate(self.arrival, tier, weight) for name in proposal.ask}
        return [*apply_quotes(proposal, quotes)]


@st.composite
def cases(draw: st.DrawFn) -> Mapping[str, Any]:
    nodes = draw(NODES)
    names = [f"i{number:03}" for number in range(len(nodes))]
    adapter = draw(st.sampled_from(("adapter-00000", None)))
    rank = 0 if adapter is None else draw(st.sampled_from(RANKS))
    arrival = Arrival(
        adapter,
        rank,
        draw(st.integers(1, 8000)),
        draw(st.floats(1, 1000)),
        0 if adapter is None else 10**7,
        draw(st.sampled_from([1.0, 40.0, 400.0, float("inf")])),
    )
    places = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    shares = tuple(Share(name, draw(st.sampled_from([0.0, 0.25, 0.5]))) for name in places)
    classes = {name: draw(st.sampled_from(RANKS)) for name in names}
    plan = PlacementPlan.made(1, {"adapter-00000": shares}, classes)
    return {"nodes": nodes, "arrival": arrival, "plan": plan, "seed": draw(st.integers(0, 99))}


@pytest.mark.parametrize("name", ROUTINGS)
@settings(max_examples=40)
@given(cases(), st.integers(0, 3000))
def test_orders_and_what_follows_refusals_equal_the_servers(
    name: str, case: Mapping[str, Any], elapsed_ms: int
) -> None:
    plan = case["plan"] if name in ("auto", "loraserve", "s-lora-random", "s-lora-contiguous") else None
    made = Case(name, case["nodes"], case["arrival"], plan, case["seed"])
    order, routed = made.order(), made.fleet.routes[0]
    assert route(made.fleet, DECIDE, 0, made.rng) == made.policy.enforces_slo, "only these wait for quotes"
    assert made.names[routed["target"]] == order[0]
    assert [made.names[number] for number in made.fleet.orders[0, : made.fleet.known[0]]] == order
    assert made.rng.random() == made.random.random()
    tier = Tier.DEVICE if made.arrival.adapter is None else Tier.ABSENT
    attempts: list[Attempt] = []
    for tries in range(9):
        now = elapsed_ms * tries * MS
        target = next_target(order, attempts, elapsed_ms * tries, 10_000.0, force=not made.policy.enforces_slo)
        assert route(made.fleet, CHOOSE_NEXT, now, made.rng) == (target is not None)
        if target is None:
            break
        assert (made.names[routed["target"]], bool(routed["force"])) == (target.name, target.force)
        refusal = check_acceptance(made.arrival, made.exact[target.name], tier, target.force)
        assert route(made.fleet, REFUSES, now, made.rng) == (refusal is not None)
        if refusal is None:
            break
        attempts.append((target, refusal))
    assert len(attempts) < 9
