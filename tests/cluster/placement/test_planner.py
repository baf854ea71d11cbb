"""Planning: one instance makes the plan, all adopt it, and the next one takes the place of a silent planner."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import orjson
import pytest

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.peer_client import PeerClient, TransferFailure
from caraserve.cluster.node import placement_routing
from caraserve.cluster.placement.plan import AdapterDemand, Server, decoded, encoded, packed, planners
from caraserve.cluster.placement.planner import PLAN as PUBLISHED
from caraserve.cluster.placement.planner import (
    ROOM,
    STEP_S,
    DemandCounter,
    PlacementPlanner,
    PlannerTiming,
    _rates,
    expected_demand,
)
from caraserve.cluster.placement.planner_process import Question, ask
from caraserve.cluster.routing.advertised import InstanceViews, publish_speed
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.placement_plan import PlacementPlan, Share, Shares
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from tests.cluster.nodes import KEYS, Instances, instances, until

MODEL = PerfModel(0.01, 0.1, 5.0, True, 1.0, 0.05, 0.001)
PLAN = PlacementPlan.made(
    7, {"x": (Share("a", 0.75), Share("b", 0.25)), "y": (Share("b", 1.0),)}, {"a": 8, "b": 64}, 1.1, 0.25, ("b",)
)
EPOCH = 29_000_000
RANKS = {"small": 8, "other": 8, "large": 64}


class Clock:
    """A clock that stands at the beginning of a time step until a test advances it."""

    def __init__(self) -> None:
        self.wall_s = EPOCH * STEP_S + 5.0


@asynccontextmanager
async def planning(
    folder: Path,
    clock: Clock,
    *names: str,
    pace: PlannerTiming | None = None,
    adopted_by_b: list[PlacementPlan] | None = None,
) -> AsyncIterator[tuple[Instances, dict[str, PlacementPlanner]]]:
    pace = pace or PlannerTiming(look_s=0.05, settle_s=1.0, silence_s=20.0)
    made: dict[str, PlacementPlanner] = {}
    adopted: list[PlacementPlan] = [] if adopted_by_b is None else adopted_by_b
    wires: list[PeerClient] = []

    def add(member: Member) -> PlacementPlanner:
        wire = PeerClient(lambda: KEYS, None)
        wires.append(wire)
        on_plan = adopted.append if member.name == "b" else lambda plan: None
        made[member.name] = PlacementPlanner(
            *(member, InstanceViews(member), wire, "loraserve", 10**9, math.inf, on_plan),
            wall=lambda: clock.wall_s,
            pace=pace,
        )
        return made[member.name]

    async with instances(folder) as group:
        for name in names:
            await group.start(name, routes=lambda member: add(member).routes())
        await until(group.agree)
        for one in group.running.values():
            publish_speed(one.member, MODEL, LinkSpeeds())
        for name, rank in RANKS.items():
            group.running[names[0]].member.register(RegisteredAdapter(name, name.encode().hex().zfill(64), rank, 1000))
        for one in group.running.values():
            await until(lambda one=one: sum(1 for _ in one.member.adapters()) == len(RANKS))
            await until(lambda one=one: len(one.views.instances()) == len(names))
        tasks = [asyncio.create_task(planner.run()) for planner in made.values()]
        try:
            await until(lambda: all(len(planner._member.advertised(ROOM)) == len(names) for planner in made.values()))
            assert all(planner.plan is None for planner in made.values())  # not before the others are known
            clock.wall_s += 1.0
            yield group, made
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in done), done
            await asyncio.gather(*(wire.close() for wire in wires))


def agreed(planners_by_name: dict[str, PlacementPlanner], epoch: int) -> bool:
    plans = [planner.plan for planner in planners_by_name.values()]
    return all(plan is not None and plan.epoch == epoch for plan in plans) and len({p.digest for p in plans if p}) == 1


async def test_the_first_planner_makes_a_plan_from_all_demand_and_all_adopt_it(tmp_path: Path) -> None:
    clock = Clock()
    adopted: list[PlacementPlan] = []
    async with planning(tmp_path, clock, "a", "b", "c", adopted_by_b=adopted) as (_, made):
        for planner in made.values():
            for step in (EPOCH - 2, EPOCH - 1):
                planner.demand.count("small", step * STEP_S, 600)
                planner.demand.count("large", step * STEP_S, 600)
        await until(lambda: agreed(made, EPOCH))
        first = planners(EPOCH, made)[0]
        assert {name: planner.made for name, planner in made.items()} == {name: name == first for name in made}
        plan = made["a"].plan
        assert plan is not None
        assert plan.shares.keys() == RANKS.keys()
        assert set(plan.classes.values()) == {8, 64}  # without demand, all three instances would be for large
        clock.wall_s += STEP_S
        await until(lambda: agreed(made, EPOCH + 1))
        assert [plan.epoch for plan in adopted] == [EPOCH, EPOCH + 1]


async def test_when_the_first_planner_is_silent_the_second_makes_the_plan(tmp_path: Path) -> None:
    clock = Clock()
    order = planners(EPOCH, ("a", "b"))
    async with planning(tmp_path, clock, "a", "b") as (_, made):
        made[order[0]]._make = _never  # type: ignore[method-assign]
        await asyncio.sleep(0.3)  # several turns
        assert all(planner.plan is None for planner in made.values())
        clock.wall_s += 20.0
        await until(lambda: agreed(made, EPOCH))
        assert made[order[1]].made == 1


async def test_a_failed_plan_is_not_retried_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.cluster.placement.planner.ask", _fails)
    async with planning(tmp_path, Clock(), "a") as (_, made):
        await until(lambda: made["a"].failed == 1)
        await asyncio.sleep(0.3)  # several turns
        assert made["a"].failed == 1


async def test_a_plan_of_a_clock_that_is_ahead_is_not_adopted(tmp_path: Path) -> None:
    clock = Clock()
    async with planning(tmp_path, clock, "a", "b") as (_, made):
        await until(lambda: agreed(made, EPOCH))
        ahead = PlacementPlan.made(EPOCH + 1000, {"small": (Share("a", 1.0),)}, {"a": 8, "b": 8})
        made["a"]._make = made["b"]._make = _never  # type: ignore[method-assign]
        made["a"]._wall = lambda: clock.wall_s + 1000 * STEP_S
        made["a"]._adopt(ahead, encoded(ahead))
        current = PlacementPlan.made(EPOCH + 1, {"small": (Share("b", 1.0),)}, {"a": 8, "b": 8})
        assert await _takes(made["b"], ahead) is None
        made["a"]._wall = lambda: clock.wall_s  # it is set right, and the plan dropped
        await until(lambda: made["a"].plan != ahead)
        made["a"]._adopt(current, encoded(current))
        assert await _takes(made["b"], current) == current
        await until(lambda: agreed(made, EPOCH + 1))


async def test_if_the_latest_plan_cannot_be_downloaded_the_one_before_it_is_adopted(tmp_path: Path) -> None:
    clock = Clock()
    async with planning(tmp_path, clock, "a", "b", "c") as (_, made):
        await until(lambda: agreed(made, EPOCH))
        for planner in made.values():
            planner._make = _never  # type: ignore[method-assign]
        late = PlacementPlan.made(EPOCH + 1, {"small": (Share("b", 1.0),)}, {"a": 8, "b": 8, "c": 8})
        made["a"]._adopt_published = _never  # type: ignore[method-assign]
        made["a"]._member.advertise(PUBLISHED, (EPOCH + 1, "f" * 64))  # and has no such plan
        made["b"]._adopt(late, encoded(late))
        assert late.digest < "f" * 64
        await until(lambda: made["c"].plan == late)


async def _takes(planner: PlacementPlanner, plan: PlacementPlan) -> PlacementPlan | None:
    """Returns the plan if the planner adopts it within 0.3 s of its publication, else None."""
    await until(lambda: (plan.epoch, plan.digest) in planner._member.advertised(PUBLISHED).values())
    await asyncio.sleep(0.3)
    return planner.plan if planner.plan == plan else None


async def _fails(body: bytes, previous: bytes, timeout_s: float) -> bytes:
    raise OSError("it could not be started")


async def _never(epoch: int) -> None:
    return


async def test_demand_and_plans_are_sent_only_for_signed_requests(tmp_path: Path) -> None:
    clock = Clock()
    async with planning(tmp_path, clock, "a") as (group, made):
        await until(lambda: made["a"].plan is not None)
        address, plan = group.running["a"].address, made["a"].plan
        assert plan is not None
        for keys, gets_in in ((KEYS, True), (Keyring((b"some other secret",)), False)):
            wire = PeerClient(lambda keys=keys: keys, None)
            for path in (f"/cluster/placement/plans/{plan.digest}", "/cluster/placement/demand?epoch=3"):
                assert isinstance(await wire.page(address, path, 1 << 20), bytes) is gets_in
            assert await wire.page(address, "/cluster/placement/plans/0", 1 << 20) in (
                TransferFailure.ABSENT,
                TransferFailure.FAILED,
            )
            await wire.close()


@pytest.mark.parametrize(
    ("routing", "by"), [("local", "auto"), ("auto", "auto"), ("s-lora-random", "s-lora-random"), ("most-idle", None)]
)
def test_local_routing_has_a_placement_too(routing: str, by: str | None) -> None:
    assert placement_routing(routing) == by


# --- plans as bytes ---


def test_a_plan_is_decoded_exactly_as_it_was_encoded() -> None:
    assert decoded(encoded(PLAN)) == PLAN


BAD = {
    "no bytes": b"",
    "not packed": b"[]",
    "cut short": encoded(PLAN)[:-9],
    "a list": packed([]),
    "another version": packed([1, 7, 1.0, 0.0, [], ["a"], [8], [], [], [], []]),
    "an instance twice": packed([2, 7, 1.0, 0.0, [], ["a", "a"], [8, 8], [], [], [], []]),
    "fewer ranks than instances": packed([2, 7, 1.0, 0.0, [], ["a"], [], [], [], [], []]),
    "an unknown instance": packed([2, 7, 1.0, 0.0, [], ["a"], [8], ["x"], [1], [1], [1.0]]),
    "the last one by -1": packed([2, 7, 1.0, 0.0, [], ["a"], [8], ["x"], [1], [-1], [1.0]]),
    "more than all": packed([2, 7, 1.0, 0.0, [], ["a"], [8], ["x"], [1], [0], [1.5]]),
    "no shares": packed([2, 7, 1.0, 0.0, [], ["a"], [8], ["x"], [0], [], []]),
    "half a share": packed([2, 7, 1.0, 0.0, [], ["a"], [8], ["x"], [1], [0], []]),
    "a share too many": packed([2, 7, 1.0, 0.0, [], ["a"], [8], ["x"], [1], [0, 0], [0.5, 0.5]]),
    "an adapter twice": packed([2, 7, 1.0, 0.0, [], ["a"], [8], ["x", "x"], [1, 1], [0, 0], [1.0, 1.0]]),
    "a text for a number": packed([2, 7, "1", 0.0, [], ["a"], [8], [], [], [], []]),
    "numbers for names": packed([2, 7, 1.0, 0.0, [], [1], [8], [], [], [], []]),
    "truth for a number": packed([2, 7, 1.0, 0.0, [], ["a"], [8], ["x"], [1], [0], [True]]),
    "an early step": packed([2, -7, 1.0, 0.0, [], ["a"], [8], [], [], [], []]),
    "shares by name": packed([2, 7, 1.0, 0.0, [], ["a"], [8], {"x": [0, 1.0]}]),
    "adapters by name": packed([2, 7, 1.0, 0.0, [], ["a"], [8], {"x": 1}, [1], [0], [1.0]]),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_malformed_plans_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decoded(body)


def test_a_plan_larger_than_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        decoded(packed("0" * (65 << 20)))


def test_decoding_computes_the_digest_from_the_content() -> None:
    other = replace(PLAN, shares=Shares.of({**PLAN.shares, "y": (Share("a", 1.0),)}))
    assert decoded(encoded(other)).digest != PLAN.digest


# --- the process ---


ADAPTERS = [AdapterDemand("x", 8, 10, 5.0), AdapterDemand("y", 64, 10, 5.0)]
SERVERS = [Server("a", 100), Server("b", 100)]


POINTS = {8: 10.0, 64: 10.0}


async def asked(question: Question, previous: bytes = b"") -> bytes:
    return await ask(msgspec.json.encode(question), previous, 60)


async def test_the_process_makes_the_same_plan_and_keeps_a_good_one() -> None:
    question = Question("loraserve", 3, ADAPTERS, SERVERS, POINTS, padded=True)
    body = await asked(question)
    assert decoded(body) == question.answer(None)
    again = decoded(await asked(Question("loraserve", 4, ADAPTERS, SERVERS[::-1], POINTS, padded=True), body))
    assert (again.epoch, again.shares) == (4, decoded(body).shares)


async def test_an_error_of_the_process_is_raised_with_its_text() -> None:
    with pytest.raises(OSError, match="no instance to place adapters on"):
        await asked(Question("loraserve", 3, ADAPTERS, [], POINTS, padded=True))


# --- demand ---


def test_demand_is_counted_by_steps_and_old_steps_are_forgotten() -> None:
    demand = DemandCounter()
    for step, tokens in ((5, 60), (6, 120), (7, 600), (7, 600)):
        demand.count("x", step * STEP_S + 1, tokens)
    assert demand.rates(8) == {"x": (2.0, 20.0)}
    assert demand.rates(7) == {"x": (1.0, 2.0)}
    demand.count("y", 20 * STEP_S)
    assert demand.rates(8) == {}


@pytest.mark.parametrize("value", ["inf", "nan", -1, 1e300, "-inf"])
def test_impossible_rates_count_as_no_demand(value: object) -> None:
    assert _rates(orjson.dumps({"x": [value, 2.0], "y": [1.0, 3]})) == {"x": (0.0, 2.0), "y": (1.0, 3.0)}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"x": 1}', b'{"x": ["a", 1]}', b'{"x": [[], 1]}', b"[" * 9000])
def test_malformed_demand_counts_as_none(body: bytes) -> None:
    assert _rates(body) == {}


def test_expected_demand_is_the_sum_of_all_instances_and_extrapolated_within_bounds() -> None:
    assert expected_demand([{"x": (1.0, 2.0)}, {"x": (2.0, 2.0), "y": (0.0, 3.0)}]) == {"x": 5.0, "y": 6.0}
