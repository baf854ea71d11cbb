"""The reasoning of an answer in POST /v1/responses and /v1/messages: items and blocks of its own."""

from typing import Any

import pytest

from caraserve.core.reasoning_grammar import ReasoningGrammar
from tests.http.apis import test_anthropic_messages as messages_tests
from tests.http.apis import test_openai_responses as responses_tests
from tests.http.apis.test_openai_client import connected
from tests.http.apis.test_reasoning import BY_EFFORT, WITHOUT_SWITCH, Rendered, rendered, saying  # noqa: F401
from tests.http.fake_engine import FakeTokenizer
from tests.http.serving import serving, typed_events

THOUGHT = "<think>It greets.</think>Hi!"
ENABLED = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
pytestmark = pytest.mark.usefixtures("rendered")


async def respond(text: str = THOUGHT, **fields: Any) -> Any:
    return await responses_tests.answered(saying(text), **fields)


async def message(text: str = THOUGHT, **fields: Any) -> Any:
    return await messages_tests.answered(saying(text), **fields)


# --- Responses ---


async def test_reasoning_is_an_item_before_the_message() -> None:
    reasoning, text = (await respond()).json["output"]
    assert (reasoning["type"], reasoning["status"], reasoning["summary"]) == ("reasoning", "completed", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "It greets."}]
    assert text["content"][0]["text"] == "Hi!"


async def test_a_format_beside_an_effort_is_not_listed_as_ignored() -> None:
    wanted = {"format": {"type": "json_schema", "schema": {}}, "effort": "low"}
    answer = await message(**ENABLED, output_config=wanted)
    assert answer.status == 200
    assert "output_config.format" not in answer.headers.get("x-caraserve-ignored", "")


async def test_the_events_of_reasoning() -> None:
    events = responses_tests.events_of(await respond(stream=True))
    kinds = [event["type"] for event in events if event.get("output_index") == 0]
    assert list(dict.fromkeys(kinds)) == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert "".join(event.get("delta", "") for event in events if event.get("output_index") == 0) == "It greets."
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


async def test_an_answer_that_is_cut_off_in_its_reasoning() -> None:
    response = (await respond(max_output_tokens=12)).json
    (item,) = response["output"]
    assert (response["status"], item["type"], item["status"]) == ("incomplete", "reasoning", "incomplete")


async def test_openais_client_sends_reasoning_back(rendered: Rendered) -> None:  # noqa: F811
    async with connected(saying(THOUGHT)) as client:
        response = await client.responses.create(model="a", input="x")
        history: Any = [{"role": "user", "content": "x"}, *response.output, {"role": "user", "content": "y"}]
        await client.responses.create(model="a", input=history)
    expected = {"role": "assistant", "content": "Hi!", "reasoning_content": "It greets."}
    assert list(rendered.messages)[1:2] == [expected]
    assert len(rendered.messages) == 3


@pytest.mark.parametrize(("effort", "expected"), [("none", False), ("high", True)])
async def test_the_effort_reaches_the_template(
    rendered: Rendered,  # noqa: F811
    effort: str,
    expected: bool,
) -> None:
    answer = await respond(reasoning={"effort": effort, "summary": "auto"})
    assert rendered.kwargs == {"enable_thinking": expected}
    assert answer.json["reasoning"]["effort"] == effort
    assert answer.headers["x-caraserve-ignored"] == "reasoning.summary"


async def test_a_response_takes_the_budget_of_chat_completions() -> None:
    fake = saying(THOUGHT)
    answer = await responses_tests.answered(fake, thinking_token_budget=5)
    assert "x-caraserve-ignored" not in answer.headers
    assert fake.requests[0].params.grammar.budget_tokens == 5
    assert answer.json["usage"]["output_tokens_details"] == {"reasoning_tokens": len("It greets.")}


# --- Messages ---


async def test_thinking_is_a_block_where_the_client_asks_for_it() -> None:
    thinking, text = (await message(**ENABLED)).json["content"]
    assert thinking == {"type": "thinking", "thinking": "It greets.", "signature": ""}
    assert text == {"type": "text", "text": "Hi!"}


@pytest.mark.parametrize(
    "fields", [{}, {"thinking": {"type": "disabled"}}, {"thinking": ENABLED["thinking"] | {"display": "omitted"}}]
)
async def test_thinking_is_left_out_elsewhere(fields: dict[str, Any]) -> None:
    assert (await message(**fields)).json["content"] == [{"type": "text", "text": "Hi!"}]
    assert b"greets" not in (await message(stream=True, **fields)).body


async def test_the_events_of_thinking() -> None:
    events = [one for one in typed_events(await message(stream=True, **ENABLED)) if one.get("index") == 0]
    start, *deltas, stop = events
    assert start["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert {delta["delta"]["type"] for delta in deltas} == {"thinking_delta"}
    assert "".join(delta["delta"]["thinking"] for delta in deltas) == "It greets."
    assert stop["type"] == "content_block_stop"


async def test_thinking_in_a_conversation_reaches_the_template(rendered: Rendered) -> None:  # noqa: F811
    async with serving(saying(THOUGHT)) as client:
        content = (await client.post("/v1/messages", messages_tests.ASKED | ENABLED)).json["content"]
        user = messages_tests.ASKED["messages"][0]
        history = [user, {"role": "assistant", "content": content}, user]
        answer = await client.post("/v1/messages", messages_tests.ASKED | {"messages": history})
    assert answer.status == 200
    assert rendered.messages[1] == {"role": "assistant", "content": "Hi!", "reasoning_content": "It greets."}


async def test_the_budget_of_thinking_holds() -> None:
    fake = saying(THOUGHT)
    for thinking in (ENABLED["thinking"], {"type": "enabled", "budget_tokens": 3}):
        answer = await messages_tests.answered(fake, thinking=thinking)
        grammar = fake.requests[-1].params.grammar
        assert isinstance(grammar, ReasoningGrammar)
        assert grammar.budget_tokens == thinking["budget_tokens"]
        assert "x-caraserve-ignored" not in answer.headers


async def test_disabled_thinking_ends_at_once_where_the_template_cannot_leave_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = saying(THOUGHT)
    await messages_tests.answered(fake, thinking={"type": "disabled"})
    monkeypatch.setattr(FakeTokenizer, "reasoning_format", WITHOUT_SWITCH)
    await messages_tests.answered(fake, thinking={"type": "disabled"})
    with_switch, without_switch = (request.params.grammar for request in fake.requests)
    assert with_switch is None
    assert without_switch.budget_tokens == 0


@pytest.mark.parametrize(
    ("thinking", "kwargs", "ignored"),
    [
        ({"type": "adaptive"}, {"reasoning_effort": "max", "enable_thinking": True, "thinking": True}, None),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}, "output_config.effort"),
        (None, {}, "output_config.effort"),
    ],
    ids=["on", "off", "unsaid"],
)
async def test_the_effort_reaches_the_template_where_thinking_is_on(
    monkeypatch: pytest.MonkeyPatch,
    rendered: Rendered,  # noqa: F811
    thinking: dict[str, Any] | None,
    kwargs: dict[str, Any],
    ignored: str | None,
) -> None:
    monkeypatch.setattr(FakeTokenizer, "reasoning_format", BY_EFFORT)
    answer = await message(thinking=thinking, output_config={"effort": "max"})
    assert rendered.kwargs == kwargs
    assert answer.headers.get("x-caraserve-ignored") == ignored


async def test_a_wrong_effort_is_named() -> None:
    answer = await message(**ENABLED, output_config={"effort": 5})
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert "output_config.effort" in answer.json["error"]["message"]


@pytest.mark.parametrize("fields", [{}, ENABLED], ids=["unseen", "seen"])
async def test_the_usage_of_a_message_counts_its_thinking(fields: dict[str, Any]) -> None:
    whole = (await message(**fields)).json["usage"]
    *_, delta, _ = typed_events(await message(stream=True, **fields))
    for usage in (whole, delta["usage"]):
        assert usage["output_tokens_details"] == {"thinking_tokens": len("It greets.")}
        assert usage["output_tokens"] > len("It greets.")
