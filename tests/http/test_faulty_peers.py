"""Another instance that falls silent, sends without end, or sends what no instance sends, costs a client no answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from caraserve.cluster.membership.dns import PeerResolver
from caraserve.cluster.membership.websocket import WEBSOCKET_PATH, WebSocketTransport
from caraserve.http import api_request, dispatch
from caraserve.http.context import CONTEXT, HttpTimings
from caraserve.http.dispatch import is_answering
from caraserve.http.peer_watch import PeerFailedError, PeerWatch
from caraserve.util.least_rate import LeastRate
from tests.http.fake_engine import FakeEngine
from tests.http.fleet import Fleet, RawAnswer, View, answers, fleet, streamed
from tests.http.test_streaming import begun

pytestmark = pytest.mark.timeout(30)  # what takes longer waits without end

HASTE = LeastRate(grace_s=0.1, bytes_per_s=1e9)
EVENT, DONE = b'data: {"n":1}\n\n', b"data: [DONE]\n\n"
JSON = {"Content-Type": "application/json"}
STREAM = {"Content-Type": "text/event-stream"}

Handler = Callable[[web.Request, RawAnswer], Awaitable[web.StreamResponse]]


def sends(
    headers: dict[str, str], start: bytes = b"", again: bytes = b"", *, status: int = 200, pause_s: float = 0.0
) -> Handler:
    """A peer that sends `start`, then `again` without end; if that is empty, nothing more."""

    async def handle(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers, status=status)
        await response.prepare(request)
        await response.write(start)
        while again:
            await response.write(again)
            await asyncio.sleep(pause_s)
        await asyncio.Event().wait()
        return response

    return handle


async def no_head(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def continues(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
    while request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0.01)
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "stream"),
    [
        *((handler, stream) for handler in (no_head, continues) for stream in (False, True)),
        (sends(JSON), False),
        (sends(JSON, b'{"id":'), False),
        (sends(JSON, b'{"id":', b"1", pause_s=0.01), False),
        (sends(STREAM), True),
        (sends(STREAM, EVENT[:5]), True),
        (sends(STREAM, EVENT[:5], b" ", pause_s=0.01), True),
    ],
    ids=[
        *("no head", "no head, stream", "interim responses", "interim responses, stream"),
        *("head", "half a body", "body byte by byte"),
        *("head of a stream", "half an event", "event byte by byte"),
    ],
)
async def test_an_instance_that_falls_silent_before_the_first_byte_is_replaced(handler: Handler, stream: bool) -> None:
    async with fleet(raw={"a": handler}) as running:
        b = await running.start("b", pace=HASTE)
        answer = await b.client.complete(stream=stream)
        assert (answer.status, len(b.engine.requests), b.routing_metrics.unreached) == (200, 1, {"a": 1})


@pytest.mark.parametrize("rest", [b"", b" "], ids=["nothing", "byte by byte"])
async def test_a_stream_that_falls_silent_ends_with_an_error(rest: bytes) -> None:
    async with fleet(raw={"a": sends(STREAM, EVENT + EVENT[:5], rest, pause_s=0.01)}) as running:
        b = await running.start("b", pace=HASTE)
        answer = await b.client.complete(stream=True)
        assert [event.get("error", {}).get("code") for event in answer.events] == [None, "instance_lost"]
        assert b.routing_metrics.lost == {"a": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_computation_is_waited_for(stream: bool, running: Fleet) -> None:
    a = await running.start("a", FakeEngine(script=None))
    b = await running.start("b", pace=LeastRate(0.3, 1e9))
    asked = asyncio.Semaphore(0)
    answer_query = a.router.answer_query

    def note(peer: str, body: Any) -> Any:
        asked.release()
        return answer_query(peer, body)

    a.router.answer_query = note  # type: ignore[method-assign]
    answer = asyncio.create_task(b.client.complete(stream=stream))
    (there,) = await a.engine.submitted()
    for _ in range(2):
        await asked.acquire()
    there.feed(*begun(there.request))
    there.end()
    assert (await answer).status == 200
    assert not b.engine.requests


async def test_pings_keep_a_stream_alive(running: Fleet) -> None:
    a = await running.start("a", FakeEngine(script=begun), HttpTimings(ping_s=0.05))
    b = await running.start("b", pace=LeastRate(0.5, 1e9))
    answer = asyncio.create_task(b.client.complete(stream=True))
    (there,) = await a.engine.submitted()
    await asyncio.wait([answer], timeout=1.0)
    there.end()
    assert (await answer).body.count(b": ping\n\n") > 5
    assert b.routing_metrics.lost == {}


async def test_only_the_time_in_which_the_other_instance_is_waited_for_counts() -> None:
    class Content:
        def __init__(self) -> None:
            self.is_silent = False

        async def readany(self) -> bytes:
            if self.is_silent:
                await asyncio.Event().wait()
            return b"x"

    async def exchange(content: Any) -> None:
        async with asyncio.timeout(None) as scope:
            watch = PeerWatch(scope, LeastRate(0.05, 1e9), does_not_answer)
            with closing(watch):
                await watch.head(asyncio.sleep(0))
                await watch.piece(content)
                await asyncio.sleep(0.15)  # a slow client is written to
                assert not scope.expired()
                watch.restart()
                await watch.piece(content)
                content.is_silent = True
                await watch.piece(content)

    with pytest.raises(TimeoutError):
        await exchange(Content())


async def does_not_answer() -> bool:
    return False


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([None, None, (1,)], True),
        ([None, (0,)], False),
        ([()], True),  # an earlier version, which does not know the question
        ([None] * 5, False),
    ],
)
async def test_an_instance_that_does_not_answer_a_question_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, ...] | None], expected: bool
) -> None:
    monkeypatch.setattr(dispatch, "_ANSWER_S", 0.0)

    async def query(peer: str, body: object, timeout_s: float) -> tuple[int, ...] | None:
        return answers.pop(0)

    node: Any = SimpleNamespace(query=query)
    assert await is_answering(node, "a", "id", 1) is expected
    assert answers == []


async def test_an_answer_larger_than_any_is_not_read_to_its_end() -> None:
    sent = 0
    piece = b'{"id":"' + b"x" * 65536

    async def send(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers=JSON)
        await response.prepare(request)
        while True:
            await response.write(piece)
            sent += len(piece)

    async with fleet("b", raw={"a": send}) as running:
        answer = await running["b"].client.complete(max_tokens=3)
        assert answer.json["choices"][0]["text"] == "Hi!"
        assert sent < 16 << 20


async def test_an_answer_whose_stated_length_is_larger_than_any_is_not_read() -> None:
    async with fleet("b", raw={"a": sends(JSON | {"Content-Length": str(1 << 40)})}) as running:
        assert (await running["b"].client.complete(max_tokens=3)).status == 200


async def test_answers_of_other_instances_count_as_bodies_of_requests() -> None:
    async with fleet(raw={"a": sends(JSON, b'{"id":"' + b"x" * (1 << 20))}) as running:
        b = await running.start("b", pace=HASTE)
        bodies = b.app[CONTEXT].bodies
        bodies._max_bytes = 1 << 19
        answer = await b.client.complete(max_tokens=900)
        assert (answer.status, answer.error["code"]) == (503, "server_busy")
        assert bodies.held_bytes == 0


async def test_the_largest_answers_are_passed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_request, "_ANSWER_BYTES", 0)
    async with fleet("a", "b") as running:
        client, prompt = running["b"].client, "\x00" * 400
        scored = {"n": 3, "logprobs": 20, "prompt_logprobs": 20, "echo": True}
        messages = [{"role": "user", "content": prompt}]
        answers = [
            await client.complete(prompt=prompt, **scored),
            await client.chat(messages=messages, n=3, logprobs=True, top_logprobs=20),
            await client.post("/v1/rerank", {"query": "x", "documents": [prompt] * 10, "return_documents": True}),
            await client.embed(input=[prompt] * 10),
        ]
        assert [answer.status for answer in answers] == [200] * 4
        assert running["b"].routing_metrics.unreached == {}
        assert not running["b"].engine.requests


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (302, {"Location": "http://127.0.0.1:1/"}, b""),
        (204, JSON, b""),
        (500, {"Content-Type": "text/plain"}, b"boom"),
        (500, JSON, b'{"error":"boom"}'),
        (503, {"Content-Type": "text/html"}, b"<h1>try later</h1>"),
        (429, JSON | {"X-CaraServe-Refused": "full 1 1"}, b"boom"),
        (404, {"Content-Type": "text/plain"}, b"404: Not Found"),
        (200, {"Content-Type": "text/html"}, b"<html></html>"),
        (200, JSON, b"garbage"),
        (200, JSON, b'{"id":'),
        (200, JSON, b"[]"),
        (200, JSON, b"x" * 100_000),
        (200, STREAM, b"<html>\n\n" + DONE),
        (500, STREAM, EVENT + DONE),
    ],
)
async def test_what_no_instance_sends_is_answered_by_another(status: int, headers: dict[str, str], body: bytes) -> None:
    async with fleet("b") as running:
        await running.start_raw("a", answers(lambda: web.Response(status=status, headers=headers, body=body)))
        for stream in (False, True):
            answer = await running["b"].client.complete(stream=stream)
            assert answer.status == 200
        assert running["b"].routing_metrics.unreached["a"] >= 1
        assert len(running["b"].engine.requests) == 2


@pytest.mark.parametrize(("stream", "headers", "body"), [(False, STREAM, EVENT + DONE), (True, JSON, b"{}")])
async def test_a_stream_for_a_whole_answer_or_the_other_way_round_is_answered_by_another(
    stream: bool, headers: dict[str, str], body: bytes
) -> None:
    async with fleet("b", raw={"a": answers(lambda: web.Response(headers=headers, body=body))}) as running:
        answer = await running["b"].client.complete(stream=stream)
        assert (answer.status, len(running["b"].engine.requests)) == (200, 1)


@pytest.mark.parametrize("headers", [JSON, STREAM])
async def test_an_answer_that_is_not_passed_back_leaves_no_trace_in_the_next_one(headers: dict[str, str]) -> None:
    async with fleet("b") as running:
        await running.start_raw(
            "a",
            answers(lambda: web.Response(headers=headers | {"x-caraserve-adapter": "poet@old"}, body=b"garbage\n\n")),
        )
        answer = await running["b"].client.complete(stream=headers is STREAM)
        assert answer.headers["x-caraserve-adapter"] == "org/base"


async def test_garbage_in_the_middle_of_a_stream_ends_it_with_an_error() -> None:
    async def send(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        response = await streamed(EVENT, request=request)
        await asyncio.sleep(0.05)
        await response.write(b"<html>\n\n" + DONE)
        return response

    async with fleet("b", raw={"a": send}) as running:
        answer = await running["b"].client.complete(stream=True)
        assert [event.get("error", {}).get("code") for event in answer.events] == [None, "instance_lost"]


async def test_an_instance_that_leaves_while_its_connection_is_accepted_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends: Any = None
    transport = WebSocketTransport(ends, None, PeerResolver())

    async def accept(view: View, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return await transport.accept(request)

    monkeypatch.setattr(View, "accept", accept)
    async with fleet("a") as running:
        client = running["a"].client
        with pytest.raises(aiohttp.ClientError):
            await client.session.ws_connect(client.url + WEBSOCKET_PATH)
    await transport.end()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_read_that_fails_is_the_other_instances_failure() -> None:
    async def fails() -> None:
        raise ConnectionResetError("reset")

    async with asyncio.timeout(None) as scope:
        watch = PeerWatch(scope, HASTE, does_not_answer)
        with pytest.raises(PeerFailedError, match="ConnectionResetError: reset"):
            await watch.head(fails())
        watch.close()
