"""Reasoning over HTTP: divided from the answer, switched, limited, hidden, and sent back in histories."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from caraserve.core.grammar import mask_words
from caraserve.core.reasoning_grammar import ReasoningGrammar, ReasoningTokens
from caraserve.core.reasoning_progress import ReasoningState
from caraserve.tokenizer.reasoning import ReasoningFormat
from tests.http.fake_engine import EOS, FakeEngine, FakeTokenizer, spell
from tests.http.serving import Answer, Client, OneOff, serving

BEGIN, END = 1, 2
MARKS = ReasoningTokens(BEGIN, (END,))
WITH_SWITCH = ReasoningFormat(MARKS, switch="enable_thinking")
WITHOUT_SWITCH = ReasoningFormat(MARKS)
BY_EFFORT = ReasoningFormat(MARKS, switch="thinking", takes_effort=True)
THOUGHT = "<think>\nIt greets </th.\n</think>\n\nHi!"
TOOLS = [{"type": "function", "function": {"name": "time"}}]
USER = {"role": "user", "content": "hello"}


class Rendered:
    """What the chat template gets; its prompt ends with `last_ids`."""

    def __init__(self) -> None:
        self.last_ids: list[int] = []
        self.messages: Sequence[Mapping[str, Any]] = ()
        self.kwargs: Mapping[str, Any] = {}

    def chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        self.messages, self.kwargs = messages, settings["kwargs"]
        return [65, *self.last_ids]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Rendered:
    made = Rendered()
    monkeypatch.setattr(FakeTokenizer, "chat", lambda tokenizer, *given, **settings: made.chat(*given, **settings))
    monkeypatch.setattr(FakeTokenizer, "reasoning_format", WITH_SWITCH)
    texts = {BEGIN: b"<think>", END: b"</think>"}
    bytes_of = FakeTokenizer.token_bytes
    monkeypatch.setattr(FakeTokenizer, "token_bytes", lambda self, one: texts.get(one) or bytes_of(self, one))
    return made


def saying(text: str) -> FakeEngine:
    return FakeEngine(script=lambda request: spell(request, text))


async def chat(text: str = THOUGHT, **fields: Any) -> Answer:
    answer = await OneOff(saying(text)).chat(**fields)
    assert answer.status == 200, answer.body
    return answer


async def message(text: str = THOUGHT, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = (await chat(text, **fields)).json["choices"][0]["message"]
    return found


def shown_as(reasoning: str) -> dict[str, str]:
    """Returns the keys of a message by which older and newer clients read its reasoning."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


async def streamed(text: str = THOUGHT, **fields: Any) -> list[dict[str, Any]]:
    """Returns the `delta` objects of a stream, without empty ones."""
    events = (await chat(text, stream=True, **fields)).events
    return [event["choices"][0]["delta"] for event in events if event["choices"][0]["delta"]]


@pytest.mark.usefixtures("rendered")
async def test_the_reasoning_is_apart_from_the_answer() -> None:
    expected = {"role": "assistant", "content": "Hi!"} | shown_as("It greets </th.")
    assert await message() == expected
    assert await message("Hi!") == {"role": "assistant", "content": "Hi!"}
    cut_off = await message("<think>\nIt gr")
    assert cut_off == {"role": "assistant", "content": None} | shown_as("It gr")


@pytest.mark.usefixtures("rendered")
async def test_a_stream_has_first_the_reasoning_and_then_the_answer() -> None:
    role, *deltas = await streamed()
    kinds = [tuple(delta) for delta in deltas]
    assert role == {"role": "assistant", "content": ""}
    assert list(dict.fromkeys(kinds)) == [("reasoning_content", "reasoning"), ("content",)]
    for key in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(key, "") for delta in deltas) == "It greets </th."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi!"


async def test_a_prompt_may_open_the_reasoning_or_close_it(rendered: Rendered) -> None:
    rendered.last_ids = [BEGIN, ord("\n")]
    assert (await message("Well.</think>Hi!"))["reasoning_content"] == "Well."
    rendered.last_ids = [BEGIN, ord("\n"), END, ord("\n")]
    assert await message("Hi </think>!") == {"role": "assistant", "content": "Hi </think>!"}


@pytest.mark.usefixtures("rendered")
async def test_an_answer_may_continue_the_reasoning_of_the_last_message() -> None:
    fields: dict[str, Any] = {"continue_final_message": True}
    begun = [USER, {"role": "assistant", "content": "<think>We"}]
    ended = [USER, {"role": "assistant", "content": "<think>We</think>"}]
    assert (await message("ll.</think>Hi!", messages=begun, **fields))["reasoning_content"] == "ll."
    assert (await message("Hi!", messages=ended, **fields))["content"] == "Hi!"


@pytest.mark.usefixtures("rendered")
async def test_the_client_may_leave_the_reasoning_out() -> None:
    assert await message(include_reasoning=False) == {"role": "assistant", "content": "Hi!"}
    assert not [delta for delta in await streamed(include_reasoning=False) if delta.keys() & shown_as("")]


@pytest.mark.usefixtures("rendered")
async def test_calls_are_found_after_the_reasoning() -> None:
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    text = f"<think>Not {call}</think>\n{call}"
    whole = await message(text, tools=TOOLS)
    assert whole["reasoning_content"] == f"Not {call}"
    assert [one["function"]["name"] for one in whole["tool_calls"]] == ["time"]
    calls = [one for delta in await streamed(text, tools=TOOLS) for one in delta.get("tool_calls", ())]
    assert [one["function"]["name"] for one in calls if "name" in one["function"]] == ["time"]


async def test_histories_with_reasoning_reach_the_template(rendered: Rendered) -> None:
    history = [
        USER,
        {"role": "assistant", "content": "Hi!", "reasoning_content": "one", "reasoning": None},
        {"role": "assistant", "content": None, "reasoning": "two"},
        {"role": "assistant", "content": "Hi!", "reasoning_content": None},
        USER,
    ]
    await chat(messages=history)
    assert [one.get("reasoning_content") for one in rendered.messages] == [None, "one", "two", None, None]
    assert [one["content"] for one in rendered.messages] == ["hello", "Hi!", "", "Hi!", "hello"]
    assert not [one for one in rendered.messages if "reasoning" in one]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
async def test_reasoning_of_a_history_must_be_text(key: str) -> None:
    answer = await OneOff().chat(messages=[USER, {"role": "assistant", "content": "x", key: ["x"]}])
    assert (answer.status, answer.error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("reasoning_format", "fields", "kwargs"),
    [
        (WITH_SWITCH, {}, {}),
        (WITH_SWITCH, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (WITH_SWITCH, {"reasoning_effort": "low"}, {"enable_thinking": True}),
        (WITH_SWITCH, {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            WITH_SWITCH,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
        (BY_EFFORT, {"reasoning_effort": "high"}, {"thinking": True, "reasoning_effort": "high"}),
        (BY_EFFORT, {"reasoning_effort": "none"}, {"thinking": False}),
        (WITHOUT_SWITCH, {"reasoning_effort": "low"}, {}),
        (None, {"reasoning_effort": "none"}, {}),
    ],
    ids=str,
)
async def test_the_effort_sets_the_templates_own_arguments(
    monkeypatch: pytest.MonkeyPatch,
    rendered: Rendered,
    reasoning_format: ReasoningFormat | None,
    fields: dict[str, Any],
    kwargs: dict[str, Any],
) -> None:
    monkeypatch.setattr(FakeTokenizer, "reasoning_format", reasoning_format)
    answer = await chat(**fields)
    assert rendered.kwargs == kwargs
    is_listed = "reasoning_effort" in answer.headers.get("x-caraserve-ignored", "")
    assert is_listed is ("reasoning_effort" in fields and not kwargs)


async def test_a_template_without_a_switch_refuses_no_effort(
    monkeypatch: pytest.MonkeyPatch, rendered: Rendered
) -> None:
    monkeypatch.setattr(FakeTokenizer, "reasoning_format", WITHOUT_SWITCH)
    answer = await OneOff().chat(reasoning_effort="none")
    assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")


async def grammar_of(**fields: Any) -> Any:
    answer = await OneOff(fake := FakeEngine()).chat(**fields)
    assert answer.status == 200, answer.body
    return fake.requests[0].params.grammar


async def test_a_grammar_applies_after_the_reasoning(rendered: Rendered) -> None:
    constrained = {"response_format": {"type": "json_object"}}
    assert await grammar_of() is None
    before = await grammar_of(**constrained)
    assert isinstance(before, ReasoningGrammar)
    assert (before.state, before.budget_tokens, before.stop_ids) == (ReasoningState.NOT_BEGUN, None, (EOS,))
    assert before.grammar.field == "response_format"
    rendered.last_ids = [BEGIN]
    assert (await grammar_of(**constrained)).state is ReasoningState.UNDER_WAY
    rendered.last_ids = [END]
    assert (await grammar_of(**constrained)).field == "response_format"


async def test_a_budget_limits_the_reasoning(rendered: Rendered) -> None:
    rendered.last_ids = [BEGIN]
    grammar = await grammar_of(thinking_token_budget=1, bad_words=["b"])
    mask = np.zeros(mask_words(FakeTokenizer.vocab_size), np.uint32)
    allowed = []
    for output in ([], [97], [97, END]):
        grammar.matcher(output).write_mask(mask)
        allowed.append({one for one in range(258) if mask[one // 32] >> np.uint32(one % 32) & 1})
    every = set(range(258)) - {98}
    assert allowed == [every, {END}, every]
    assert await grammar_of(thinking_token_budget=-1) is None


async def test_white_space_before_the_reasoning_does_not_evade_its_budget(rendered: Rendered) -> None:
    rendered.last_ids = []
    grammar = await grammar_of(thinking_token_budget=1)
    mask = np.zeros(mask_words(FakeTokenizer.vocab_size), np.uint32)
    for before, is_limited in ((b"", True), (b"\n ", True), (b"\xc2\xa0", False), (b"a", False)):
        for mark in (bytes([BEGIN]), b"<think>"):
            grammar.matcher([*before, *mark, 97]).write_mask(mask)
            assert (np.bitwise_count(mask).sum() == 1) == is_limited


@pytest.mark.parametrize(
    ("last_ids", "text", "count"),
    [
        ([], "\n\x01abcd\x02Hi!", 4),
        ([], "Hi\x01abcd\x02", 0),
        ([BEGIN], "abc\x02Hi!", 3),
        ([], "\n<think>abcd</think>Hi!", 4),
        (list(b"<think>\n"), "abc</think>Hi!", 3),
        ([BEGIN], "cut off", 7),
        ([END], "Hi!", 0),
    ],
)
async def test_the_usage_has_the_tokens_between_the_marks(
    rendered: Rendered, last_ids: list[int], text: str, count: int
) -> None:
    rendered.last_ids = last_ids
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"input": "x", "model": "org/base"}
    async with serving(saying(text)) as client:
        whole, stream = await client.chat(n=2), await client.chat(**with_usage)
        response = await client.post("/v1/responses", body)
        events = (await client.post("/v1/responses", body | {"stream": True})).body.decode()
    assert whole.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * count}
    assert stream.events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    assert response.json["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    assert f'"output_tokens_details":{{"reasoning_tokens":{count}}}' in events


async def test_the_usage_of_a_model_that_does_not_reason_has_no_reasoning_tokens() -> None:
    assert "completion_tokens_details" not in (await chat("Hi!")).json["usage"]


async def test_a_model_that_does_not_reason_refuses_a_budget(client: Client) -> None:
    answer = await client.chat(thinking_token_budget=5)
    neutral = await client.chat(thinking_token_budget=-1)
    assert (answer.status, answer.error["param"]) == (400, "thinking_token_budget")
    assert neutral.status == 200
