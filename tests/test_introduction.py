"""When an instance of a fleet is ready: it has received the registry, or there are no other instances."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

from caraserve.cluster.membership.member import Member
from caraserve.cluster.routing.advertised import InstanceViews
from caraserve.cluster.routing.selector import InstanceSelector, LatencyTargets
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from tests.cluster.nodes import instances, until


def joined(member: Member, now: Callable[[], float]) -> InstanceSelector:
    router = InstanceSelector(
        *(member, InstanceViews(member), None, LatencyTargets(), lambda name: None, lambda: False),
        fetcher=None,
        rng=Random(1),
        now=now,
    )
    router.join()
    return router


async def test_a_joining_instance_is_ready_when_it_has_the_registry(tmp_path: Path) -> None:
    async with asyncio.timeout(20), instances(tmp_path) as running:
        a = (await running.start("a")).member
        for number in range(500):
            a.register(RegisteredAdapter(f"poet-{number}", "d" * 64, 8, 1))
        b = (await running.start("b")).member
        router = joined(b, lambda: 0.0)
        assert not router.is_registry_known
        await until(lambda: router.is_registry_known)
        assert len(list(b.adapters())) == 500


async def test_an_instance_without_peers_is_ready_after_5_s(tmp_path: Path) -> None:
    async with asyncio.timeout(20), instances(tmp_path) as running:
        times = iter((0.0, 4.9, 5.0))
        router = joined((await running.start("a")).member, lambda: next(times))
        assert not router.is_registry_known
        assert router.is_registry_known
