"""The reasoning of an answer in POST /v1/responses and /v1/messages: items and blocks of its own."""

from typing import Any

import pytest

from caraserve.core.reasoning_grammar import ReasoningGrammar
from tests.http.apis import test_anthropic_messages as messages_tests
from tests.http.apis import test_openai_responses as responses_tests
from tests.http.apis.test_openai_client import connected
from tests.http.apis.test_reasoning import Rendered, rendered, saying  # noqa: F401
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
    answer = await messages_tests.answered(fake, **ENABLED)
    assert isinstance(fake.requests[0].params.grammar, ReasoningGrammar)
    assert "x-caraserve-ignored" not in answer.headers
