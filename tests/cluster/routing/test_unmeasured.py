"""Instances without a measured performance model: they are routed to as the slowest measured one is."""

import asyncio
import operator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.cluster.routing.advertised import MODEL, publish_speed
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.publisher import Publisher
from caraserve.cluster.routing.selector import InstanceSelector, LatencyTargets, LocalTarget
from caraserve.cluster.state.lww_map import EntryValue
from tests.cluster.nodes import LOAD, Instance, Instances, until

FAST = PerfModel(0.01, 0.1, 5.0, False, 1.0, 0.05, 0.001)
SLOW = PerfModel(0.1, 1.0, 50.0, False, 10.0, 0.5, 0.01)
FAST_LINKS, SLOW_LINKS = LinkSpeeds(1.0, 1000.0), LinkSpeeds(10.0, 100.0)


def router(one: Instance, routing: str) -> InstanceSelector:
    made = InstanceSelector(
        *(one.member, one.views, Policy(routing), LatencyTargets(), lambda name: None, lambda: False),
        fetcher=None,
        rng=Random(1),
        now=lambda: 0.0,
    )
    made.join()
    return made


def _sees(viewer: Instance, count: int) -> bool:
    return len(viewer.views.instances()) == count and all(one.able for one in viewer.views.instances())


@pytest.mark.parametrize("value", [(), ("a model", "of a later version")])
async def test_an_unmeasured_instance_gets_the_model_of_the_slowest_measured_one(
    running: Instances, value: EntryValue
) -> None:
    a, b, c, _ = await running.together("a", "b", "c", "d")  # d has said nothing yet
    publish_speed(a.member, FAST, FAST_LINKS)
    publish_speed(b.member, SLOW, SLOW_LINKS)
    c.member.advertise(MODEL, value)
    for viewer in (a, b, c):
        await until(partial(_sees, viewer, 3))
        seen = {one.name: (one.model, one.links, one.able) for one in viewer.views.instances()}
        assert seen["a"] == (FAST, FAST_LINKS, True)
        assert seen["b"] == seen["c"] == (SLOW, SLOW_LINKS, True)
        assert all(map(operator.is_, viewer.views.instances(), viewer.views.instances()))  # nothing is built twice


async def test_an_unmeasured_instance_gets_requests_only_when_faster_ones_are_busy(running: Instances) -> None:
    a, b, c = await running.together("a", "b", "c")
    publish_speed(a.member, FAST, FAST_LINKS)
    publish_speed(b.member, SLOW, SLOW_LINKS)
    publish_speed(c.member, None, LinkSpeeds())
    await until(partial(_sees, a, 3))
    entry = router(a, "auto")
    arrival = entry.arrival(None, 10, 10)
    went: list[str] = []
    for _ in range(LOAD.queue_room + 6):
        went.append(entry.propose(arrival).order[0])
        entry.began(went[-1], arrival)
    assert set(went[: LOAD.queue_room]) == {"a"}
    assert set(went[LOAD.queue_room :]) == {"b", "c"}
    by_turns = router(a, "round-robin")
    assert {by_turns.propose(arrival).order[0] for _ in range(3)} == set("abc")


async def test_without_any_measured_instance_each_answers_its_own_requests(running: Instances) -> None:
    a, b = await running.together("a", "b")
    for one in (a, b):
        publish_speed(one.member, None, LinkSpeeds())
    await until(lambda: "b" in a.member.advertised(MODEL))
    assert a.views.instances() == ()
    entry = router(a, "auto")
    assert isinstance((await entry.begin(entry.arrival(None, 100, 100))).next(), LocalTarget)
    assert entry.refusal(entry.arrival(None, 100, 100), force=False) is None


async def test_an_instance_without_a_profile_advertises_an_empty_model(running: Instances) -> None:
    (a,) = await running.together("a")
    engine: Any = SimpleNamespace(
        catalog=SimpleNamespace(all=list, manager=SimpleNamespace(on_move=lambda report: None))
    )
    await asyncio.wait_for(Publisher(a.member, engine, lambda: (0, 0), None, LinkSpeeds()).announce(), 5)
    assert a.member.advertised(MODEL) == {"a": ()}
