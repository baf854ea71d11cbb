"""Tests of the start of a measurement: every adapter has been loaded before, and no load is left under way."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from aiohttp import web

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import AdapterLoads, Endpoint, adapter_loads, find_endpoint
from caraserve.bench.runner import BenchmarkRunner
from caraserve.telemetry.metrics import Metrics
from tests.bench.fake_endpoint import Fake, serve
from tests.http.fake_engine import FakeSnapshot

ADAPTERS = ("ttft-0-tpot-0", "ttft-1-tpot-0", "ttft-2-tpot-0")


@dataclass
class Loading(Fake):
    """An endpoint whose metrics have one of the given numbers of loads under way at each look."""

    models: tuple[str, ...] = ADAPTERS
    under_way: Iterator[int] = field(default_factory=lambda: iter([0]))
    looks: list[int] = field(default_factory=list)  # requests answered before each
    metrics: Metrics = field(default_factory=lambda: Metrics("base", max_loras=4, block_tokens=16))

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/metrics", self.show_metrics)
        return app

    async def show_metrics(self, _request: web.Request) -> web.Response:
        self.looks.append(len(self.log))
        snapshot = FakeSnapshot(loads_under_way=next(self.under_way))
        return web.Response(body=self.metrics.render(snapshot, lambda _: 8))  # type: ignore[arg-type]


def with_endpoint(fake: Fake, use: Callable[[Endpoint], Awaitable[None]]) -> None:
    async def run() -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def use_it() -> None:
            await use(await find_endpoint(f"http://127.0.0.1:{await port}", "openai", None, None))

        await serve(fake, port.set_result, use_it)

    asyncio.run(run())


def test_a_warm_up_waits_for_loads_that_outlast_their_requests() -> None:
    fake = Loading(under_way=iter([2, 1, 0]))

    async def warm_up(endpoint: Endpoint) -> None:
        await BenchmarkRunner(LoadSettings(seed=0)).warm_up(endpoint, ADAPTERS)

    with_endpoint(fake, warm_up)
    assert fake.looks == [len(ADAPTERS)] * 3
    assert [asked["model"] for asked in fake.log] == list(ADAPTERS)


def test_an_interrupted_warm_up_waits_for_no_load() -> None:
    async def warm_up(endpoint: Endpoint) -> None:
        runner = BenchmarkRunner(LoadSettings(seed=0))
        runner.interrupt()
        await runner.warm_up(endpoint, ADAPTERS)

    with_endpoint(fake := Loading(), warm_up)
    assert fake.looks == []


def test_a_servers_loads_are_counted_over_modes_and_outcomes() -> None:
    fake = Loading(under_way=iter([5]))
    for outcome in ("ok", "ok", "failed"):
        fake.metrics.observe_load("auto", 0.1, outcome=outcome)
    found: list[AdapterLoads] = []

    async def look(endpoint: Endpoint) -> None:
        found.append(await adapter_loads(endpoint))

    with_endpoint(fake, look)
    assert found == [AdapterLoads(ended=3, under_way=5)]
