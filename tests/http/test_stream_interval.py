"""`--stream-interval`: fewer events with the same contents, in every API, from a real engine."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from caraserve import demo
from caraserve.engine.stats import EngineObservers
from caraserve.http.app import make_app, start_http
from tests.http.serving import http_config, new_metrics
from tests.serving import engine_config, lora_config, model_config, running

_MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
_SAMPLING = {"stream": True, "temperature": 0, "seed": 1}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "The sea is",
        "max_tokens": 21,
        "n": 2,
        "logprobs": 2,
        "stop": ["zz"],
        "stream_options": {"include_usage": True},
    },
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 21, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "Tell me about the sea.", "max_output_tokens": 21},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 21},
}


def text_of(path: str, events: list[dict[str, Any]]) -> dict[int, str]:
    """Returns the whole text of each answer in a stream's events."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
        delta = event.get("delta")
        text = delta if isinstance(delta, str) else delta.get("text", "") if isinstance(delta, dict) else ""
        texts[0] = texts.get(0, "") + text if path in ("/v1/responses", "/v1/messages") else texts.get(0, "")
    return texts


def logprobs_of(events: list[dict[str, Any]]) -> list[Any]:
    return [
        entry
        for event in events
        for choice in event.get("choices", ())
        if choice["index"] == 0 and choice.get("logprobs")
        for entry in zip(
            *(choice["logprobs"][name] for name in ("tokens", "token_logprobs", "text_offset")), strict=True
        )
    ]


@asynccontextmanager
async def serving(
    interval: int, observers: EngineObservers | None = None, **engine: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    """Serves the demo's model; the engine has ended its requests when the context has ended."""
    config = http_config(stream_interval=interval)
    async with running(
        model_config(demo.model_folder()), lora_config({}), engine_config(**engine), observers
    ) as engine:
        runner, port = await start_http(make_app(engine, config, new_metrics(), allow_lora_updates=False), config)
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                yield session
            await engine.drain(10.0)
        finally:
            await runner.cleanup()


async def events_of(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with session.post(path, json=body) as answer:
        lines = (await answer.text()).splitlines()
        assert answer.status == 200, lines
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


async def streamed(interval: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the events of one stream of each API."""
    found = {}
    async with serving(interval) as session:
        for path, body in _BODIES.items():
            sent = body | _SAMPLING if path != "/v1/messages" else body | {"stream": True, "temperature": 0}
            if path == "/v1/responses":
                sent = {name: value for name, value in sent.items() if name != "seed"}
            found[path] = await events_of(session, path, sent)
    return found


def tokens_of(events: list[dict[str, Any]]) -> list[Any]:
    """Returns every `usage` with numbers in a stream's events, wherever it is."""
    usages = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    return [usage for usage in usages if usage]


async def test_fewer_events_say_the_same_in_every_api() -> None:
    each, joined = await streamed(1), await streamed(8)
    for path in _BODIES:
        assert text_of(path, joined[path]) == text_of(path, each[path]), path
        assert any(text_of(path, each[path]).values()), path
        assert tokens_of(joined[path])[-1] == tokens_of(each[path])[-1], path
        assert len(joined[path]) < 0.6 * len(each[path]), path
    path = "/v1/completions"
    assert logprobs_of(joined[path]) == logprobs_of(each[path])
    assert len(logprobs_of(each[path])) == 21
    reasons = [choice["finish_reason"] for event in joined[path] for choice in event["choices"]]
    assert reasons.count("length") == 2


async def test_the_first_token_is_an_event_of_its_own() -> None:
    events = (await streamed(8))["/v1/completions"]
    first = next(event["choices"][0] for event in events if event["choices"][0]["index"] == 0)
    assert len(first["logprobs"]["tokens"]) == 1


async def test_an_interval_shows_nothing_after_a_stop_string() -> None:
    path, body = "/v1/completions", {"prompt": "The sea is", "max_tokens": 30} | _SAMPLING
    async with serving(8) as session:
        whole = text_of(path, await events_of(session, path, body))[0]
        for at in range(4, len(whole) - 3, 9):
            stop = whole[at : at + 3]
            events = await events_of(session, path, body | {"stop": stop})
            assert text_of(path, events)[0] == whole[: whole.index(stop)]
            last = events[-1]["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


async def test_a_client_that_leaves_within_an_interval_ends_its_answer() -> None:
    body, computed = {"prompt": "The sea is", "max_tokens": 900, "ignore_eos": True} | _SAMPLING, list[int]()
    observers = EngineObservers(iterations=[lambda rows, _: computed.extend(row.count for _, row in rows)])
    async with serving(1 << 20, observers) as session, session.post("/v1/completions", json=body) as answer:
        await answer.content.readuntil(b"\n\n")
        answer.close()
    assert 0 < sum(computed) < 900
