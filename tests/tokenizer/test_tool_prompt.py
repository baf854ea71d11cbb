"""Tools as text, for chat templates that have none: what the model is shown, and that its calls are written as read."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from caraserve.tokenizer.chat_template import ChatTemplate
from caraserve.tokenizer.tool_format import TOOL_FORMATS, ArgumentsPart, CallStart, ToolCallParser

PLAIN = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}{% if add_generation_prompt %}<|>{% endif %}"
)
IN_TURNS = (  # as Mistral's older ones
    "{% for one in messages %}{% if (one.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}<{{ one.role }}>{{ one.content }}{% endfor %}"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DROPS_SYSTEM = "{% for one in messages if one.role != 'system' %}<{{ one.role }}>{{ one.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Städte"}}]
HI, RESULT = {"role": "user", "content": "hi"}, {"role": "tool", "content": "4 °C"}
PARSERS = sorted(TOOL_FORMATS)


def call(city: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def rendered(source: str, messages: Sequence[dict[str, Any]], parser: str | None = "hermes", **options: Any) -> str:
    template = ChatTemplate(source, {}, "a test", parser)
    settings = {"add_generation_prompt": False, "continue_final_message": False, "kwargs": {}, "tools": TOOLS} | options
    return template.render(messages, **settings)


def test_tools_are_described_in_the_systems_message() -> None:
    text = rendered(PLAIN, [HI])
    assert text.startswith(
        '<system>You can call these functions:\n{"name": "weather", "description": "Städte"}\nTo call'
    )
    assert text.endswith('<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call><user>hi')
    for role in ("system", "developer"):
        text = rendered(PLAIN, [{"role": role, "content": "Be brief."}, HI])
        assert text.startswith("<system>Be brief.\n\nYou can call these functions:")


@pytest.mark.parametrize(
    ("source", "begin", "end"),
    [(IN_TURNS, "<user>", ""), (DROPS_SYSTEM, "<user>", ""), (GEMMA_2, "<start_of_turn>user\n", "<end_of_turn>\n")],
    ids=["turns", "drops", "gemma-2"],
)
def test_a_template_without_a_system_has_them_in_the_first_message(source: str, begin: str, end: str) -> None:
    text = rendered(source, [HI])
    assert text.startswith(f"{begin}You can call these functions:")
    assert text.endswith(f"</tool_call>\n\nhi{end}")


@pytest.mark.parametrize(("before", "shown"), [([], ""), ([{"role": "user", "content": "So:"}], "So:\n")])
def test_results_and_what_the_user_says_beside_them_are_one_turn(before: list[dict[str, Any]], shown: str) -> None:
    asked = {"role": "assistant", "content": "", "tool_calls": [call("Oslo")]}
    text = rendered(IN_TURNS, [HI, asked, *before, RESULT, RESULT, {"role": "user", "content": "And now?"}], tools=None)
    result = "<tool_response>\n4 °C\n</tool_response>"
    assert text.endswith(f"</tool_call><user>{shown}{result}\n{result}\nAnd now?")


def test_calls_and_results_are_text_of_the_assistant_and_the_user() -> None:
    asked = {"role": "assistant", "content": "Let me see.", "tool_calls": [call("Oslo"), call("Bonn")]}
    text = rendered(IN_TURNS, [HI, asked, RESULT, RESULT, {"role": "assistant", "content": "Cold."}], tools=None)
    assert text == (
        "<user>hi<assistant>Let me see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call><user>'
        "<tool_response>\n4 °C\n</tool_response>\n<tool_response>\n4 °C\n</tool_response><assistant>Cold."
    )


@pytest.mark.parametrize("parser", PARSERS)
def test_a_conversation_without_tools_stays_as_it_is(parser: str) -> None:
    messages = [{"role": "system", "content": "x"}, HI, {"role": "assistant", "content": "y"}, HI]
    for tools in (None, []):
        for last in (True, False):
            plain, shown = (
                rendered(PLAIN, messages, one, tools=tools, add_generation_prompt=last) for one in (None, parser)
            )
            assert plain == shown


@pytest.mark.parametrize("parser", PARSERS)
def test_calls_are_written_as_the_parser_reads_them(parser: str) -> None:
    tool_format = TOOL_FORMATS[parser]
    for calls in ([call("Tromsø")], [call("Oslo"), call("Bonn")]):
        text = rendered(PLAIN, [{"role": "assistant", "content": "", "tool_calls": calls}], parser, tools=None)
        reader = ToolCallParser(tool_format)
        events = reader.push(text.removeprefix("<assistant>")) + reader.finish()
        assert [event for event in events if isinstance(event, CallStart)] == [CallStart("weather")] * len(calls)
        arguments = "".join(event.text for event in events if isinstance(event, ArgumentsPart))
        assert arguments == "".join(json.dumps(one["function"]["arguments"], ensure_ascii=False) for one in calls)
    described = rendered(PLAIN, [HI], parser)
    assert f'"{tool_format.arguments_key}": {{"PARAMETER"' in described


def test_a_template_with_tools_of_its_own_renders_them() -> None:
    own = "{{ tools | length }}" + PLAIN
    assert rendered(own, [HI]) == rendered(own, [HI], None) == "1<user>hi"
