"""Tests of server-sent events: their bytes, their order, and the effects of slow, silent or disconnected clients."""

import asyncio
import json
import socket
import time
from collections.abc import Iterable
from typing import Any

import pytest
from aiohttp import web

from caraserve.core.request import GenerateRequest, TokenDelta, TokenLogprob
from caraserve.errors import BackendFailed
from caraserve.http.context import HttpTimings
from caraserve.http.streaming import progress_comment, tokens_comment, tokens_in, without_progress
from caraserve.http.whole_answer import TURN_LOGPROBS, paced
from caraserve.util.tasks import TurnBudget
from tests.http.fake_engine import BOS, DIGEST, FakeEngine, finish
from tests.http.serving import Client, OneOff, serving

FIELDS: dict[str, Any] = {"prompt": "ab", "stream": True}


def begun(request: GenerateRequest) -> list[TokenDelta]:
    """Returns a first delta, with which the response starts; the test sends the others."""
    return [TokenDelta("x", (1,))]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [value for values in lists for value in values]


async def read_event(response: Any) -> bytes:
    """Returns the next event or comment, without its blank line."""
    event: bytes = await response.content.readuntil(b"\n\n")
    return event.removesuffix(b"\n\n")


async def read_chunk(response: Any) -> Any:
    """Returns the data of the next event, past comments."""
    while (event := await read_event(response)).startswith(b":"):
        pass
    return json.loads(event.removeprefix(b"data: "))


async def raw_post(client: Client, path: str, fields: dict[str, Any]) -> tuple[Any, asyncio.StreamWriter]:
    """Sends a request over a bare connection, whose receive buffer is small."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", client.port))
    reader, writer = await asyncio.open_connection(sock=link, limit=1 << 12)
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + body)
    return reader, writer


async def test_headers() -> None:
    headers = (await OneOff().complete(stream=True)).headers
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    assert headers["X-Request-Id"]


async def test_bytes_of_a_completion_stream() -> None:
    answer = await OneOff().complete(stream=True, model="a", max_tokens=2)
    first = answer.events[0]
    head = b'data: {"id":"%b","object":"text_completion","created":%d,"model":"a","choices":[{"index":0,"text":' % (
        first["id"].encode(),
        first["created"],
    )
    assert answer.body == (
        head + b'"H","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + head + b'"i","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + head + b'"","logprobs":null,"finish_reason":"length","stop_reason":null}],'
        + b'"system_fingerprint":"a@%b"}\n\n' % DIGEST.encode()
        + b": phases queued=1.000;load=2.000;prefill=3.000;decode=4.000;"
        + b"stalled=0.000;interrupted=0.000;cpu_lora=0.000;cpu_layers=0\n\n"
        + b": completion_tokens 2\n\n"
        + b"data: [DONE]\n\n"
    )  # fmt: skip


async def test_chat_stream_is_role_then_text_then_finish() -> None:
    events = (await OneOff().chat(stream=True, max_tokens=2)).events
    assert {(event["object"], event["id"]) for event in events} == {("chat.completion.chunk", events[0]["id"])}
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "i"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]


async def test_chat_text_that_comes_with_the_finish_is_not_lost() -> None:
    def at_once(request: GenerateRequest) -> list[TokenDelta]:
        return [TokenDelta("all", (1, 2), finish=finish(request, 2))]

    events = (await OneOff(FakeEngine(script=at_once)).chat(stream=True)).events
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "all"},
        {},
    ]


async def test_usage_is_null_until_the_last_event() -> None:
    *chunks, last = (await OneOff().complete(stream=True, stream_options={"include_usage": True}, n=2)).events
    assert [chunk["usage"] for chunk in chunks] == [None] * 8
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 6)


async def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await OneOff().complete(stream=True, stream_options=options)).events
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3, 3]


async def test_answers_of_one_request_share_the_stream_and_keep_their_order() -> None:
    events = (await OneOff().complete(stream=True, prompt=["a", "b"], n=2)).events
    texts = ["", "", "", ""]
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["Hi!"] * 4


async def test_logprobs_of_a_stream_add_up_to_those_of_a_whole_answer(client: Client) -> None:
    fields: dict[str, Any] = {"logprobs": 1, "echo": True}
    whole = (await client.complete(**fields)).json["choices"][0]
    events = (await client.complete(**fields, stream=True)).events
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert {name: joined(logprobs[name] for logprobs in streamed) for name in whole["logprobs"]} == whole["logprobs"]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"] == "abHi!"


async def test_token_ids_of_a_stream(client: Client) -> None:
    completion = (await client.complete(stream=True, return_token_ids=True)).events
    chat = (await client.chat(stream=True, return_token_ids=True)).events
    assert [event["choices"][0]["prompt_token_ids"] for event in completion] == [[BOS, 97, 98], None, None, None]
    assert joined(event["choices"][0]["token_ids"] for event in completion) == list(b"Hi!")
    assert len(chat[0]["prompt_token_ids"]) > 3
    assert "prompt_token_ids" not in chat[1]
    assert joined(event["choices"][0].get("token_ids", []) for event in chat) == list(b"Hi!")


@pytest.mark.parametrize(
    ("events", "count"),
    [
        (tokens_comment(12), 12),
        (b'data: {"x":1}\n\n' + tokens_comment(7) + b"data: [DONE]\n\n", 7),
        (b"data: x: completion_tokens 9\n\n", None),
    ],
)
def test_the_number_of_tokens_is_read_from_its_comment_only(events: bytes, count: int | None) -> None:
    assert tokens_in(events) == count


def test_comments_with_the_tokens_so_far_are_taken_out_of_events() -> None:
    event, written = b'data: {"x":1}\n\n', b"data: x: tokens_so_far 9\n\n"
    three, seven = progress_comment(3), progress_comment(7)
    assert without_progress(three + event + three + seven + written) == (event + written, 7)
    assert without_progress(seven) == (b"", 7)
    assert without_progress(event + written) == (event + written, None)


async def test_held_back_text_sends_no_event() -> None:
    def held(request: GenerateRequest) -> list[TokenDelta]:
        return [TokenDelta("", (1,)), TokenDelta("é", (2,)), TokenDelta("", (), finish=finish(request, 2))]

    events = (await OneOff(FakeEngine(script=held)).complete(stream=True)).events
    assert [event["choices"][0]["text"] for event in events] == ["é", ""]


async def test_each_event_goes_out_when_its_delta_comes() -> None:
    fake = FakeEngine(script=begun)
    async with serving(fake) as client, client.session.post(client.url + "/v1/completions", json=FIELDS) as response:
        (stream,) = fake.streams
        assert (await read_chunk(response))["choices"][0]["text"] == "x"
        for text in "yz":
            stream.feed(TokenDelta(text, (1,)))
            assert (await read_chunk(response))["choices"][0]["text"] == text
        stream.end()
        await read_chunk(response)
        assert (await read_event(response)).startswith(b": phases")
        assert (await read_event(response)).startswith(b": completion_tokens")
        assert await read_event(response) == b"data: [DONE]"


async def test_silence_is_filled_with_ping_comments() -> None:
    fake = FakeEngine(script=None)
    async with (
        serving(fake, timings=HttpTimings(ping_s=0.02)) as client,
        client.session.post(client.url + "/v1/completions", json=FIELDS) as response,
    ):
        assert [await read_event(response) for _ in range(3)] == [b": ping"] * 3
        fake.streams[0].feed(TokenDelta("x", (1,)))
        while (event := await read_event(response)) == b": ping":
            continue
        assert b'"text":"x"' in event


async def test_a_prompt_that_takes_long_has_comments_with_its_progress() -> None:
    fake, fields = FakeEngine(script=None), {**FIELDS, "prompt": list(range(100)), "n": 2}
    async with serving(fake, timings=HttpTimings(progress_s=0.01)) as client:
        answer = asyncio.ensure_future(client.session.post(client.url + "/v1/completions", json=fields))
        first, second = await fake.submitted(2)
        first.num_computed = lambda: 32
        async with await answer as response:
            assert await read_event(response) == b": prefill 32 of 200 tokens"
            second.num_computed = lambda: 101  # and the first token of its answer
            assert await read_event(response) == b": prefill 132 of 200 tokens"
            first.feed(TokenDelta("x", (1,)))
            assert b'"text":"x"' in await read_event(response)


@pytest.mark.parametrize("error", [BackendFailed("device lost"), None])
async def test_failure_after_the_first_byte_is_an_event_and_the_end(error: BackendFailed | None) -> None:
    fake = FakeEngine(script=begun)
    async with serving(fake) as client, client.session.post(client.url + "/v1/completions", json=FIELDS) as response:
        await read_chunk(response)
        fake.streams[0].end(1, "error" if error else "cancelled", error)
        last = await read_chunk(response)
        assert last["error"]["code"] == ("backend_failed" if error else "draining")
        assert await response.content.read() == b"data: [DONE]\n\n"


async def test_a_connection_is_used_again_after_a_stream_that_ended_with_an_error() -> None:
    fake = FakeEngine(script=begun)
    async with serving(fake) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for _ in range(3):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 29\r\n\r\n"
            writer.write(head + b'{"prompt":"ab","stream":true}')
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b'"x"')
            fake.streams[-1].end(1, "error", BackendFailed("device lost"))
            assert b"backend_failed" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_client_that_leaves_cancels_everything_at_once(stream: bool, n: int) -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        _, writer = await raw_post(client, "/v1/completions", {"prompt": "a", "stream": stream, "n": n})
        streams = await fake.submitted(n)
        writer.transport.abort()
        await asyncio.gather(*(each.cancelled.wait() for each in streams))


async def test_client_that_leaves_amid_a_stream_cancels_it(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        reader, writer = await raw_post(
            client, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}
        )
        (stream,) = await fake.submitted()
        stream.feed(TokenDelta("x", (1,)))
        await reader.readuntil(b'"content":"x"')
        writer.transport.abort()
        stream.feed(*[TokenDelta("x" * 50_000, (1,))] * 9)  # while the server does not know yet
        await stream.cancelled.wait()
    assert not caplog.records


async def test_a_write_to_a_client_that_has_left_is_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(response: web.StreamResponse, data: bytes) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    fake = FakeEngine(script=begun)
    async with serving(fake) as client:
        monkeypatch.setattr(web.StreamResponse, "write", broken)
        await client.complete(stream=True)
    assert fake.streams[0].cancelled.is_set()
    assert not caplog.records


async def test_finished_stream_is_not_cancelled() -> None:
    fake = FakeEngine()
    await OneOff(fake).complete(stream=True)
    assert not fake.streams[0].cancelled.is_set()


async def test_a_slow_reader_delays_only_its_own_stream() -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        reader, writer = await raw_post(client, "/v1/completions", FIELDS)
        (slow,) = await fake.submitted()
        slow.feed(*[TokenDelta("x" * 50_000, (1,))] * 400)  # 20 MB: more than all buffers between us
        slow.end()
        fake.script = lambda request: [TokenDelta("fast", (1,), finish=finish(request, 1))]
        assert (await client.complete()).json["choices"][0]["text"] == "fast"
        assert slow.taken < 400
        total = 0
        while not (piece := await reader.read(1 << 20)).endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            total += len(piece)
            assert piece
        assert total > 20_000_000
        writer.close()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_reader_that_reads_nothing_is_disconnected(n: int, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeEngine(script=None)
    async with serving(fake, timings=HttpTimings(write_s=0.1)) as client:
        _, writer = await raw_post(client, "/v1/completions", FIELDS | {"n": n})
        for stream in await fake.submitted(n):
            stream.feed(*[TokenDelta("x" * 50_000, (1,))] * 400)
        await asyncio.gather(*(stream.cancelled.wait() for stream in fake.streams))
        writer.transport.abort()
    assert not caplog.records  # a client's fault, not worth a line


async def test_a_reader_that_is_slow_but_reads_on_gets_all() -> None:
    """It takes longer than `write_s` for one event, but never so long for 32 KiB."""
    size = 6 << 20
    fake = FakeEngine(script=lambda request: [TokenDelta("x" * size, (1,), finish=finish(request, 1))])
    async with serving(fake, timings=HttpTimings(write_s=0.3)) as client:
        reader, writer = await raw_post(client, "/v1/completions", FIELDS)
        began_s, total, piece = time.perf_counter(), 0, b""
        while not piece.endswith(b"0\r\n\r\n"):
            piece = await reader.read(256 << 10)
            assert piece
            total += len(piece)
            await asyncio.sleep(0.0004)
        assert total > size
        assert time.perf_counter() - began_s > 0.3
        writer.close()


async def test_keep_alive_connection_is_used_again_after_a_stream_and_after_an_error(client: Client) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    for body, status in ((b'{"prompt":"a","stream":true}', b"200"), (b"{}", b"400"), (b'{"prompt":"a"}', b"200")):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == status
        if b"chunked" in head:
            await reader.readuntil(b"0\r\n\r\n")
        else:
            (length,) = [line.split()[1] for line in head.splitlines() if line.startswith(b"Content-Length")]
            await reader.readexactly(int(length))
    writer.close()


SCORES = tuple(TokenLogprob(token, -1.0, (token,) * 20, (-1.0,) * 20) for token in range(100))


async def test_a_client_that_does_not_read_logprobs_delays_no_other_client() -> None:
    turns, delta = TurnBudget(TURN_LOGPROBS), TokenDelta("", tuple(range(100)), SCORES)
    slow = paced(delta, turns)
    await anext(slow)  # and no more of it: its client reads nothing
    async with asyncio.timeout(5):
        parts = [part async for part in paced(delta, turns)]
    assert joined([list(part.logprobs) for part in parts]) == list(SCORES)
    assert len(parts) > 1


async def test_streams_that_are_ready_together_write_few_logprobs_in_one_turn_of_the_event_loop() -> None:
    turns, written = TurnBudget(TURN_LOGPROBS), [0]

    async def write() -> None:
        async for part in paced(TokenDelta("", (1,), SCORES[:1]), turns):
            written[-1] += 21 * len(part.logprobs)

    async def count_turns() -> None:
        while True:
            written.append(0)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(write() for _ in range(500)))
    counting.cancel()
    assert sum(written) == 500 * 21
    assert max(written) <= TURN_LOGPROBS


async def test_a_request_that_ends_while_it_waits_for_its_turn_delays_no_other() -> None:
    turns = TurnBudget(1)
    tasks = [asyncio.create_task(turns.spend(1)) for _ in range(10)]
    await asyncio.sleep(0)
    ended = tasks.pop(5)
    ended.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)
    assert ended.cancelled()
