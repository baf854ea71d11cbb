"""Tests of POST /v1/messages and its count of tokens: what bodies become, messages, events and errors."""

import dataclasses
import json
from typing import Any

import pytest

from caraserve.core.request import GenerateRequest, TokenDelta
from caraserve.errors import BackendFailed, Draining, Overloaded, RateLimited, Unreachable
from caraserve.http.context import HttpTimings
from caraserve.tokenizer.grammar import GrammarSource
from tests.http.apis.test_tool_calls import ARGUMENTS, CALL, SCHEMA, engine
from tests.http.fake_engine import DIGEST, FakeEngine, FakeTokenizer, failing, finish, spell
from tests.http.serving import Answer, OneOff, serving, typed_events, wrong
from tests.http.test_streaming import read_event

PATH = "/v1/messages"
ASKED: dict[str, Any] = {"model": "a", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
WEATHER: Any = {"name": "weather", "description": "It.", "input_schema": SCHEMA}
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Tromsø"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "4 °C"}


async def answered(fake: FakeEngine | None = None, path: str = PATH, **fields: Any) -> Answer:
    return await OneOff(fake or FakeEngine()).post(path, ASKED | fields)


def error_of(answer: Answer) -> tuple[int, str, str]:
    """Returns status, type and message of an error, which must have Anthropic's shape."""
    assert set(answer.json) == {"type", "error"}
    assert answer.json["type"] == "error"
    assert set(answer.json["error"]) == {"type", "message"}
    return answer.status, answer.json["error"]["type"], answer.json["error"]["message"]


async def prompt_of(**fields: Any) -> str:
    """Returns the prompt that the engine gets."""
    fake = FakeEngine()
    answer = await answered(fake, **fields)
    assert answer.status == 200, answer.body
    return bytes(fake.requests[0].prompt_ids[1:]).decode()


# --- messages ---


async def test_a_message() -> None:
    answer = await answered()
    message = answer.json
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "a",
        "content": [{"type": "text", "text": "Hi!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 22,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
        "system_fingerprint": f"a@{DIGEST}",
    }
    assert answer.headers["x-caraserve-phases"].startswith("queued=")


LONG = FakeEngine(script=lambda asked: spell(asked, "x" * 2000))


def stopped_by(stop: str | int | None) -> FakeEngine:
    def script(request: GenerateRequest) -> list[TokenDelta]:
        return [TokenDelta("x", (1,), finish=finish(request, 1, "stop", stop))]

    return FakeEngine(script=script)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fake", "fields", "expected"),
    [
        (FakeEngine(), {}, ("end_turn", None)),
        (FakeEngine(), {"max_tokens": 2}, ("max_tokens", None)),
        (LONG, {"max_tokens": 5000}, ("model_context_window_exceeded", None)),
        (stopped_by("END"), {"stop_sequences": ["END"]}, ("stop_sequence", "END")),
        (stopped_by(7), {"stop_token_ids": [7]}, ("end_turn", None)),
        (engine(CALL), {"tools": [WEATHER]}, ("tool_use", None)),
        (engine(CALL[:60], reason="length"), {"tools": [WEATHER]}, ("max_tokens", None)),
    ],
    ids=["end", "limit", "context", "sequence", "token", "call", "cut off"],
)  # fmt: skip
async def test_why_an_answer_ended(
    fake: FakeEngine, fields: dict[str, Any], expected: tuple[str, str | None], stream: bool
) -> None:
    answer = await answered(fake, stream=stream, **fields)
    ended = typed_events(answer)[-2]["delta"] if stream else answer.json
    assert (ended["stop_reason"], ended["stop_sequence"]) == expected


async def test_calls_are_blocks() -> None:
    text, *calls = (await answered(engine(f"Let me see.\n{CALL}\n{CALL}"), tools=[WEATHER])).json["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "weather", json.loads(ARGUMENTS))
    ] * 2
    assert len({call["id"] for call in calls}) == 2


async def test_arguments_keep_large_numbers() -> None:
    number = 12345678901234567890123
    text = f'<tool_call>\n{{"name": "weather", "arguments": {{"n": {number}}}}}\n</tool_call>'
    answer = await answered(engine(text), tools=[WEATHER])
    assert answer.json["content"][0]["input"] == {"n": number}


async def test_a_call_that_is_cut_off_is_text_that_nobody_runs() -> None:
    (block,) = (await answered(engine(CALL[:60], reason="length"), tools=[WEATHER])).json["content"]
    assert block["type"] == "text"
    assert ARGUMENTS.startswith(block["text"])


# --- events ---


async def test_the_events_of_a_text() -> None:
    events = typed_events(await answered(stream=True))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 22)
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in events[2:5]) == "Hi!"
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_cached_tokens_are_counted_apart() -> None:
    def cached(request: GenerateRequest) -> list[TokenDelta]:
        last = dataclasses.replace(finish(request, 2), cached_tokens=16)
        return [TokenDelta("ab", (1, 2)), TokenDelta("", (), finish=last)]

    usage = (await answered(FakeEngine(script=cached))).json["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 16)
    events = typed_events(await answered(FakeEngine(script=cached), stream=True))
    assert events[0]["message"]["usage"]["output_tokens"] == 0  # the number is not known yet
    assert events[-2]["usage"] == usage


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_the_events_of_calls(size: int) -> None:
    events = typed_events(await answered(engine(f"Let me see.\n{CALL}", size=size), tools=[WEATHER], stream=True))
    start, *deltas, stop = [event for event in events if event.get("index") == 1]
    assert start["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "weather", "input": {}}
    assert {delta["delta"]["type"] for delta in deltas} == {"input_json_delta"}
    assert "".join(delta["delta"]["partial_json"] for delta in deltas) == ARGUMENTS
    assert stop["type"] == "content_block_stop"


async def test_a_silent_stream_has_pings() -> None:
    fake = FakeEngine(script=None)
    async with (
        serving(fake, timings=HttpTimings(ping_s=0.02)) as client,
        client.session.post(client.url + PATH, json=ASKED | {"stream": True}) as response,
    ):
        assert await read_event(response) == b'event: ping\ndata: {"type":"ping"}'


async def test_a_failure_in_a_stream_is_its_last_event() -> None:
    last = typed_events(await answered(FakeEngine(script=failing(BackendFailed("device lost"), "x")), stream=True))[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": "device lost"}}


# --- what bodies become ---


async def test_blocks_become_messages() -> None:
    thinking = {"type": "thinking", "thinking": "x", "signature": ""}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "c"}, TOOL_USE]},
        {"role": "user", "content": [RESULT, RESULT, {"type": "text", "text": "d"}]},
    ]
    system = [{"type": "text", "text": "e", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "f"}]
    prompt = await prompt_of(messages=messages, system=system, tools=[WEATHER])
    assert prompt == "tool:weather;system:e\nf;user:a\nb;assistant:c;tool:4 °C;tool:4 °C;user:d;assistant:"
    assert await prompt_of(system="S") == "system:S;user:hello;assistant:"


async def test_a_text_before_a_result_comes_before_it() -> None:
    blocks = [{"type": "text", "text": "a"}, RESULT, {"type": "text", "text": "b"}]
    messages = [*ASKED["messages"], {"role": "assistant", "content": [TOOL_USE]}, {"role": "user", "content": blocks}]
    assert (await prompt_of(messages=messages)).endswith("assistant:;user:a;tool:4 °C;user:b;assistant:")


async def test_the_template_learns_of_errors_and_of_thinking() -> None:
    seen: dict[str, Any] = {}

    class Tokenizer(FakeTokenizer):
        def chat(self, messages: Any, **options: Any) -> list[int]:
            seen.update(kwargs=options["kwargs"], result=messages[-1])
            return super().chat(messages, **options)

    turn = {"role": "user", "content": [RESULT | {"is_error": True}]}
    messages = [*ASKED["messages"], {"role": "assistant", "content": [TOOL_USE]}, turn]
    for kind, expected in (("enabled", True), ("disabled", False)):
        await answered(
            FakeEngine(tokenizer=Tokenizer()),
            messages=messages,
            thinking={"type": kind},
            chat_template_kwargs={"more": 1},
        )
        assert seen["kwargs"] == {"enable_thinking": expected, "thinking": expected, "more": 1}
        assert seen["result"]["is_error"] is True


async def test_an_answer_that_the_client_began_is_continued() -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
    assert await prompt_of(messages=messages) == "user:hello;assistant:It is;"


async def test_a_content_is_input_again() -> None:
    fake = engine(f"Let me see.\n{CALL}")
    async with serving(fake) as client:
        content = (await client.post(PATH, ASKED | {"tools": [WEATHER]})).json["content"]
        result = RESULT | {"tool_use_id": content[1]["id"], "content": [{"type": "text", "text": "4"}]}
        turn = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        answer = await client.post(PATH, ASKED | {"tools": [WEATHER], "messages": ASKED["messages"] + turn})
    assert answer.status == 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "any"}}, "city"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}, "city"),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto"}}, None),
        ({"tools": [WEATHER], "tool_choice": {"type": "none"}}, None),
        ({"tool_choice": {"type": "auto"}}, None),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "city"),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, "city"),
    ],
)
async def test_what_constrains_an_answer(fields: dict[str, Any], expected: str | None) -> None:
    fake = FakeEngine()
    assert (await answered(fake, **fields)).status == 200
    source = fake.requests[0].params.grammar
    assert (source is None) == (expected is None)
    assert expected is None or (isinstance(source, GrammarSource) and expected in source.text)


async def test_one_call_is_kept_where_the_client_wants_no_more() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await answered(engine(f"{CALL}\n{CALL}"), tools=[WEATHER], tool_choice=choice)
    assert len(answer.json["content"]) == 1


async def test_sampling_fields_pass_on() -> None:
    fake = FakeEngine()
    fields = {"temperature": 0.5, "top_p": 0.6, "top_k": 7, "seed": 3, "stop_sequences": ["x"]}
    await answered(fake, metadata={"user_id": "me"}, **fields)
    params = fake.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.stop) == (0.5, 0.6, 7, 3, ("x",))
    assert (params.max_tokens, fake.requests[0].tenant.user) == (50, "me")


async def test_what_has_no_effect_is_taken() -> None:
    answer = await answered(
        thinking={"type": "enabled", "budget_tokens": 2000},
        service_tier="auto",
        output_config={"effort": "low"},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        mcp_servers=[],
    )
    assert answer.status == 200
    ignored = set(answer.headers["x-caraserve-ignored"].split(", "))
    assert ignored == {"service_tier", "output_config.effort", "thinking.budget_tokens"}


# --- counts ---


async def test_tokens_are_counted_as_a_message_counts_them() -> None:
    fields: dict[str, Any] = {"system": "S", "tools": [WEATHER]}
    counted = await answered(path=f"{PATH}/count_tokens", **fields)
    usage = (await answered(**fields)).json["usage"]
    assert counted.json == {"input_tokens": usage["input_tokens"]}


async def test_more_tokens_than_the_context_are_counted() -> None:
    long = [{"role": "user", "content": "x" * 2000}]
    assert (await answered(path=f"{PATH}/count_tokens", messages=long)).json["input_tokens"] > 2000
    too_long = [{"role": "user", "content": "x" * 70_000}]
    assert error_of(await answered(path=f"{PATH}/count_tokens", messages=too_long))[:2] == (
        400,
        "invalid_request_error",
    )


# --- errors ---


def message(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *wrong("max_tokens", None, 0),
        *wrong("messages", None, []),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "prompt is too long"),
        (message({"type": "image", "source": {}}), "'image'"),
        (message(TOOL_USE), "'tool_use'"),
        (message(RESULT, role="assistant"), "'tool_result'"),
        (message(TOOL_USE, role="assistant"), "tool_result"),
        (message(TOOL_USE | {"input": 3}, role="assistant"), "input"),
        (message({"type": "tool_result", "content": "x"}), "tool_use_id"),
        (message(RESULT | {"content": [{"type": "image"}]}), "messages[0].content[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences must"),
        ({"metadata": {"user_id": "x" * 300}}, "user_id"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"user": "x"}, "metadata.user_id"),
        ({"response_format": {}}, "output_config.format"),
        ({"guided_json": {"type": "object"}}, "output_config.format"),
        ({"temperature": -1}, "temperature"),
        ({"max_token": 5}, "max_tokens"),
    ],
)
async def test_mistakes_are_named(fields: dict[str, Any], named: str) -> None:
    fake = FakeEngine()
    status, kind, text = error_of(await answered(fake, **fields))
    assert (status, kind) == (400, "invalid_request_error")
    assert named in text
    assert not fake.streams


async def test_clients_learn_that_conversations_are_not_kept() -> None:
    answer = await answered(thread={"type": "create"})
    assert answer.json["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Overloaded("full", retry_after_s=1), (529, "overloaded_error")),
        (Draining("stopping", retry_after_s=1), (529, "overloaded_error")),
        (Unreachable("no instance has it", retry_after_s=1), (529, "overloaded_error")),
        (RateLimited("1 request", "requests", 1), (429, "rate_limit_error")),
        (BackendFailed("lost"), (500, "api_error")),
    ],
    ids=["full", "draining", "unreachable", "limited", "failed"],
)
async def test_errors_of_the_server(error: Exception, expected: tuple[int, str], stream: bool) -> None:
    answer = await answered(FakeEngine(refusals={0: error}), stream=stream)
    assert error_of(answer) == (*expected, str(error))
    assert ("Retry-After" in answer.headers) == (expected[0] != 500)


async def test_errors_of_every_layer_have_the_shape() -> None:
    async with serving(FakeEngine(), api_key=("right",), max_body_bytes=1000) as client:
        key = {"x-api-key": "right", "anthropic-version": "2023-06-01"}
        wrong = await client.post(PATH, ASKED, headers={"x-api-key": "wrong"})
        assert error_of(wrong)[:2] == (401, "authentication_error")
        assert "WWW-Authenticate" in wrong.headers
        assert (await client.post(PATH, ASKED, headers=key)).status == 200
        assert error_of(await client.post(PATH, ASKED | {"model": "absent"}, headers=key))[:2] == (
            404,
            "not_found_error",
        )
        large = await client.post(PATH, b" " * 2000, headers=key | {"Content-Type": "application/json"})
        assert error_of(large)[:2] == (413, "request_too_large")
        text = await client.post(PATH, b"{", headers=key | {"Content-Type": "application/json"})
        assert error_of(text)[:2] == (400, "invalid_request_error")
        assert error_of(await client.get(PATH, headers=key))[:2] == (405, "invalid_request_error")
        assert error_of(await client.post(f"{PATH}/batches", {}, headers=key))[:2] == (404, "not_found_error")
        assert error_of(await client.post(f"{PATH}/count_tokens", {}, headers=key))[:2] == (
            400,
            "invalid_request_error",
        )
