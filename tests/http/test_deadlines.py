"""Tests of requests past their deadline: the client gets an error and the work ends. Tests set the clock, none wait."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from caraserve.cluster.routing.forward_auth import INSTANCE_HEADER, PREFIX, ForwardClaims, forward_headers
from caraserve.core.request import Finish
from caraserve.errors import DeadlineExceeded
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.context import HttpTimings
from caraserve.http.deadline import HEADER, remaining_time_header, within_deadline
from caraserve.http.proxy import body_digest
from caraserve.http.streaming import EventStream
from tests.engine_harness import harness
from tests.http.fake_engine import FakeEngine
from tests.http.fleet import KEYS, RawAnswer, answers, die, fleet, streamed
from tests.http.serving import Answer, OneOff, serving
from tests.http.test_forwarding import EVENTS, same
from tests.http.test_streaming import begun, read_chunk, read_event

COMPLETION = ("/v1/completions", {"prompt": "ab"})
DONE = OpenAiStream.stream_end
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]})
HOLDS_S = 10.0  # a deadline that no test reaches by itself, and less than the bound of a whole test
HEADERS = {HEADER: str(int(1000 * HOLDS_S))}

PassTime = Callable[[float], None]


def assert_exceeded(answer: Answer) -> None:
    assert (answer.status, answer.error["code"], answer.error["type"]) == (504, "deadline_exceeded", "server_error")
    assert HEADER in answer.error["message"]


async def rest(response: Any) -> list[Any]:
    """Returns the data of all further events; exactly one [DONE] must end them."""
    body = await response.content.read()
    assert body.count(DONE) == 1
    return Answer(200, {}, body).events


def codes(events: list[Any]) -> list[str | None]:
    return [event["error"]["code"] if "error" in event else None for event in events]


# --- what the client gets ---


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "asked"), [COMPLETION, CHAT])
async def test_a_deadline_before_the_first_byte_is_a_504(
    pass_time: PassTime, path: str, asked: dict[str, Any], stream: bool, n: int
) -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        asking = asyncio.create_task(client.post(path, asked | {"stream": stream, "n": n}, headers=HEADERS))
        streams = await fake.submitted(n)
        pass_time(HOLDS_S)
        assert_exceeded(await asking)
        assert all(stream.cancelled.is_set() for stream in streams)
        responses = (await client.get("/metrics")).body.decode()
        assert f'caraserve:http_responses_total{{route="{path}",status="504",' in responses


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "asked"), [COMPLETION, CHAT])
async def test_a_deadline_during_a_stream_ends_it_with_an_error(
    pass_time: PassTime, path: str, asked: dict[str, Any], n: int
) -> None:
    fake = FakeEngine(script=begun)
    body = asked | {"stream": True, "n": n}
    async with serving(fake) as client, client.session.post(client.url + path, json=body, headers=HEADERS) as response:
        assert (await read_chunk(response))["choices"]
        pass_time(HOLDS_S)
        *events, last = codes(await rest(response))
        assert last == "deadline_exceeded"
        assert set(events) <= {None}
        assert all(stream.cancelled.is_set() for stream in fake.streams)


async def test_a_stream_with_only_comments_sent_ends_with_an_error(pass_time: PassTime) -> None:
    fake = FakeEngine(script=None)
    body = COMPLETION[1] | {"stream": True}
    async with (
        serving(fake, timings=HttpTimings(ping_s=0.02)) as client,
        client.session.post(client.url + COMPLETION[0], json=body, headers=HEADERS) as response,
    ):
        assert await read_event(response) == b": ping"
        pass_time(HOLDS_S)
        assert codes(await rest(response)) == ["deadline_exceeded"]


@pytest.mark.parametrize("given", ["0", "60000"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}])
async def test_a_deadline_that_is_met_changes_nothing(given: str, fields: dict[str, Any]) -> None:
    async with fleet("a", "b") as running:
        for name in "ab":
            client = running[name].client
            free = await client.complete(seed=1, **fields)
            bounded = await client.complete(seed=1, headers={HEADER: given}, **fields)
            assert (bounded.status, same(bounded.body)) == (200, same(free.body))


async def test_zero_means_no_deadline(pass_time: PassTime) -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        asking = asyncio.create_task(client.complete(headers={HEADER: "0"}))
        (stream,) = await fake.submitted()
        pass_time(HOLDS_S)
        await client.get("/health")
        stream.end()
        assert (await asking).status == 200


@pytest.mark.parametrize("given", ["", "-1", "+5", "1.5", "10s", "1e3", "٣", "1" * 16])
async def test_a_header_that_gives_no_time_is_refused(given: str) -> None:
    answer = await OneOff(fake := FakeEngine()).complete(headers={HEADER: given})
    assert (answer.status, answer.error["param"]) == (400, HEADER)
    assert f"{HEADER} must be a whole number of milliseconds" in answer.error["message"]
    assert repr(given) in answer.error["message"]
    assert not fake.requests


# --- what it leaves behind ---


@pytest.mark.parametrize("where", ["in the queue", "at its adapter's load", "in the middle"])
async def test_the_engine_gets_back_all_that_the_request_held(
    pass_time: PassTime, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    finishes: list[Finish] = []
    first = asyncio.Event()
    async with harness(random.Random(0), slots=1) as here:
        engine: Any = here.engine
        monkeypatch.setattr(here.metrics, "observe_finish", finishes.append)
        monkeypatch.setattr(here.metrics, "observe_first_token", lambda seconds: first.set())
        if where == "in the queue":
            here.ask([1, 2, 3], None, max_tokens=4)
        async with serving(engine) as client:
            body = {"prompt": [4, 5, 6], "model": "a0", "max_tokens": 40, "stream": where == "in the middle"}
            asking = asyncio.create_task(client.post(COMPLETION[0], body, headers=HEADERS))
            while "a0" not in {*engine.snapshot().waiting_adapters, *engine.snapshot().running_adapters}:  # noqa: ASYNC110
                await asyncio.sleep(0)
            while where == "in the middle" and not first.is_set():
                here.end_something()
                await asyncio.sleep(0)
            pass_time(HOLDS_S)
            answer = await asking
            assert answer.body.count(b'"deadline_exceeded"') == 1
        await here.settle()
        await engine.unload_adapter("a0")  # waits until no request has it pinned
        assert [finish.reason for finish in finishes] == ["cancelled", "length"][: 1 + (where == "in the queue")]


class WrittenResponse:
    """A started response that keeps what is written."""

    prepared = True

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.ended = False

    async def write(self, data: bytes) -> None:
        self.written.append(data)

    async def write_eof(self) -> None:
        self.ended = True


async def test_a_stream_that_has_sent_done_gets_no_error_event() -> None:
    response: Any = WrittenResponse()
    async with EventStream(response, HttpTimings(), OpenAiStream()) as out:
        out.response = response
        await out.send(EVENTS[0] + DONE)
    await out.end_with_error(DeadlineExceeded("late"))
    assert response.written == [EVENTS[0] + DONE]
    assert response.ended


# --- across instances ---


async def serve(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
    return web.json_response({})


async def test_a_forwarded_request_carries_the_remaining_time() -> None:
    async with fleet("b") as running:
        seen = await running.start_raw("a", serve)
        for headers in ({HEADER: "60000"}, {HEADER: "0"}, {}):
            assert (await running["b"].client.complete(headers=headers)).status == 200
        bounded, *free = [headers.get(HEADER) for headers in seen.headers]
        assert bounded is not None
        assert 0 < int(bounded) < 60000
        assert free == [None, None]


async def test_a_second_attempt_carries_the_remaining_time(pass_time: PassTime) -> None:
    async def late(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        pass_time(7.0)
        return await die(request, seen)

    async with fleet("c") as running:
        dead, alive = await running.start_raw("a", late), await running.start_raw("b", serve)
        assert (await running["c"].client.complete(headers={HEADER: "20000"})).status == 200
        (first,), (second,) = dead.headers, alive.headers
        assert 0 < int(second[HEADER]) <= int(first[HEADER]) - 7000


async def test_after_the_deadline_no_other_instance_is_tried(pass_time: PassTime) -> None:
    async def late(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        pass_time(HOLDS_S)
        return await die(request, seen)

    async with fleet("c", raw={"a": late}) as running:
        other = await running.start_raw("b", serve)
        assert_exceeded(await running["c"].client.complete(headers=HEADERS))
        assert not other.headers
        assert not running["c"].engine.requests


async def test_less_than_a_remaining_millisecond_is_a_504(pass_time: PassTime) -> None:
    @within_deadline
    async def forward(request: web.Request) -> web.StreamResponse:
        assert 0 < int(remaining_time_header(request)[HEADER]) <= 1000 * HOLDS_S
        pass_time(HOLDS_S)  # the clock's own turn has not come yet
        return web.json_response(remaining_time_header(request))

    with pytest.raises(DeadlineExceeded):
        await forward(make_mocked_request("POST", "/", headers=HEADERS))


async def test_another_timeout_in_a_handler_is_not_a_deadline() -> None:
    @within_deadline
    async def fail(request: web.Request) -> web.StreamResponse:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await fail(make_mocked_request("POST", "/", headers=HEADERS))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sender_of_a_request_enforces_its_deadline_on_a_stuck_peer(pass_time: PassTime, stream: bool) -> None:
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def stick(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        if stream:
            await streamed(EVENTS[0], EVENTS[1][:7], request=request)
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    async with fleet("b", "c", raw={"a": stick}) as running:
        client = running["b"].client
        body = COMPLETION[1] | {"stream": stream}
        if stream:
            async with client.session.post(client.url + COMPLETION[0], json=body, headers=HEADERS) as response:
                assert await read_event(response) + b"\n\n" == EVENTS[0]
                pass_time(HOLDS_S)
                assert codes(await rest(response)) == ["deadline_exceeded"]
        else:
            asking = asyncio.create_task(client.complete(headers=HEADERS))
            await arrived.wait()
            pass_time(HOLDS_S)
            assert_exceeded(await asking)
        await ended.wait()
        assert (running["b"].routing_metrics.lost, running["b"].routing_metrics.unreached) == ({}, {})
        assert not running["b"].engine.requests
        assert not running["c"].engine.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_the_receiver_of_a_request_enforces_its_deadline(pass_time: PassTime, stream: bool) -> None:
    body = b'{"prompt":"ab","stream":%s}' % (b"true" if stream else b"false")
    path = PREFIX + COMPLETION[0]
    async with fleet() as running:
        a = await running.start("a", FakeEngine(script=begun if stream else None))
        claims = ForwardClaims(
            *("id", 1, "b", "a", None, "", 5),
            force=True,
            time_ms=int(time.time() * 1000),
            body_digest=await body_digest(body),
            defaults_digest="",
            client="c",
            weight=1.0,
            owns_cache=False,
        )
        headers = forward_headers(KEYS, path, claims) | HEADERS | {"Content-Type": "application/json"}
        asking = asyncio.create_task(a.client.post(path, body, headers=headers))
        (there,) = await a.engine.submitted()
        while stream and not there.taken:  # noqa: ASYNC110
            await asyncio.sleep(0)
        pass_time(HOLDS_S)
        answer = await asking
        if stream:
            assert codes(answer.events) == [None, "deadline_exceeded"]
        else:
            assert_exceeded(answer)
        assert answer.headers[INSTANCE_HEADER] == "a"
        assert there.cancelled.is_set()
        assert a.routing_metrics.received == 0


async def test_the_receivers_504_reaches_the_client() -> None:
    words = {"error": {"message": "late", "type": "server_error", "param": None, "code": "deadline_exceeded"}}

    async with fleet("b", "c", raw={"a": answers(lambda: web.json_response(words, status=504))}) as running:
        answer = await running["b"].client.complete(headers=HEADERS)
        assert (answer.status, answer.json) == (504, words)
        assert [name for name, _ in running["b"].forwards] == ["a"]
        assert running["b"].routing_metrics.forwarded == {}


async def test_a_stream_that_both_instances_end_has_one_error(pass_time: PassTime) -> None:
    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(script=begun))
        client, body = running["b"].client, COMPLETION[1] | {"stream": True}
        async with client.session.post(client.url + COMPLETION[0], json=body, headers=HEADERS) as response:
            assert (await read_chunk(response))["choices"]
            pass_time(HOLDS_S)
            assert codes(await rest(response)) == ["deadline_exceeded"]
        (there,) = a.engine.streams
        await there.cancelled.wait()
