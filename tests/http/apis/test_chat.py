"""POST /v1/chat/completions: messages in, messages out."""

from typing import Any

import pytest

from tests.http.fake_engine import BOS, DIGEST, FakeEngine, FakeTokenizer
from tests.http.serving import OneOff, wrong


async def prompt_of(**fields: Any) -> str:
    """Returns the text that the template made of the messages."""
    answer = await OneOff(fake := FakeEngine()).chat(**fields)
    assert answer.status == 200, answer.body
    ids = fake.requests[0].prompt_ids
    assert ids[0] == BOS
    return bytes(ids[1:]).decode()


async def test_answer_has_openai_shape() -> None:
    answer = (await OneOff().chat(model="a")).json
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    usage = answer.pop("usage")
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert answer == {
        "object": "chat.completion",
        "model": "a",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi!"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "system_fingerprint": f"a@{DIGEST}",
    }


async def test_messages_go_through_the_template() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert await prompt_of(messages=messages) == "developer:Be brief.;user:hi;assistant:"


async def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert await prompt_of(messages=[{"role": "user", "content": parts}]) == "user:one\ntwo;assistant:"


async def test_long_conversations_are_rendered_too() -> None:
    fake = FakeEngine(max_model_len=100_000)
    await OneOff(fake).chat(messages=[{"role": "user", "content": "x" * 9000}])
    assert len(fake.requests[0].prompt_ids) > 9000


@pytest.mark.parametrize("content", ["one\ntwo", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]])
async def test_the_text_that_a_client_expects_is_given_to_the_engine(content: object) -> None:
    answer = await OneOff(fake := FakeEngine()).chat(prediction={"type": "content", "content": content}, n=2)
    assert answer.status == 200
    assert [bytes(one.predicted_ids).decode() for one in fake.requests] == ["one\ntwo"] * 2


async def test_an_expected_text_beyond_the_context_is_left_out() -> None:
    prediction = {"type": "content", "content": "x" * 9000}
    assert (await OneOff(fake := FakeEngine()).chat(prediction=prediction)).status == 200
    assert fake.requests[0].predicted_ids == ()


@pytest.mark.parametrize("prediction", ["x", {}, {"type": "content"}, {"type": "tokens", "content": "x"}])
async def test_a_malformed_prediction_is_refused(prediction: object) -> None:
    answer = await OneOff().chat(prediction=prediction)
    assert (answer.status, answer.error["param"]) == (400, "prediction")


@pytest.mark.parametrize(
    ("fields", "ending"),
    [({}, "assistant:"), ({"add_generation_prompt": False}, ";"), ({"continue_final_message": True}, ";")],
)
async def test_the_generation_prompt_is_added_unless_switched_off(fields: dict[str, Any], ending: str) -> None:
    assert (await prompt_of(**fields)).endswith(ending)


async def test_the_default_length_is_the_rest_of_the_context() -> None:
    fake = FakeEngine()
    await OneOff(fake).chat()
    (request,) = fake.requests
    assert request.params.max_tokens + len(request.prompt_ids) == fake.max_model_len


@pytest.mark.parametrize(
    ("fields", "expected"), [({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 7}, 7)]
)
async def test_max_completion_tokens_wins(fields: dict[str, int], expected: int) -> None:
    fake = FakeEngine()
    await OneOff(fake).chat(**fields)
    assert fake.requests[0].params.max_tokens == expected


async def test_logprobs_have_bytes_and_alternatives() -> None:
    answer = (await OneOff().chat(logprobs=True, top_logprobs=2, max_tokens=1)).json
    first = {"token": "H", "logprob": -0.5, "bytes": [72]}
    other = {"token": "I", "logprob": -1.5, "bytes": [73]}
    assert answer["choices"][0]["logprobs"] == {"content": [first | {"top_logprobs": [first, other]}]}


async def test_logprobs_alone_score_the_chosen_token() -> None:
    answer = (await OneOff(fake := FakeEngine()).chat(logprobs=True)).json
    assert fake.requests[0].params.logprobs == 0
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_several_answers() -> None:
    answer = (await OneOff(fake := FakeEngine()).chat(n=2, seed=-1)).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [request.params.seed for request in fake.requests] == [2**63 - 1, 0]


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


async def template_messages(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages that the template gets for a conversation that ends with `messages`."""
    given: list[dict[str, Any]] = []

    class Listening(FakeTokenizer):
        def chat(self, messages: Any, **options: Any) -> list[int]:
            given.extend(messages)
            return super().chat(messages, **options)

    answer = await OneOff(FakeEngine(tokenizer=Listening())).chat(
        messages=[{"role": "user", "content": "hi"}, *messages]
    )
    assert answer.status == 200, answer.body
    return given[1:]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Oslo"}', {"city": "Oslo"}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        # Cut off: what is open is closed, and a member without a value is left out.
        ('{"city": "Tro', {"city": "Tro"}),
        ('{"city": "Oslo", "unit', {"city": "Oslo"}),
        ('{"city": "Oslo", "unit":', {"city": "Oslo"}),
        ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": {"b": tr', {"a": {}}),
        ('{"a": "x, {[', {"a": "x, {["}),
        ('{"a": "\\"\\u00e9\\u00', {"a": '"é'}),
        ('{"a": "x\\ud83c\\udf', {"a": "x"}),
        ("{", {}),
        # Malformed: the beginning that is an object, if any.
        ('{"a": 1} and so on', {"a": 1}),
        ('{"half": "x\\ud800y"}', {"half": "x"}),
        ('{"a": NaN}', {}),
        ('{"a": Oslo}', {}),
        ("Oslo", {}),
        ("[1]", {}),
        ("]}", {}),
        ("[" * 5000, {}),
        # Larger than what is parsed at once.
        ('{"a": "%s"}' % ("x" * 70_000), {"a": "x" * 70_000}),
        ('{"a": "%s' % ("x" * 70_000), {"a": "x" * 70_000}),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_templates_get_the_arguments_of_tool_calls_as_objects(arguments: object, expected: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    call_message, result = await template_messages(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "4 °C"}], "tool_call_id": "1"},
    )
    assert call_message["content"] == ""
    assert call_message["tool_calls"] == [{**call, "function": {"name": "weather", "arguments": expected}}]
    assert result == {"role": "tool", "content": "4 °C", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"path": "/etc", "rows": [%s1]}' % ("1," * 70_000), "65536 numbers in lists; send fewer in one request."),
        ('{"path": "/etc", "rows": [%s1' % ("1," * 70_000), "65536 numbers in lists; send fewer in one request."),
        ('{"path": "%s", "path": "/"}' % ("x" * 70_000), "'path' twice in one object."),
    ],
    ids=["numbers", "cut off", "equal keys"],
)
async def test_large_arguments_that_cannot_be_passed_whole_are_refused(arguments: str, error: str) -> None:
    function = {"name": "write", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    answer = await OneOff().chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages")
    message = answer.json["error"]["message"]
    assert message.startswith("messages[0].tool_calls[0].function.arguments has ")
    assert message.endswith(error)


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, ""),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
            "a\nb",
        ),
    ],
)
async def test_what_answers_a_prompt_may_have_no_content_or_a_refusal(given: dict[str, Any], content: str) -> None:
    (message,) = await template_messages(given)
    assert message["content"] == content


@pytest.mark.parametrize("none", [None, []])
async def test_an_empty_list_of_tool_calls_is_not_passed_to_the_template(none: object) -> None:
    (message,) = await template_messages({"role": "assistant", "content": "hello", "tool_calls": none})
    assert message == {"role": "assistant", "content": "hello"}


async def test_token_ids_on_request() -> None:
    answer = (await OneOff().chat(return_token_ids=True)).json
    assert answer["prompt_token_ids"][0] == BOS
    assert answer["choices"][0]["token_ids"] == list(b"Hi!")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *wrong("messages", [], None, "hello", ["hello"], [{"role": "wizard", "content": "x"}], [{"content": "x"}]),
        *wrong("messages", [{"role": ["user"], "content": "x"}], [{"role": "user"}]),
        *wrong("messages", [{"role": "user", "content": 3}]),
        *wrong("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        *wrong("messages", [{"role": "user", "content": [{"type": "text", "text": 1}]}]),
        *wrong("messages", [{"role": "user", "content": ["x"]}], [{"role": "user", "content": None}]),
        *wrong("messages", [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]),
        *wrong("messages", [{"role": "user", "content": "x", "tool_calls": [CALL]}]),
        *wrong("messages", [{"role": "assistant", "tool_calls": {}, "content": None}]),
        *wrong("messages", [{"role": "assistant", "tool_calls": [3]}]),
        *wrong("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        *wrong("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]),
        *wrong("messages", [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]),
        ({"max_completion_tokens": 10**12}, "max_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"broken": True}}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
    ],
)
async def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    answer = await OneOff(fake := FakeEngine()).chat(**fields)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)
    assert not fake.streams
