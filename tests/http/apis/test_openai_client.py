"""Tests with OpenAI's Python client, unchanged."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from caraserve.core.request import TokenDelta
from caraserve.errors import BackendFailed, Draining, Overloaded
from tests.http.fake_engine import FakeEngine, failing
from tests.http.serving import serving

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def connected(engine: FakeEngine, *, key: str = "none", **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(engine, **settings) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


async def test_completion() -> None:
    async with connected(FakeEngine()) as client:
        answer = await client.completions.create(model="a", prompt="x", n=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hi!", "Hi!"]
    assert answer.choices[1].index == 1
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["H", "i", "!"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8


async def test_completion_stream() -> None:
    async with connected(FakeEngine()) as client:
        stream = await client.completions.create(
            model="a", prompt="x", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hi!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_chat() -> None:
    async with connected(FakeEngine()) as client:
        answer = await client.chat.completions.create(model="a", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "Hi!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [top.token for top in answer.choices[0].logprobs.content[0].top_logprobs] == ["H", "I"]


async def test_chat_stream() -> None:
    async with connected(FakeEngine()) as client:
        stream = await client.chat.completions.create(
            model="a", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hi!", "Hi!"]
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} == {None, "stop"}
    assert chunks[-1].usage is not None


async def test_accumulating_stream_helper() -> None:
    async with (
        connected(FakeEngine()) as client,
        client.chat.completions.stream(model="a", messages=MESSAGES, logprobs=True) as stream,
    ):
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "Hi!"


async def test_models() -> None:
    async with connected(FakeEngine()) as client:
        assert [model.id async for model in client.models.list()] == ["org/base", "a", "b"]
        assert (await client.models.retrieve("org/base")).id == "org/base"


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (Overloaded("full", retry_after_s=1), openai.RateLimitError),
        (Draining("stopping", retry_after_s=1), openai.InternalServerError),
        (BackendFailed("lost"), openai.InternalServerError),
    ],
)
async def test_refusals_are_the_clients_exceptions(refusal: Exception, expected: type[Exception]) -> None:
    async with connected(FakeEngine(refusals={0: refusal})) as client:
        with pytest.raises(expected, match=str(refusal)):
            await client.completions.create(model="a", prompt="x")


async def test_bad_requests_are_the_clients_exceptions() -> None:
    async with connected(FakeEngine()) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="absent", prompt="x")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="a", prompt="x", temperature=-1)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert (bad.value.type, bad.value.param) == ("invalid_request_error", "temperature")


async def test_wrong_key_is_the_clients_exception() -> None:
    async with connected(FakeEngine(), api_key=("right",), key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_client_tries_again_when_the_queue_was_full() -> None:
    fake = FakeEngine(refusals={0: Overloaded("full", retry_after_s=0.01)})
    async with connected(fake) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="a", prompt="x")
        assert refused.value.response.headers["retry-after-ms"] == "10"
        fake.refusals.clear()
        answer = await client.with_options(max_retries=2).completions.create(model="a", prompt="x")
    assert answer.choices[0].text == "Hi!"


async def test_failure_amid_a_stream_is_raised() -> None:
    async with connected(FakeEngine(script=failing(BackendFailed("device lost"), "x"))) as client:
        stream = await client.chat.completions.create(model="a", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="device lost"):
            [chunk async for chunk in stream]


async def test_closing_a_stream_cancels_the_request() -> None:
    fake = FakeEngine(script=lambda request: [TokenDelta("x", (1,))])
    async with connected(fake) as client:
        stream = await client.completions.create(model="a", prompt="x", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await fake.streams[0].cancelled.wait()
