"""Tests of POST /v1/responses: what bodies become, the response object, its events, and OpenAI's client."""

import json
from typing import Any

import openai
import pydantic
import pytest

from caraserve.errors import BackendFailed
from caraserve.tokenizer.grammar import GrammarSource
from tests.http.apis.test_openai_client import connected
from tests.http.apis.test_tool_calls import ARGUMENTS, CALL, SCHEMA, engine
from tests.http.fake_engine import DIGEST, FakeEngine, failing
from tests.http.serving import Answer, OneOff, typed_events, wrong

PATH = "/v1/responses"
WEATHER: Any = {"type": "function", "name": "weather", "description": "It.", "parameters": SCHEMA, "strict": False}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


async def answered(fake: FakeEngine | None = None, **fields: Any) -> Answer:
    return await OneOff(fake or FakeEngine()).post(PATH, {"model": "a", "input": "hello"} | fields)


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """Returns the data of all events, each of which must have its type as name and the next number."""
    events = typed_events(answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def prompt_of(**fields: Any) -> str:
    """Returns the prompt that the engine gets."""
    fake = FakeEngine()
    answer = await answered(fake, **fields)
    assert answer.status == 200, answer.body
    return bytes(fake.requests[0].prompt_ids[1:]).decode()


# --- the response object ---


async def test_the_response_object() -> None:
    answer = await answered(metadata={"a": "b"}, instructions="Be brief.", temperature=0.5, max_output_tokens=9)
    response = answer.json
    (item,) = response["output"]
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "a")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hi!", "annotations": [], "logprobs": []}]
    assert (response["metadata"], response["instructions"]) == ({"a": "b"}, "Be brief.")
    assert (response["temperature"], response["max_output_tokens"], response["store"]) == (0.5, 9, False)
    assert response["error"] is response["incomplete_details"] is response["previous_response_id"] is None
    assert response["system_fingerprint"] == answer.headers["x-caraserve-adapter"] == f"a@{DIGEST}"
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 3
    assert answer.headers["x-caraserve-phases"].startswith("queued=")


async def test_an_answer_at_the_limit_is_incomplete() -> None:
    response = (await answered(max_output_tokens=2)).json
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


async def test_calls_are_items_of_their_own() -> None:
    response = (await answered(engine(f"Let me see.\n{CALL}\n{CALL}"), tools=[WEATHER])).json
    message, *calls = response["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "weather", ARGUMENTS)
    ] * 2
    assert len({call["call_id"] for call in calls}) == len({call["id"] for call in calls}) == 2
    assert response["tools"] == [WEATHER | {"strict": None}]


# --- events ---


async def test_the_events_of_a_text() -> None:
    events = events_of(await answered(stream=True))
    kinds = [event["type"] for event in events]
    assert kinds.count("response.output_text.delta") == 3
    assert list(dict.fromkeys(kinds)) == TEXT_EVENTS
    assert "".join(event.get("delta", "") for event in events) == "Hi!"
    assert events[0]["response"]["output"] == []
    completed = events[-1]["response"]
    assert completed["output"] == [events[-2]["item"]]
    assert completed["output"][0]["content"][0]["text"] == "Hi!"
    assert completed["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_the_events_of_calls(size: int) -> None:
    answer = await answered(engine(f"Let me see.\n{CALL}", size=size), tools=[WEATHER], stream=True)
    events = [event for event in events_of(answer) if event.get("output_index") == 1]
    added, *deltas, done, item_done = events
    assert (added["type"], added["item"]["arguments"]) == ("response.output_item.added", "")
    assert {delta["type"] for delta in deltas} == {"response.function_call_arguments.delta"}
    assert "".join(delta["delta"] for delta in deltas) == done["arguments"] == ARGUMENTS
    assert item_done["item"] == added["item"] | {"arguments": ARGUMENTS, "status": "completed"}
    assert {event["item_id"] for event in (*deltas, done)} == {added["item"]["id"]}


async def test_a_stream_and_a_whole_response_are_the_same() -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "metadata": {"a": "b"}, "max_output_tokens": 900}
    whole = (await answered(engine(f"x\n{CALL}"), **fields)).json
    streamed = events_of(await answered(engine(f"x\n{CALL}"), stream=True, **fields))[-1]["response"]
    for response in (whole, streamed):
        for name in ("id", "created_at", "completed_at"):
            assert response.pop(name)
        for item in response["output"]:
            item.pop("id")
            item.pop("call_id", None)
    assert whole == streamed


async def test_a_failure_in_a_stream_is_its_last_event() -> None:
    last = events_of(await answered(FakeEngine(script=failing(BackendFailed("device lost"), "x")), stream=True))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "backend_failed", "message": "device lost"}


# --- what bodies become ---


async def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS, "id": "fc_1"}
    items = [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4 °C"}]},
    ]
    prompt = await prompt_of(input=items, instructions="Be brief.", tools=[WEATHER])
    assert prompt == "tool:weather;system:Be brief.;developer:Rules;user:a\nb;assistant:c;tool:4 °C;assistant:"
    assert await prompt_of(input="hello") == "user:hello;assistant:"


async def test_reasoning_of_other_servers_is_left_out_and_listed() -> None:
    fake = FakeEngine()
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    answer = await answered(fake, input=[{"role": "user", "content": "a"}, reasoning])
    assert bytes(fake.requests[0].prompt_ids[1:]) == b"user:a;assistant:"
    assert answer.headers["x-caraserve-ignored"] == "input.reasoning"


async def test_an_output_is_input_again() -> None:
    async with connected(engine(f"Let me see.\n{CALL}\n{CALL}")) as client:
        asked: Any = [{"role": "user", "content": "Tromsø?"}]
        response = await client.responses.create(model="a", input=asked, tools=[WEATHER])
        calls = [item for item in response.output if item.type == "function_call"]
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "4 °C"} for call in calls]
        assert await client.responses.create(model="a", input=[*asked, *response.output, *results], tools=[WEATHER])


async def test_what_cannot_be_called_here_is_left_out_and_listed() -> None:
    search = {"type": "web_search"}
    fake = FakeEngine()
    answer = await answered(
        fake, tools=[search, WEATHER], include=["reasoning.encrypted_content"], text={"verbosity": "low"}, store=True
    )
    assert answer.status == 200
    assert bytes(fake.requests[0].prompt_ids[1:]).startswith(b"tool:weather;user")
    listed = set(answer.headers["x-caraserve-ignored"].split(", "))
    assert listed == {"tools.web_search", "include.reasoning.encrypted_content", "text.verbosity"}
    assert (await answered(tools=[search], tool_choice="auto")).status == 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}}, "city"),
        ({"text": {"format": {"type": "json_object"}}}, '{"type":"object"}'),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"tools": [WEATHER], "tool_choice": "required"}, "city"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}, "city"),
        ({"tools": [WEATHER], "tool_choice": "none"}, None),
    ],
)
async def test_what_constrains_an_answer(fields: dict[str, Any], expected: str | None) -> None:
    fake = FakeEngine()
    assert (await answered(fake, **fields)).status == 200
    source = fake.requests[0].params.grammar
    assert (source is None) == (expected is None)
    assert expected is None or (isinstance(source, GrammarSource) and expected in source.text)


async def test_sampling_fields_pass_on() -> None:
    fake = FakeEngine()
    await answered(fake, top_p=0.5, top_k=7, seed=3, max_output_tokens=5, user="me", stop="x", adapter_id="a")
    params = fake.requests[0].params
    assert (params.top_p, params.top_k, params.seed, params.max_tokens, params.stop) == (0.5, 7, 3, 5, ("x",))
    assert fake.requests[0].tenant.user == "me"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        *wrong("input", None, [], 3, ["x"], [{"role": "robot", "content": "x"}]),
        *wrong("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        *wrong("input", [{"type": "item_reference", "id": "x"}]),
        *wrong("input", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": [1]}]),
        *wrong("input", [{"type": "function_call", "name": "f", "arguments": "{}"}]),
        *wrong("input", [{"type": "function_call_output", "call_id": "c", "output": 3}], "x" * 2000),
        *wrong("max_output_tokens", 0, 5000),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        *wrong("tools", [{"type": "function"}], [{"name": "f"}]),
        *wrong("tool_choice", {"type": "web_search"}, "required"),
        *wrong("metadata", {"a": 1}, {str(key): "" for key in range(17)}),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"regex": "a"}, "regex"),
    ],
)
async def test_mistakes_are_named_as_the_client_knows_them(fields: dict[str, Any], param: str) -> None:
    fake = FakeEngine()
    answer = await answered(fake, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "messages" in fields or "messages" not in answer.error["message"]
    assert not fake.streams


async def test_messages_name_fields_of_this_api() -> None:
    for fields, named in (
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "store"),
        ({"regex": "a"}, "text.format"),
        ({"output_format": {}}, "text.format"),
        ({"max_new_tokens": 5}, "max_output_tokens"),
        ({"reasoning_effort": "low"}, "reasoning.effort"),
        ({"chat_template_kwargs": {"broken": True}}, "input has tool_calls"),
    ):
        assert named in (await answered(**fields)).error["message"]


# --- OpenAI's client ---


async def test_openais_client_creates_and_streams() -> None:
    async with connected(FakeEngine()) as client:
        assert (await client.responses.create(model="a", input="x")).output_text == "Hi!"
        async with client.responses.stream(model="a", input="x") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "Hi!"
    assert list(dict.fromkeys(kinds)) == TEXT_EVENTS


async def test_openais_client_parses() -> None:
    class Weather(pydantic.BaseModel):
        city: str

    async with connected(engine('{"city": "Tromsø"}')) as client:
        response = await client.responses.parse(model="a", input="x", text_format=Weather)
    assert response.output_parsed == Weather(city="Tromsø")


async def test_openais_client_parses_calls() -> None:
    class Weather(pydantic.BaseModel):
        city: str

    async with connected(engine(CALL.replace('"weather"', '"Weather"'))) as client:
        tools: Any = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
        response = await client.responses.parse(model="a", input="x", tools=tools)
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == json.loads(ARGUMENTS)


async def test_openais_client_sees_what_fails() -> None:
    async with connected(FakeEngine(script=failing(BackendFailed("device lost"), "x"))) as client:
        stream = await client.responses.create(model="a", input="x", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        with pytest.raises(openai.InternalServerError, match="device lost"):
            await client.responses.create(model="a", input="x")
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="absent", input="x")
