"""Shows tools to a model whose chat template cannot: as text in messages of the roles that every template has.

That is done where the operator says how the model is to write calls. Conversations without tools stay as they are.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from caraserve.tokenizer.tool_format import HERMES, MISTRAL, ToolFormat

_SYSTEM = ("system", "developer")


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat,
    *,
    has_system: bool,
) -> list[Mapping[str, Any]]:
    """Returns the messages with tools, calls and results in their texts. The tools are described in the system's
    message, or in the first one if the template has none (`has_system`)."""
    shown: list[Mapping[str, Any]] = []
    previous = None
    for message in messages:
        if message["role"] == "tool":
            turn = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif calls := message.get("tool_calls"):
            text = _calls_text([call["function"] for call in calls], tool_format)
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            turn = {**others, "content": _joined(message["content"], text, "\n")}
        else:
            turn = dict(message)
        # Templates may want the user and the assistant in turns.
        if "tool" in (previous, message["role"]) and shown and shown[-1]["role"] == turn["role"]:
            before = shown.pop()
            turn = {**before, **turn, "content": _joined(before["content"], turn["content"], "\n")}
        shown.append(turn)
        previous = message["role"]
    if not tools:
        return shown
    described = _description(tools, tool_format)
    if shown and (shown[0]["role"] in _SYSTEM or not has_system):
        first = {**shown[0], "content": _joined(shown[0]["content"], described, "\n\n", reverse=not has_system)}
        return [first, *shown[1:]]
    return [{"role": "system", "content": described}, *shown]


def _description(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    example = _calls_text([{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}], tool_format)
    return (
        f"You can call these functions:\n{functions}\n"
        f"To call a function, answer with its name and its arguments, and nothing else, like this:\n{example}"
    )


def _calls_text(functions: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    """Calls as the model writes them. `functions`: their names and arguments."""
    calls = [
        _json({"name": function["name"], tool_format.arguments_key: function["arguments"]}) for function in functions
    ]
    if tool_format.name == HERMES.name:
        return "\n".join(f"{tool_format.trigger}\n{call}\n{tool_format.close}" for call in calls)
    if tool_format.name == MISTRAL.name:
        return f"{tool_format.trigger}[{', '.join(calls)}]"
    return "; ".join(calls)


def _joined(content: str, text: str, separator: str, *, reverse: bool = False) -> str:
    parts = [text, content] if reverse else [content, text]
    return separator.join(filter(None, parts))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
