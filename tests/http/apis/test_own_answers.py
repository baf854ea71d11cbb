"""An answer that is cut off after any of its tokens may be sent back, in each dialect, to continue the conversation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from caraserve.core.reasoning_grammar import ReasoningTokens
from caraserve.tokenizer.chat_template import ChatTemplate
from caraserve.tokenizer.reasoning import ReasoningFormat
from tests.http.fake_engine import FakeEngine, FakeTokenizer, spell
from tests.http.serving import Answer, Client, serving, typed_events

ANSWER = '<think>Hm.</think>Ok.<tool_call>{"name":"f","arguments":{"c":"\\u00e9","n":[1,{"x":true}]}}</tool_call>'
TEMPLATE = """
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for message in messages %}{{ '<tool>' if message.role == 'tool' else '<' + message.role + '>' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content + '</think>' }}{% endif %}
{{- message.content + '' }}
{%- for call in message.tool_calls or [] %}
{%- for name, value in call.function.arguments | items %}{{ name }}={{ value | tojson }}{% endfor %}
{%- endfor %}{% endfor %}"""
SCHEMA = {"type": "object"}
FUNCTION = {"name": "f", "parameters": SCHEMA}
USER = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES: dict[str, Any] = {"model": "a", "input": [USER], "tools": [{"type": "function", **FUNCTION}]}
MESSAGES: dict[str, Any] = {
    "model": "a",
    "messages": [USER],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "thinking": {"type": "enabled"},
}

Items = list[dict[str, Any]]


class Tokenizer(FakeTokenizer):
    """A tokenizer whose chat template shows reasoning and the arguments of calls, one by one."""

    reasoning_format = ReasoningFormat(ReasoningTokens(1, (2,)))
    template = ChatTemplate(TEMPLATE, {}, "a test", "hermes")

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> list[int]:
        options["continue_final_message"] = False
        return self.encode(self.template.render(messages, **options), max_tokens=max_tokens, source="messages")


async def answers(client: Client, path: str, body: dict[str, Any], limit: str) -> list[Answer]:
    """Returns the answers that are cut off after 1 token, after 2, and so on, and the whole one."""
    found = [await client.post(path, body | {limit: count}) for count in range(1, len(ANSWER) + 2)]
    assert {answer.status for answer in found} == {200}
    return found


async def resend(client: Client, path: str, body: dict[str, Any], field: str, items: Sequence[Items]) -> None:
    for each in items:
        again = await client.post(path, {**body, "stream": False, field: [*body[field], *each, USER]})
        assert again.status == 200, (each, again.body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_chat_completions(stream: bool) -> None:
    body = CHAT | {"stream": stream}
    async with serving(FakeEngine(script=said, tokenizer=Tokenizer())) as client:
        for answer in await answers(client, "/v1/chat/completions", body, "max_tokens"):
            message = joined_message(answer) if stream else answer.json["choices"][0]["message"]
            plain = {key: message[key] for key in ("role", "content")}  # as many clients keep it
            calls = message.get("tool_calls") or []
            results = [{"role": "tool", "tool_call_id": call["id"], "content": None} for call in calls]
            ways = [[message, *results], *([[plain]] if not plain["content"] else [])]
            await resend(client, "/v1/chat/completions", body, "messages", ways)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_responses(stream: bool) -> None:
    body = RESPONSES | {"stream": stream}
    async with serving(FakeEngine(script=said, tokenizer=Tokenizer())) as client:
        for answer in await answers(client, "/v1/responses", body, "max_output_tokens"):
            output = (typed_events(answer)[-1]["response"] if stream else answer.json)["output"]
            calls = [item["call_id"] for item in output if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": call, "output": None} for call in calls]
            await resend(client, "/v1/responses", body, "input", [[*output, *results]])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_messages(stream: bool) -> None:
    body = MESSAGES | {"stream": stream}
    async with serving(FakeEngine(script=said, tokenizer=Tokenizer())) as client:
        for answer in await answers(client, "/v1/messages", body, "max_tokens"):
            content = list(joined_blocks(answer)) if stream else answer.json["content"]
            calls = [block["id"] for block in content if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call, "content": None} for call in calls]
            outcome = [{"role": "user", "content": results}] if results else []
            kept = body | {"max_tokens": 5}
            await resend(
                client, "/v1/messages", kept, "messages", [[{"role": "assistant", "content": content}, *outcome]]
            )


def said(request: Any) -> Any:
    return spell(request, ANSWER)


def joined_message(answer: Answer) -> dict[str, Any]:
    """Returns the message that a stream's deltas make."""
    message: dict[str, Any] = {}
    for event in answer.events:
        for key, value in event["choices"][0]["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
                continue
            for part in value:
                if "id" in part:
                    message.setdefault(key, []).append({**part, "function": dict(part["function"])})
                else:
                    message[key][-1]["function"]["arguments"] += part["function"]["arguments"]
    return message


def joined_blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    """Yields the blocks that a stream's events make; the input of a call is text where it is no JSON."""
    blocks: list[dict[str, Any]] = []
    for event in typed_events(answer):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"joined": ""})
        elif event["type"] == "content_block_delta":
            _, text = event["delta"].values()
            blocks[-1]["joined"] += text
    for block in blocks:
        text = block.pop("joined")
        if block["type"] == "tool_use":
            yield block | {"input": parsed(text)}
        else:
            yield block | {block["type"]: text}


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
