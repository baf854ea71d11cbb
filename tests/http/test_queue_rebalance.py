"""Tests that a waiting request moves to a less loaded instance under dLoRA's rule, without effect on its client."""

import asyncio

import pytest

from caraserve.cluster.routing.cost import Backlog
from tests.http.fake_engine import FakeEngine, FakeStream
from tests.http.fleet import Fleet, fleet
from tests.http.serving import Answer

BUSY = Backlog(requests=40, queued_tokens=3000)
LOOK_S = 0.03  # until every instance has read the state of the others again


async def waiting_at_a(running: Fleet, entry: str) -> "tuple[asyncio.Task[Answer], FakeStream]":
    """Returns a request that waits at instance a, which was idle when it arrived and is now the busiest."""
    running.world.loads |= {"a": Backlog(), "b": BUSY, "c": BUSY}
    asked = asyncio.create_task(running[entry].client.complete(model="b", stream=True))
    (stream,) = await running["a"].engine.submitted()
    stream.taken = 0  # the stream was looked at; nothing came
    running.world.loads |= {"a": BUSY, "b": Backlog(), "c": Backlog(requests=5)}
    await asyncio.sleep(LOOK_S)
    return asked, stream


async def start(running: Fleet) -> None:
    await running.start("a", FakeEngine(script=None))
    await running.start("b")
    await running.start("c")


@pytest.mark.parametrize("entry", ["a", "c"])
async def test_a_waiting_request_moves(entry: str) -> None:
    async with fleet(routing="dlora") as running:
        await start(running)
        asked, stream = await waiting_at_a(running, entry)
        running["a"].router.rebalancer.rebalance()
        await stream.cancelled.wait()
        stream.end(0, "cancelled")
        answer = await asked
        assert answer.status == 200
        (there,) = running["b"].engine.requests
        assert (there.adapter, there.params.seed) == ("b", stream.request.params.seed)
        assert running["a"].routing_metrics.moved == 1
        assert not running["c"].engine.requests


async def test_a_request_that_has_started_does_not_move() -> None:
    async with fleet(routing="dlora") as running:
        await start(running)
        asked, stream = await waiting_at_a(running, "c")
        stream.taken = 1
        running["a"].router.rebalancer.rebalance()
        assert not stream.cancelled.is_set()
        stream.end()
        assert (await asked).status == 200


async def test_requests_do_not_move_to_an_equally_loaded_instance() -> None:
    async with fleet(routing="dlora") as running:
        await start(running)
        asked, stream = await waiting_at_a(running, "c")
        running.world.loads |= dict.fromkeys("bc", BUSY)
        await asyncio.sleep(LOOK_S)
        running["a"].router.rebalancer.rebalance()
        assert not stream.cancelled.is_set()
        stream.end()
        await asked


async def test_a_moved_request_returns_when_no_other_instance_accepts_it() -> None:
    async with fleet(routing="dlora") as running:
        await start(running)
        asked, stream = await waiting_at_a(running, "a")
        running["a"].router.rebalancer.rebalance()
        for name in "bc":
            running.world.records.pop(name)
        stream.end(0, "cancelled")
        _, again = await running["a"].engine.submitted(2)
        again.end()
        assert (await asked).status == 200
