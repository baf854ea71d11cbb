"""Tests of forwarded requests: the client's response, also when an instance fails or the client disconnects."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from caraserve.cluster.membership.swim import MemberState
from caraserve.cluster.routing.cost import Backlog
from caraserve.core.tenant import Tenant
from caraserve.errors import BackendFailed, Draining, Overloaded, ServerBusy
from caraserve.http.access.api_keys import key_name
from caraserve.http.context import HttpTimings
from caraserve.http.responses import error_body
from caraserve.lora.settings import AdapterSettings, RequestDefaults
from tests.http.fake_engine import WRONG_GRAMMAR, FakeAdapter, FakeEngine
from tests.http.fleet import FULL, Fleet, RawAnswer, answers, die, fleet, streamed, streams
from tests.http.serving import Answer
from tests.http.test_streaming import begun, raw_post, read_chunk, read_event

EVENTS = tuple(b'data: {"n":%d}\n\n' % number for number in range(200))
DONE = b"data: [DONE]\n\n"


# --- what the client gets ---


async def test_any_instance_accepts_any_request_and_one_answers() -> None:
    async with fleet("a", "b", "c") as running:
        for name in "abc":
            for fields in ({}, {"stream": True}):
                answer = await running[name].client.complete(**fields, model="b")
                assert answer.status == 200
        assert [len(running[name].engine.requests) for name in "abc"] == [6, 0, 0]
        assert (running["b"].routing_metrics.forwarded, running["a"].routing_metrics.received) == ({"a": 2}, 4)


async def test_a_combination_is_answered_by_an_instance_that_has_all_of_its_adapters() -> None:
    one, other = (FakeAdapter(name, f"/{name}", digest=64 * name) for name in "ab")
    async with fleet() as running:
        for name, adapters in (("i1", []), ("i2", [one]), ("i3", [one, other])):
            await running.start(name, FakeEngine(loaded={adapter.name: adapter for adapter in adapters}))
        for name in running.servers:
            for fields in ({}, {"stream": True}):
                answer = await running[name].client.complete(model="b*0.5+a*0.25", **fields)
                assert (answer.status, answer.headers["x-caraserve-instance"]) == (200, "i3")
        assert {request.adapter for request in running["i3"].engine.requests} == {"a*0.25+b*0.5"}
        assert running["i1"].routing_metrics.refused == {}


async def test_an_answer_is_the_same_as_from_the_instance_itself() -> None:
    async with fleet("a", "b") as running:
        for post in ("complete", "chat"):
            for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}, {"n": 2}):
                one, other = [await getattr(running[name].client, post)(seed=1, **fields) for name in "ab"]
                assert same(one.body) == same(other.body)
                assert one.headers["Content-Type"] == other.headers["Content-Type"]
                assert one.headers.get("x-caraserve-phases") == other.headers.get("x-caraserve-phases")
        assert not running["b"].engine.requests


async def test_every_answer_names_the_instance_that_computed_it() -> None:
    async def who(asked: Coroutine[None, None, Answer], status: int = 200) -> list[str]:
        answer = await asked
        assert answer.status == status
        return list(answer.headers.getall("x-caraserve-instance", []))

    async with fleet("a", "b") as running:
        for name in "ab":  # a computes all
            client = running[name].client
            for asked in (client.complete(), client.complete(stream=True), client.chat(n=2), client.embed()):
                assert await who(asked) == ["a"]
            assert await who(client.complete(prompt=7), 400) == [name]


async def test_a_stream_that_another_instance_computes_after_a_refusal_names_that_one() -> None:
    async with fleet("b") as running:
        await running.start("a", FakeEngine(refusals={0: Overloaded("full", retry_after_s=1)}))
        answer = await running["b"].client.complete(stream=True)
        assert answer.headers["x-caraserve-instance"] == "b"


async def test_only_an_instance_with_the_same_defaults_of_the_adapter_answers(running: Fleet) -> None:
    cool, hot = adapters_at(0.5), adapters_at(1.5)
    for name, management in (("a", hot), ("b", cool), ("c", cool)):
        await running.start(name, management=management)
    for fields in ({"model": "b"}, {"model": "b", "stream": True}, {}):
        assert (await running["c"].client.complete(**fields)).status == 200
    assert running["a"].routing_metrics.refused == {"no-adapter": 2}
    temperatures = [[one.params.temperature for one in running[name].engine.requests] for name in "abc"]
    assert temperatures == [[1.0], [0.5, 0.5], []]


def adapters_at(temperature: float) -> Any:
    """The settings that an instance has of its adapters: all have this temperature by default."""
    settings = AdapterSettings(defaults=RequestDefaults(sampling={"temperature": temperature}))
    return SimpleNamespace(
        settings=SimpleNamespace(get=lambda name: settings),
        aliases=SimpleNamespace(find=lambda name: None, target=lambda name, is_known: name),
    )


def same(body: bytes) -> bytes:
    """Returns an answer without its id and its time, for comparison."""
    lines = []
    for line in body.split(b"\n"):
        value = line.removeprefix(b"data: ")
        if value.startswith(b"{"):
            document = json.loads(value)
            del document["id"], document["created"]
            line = json.dumps(document).encode()
        lines.append(line)
    return b"\n".join(lines)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_stream_passes_byte_for_byte_however_it_is_cut(size: int) -> None:
    text = b"".join(EVENTS) + b": phases x\n\n" + DONE

    async def send(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        return await streamed(*pieces, request=request)

    async with fleet("b", raw={"a": send}) as running:
        assert (await running["b"].client.complete(stream=True)).body == text


@pytest.mark.parametrize("cut", [5, -1])
async def test_events_come_as_they_are_sent(cut: int) -> None:
    go, end = asyncio.Event(), asyncio.Event()

    async def send(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        response = await streamed(EVENTS[0] + EVENTS[1][:cut], request=request)
        await go.wait()
        await response.write(EVENTS[1][cut:])
        await end.wait()
        await response.write(DONE)
        return response

    async with fleet("b", raw={"a": send}) as running:
        client = running["b"].client
        async with client.session.post(f"{client.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert await read_event(answer) + b"\n\n" == EVENTS[0]
            go.set()
            assert await read_event(answer) + b"\n\n" == EVENTS[1]
            end.set()
            assert await answer.content.read() == DONE


async def test_a_grammar_is_compiled_where_the_request_is_answered() -> None:
    """The other instance does not notice that it is wrong."""
    async with fleet("a", "b") as running:
        answer = await running["b"].client.complete(guided_regex=WRONG_GRAMMAR, model="b")
        assert (answer.status, answer.error["param"]) == (400, "guided_regex")
        assert (running["b"].routing_metrics.forwarded, running["a"].routing_metrics.received) == ({"a": 1}, 0)
        assert (await running["b"].client.complete(guided_regex="a*", model="b")).status == 200
        assert [len(running[name].engine.requests) for name in "ab"] == [1, 0]


async def test_a_clients_mistake_is_not_forwarded() -> None:
    async with fleet("a", "b") as running:
        answer = await running["b"].client.complete(temperature=-1)
        assert (answer.status, answer.error["param"]) == (400, "temperature")
        assert not running["b"].forwards


async def test_a_request_whose_device_fails_before_the_first_byte_is_answered_by_another() -> None:
    def fail(request: Any) -> Any:
        return [*begun(request)][:0]

    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(script=fail))
        asked = asyncio.create_task(running["b"].client.complete())
        (stream,) = await a.engine.submitted()
        stream.end(0, "error", BackendFailed("the iteration failed: boom"))
        answer = await asked
        assert answer.status == 200
        assert len(running["b"].engine.requests) == 1


async def test_a_request_that_two_devices_failed_with_goes_to_no_third(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as running:
        for name in "abcd":
            await running.start(name, FakeEngine(refusals={0: BackendFailed("the iteration failed: boom")}))
        for entry, carried in (("d", ["a", "b"]), ("a", ["b"])):
            answer = await running[entry].client.complete()
            assert (answer.status, answer.error["code"]) == (500, "backend_failed")
            assert "boom" in answer.error["message"]
            assert [name for name, _ in running[entry].forwards] == carried
        assert len([record for record in caplog.records if "boom" in record.message]) == 4  # each where it happened


async def test_an_instance_whose_device_has_failed_refuses_requests() -> None:
    async with fleet("a", "b") as running:
        running["a"].engine.failure = "gone"
        for entry in "ab":
            assert (await running[entry].client.complete()).status == 200
        assert [len(running[name].engine.requests) for name in "ab"] == [0, 2]
        assert running["a"].routing_metrics.refused == {"draining": 1}


async def test_ids_traces_tenant_and_seed_are_forwarded_and_the_clients_key_is_not(running: Fleet) -> None:
    b = await running.start("b", api_key=("secret",))
    seen = await running.start_raw("a", answers(lambda: web.json_response({})))
    headers = {"X-Request-Id": "r-1", "traceparent": "00-abc-01", "Authorization": "Bearer secret"}
    answer = await b.client.complete(headers=headers, user="alice", seed=5)
    assert answer.headers["X-Request-Id"] == "r-1"
    (got,), (body,), (claims,) = seen.headers, seen.bodies, seen.claims
    assert (got["X-Request-Id"], got["traceparent"]) == ("r-1", "00-abc-01")
    assert "Authorization" not in got
    assert json.loads(body) == {"prompt": "ab", "user": "alice", "seed": 5}
    assert claims["seed"] is None
    await b.client.complete(headers=headers)
    assert seen.claims[1]["seed"] is not None


async def test_a_forwarded_request_needs_no_api_key(running: Fleet) -> None:
    a, b = await running.start("a", api_key=("of a",)), await running.start("b", api_key=("of b",))
    answer = await b.client.complete(headers={"Authorization": "Bearer of b"}, user="alice")
    tenants = [request.tenant for request in a.engine.requests]
    assert (answer.status, tenants) == (200, [Tenant(key_name("of b"), "alice")])


# --- leaving, waiting ---


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_ends_the_request_there(stream: bool) -> None:
    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(script=None))
        asked = asyncio.create_task(running["b"].client.complete(stream=stream))
        (there,) = await a.engine.submitted()
        asked.cancel()
        await there.cancelled.wait()


async def test_a_client_that_leaves_in_the_middle_ends_the_request_there() -> None:
    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(script=begun))
        reader, writer = await raw_post(running["b"].client, "/v1/completions", {"prompt": "ab", "stream": True})
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        (there,) = await a.engine.submitted()
        await there.cancelled.wait()
        assert running["b"].routing_metrics.lost == {}


async def test_a_client_that_does_not_read_delays_its_own_stream_and_buffers_little() -> None:
    sent, ended = 0, asyncio.Event()
    piece = b"data: %b\n\n" % (b"x" * 65536)

    async def send(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        nonlocal sent
        response = await streamed(request=request)
        try:
            while True:
                await response.write(piece)
                sent += len(piece)
        finally:
            ended.set()

    async with fleet("b", raw={"a": send}) as running:
        reader, writer = await raw_post(running["b"].client, "/v1/completions", {"prompt": "ab", "stream": True})
        await reader.readuntil(b"data: ")
        before = -1
        while sent != before:  # until the kernel's buffers are full and nothing is written any more
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 64 << 20
        writer.transport.abort()
        await ended.wait()


# --- failures ---


async def test_before_the_first_byte_another_instance_retries_with_the_same_id_and_seed() -> None:
    async with fleet("d") as running:
        running.add_absent("a")
        dead, alive = await running.start_raw("b", die), await running.start_raw("c", streams(*EVENTS, DONE))
        answer = await running["d"].client.complete(stream=True)
        assert answer.body == b"".join(EVENTS) + DONE
        (one,), (two,) = dead.claims, alive.claims
        assert (one["id"], one["seed"]) == (two["id"], two["seed"])
        assert one["attempt"] < two["attempt"]
        assert running["d"].routing_metrics.unreached == {"a": 1, "b": 1}
        assert running["d"].routing_metrics.retried == 2


async def test_a_silent_name_server_counts_as_an_unreachable_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*about: object, **more: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("caraserve.http.proxy._REACH_S", 0.05)
    async with fleet("b") as running:
        running.add_absent("a")
        running.world.records["a"] = replace(running.world.records["a"], address="a.example:1")
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", silent)
        assert (await running["b"].client.complete()).status == 200
        assert running["b"].routing_metrics.unreached == {"a": 1}


async def test_a_local_retry_uses_the_seed_of_the_forwarded_attempts() -> None:
    async with fleet("b") as running:
        await running.start("a", FakeEngine(refusals={0: Overloaded("full", retry_after_s=1)}))
        await running["b"].client.complete(n=2)
        seeds = [request.params.seed for request in running["b"].engine.requests]
        assert len(seeds) == 2
        assert None not in seeds


@pytest.mark.parametrize("how", ["connection", "death", "another life"])
async def test_a_stream_whose_instance_dies_ends_with_an_error(how: str) -> None:
    waiting = asyncio.Event()

    async def send(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        response = await streamed(EVENTS[0], EVENTS[1][:7], request=request, die=how == "connection")
        with suppress(asyncio.CancelledError):
            await waiting.wait()
        return response

    async with fleet("b", "c", raw={"a": send}) as running:
        client = running["b"].client
        async with client.session.post(f"{client.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert await read_event(answer) + b"\n\n" == EVENTS[0]
            proxy, record = running["b"].router.proxy, running.world.records["a"]
            proxy.member_changed(record)
            if how != "connection":
                proxy.member_changed(
                    replace(record, state=MemberState.DEAD) if how == "death" else replace(record, epoch=2)
                )
            error = (await read_chunk(answer))["error"]
            assert (error["code"], error["type"]) == ("instance_lost", "server_error")
            assert await answer.content.read() == DONE
        assert running["b"].routing_metrics.lost == {"a": 1}
        assert not running["b"].engine.requests
        assert not running["c"].engine.requests
        waiting.set()


async def test_after_a_stream_whose_instance_died_the_connection_takes_the_next_request() -> None:
    async with fleet("b", raw={"a": streams(EVENTS[0], die=True)}) as running:
        reader, writer = await raw_post(running["b"].client, "/v1/completions", {"prompt": "ab", "stream": True})
        assert b"instance_lost" in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
        writer.close()


async def test_a_peers_internal_error_is_passed_on_and_not_counted_as_an_answer() -> None:
    async with fleet("b") as running:
        await running.start_raw(
            "a", answers(lambda: web.json_response(error_body("a mistake", "server_error", None, None), status=500))
        )
        assert (await running["b"].client.complete()).status == 500
        assert running["b"].routing_metrics.forwarded == {}


async def test_a_stream_without_done_counts_as_lost() -> None:
    async with fleet("b", raw={"a": streams(EVENTS[0])}) as running:
        answer = await running["b"].client.complete(stream=True)
        assert [event.get("error", {}).get("code") for event in answer.events] == [None, "instance_lost"]


async def test_an_instance_that_dies_before_its_first_byte_is_replaced_by_another() -> None:
    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(script=None))
        asked = asyncio.create_task(running["b"].client.complete(stream=True))
        (there,) = await a.engine.submitted()
        running["b"].router.proxy.member_changed(replace(running.world.records["a"], state=MemberState.DEAD))
        assert (await asked).status == 200
        await there.cancelled.wait()
        assert len(running["b"].engine.requests) == 1


async def test_a_partial_response_that_is_no_stream_is_retried() -> None:
    async def cut(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"id":')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with fleet("b", raw={"a": cut}) as running:
        answer = await running["b"].client.complete()
        assert answer.json["choices"][0]["text"] == "Hi!"


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("full", retry_after_s=3),
        Draining("stopping", retry_after_s=3),
        ServerBusy("no memory", retry_after_s=3),
        BackendFailed("the device has failed"),
    ],
)
@pytest.mark.parametrize(("entry", "asked"), [("c", ["a", "b"]), ("a", ["b"])])
async def test_an_instance_that_refuses_is_skipped(error: Exception, entry: str, asked: list[str]) -> None:
    async with fleet("c") as running:
        a = await running.start("a", FakeEngine(refusals={0: error}))
        b = await running.start("b")
        assert (await running[entry].client.complete()).status == 200
        assert [len(server.engine.requests) for server in (a, b, running["c"])] == [0, 1, 0]
        assert [name for name, _ in running[entry].forwards] == asked
        assert len({one for _, one in running[entry].forwards}) == 1


async def test_without_another_instance_the_client_gets_the_last_refusal(running: Fleet) -> None:
    far = FakeEngine(
        refusals={0: Overloaded("9 wait", retry_after_s=7)}, loaded={"far": FakeAdapter("far", "/far", digest="f")}
    )
    await running.start("a", far)
    await running.start("b")
    answer = await running["b"].client.complete(model="far")
    assert (answer.status, answer.headers["Retry-After"], answer.headers["retry-after-ms"]) == (429, "7", "7000")
    assert answer.error["message"] == "9 wait"


async def test_when_all_instances_are_full_the_client_gets_a_429(running: Fleet) -> None:
    full = {number: Overloaded("7 requests are waiting", retry_after_s=3) for number in range(9)}
    for name in "abcd":
        await running.start(name, FakeEngine(refusals=dict(full)))
    answer = await running["d"].client.complete(stream=True)
    assert (answer.status, answer.error["code"], answer.headers["Retry-After"]) == (429, "rate_limit_exceeded", "3")
    assert answer.headers["x-caraserve-instance"] == "d"


async def test_instances_that_report_a_full_queue_are_not_tried() -> None:
    async with fleet("a", "b") as running:
        running.world.loads["a"] = FULL
        await running["b"].client.complete()
        assert not running["b"].forwards


async def test_a_draining_instance_still_forwards() -> None:
    async with fleet("a", "b") as running:
        running["a"].engine.draining = True
        running["a"].view.stale = tuple(one for one in running["b"].view.instances() if one.name == "b")
        assert (await running["a"].client.complete()).status == 200
        assert len(running["b"].engine.requests) == 1


async def test_only_one_instance_sends_pings(running: Fleet) -> None:
    timings = HttpTimings(ping_s=0.05)
    a = await running.start("a", FakeEngine(script=begun), timings)
    b = await running.start("b", timings=timings)
    async with b.client.session.post(f"{b.client.url}/v1/completions", json={"prompt": "x", "stream": True}) as got:
        await read_chunk(got)
        assert [await read_event(got) for _ in range(3)] == [b": ping"] * 3
        (there,) = await a.engine.submitted()
        there.end()


async def test_a_full_instance_says_when_its_queue_is_expected_to_be_answered(running: Fleet) -> None:
    a = await running.start("a", FakeEngine(refusals={0: Overloaded("full", retry_after_s=3)}))
    b = await running.start("b")
    running.world.loads["b"] = Backlog(queue_room=0)
    answer = await a.client.complete()
    assert (answer.status, answer.headers["Retry-After"]) == (429, f"{b.engine.predicted_wait_s():.0f}")
    assert len(a.forwards) == 1
