"""When an instance of a fleet is ready: it has received the registry, or there are no other instances."""

import asyncio
from pathlib import Path

from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.serve_cluster import registry_known
from tests.cluster.nodes import instances, until


def test_a_joining_instance_is_ready_when_it_has_the_registry(tmp_path: Path) -> None:
    async def body() -> None:
        async with asyncio.timeout(20), instances(tmp_path) as running:
            a = (await running.start("a")).node
            for number in range(500):
                a.register(RegisteredAdapter(f"poet-{number}", "d" * 64, 8, 1))
            b = (await running.start("b")).node
            ready = registry_known(b, lambda: 0.0)
            assert not ready()
            await until(ready)
            assert len(list(b.adapters())) == 500

    asyncio.run(body())


def test_an_instance_without_peers_is_ready_after_5_s(tmp_path: Path) -> None:
    async def body() -> None:
        async with asyncio.timeout(20), instances(tmp_path) as running:
            times = iter((0.0, 4.9, 5.0))
            ready = registry_known((await running.start("a")).node, lambda: next(times))
            assert not ready()
            assert ready()

    asyncio.run(body())
