"""Text that is written past the reading task: the same bytes in every API, in order, counted, and held back for slow
clients."""

import asyncio
import json
import random
import re
from typing import Any

import aiohttp
import pytest

from caraserve.core.request import TokenDelta
from caraserve.errors import BackendFailed
from caraserve.http.direct_text import DirectText
from caraserve.http.generation import Generation
from caraserve.http.streaming import EventStream
from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving as fake_serving
from tests.http.test_stream_interval import serving

_MESSAGES = [{"role": "user", "content": "Tell me about the sea. \u2615"}]
_PROMPT = "The sea is"
# Values that differ in every response.
_VARYING = re.compile(
    rb'[0-9a-f]{32}|(?<="created":)[0-9]+|(?<="created_at":)[0-9]+|(?<="completed_at":)[0-9]+|: phases [^\n]*'
)
_TEXT = re.compile(rb'(?:(?<="text":)|(?<="delta":)|(?<="content":))"(?:[^"\\]|\\.)*"')
_ANSWER, _NUMBER = re.compile(rb'"choices":\[\{"index":([0-9]+)'), re.compile(rb'"sequence_number":[0-9]+')
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_LIMIT = {"max_tokens": 24, "ignore_eos": True}
# Path, fields, and whether text is written directly.
_CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "completions": ("/v1/completions", {"prompt": _PROMPT, **_LIMIT}, True),
    "usage at the end": (
        "/v1/completions",
        {"prompt": _PROMPT, **_LIMIT, "stream_options": {"include_usage": True}},
        True,
    ),
    "several answers": ("/v1/completions", {"prompt": [_PROMPT, "A boat"], "n": 2, **_LIMIT}, True),
    "echo": ("/v1/completions", {"prompt": _PROMPT, "echo": True, **_LIMIT}, True),
    "stop strings": ("/v1/completions", {"prompt": _PROMPT, "stop": ["zz", "e "], **_LIMIT}, True),
    "sampled": ("/v1/completions", {"prompt": _PROMPT, **_LIMIT, "temperature": 2.0, "max_tokens": 60}, True),
    "chat": ("/v1/chat/completions", {"messages": _MESSAGES, **_LIMIT}, True),
    "responses": ("/v1/responses", {"input": "Tell me about the sea.", "max_output_tokens": 24}, True),
    "messages": ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 24}, True),
    "continuous usage": (
        "/v1/completions",
        {"prompt": _PROMPT, **_LIMIT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        False,
    ),
    "logprobs": ("/v1/completions", {"prompt": _PROMPT, "logprobs": 1, **_LIMIT}, False),
    "logprobs of a chat": ("/v1/chat/completions", {"messages": _MESSAGES, "logprobs": True, **_LIMIT}, False),
    "token ids": ("/v1/completions", {"prompt": _PROMPT, "return_token_ids": True, **_LIMIT}, False),
    "tools": ("/v1/chat/completions", {"messages": _MESSAGES, "tools": [_TOOL], **_LIMIT}, False),
}


async def body_of(session: aiohttp.ClientSession, path: str, fields: dict[str, Any]) -> bytes:
    async with session.post(path, json={"temperature": 0, "seed": 3, "stream": True} | fields) as answer:
        body = await answer.read()
        assert answer.status == 200, body
        return _VARYING.sub(b"0", body)


def contents(body: bytes) -> dict[bytes, tuple[list[bytes], str]]:
    """Returns the events of each answer as bytes without their text, equal ones that follow each other once, and the
    whole text. How much of it an event has depends on when the task is woken that sends it."""
    shapes: dict[bytes, list[bytes]] = {}
    texts: dict[bytes, str] = {}
    for event in body.split(b"\n\n"):
        (answer,) = _ANSWER.findall(event)[:1] or [b""]
        texts[answer] = texts.get(answer, "") + "".join(json.loads(text) for text in _TEXT.findall(event))
        shape = _NUMBER.sub(b"", _TEXT.sub(b"", event))
        of_answer = shapes.setdefault(answer, [])
        if not of_answer or of_answer[-1] != shape:
            of_answer.append(shape)
    return {answer: (shapes[answer], texts[answer]) for answer in shapes}


async def test_every_api_has_the_bytes_that_the_reading_task_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = DirectText.write

    def counted(direct: DirectText, text: str, num_tokens: int) -> bool:
        written.append(text)
        return write(direct, text, num_tokens)

    monkeypatch.setattr(DirectText, "write", counted)
    async with serving(1, num_speculative_tokens=0) as session:  # how many guesses there are depends on measured times
        for name, (path, fields, is_direct) in _CASES.items():
            written.clear()
            found = await body_of(session, path, fields)
            assert bool(written) is is_direct, name
            if not is_direct:
                continue
            with monkeypatch.context() as without:
                without.setattr(Generation, "_direct_text", lambda *arguments: None)
                by_task = await body_of(session, path, fields)
            assert contents(found) == contents(by_task), name


async def test_an_answer_that_comes_at_once_is_one_write() -> None:
    async with serving(1) as session:
        fields = {"prompt": _PROMPT, "max_tokens": 1, "stream": True}
        async with session.post("/v1/completions", json=fields) as answer:
            chunks = [chunk async for chunk, is_end in answer.content.iter_chunks() if is_end]
    assert len(chunks) == 1
    assert chunks[0].startswith(b"data: {")
    assert chunks[0].endswith(b"data: [DONE]\n\n")


async def test_text_that_a_slow_client_cannot_take_is_sent_later_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"prompt": _PROMPT, "max_tokens": 100, "ignore_eos": True, "n": 3}
    async with serving(1) as session:
        expected = texts_of(await body_of(session, "/v1/completions", fields))
        chance, takes_more = random.Random(5), EventStream.takes_more.fget
        assert takes_more is not None
        monkeypatch.setattr(EventStream, "takes_more", property(lambda one: chance.random() < 0.5 and takes_more(one)))
        assert texts_of(await body_of(session, "/v1/completions", fields)) == expected
    assert all(len(text) > 100 for text in expected.values())


async def test_text_that_cannot_be_written_is_no_error_of_the_engine_and_none_follows_the_streams_end() -> None:
    fake = FakeEngine(script=lambda request: [TokenDelta("x", (1,))])
    fields = {"prompt": ["ab", "cd"], "stream": True}
    async with fake_serving(fake) as client:
        async with client.session.post(client.url + "/v1/completions", json=fields) as answer:
            first, second = await fake.submitted(2)
            await answer.content.readuntil(b'"index":1')
            assert second.write is not None
            assert second.write("y", 1)
            assert not second.write("\ud800", 1)  # no Unicode character
            first.end(1, "error", BackendFailed("device lost"))
            body = await answer.content.read()
        assert b'"text":"y"' in body
        assert not second.write("z", 1)  # an answer beside one that failed, not yet cancelled
        assert (await client.get("/health")).status == 200  # over the same connection


def texts_of(body: bytes) -> dict[int, str]:
    """Returns the text of each answer."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    indices = sorted({choice["index"] for choice in choices})
    return {index: "".join(choice["text"] for choice in choices if choice["index"] == index) for index in indices}


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with serving(1) as session:
        fields = {"prompt": _PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
        answer = await session.post("/v1/completions", json=fields)
        await answer.content.readline()
        answer.close()
        async with asyncio.timeout(10):
            while True:
                async with session.get("/metrics") as metrics:
                    text = await metrics.text()
                if 'finished_reason="cancelled"' in text or "abort" in text:
                    break
