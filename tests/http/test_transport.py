"""Tests of the transport: bytes that are no request, endless connections, clients that do not read, and the log."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.http_writer import StreamWriter

from caraserve.core.request import GenerateRequest, TokenDelta
from caraserve.engine import unread
from caraserve.http.app import make_app, start_http
from caraserve.http.context import CONTEXT, HttpTimings
from caraserve.util.tasks import TurnBudget
from tests.http.fake_engine import FakeEngine, FakeStream, finish
from tests.http.serving import Answer, Client, OneOff, exchange, http_config, new_metrics, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def parsed(raw: bytes) -> Answer:
    """Parses a raw answer whose connection the server has closed."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    return Answer(int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body)


NOT_REQUESTS = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "broken chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n{}\r\n", 400),
    "one endless header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 431),
    "200 headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: x\r\n" * 200 + b"\r\n", 400),
    "compressed chunks": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 501),
    "unknown Expect": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: 42\r\n\r\n", 417),
}


@pytest.mark.parametrize(("data", "status"), NOT_REQUESTS.values(), ids=NOT_REQUESTS.keys())
async def test_bytes_that_are_no_request_are_refused_in_openais_shape_and_not_logged(
    data: bytes, status: int, caplog: pytest.LogCaptureFixture, client: Client
) -> None:
    answer = parsed(await exchange(client.port, data))
    assert (await client.get("/health")).status == 200
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert len(answer.error["message"]) < 300
    assert answer.headers["Server"] == "CaraServe"
    assert not caplog.records


async def test_the_server_header_has_no_versions(client: Client) -> None:
    for answer in (await client.get("/health"), await client.get("/nothing"), await client.complete(stream=True)):
        assert answer.headers["Server"] == "CaraServe"


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models/a/", "/health/", "/v1/models/?x=/"])
async def test_a_slash_at_the_end_changes_nothing(path: str, client: Client) -> None:
    slashed, plain = await client.get(path), await client.get(path.replace("/?", "?").removesuffix("/"))
    assert (slashed.status, slashed.body) == (plain.status, plain.body) == (200, plain.body)


@pytest.mark.parametrize("path", ["//", "//x/", "//x/health/", "//[/", "//x:port/", "/v1//models", "/v1/models//"])
async def test_two_slashes_are_an_unknown_url(path: str, client: Client) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    async with asyncio.timeout(5):
        answer = parsed(await exchange(client.port, request.encode()))
    is_model = path == "/v1/models//"  # of the name `/`
    assert (answer.status, answer.error["code"]) == (404, "model_not_found" if is_model else "unknown_url")


async def test_completions_take_a_slash_at_the_end() -> None:
    assert (await OneOff().post("/v1/completions/", {"prompt": "a"})).status == 200


@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["read", "refused unread"])
async def test_a_body_that_turns_out_broken_is_logged_once_at_most(
    keys: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(FakeEngine(), api_key=keys, timings=HttpTimings(body_s=0.05, linger_s=0.05)) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"zzz\r\n{}\r\n")
        await reader.read()
        writer.close()
    assert len(caplog.records) <= 1
    assert not any(record.exc_info for record in caplog.records)


async def test_clients_that_leave_are_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    left = asyncio.Event()

    async def write(self: StreamWriter, data: bytes, **options: Any) -> None:
        left.set()
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    with monkeypatch.context() as patched, socket.create_connection(("127.0.0.1", client.port)) as one:
        patched.setattr(StreamWriter, "write", write)
        one.sendall(HEAD + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
        await left.wait()
    assert (await client.get("/health")).status == 200
    assert not caplog.records


@asynccontextmanager
async def listening(engine: FakeEngine, timings: HttpTimings) -> AsyncIterator[tuple[web.AppRunner, int]]:
    config = http_config()
    app = make_app(engine, config, new_metrics(), allow_lora_updates=False, timings=timings)
    runner, port = await start_http(app, config)
    try:
        yield runner, port
    finally:
        await runner.cleanup()


def long_answer(request: GenerateRequest) -> Sequence[TokenDelta]:
    return [TokenDelta("x" * (32 << 20), (1,)), TokenDelta("", (), finish=finish(request, 1))]


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n"])
async def test_an_answer_that_is_not_read_ends_with_its_connection(
    ending: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = HttpTimings(write_s=0.2)
    async with listening(FakeEngine(script=long_answer), timings) as (runner, port):
        lost, server = asyncio.Event(), runner.server
        assert server is not None
        was_lost = server.connection_lost

        def connection_lost(*args: Any) -> None:
            was_lost(*args)
            lost.set()

        monkeypatch.setattr(server, "connection_lost", connection_lost)
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)  # reads no further than its buffer
        writer.write(HEAD + ending + b'Content-Length: 14\r\n\r\n{"prompt":"a"}')
        await asyncio.wait_for(lost.wait(), 20.0)  # only the server notices
        writer.close()


async def test_a_whole_answer_counts_until_it_is_read_and_is_cut_when_memory_is_short(
    pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "_LOOK_S", 1.0)
    fake = FakeEngine(script=long_answer)
    async with serving(fake, timings=HttpTimings(write_s=1e6)) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=1)
        writer.write(HEAD + b'Content-Length: 14\r\n\r\n{"prompt":"a"}')
        await reader.readexactly(20)
        (stream,) = fake.streams
        budget = stream.unread._budget
        assert budget.held_bytes == stream.unread.unread_bytes > 32 << 20
        pass_time(1.0)
        assert budget.ended == 0
        budget.max_bytes = 1 << 20
        pass_time(1.0)
        with pytest.raises(asyncio.IncompleteReadError):
            await reader.readexactly(32 << 20)
        assert (budget.ended, budget.held_bytes) == (1, 0)
        writer.close()


async def test_a_whole_answer_for_which_there_is_no_memory_is_refused() -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        asking = asyncio.create_task(client.complete(prompt="a"))
        (stream,) = await fake.submitted()
        stream.unread._budget.max_bytes = 1 << 20
        stream.feed(*[TokenDelta("x" * (1 << 19), (1,))] * 3)
        answer = await asking
    assert (answer.status, answer.error["code"], answer.headers["Retry-After"]) == (503, "server_busy", "1")
    assert stream.cancels > 0
    assert stream.unread._budget.held_bytes == 0


@asynccontextmanager
async def connections(
    client: Client, count: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    opened = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(count)]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def get(client: Client, path: str) -> int:
    """Sends a request over a new connection and returns the status."""
    return parsed(
        await exchange(client.port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    ).status


REQUEST = HEAD + b'Content-Length: 14\r\n\r\n{"prompt":"a"}'
PROBE = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def test_idle_connections_are_closed_for_new_ones() -> None:
    async with serving(FakeEngine(), max_connections=3) as client, connections(client, 3) as opened:
        for reader, writer in opened:
            writer.write(REQUEST)
            await reader.readuntil(b"usage")
        assert [await get(client, "/v1/models") for _ in range(3)] == [200] * 3
        await asyncio.wait_for(opened[0][0].read(), 20.0)  # long before it has been idle for too long


async def test_beyond_the_most_connections_only_probes_are_answered() -> None:
    fake = FakeEngine(script=None)
    async with serving(fake, max_connections=3) as client, connections(client, 3) as opened:
        for _, writer in opened:
            writer.write(REQUEST)
        await fake.submitted(3)
        busy = parsed(await exchange(client.port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert (busy.status, busy.error["code"], busy.headers["Retry-After"]) == (503, "server_busy", "1")
        overloaded = parsed(await exchange(client.port, b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert (overloaded.status, overloaded.json["error"]["type"]) == (529, "overloaded_error")
        half = parsed(await asyncio.wait_for(exchange(client.port, HEAD + b"Content-Length: 99\r\n\r\n{"), 4.0))
        assert half.status == 503  # and closed at once, instead of waiting for the rest
        assert await get(client, "/health") == 200
        for stream in fake.streams:
            stream.end()
        for reader, _ in opened:
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        assert await get(client, "/v1/models") == 200


@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["read", "refused unread"])
async def test_half_requests_keep_no_other_client_out(keys: tuple[str, ...]) -> None:
    """There are more of them than connections allowed, and one more for each that ends."""
    half = HEAD + b"Content-Length: 100000\r\n\r\n{"
    headers = b"Authorization: Bearer secret\r\nConnection: close\r\n" if keys else b"Connection: close\r\n"
    async with serving(FakeEngine(), api_key=keys, max_connections=10) as client:

        async def flood() -> None:
            while True:
                with suppress(ConnectionError):
                    await exchange(client.port, half)

        attackers = [asyncio.create_task(flood()) for _ in range(40)]
        for _ in range(5):
            assert parsed(await exchange(client.port, PROBE)).status == 200
            models = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n"
            assert parsed(await exchange(client.port, models)).status == 200
        for attacker in attackers:
            assert not attacker.done()
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)


async def test_a_request_whose_body_is_given_up_for_another_may_be_sent_again() -> None:
    async with serving(FakeEngine(), max_connections=1) as client:
        slow = asyncio.create_task(exchange(client.port, HEAD + b"Content-Length: 99\r\n\r\n{"))
        while not slow.done():
            assert await get(client, "/v1/models") in (200, 503)
        refused = parsed(await slow)
        assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (503, "server_busy", "1")


async def test_an_idle_connection_is_closed_after_the_configured_time() -> None:
    async with serving(FakeEngine(), keep_alive_timeout_s=0.2) as client, connections(client, 1) as ((used, writer),):
        writer.write(REQUEST)
        await used.readuntil(b"usage")
        await asyncio.wait_for(used.read(), 20.0)  # until the connection is closed


async def test_a_connection_without_a_request_is_closed_sooner_than_one_between_two() -> None:
    timings = HttpTimings(first_request_s=0.05, keepalive_s=60.0)
    async with serving(FakeEngine(), timings=timings) as client, connections(client, 2) as opened:
        (silent, _), (used, writer) = opened
        writer.write(REQUEST)
        await used.readuntil(b"usage")
        assert await asyncio.wait_for(silent.read(), 20.0) == b""
        writer.write(REQUEST)
        await used.readuntil(b"usage")


async def test_of_requests_that_come_at_once_a_few_begin_in_each_turn_of_the_event_loop() -> None:
    turn, begun_in = 0, list[int]()

    class CountingEngine(FakeEngine):
        def submit(self, request: GenerateRequest) -> FakeStream:
            begun_in.append(turn)
            return super().submit(request)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    engine = CountingEngine()
    async with serving(engine) as client:
        sockets = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(40)]
        for one in sockets:
            one.sendall(REQUEST)  # all before the server's next turn
        counting = asyncio.create_task(count_turns())
        await engine.submitted(40)
        counting.cancel()
        for one in sockets:
            one.close()
    assert max(Counter(begun_in).values()) <= 16  # two turns' requests, as some begin at the end of theirs


async def test_a_probe_does_not_wait_while_others_wait_to_begin() -> None:
    config = http_config()
    app = make_app(FakeEngine(), config, new_metrics(), allow_lora_updates=False)
    app[CONTEXT] = replace(app[CONTEXT], begin_turns=TurnBudget(0))  # nothing begins
    runner, port = await start_http(app, config)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(REQUEST)
        assert parsed(await exchange(port, PROBE)).status == 200
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
    finally:
        writer.close()
        await runner.cleanup()
