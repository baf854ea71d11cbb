"""Tools in POST /v1/chat/completions: what requests may say, and how calls are written whole and in streams."""

import json
from typing import Any

import openai
import pydantic
import pytest

from caraserve.core.request import FinishReason, GenerateRequest, TokenDelta
from caraserve.tokenizer.grammar import GrammarSource
from caraserve.tokenizer.tool_format import HERMES, LLAMA3, MISTRAL, ToolFormat
from tests.http.apis.test_openai_client import MESSAGES, connected
from tests.http.fake_engine import FakeEngine, FakeTokenizer, finish, scored
from tests.http.serving import Answer, OneOff, serving, wrong

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": SCHEMA}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
NAMED: Any = {"type": "function", "function": {"name": "time"}}
ARGUMENTS = '{"city": "Tromsø 🌧"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXTS = {
    "hermes": (HERMES, f"Let me see.\n{CALL}\n{CALL}", "Let me see."),
    "llama3": (LLAMA3, '{"name": "weather", "parameters": %s}; {"name": "weather", "parameters": %s}', None),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS][{"name": "weather", "arguments": %s}, {"name": "weather", "arguments": %s}]',
        None,
    ),
}


def engine(
    text: str, tool_format: ToolFormat | None = HERMES, reason: FinishReason = "stop", size: int = 3
) -> FakeEngine:
    """Returns an engine that answers `text` in deltas of `size` characters."""

    def script(request: GenerateRequest) -> list[TokenDelta]:
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        logprobs = () if request.params.logprobs is None else (scored(65, 1),)
        last = TokenDelta("", (), finish=finish(request, len(pieces), reason))
        return [*(TokenDelta(piece, (65,), logprobs) for piece in pieces), last]

    tokenizer = FakeTokenizer()
    tokenizer.tool_format = tool_format
    return FakeEngine(script=script, tokenizer=tokenizer)


async def answered(fake: FakeEngine, **fields: Any) -> Answer:
    return await OneOff(fake).chat(**{"tools": [WEATHER, TIME]} | fields)


def joined(answer: Answer) -> dict[str, Any]:
    """Returns the choice that a stream's deltas make."""
    content, calls, reason = "", [], None
    for event in answer.events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["function"]["arguments"] == ""
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        reason = event["choices"][0]["finish_reason"] or reason
    return {"content": content, "tool_calls": calls, "finish_reason": reason}


@pytest.mark.parametrize("name", TEXTS)
async def test_calls_are_parts_of_the_message(name: str) -> None:
    tool_format, text, content = TEXTS[name]
    text = text.replace("%s", ARGUMENTS)
    choice = (await answered(engine(text, tool_format))).json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", content)
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "weather", "arguments": ARGUMENTS}] * 2
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == 2
    length = 9 if name == "mistral" else len("call_") + 24
    assert {len(call["id"]) for call in calls} == {length}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", TEXTS)
async def test_a_stream_has_the_same_calls(name: str, size: int) -> None:
    tool_format, text, content = TEXTS[name]
    text = text.replace("%s", ARGUMENTS)
    choice = joined(await answered(engine(text, tool_format, size=size), stream=True))
    assert (choice["finish_reason"], choice["content"]) == ("tool_calls", content or "")
    functions = [call["function"] for call in choice["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": ARGUMENTS}] * 2


async def test_arguments_are_streamed_as_they_come() -> None:
    answer = await answered(engine(CALL), stream=True)
    deltas = [event["choices"][0]["delta"] for event in answer.events]
    parts = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert len(parts) > 5
    assert parts[0] == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text", ["Hello <there>", "<tool_call>\nno JSON\n</tool_call>", '<tool_call>{"name": 3}', " <tool"]
)
async def test_what_is_no_call_is_content(text: str, stream: bool) -> None:
    answer = await answered(engine(text), stream=stream)
    choice = joined(answer) if stream else answer.json["choices"][0]
    message = choice if stream else choice["message"]
    assert (message["content"], choice["finish_reason"]) == (text, "stop")
    assert not message.get("tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off_keeps_the_reason_length(stream: bool) -> None:
    answer = await answered(engine(CALL[:60], reason="length"), stream=stream)
    choice = joined(answer) if stream else answer.json["choices"][0]
    (call,) = (choice if stream else choice["message"])["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    assert choice["finish_reason"] == "length"


async def test_logprobs_of_all_tokens_are_in_the_stream() -> None:
    answer = await answered(engine(CALL), stream=True, logprobs=True)
    scores = [event["choices"][0]["logprobs"] for event in answer.events]
    assert sum(len(part["content"]) for part in scores if part) == len(range(0, len(CALL), 3))


async def test_one_call_is_kept_without_parallel_calls() -> None:
    answer = await answered(engine(f"{CALL}\n{CALL}"), parallel_tool_calls=False)
    assert len(answer.json["choices"][0]["message"]["tool_calls"]) == 1


async def test_each_of_several_answers_has_its_own_calls() -> None:
    choices = (await answered(engine(CALL), n=2)).json["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1]


async def prompt_and_grammar(fake: FakeEngine, **fields: Any) -> tuple[str, str | None]:
    answer = await answered(fake, **fields)
    assert answer.status == 200, answer.body
    (request,) = fake.requests
    source = request.params.grammar
    assert source is None or isinstance(source, GrammarSource)
    return bytes(request.prompt_ids[1:]).decode(), None if source is None else source.text


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
async def test_the_template_gets_the_tools_also_if_none_may_be_called(fields: dict[str, Any]) -> None:
    prompt, grammar = await prompt_and_grammar(engine("x"), **fields)
    assert prompt.startswith("tool:weather;tool:time;")
    assert grammar is None


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_tokenize_counts_a_chat_with_its_tools(choice: str) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER, TIME]}
    async with serving(engine("x")) as client:
        counted = (await client.post("/tokenize", body)).json
        asked = (await client.chat(**body, tool_choice=choice, return_token_ids=True)).json
        wrong = await client.post("/tokenize", body | {"tools": [{}]})
    assert counted["tokens"] == asked["prompt_token_ids"]
    assert counted["count"] == asked["usage"]["prompt_tokens"]
    assert (wrong.status, wrong.error["param"]) == (400, "tools")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_may_call_nothing_is_text(stream: bool) -> None:
    answer = await answered(engine(CALL), tool_choice="none", stream=stream)
    choice = joined(answer) if stream else answer.json["choices"][0]
    message = choice if stream else choice["message"]
    assert (message["content"], choice["finish_reason"]) == (CALL, "stop")
    assert not message.get("tool_calls")


async def test_the_operator_may_leave_tools_out_where_none_may_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "excludes_unused_tools", True)
    for choice in ("auto", "none"):
        prompt, _ = await prompt_and_grammar(engine("x"), tool_choice=choice)
        assert ("tool:" in prompt) == (choice == "auto")


async def test_a_model_that_cannot_show_tools_lists_those_that_may_not_be_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeTokenizer, "renders_tools", False)
    fake = engine("x", None)
    answer = await answered(fake, tool_choice="none")
    assert (answer.status, answer.headers["x-caraserve-ignored"]) == (200, "tools")
    assert b"tool:" not in bytes(fake.requests[0].prompt_ids[1:])


async def test_required_and_named_choices_constrain_the_answer() -> None:
    _, required = await prompt_and_grammar(engine(CALL), tool_choice="required")
    assert required is not None
    assert '"required":["city"]' in required
    assert "time" in required
    assert ")*" in required.splitlines()[0]
    for fields in ({"tool_choice": NAMED}, {"tool_choice": "required", "parallel_tool_calls": False}):
        _, one = await prompt_and_grammar(engine(CALL), **fields)
        assert one is not None
        assert ")*" not in one.splitlines()[0]
        assert ("weather" in one) == (fields["tool_choice"] == "required")


async def test_strict_functions_constrain_calls_in_free_text() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    _, grammar = await prompt_and_grammar(engine(CALL), tools=[strict, TIME])
    assert grammar is not None
    assert "begin[lazy]" in grammar
    assert '"required":["city"]' in grammar


@pytest.mark.parametrize("strict", [False, True])
async def test_an_answer_without_calls_follows_the_schema_of_the_request(strict: bool) -> None:
    tools = [{"type": "function", "function": WEATHER["function"] | {"strict": strict}}]
    schema = {"type": "object", "properties": {"verdict": {}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _, grammar = await prompt_and_grammar(engine(CALL), tools=tools, response_format=wanted)
    assert grammar is not None
    assert "verdict" in grammar
    assert "weather" in grammar
    assert ('"required":["city"]' in grammar) == strict
    _, none_called = await prompt_and_grammar(engine(CALL), tools=tools, response_format=wanted, tool_choice="none")
    assert none_called is not None
    assert "weather" not in none_called


async def test_special_tokens_of_calls_are_kept() -> None:
    fake = engine("x", MISTRAL)
    fake.tokenizer.special_id = lambda text: 7 if text == "[TOOL_CALLS]" else None  # type: ignore[method-assign]
    _, grammar = await prompt_and_grammar(fake, tool_choice="required")
    assert fake.requests[0].params.kept_special_ids == {7}
    assert grammar is not None
    assert "<[7]>" in grammar


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f"} | function}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *wrong("tools", {}, ["f"], [{"type": "function"}], [{"type": "custom", "function": {"name": "f"}}]),
        *wrong("tools", tool(name="a b"), tool(name="x" * 65), tool(name=None), tool(description=3)),
        *wrong("tools", tool(parameters=[]), tool(strict="yes"), tool() * 2),
        *wrong("tools", [tool(name=f"f{at}")[0] for at in range(129)]),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        *wrong("tool_choice", "always", ["auto"], {"type": "function"}),
        *wrong("tool_choice", {"type": "function", "function": {"name": "other"}}),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": tool(strict=True), "regex": "a"}, "regex"),
        ({"json_schema": "[", "tools": tool()}, "json_schema"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_mistakes_are_named(fields: dict[str, Any], param: str) -> None:
    fake = engine("x")
    answer = await answered(fake, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert not fake.streams


@pytest.mark.parametrize(
    ("renders_tools", "words"), [(False, "the chat template cannot render tools"), (True, "a format that is not known")]
)
async def test_a_model_without_tools_refuses_them_and_names_the_cure(
    monkeypatch: pytest.MonkeyPatch, renders_tools: bool, words: str
) -> None:
    monkeypatch.setattr(FakeTokenizer, "renders_tools", renders_tools)
    answer = await answered(engine("x", None))
    assert (answer.status, answer.error["param"]) == (400, "tools")
    for word in (words, "--tool-call-parser", "--chat-template"):
        assert word in answer.error["message"]


async def test_openais_client_calls_a_tool_and_sends_its_answer() -> None:
    async with connected(engine(CALL)) as client:
        answer = await client.chat.completions.create(model="a", messages=MESSAGES, tools=[WEATHER])
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
        result: Any = {"role": "tool", "content": "4 °C", "tool_call_id": call.id}
        history = [*MESSAGES, answer.choices[0].message.model_dump(), result]
        assert await client.chat.completions.create(model="a", messages=history, tools=[WEATHER])


async def test_openais_client_streams_calls() -> None:
    async with (
        connected(engine(f"{CALL}\n{CALL}")) as client,
        client.chat.completions.stream(model="a", messages=MESSAGES, tools=[WEATHER]) as stream,
    ):
        answer = await stream.get_final_completion()
    calls = answer.choices[0].message.tool_calls or ()
    assert [call.function.arguments for call in calls] == [ARGUMENTS] * 2
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_openais_client_parses_arguments() -> None:
    class Weather(pydantic.BaseModel):
        city: str

    text = CALL.replace('"weather"', '"Weather"')
    async with connected(engine(text)) as client:
        tools = [openai.pydantic_function_tool(Weather)]
        answer = await client.chat.completions.parse(model="a", messages=MESSAGES, tools=tools)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Tromsø 🌧")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER]}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", **WEATHER["function"]}]}),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
        ),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_a_long_answer_is_searched_for_calls_in_turns_of_the_event_loop(
    path: str, fields: dict[str, Any], rests: list[float]
) -> None:
    text = 10_000 * "<tool_call>"
    answer = await OneOff(engine(text, size=len(text))).post(path, fields)
    assert answer.status == 200
    assert text in answer.body.decode()
    assert len(rests) > 2
