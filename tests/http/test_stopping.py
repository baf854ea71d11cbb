"""Tests of an instance that stops while other instances answer its clients."""

import asyncio

from aiohttp import web

from caraserve.errors import Draining
from tests.http.fleet import RawAnswer, fleet, streamed
from tests.http.test_forwarding import DONE, EVENTS
from tests.http.test_streaming import read_chunk, read_event


async def test_forwarded_streams_have_the_drain_timeout_to_end() -> None:
    go = asyncio.Event()

    async def send(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        response = await streamed(EVENTS[0], request=request)
        await go.wait()
        await response.write(DONE)
        return response

    async with fleet("b", raw={"a": send}) as running:
        client, proxy = running["b"].client, running["b"].router.proxy
        async with client.session.post(f"{client.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert await read_event(answer) + b"\n\n" == EVENTS[0]
            draining = asyncio.create_task(proxy.drain(10.0))
            await asyncio.sleep(0)
            running["b"].engine.refusals[0] = Draining("stopping", retry_after_s=1.0)
            refused = await client.complete()
            assert (refused.status, refused.error["code"]) == (503, "draining")
            assert not draining.done()
            go.set()
            assert await answer.content.read() == DONE
        await draining


async def test_after_the_drain_timeout_forwarded_streams_end_with_an_error() -> None:
    async def send(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        if b"stream" not in seen.bodies[-1]:
            arrived.set()
        response = await streamed(*EVENTS[: b"stream" in seen.bodies[-1]], request=request)
        await asyncio.Event().wait()
        return response

    arrived = asyncio.Event()
    async with fleet("b", raw={"a": send}) as running:
        client = running["b"].client
        async with client.session.post(f"{client.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert await read_event(answer) + b"\n\n" == EVENTS[0]
            whole = asyncio.create_task(client.complete())
            await arrived.wait()
            running["b"].engine.refusals[0] = Draining("stopping", retry_after_s=1.0)
            await running["b"].router.proxy.drain(0.0)
            assert (await read_chunk(answer))["error"]["code"] == "draining"
            assert await answer.content.read() == DONE
            assert (await whole).status == 503
        assert running["b"].routing_metrics.lost == {}
