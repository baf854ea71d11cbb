"""Tests of the start of a measurement: every adapter has been loaded before, and no load is left under way."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import AdapterLoads, Endpoint, adapter_loads, find_endpoint
from caraserve.bench.runner import BenchmarkRunner
from caraserve.telemetry.metrics import Metrics
from tests.bench.fake_endpoint import Fake
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


@asynccontextmanager
async def endpoint_of(fake: Fake) -> AsyncIterator[Endpoint]:
    async with TestServer(fake.app()) as server:
        yield await find_endpoint(str(server.make_url("")), "openai", None, None)


async def test_a_warm_up_waits_for_loads_that_outlast_their_requests() -> None:
    async with endpoint_of(fake := Loading(under_way=iter([2, 1, 0]))) as endpoint:
        await BenchmarkRunner(LoadSettings(seed=0)).warm_up(endpoint, ADAPTERS)
    assert fake.looks == [len(ADAPTERS)] * 3
    assert [asked["model"] for asked in fake.log] == list(ADAPTERS)


async def test_an_interrupted_warm_up_waits_for_no_load() -> None:
    async with endpoint_of(fake := Loading()) as endpoint:
        runner = BenchmarkRunner(LoadSettings(seed=0))
        runner.interrupt()
        await runner.warm_up(endpoint, ADAPTERS)
    assert fake.looks == []


async def test_a_servers_loads_are_counted_over_modes_and_outcomes() -> None:
    fake = Loading(under_way=iter([5]))
    for outcome in ("ok", "ok", "failed"):
        fake.metrics.observe_load("auto", 0.1, outcome=outcome)
    async with endpoint_of(fake) as endpoint:
        assert await adapter_loads(endpoint) == AdapterLoads(ended=3, under_way=5)
