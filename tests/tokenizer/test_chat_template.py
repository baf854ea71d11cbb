"""Roles and tool calls of a conversation: a template renders them, or the request is refused; none is left out."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from caraserve import demo
from caraserve.errors import InvalidRequest
from caraserve.tokenizer.chat_template import ChatTemplate
from caraserve.tokenizer.tool_format import HERMES as HERMES_CALLS

PLAIN = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
NAMES_DEVELOPER = (
    "{% for message in messages %}{% if message['role'] == 'developer' %}[dev]{% endif %}{{ message['content'] }}"
    "{% endfor %}"
)
# As for models of Qwen and Nous Hermes: calls in XML tags with JSON inside, answers of tools in a user's turn.
HERMES = """
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls %}
<|im_start|>assistant
{{- '\\n' + message.content if message.content else '' }}
{%- for call in message.tool_calls %}
{%- set call = call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{%- elif message.role == "tool" %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
"""
HI = {"role": "user", "content": "hi"}
TOOLS = ({"type": "function", "function": {"name": "weather"}},)
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def rendered(source: str, messages: Sequence[dict[str, Any]]) -> str:
    template = ChatTemplate(source, {}, "a test")
    return template.render(messages, add_generation_prompt=False, continue_final_message=False, kwargs={})


def test_developer_becomes_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert rendered(PLAIN, messages) == "<system>Be brief.<user>hi"
    assert rendered(NAMES_DEVELOPER, messages) == "[dev]Be brief.hi"


def test_the_demos_template_takes_developer_and_tools() -> None:
    config = json.loads((demo.model_folder() / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = ChatTemplate(config["chat_template"], {"bos_token": "^"}, "the demo")

    def text(messages: Sequence[dict[str, Any]], **options: Any) -> str:
        settings = {"add_generation_prompt": True, "continue_final_message": False, "kwargs": {}} | options
        return template.render(messages, **settings)

    for role in ("developer", "system"):  # a plain prompt is as the model and its adapters have learnt it
        messages = [{"role": role, "content": "x"}, HI, {"role": "assistant", "content": "y"}, HI]
        assert (
            text(messages) == "^<|system|>x<|end|><|user|>hi<|end|><|assistant|>y<|end|><|user|>hi<|end|><|assistant|>"
        )
    assert template.tool_format is HERMES_CALLS
    history = [HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4 °C"}]
    shown = text(history, tools=TOOLS)
    assert shown.startswith('^<|system|>You can call these functions:\n{"name": "weather"}\nTo call')
    assert shown.endswith(
        '<|end|><|user|>hi<|end|><|assistant|>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call><|end|><|user|><tool_response>\n4 °C\n</tool_response><|end|><|assistant|>"
    )


def test_tool_calls_and_their_answers_are_rendered() -> None:
    text = rendered(
        HERMES,
        [
            {"role": "user", "content": "Weather in Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "4 °C", "tool_call_id": "1"},
        ],
    )
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n4 °C\n</tool_response>" in text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "messages[1] has tool_calls"),
        ({"role": "tool", "content": "4 °C"}, "messages[1] has the role tool"),
    ],
)
def test_messages_that_the_template_would_drop_are_refused(message: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered(PLAIN, [{"role": "user", "content": "hi"}, message])
    assert words in caught.value.message
    assert "cannot render" in caught.value.message
    assert caught.value.param == "messages"


def test_tools_are_rendered_or_refused() -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": False, "kwargs": {}}
    template = ChatTemplate("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}", {}, "a test")
    assert template.render([], **options, tools=TOOLS) == '{"type": "function", "function": {"name": "weather"}}'
    assert template.render([], **options) == ""
    with pytest.raises(InvalidRequest, match=r"cannot render tools; .*--tool-call-parser .*--chat-template"):
        ChatTemplate(PLAIN, {}, "a test").render([], **options, tools=TOOLS)
