"""Reads a chat's tools."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from caraserve.errors import InvalidRequest
from caraserve.http.apis.chat_format import ChatFormat
from caraserve.http.apis.structured_output import json_text
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, shown
from caraserve.tokenizer.chat_template import HOW_TO_RENDER_TOOLS
from caraserve.tokenizer.grammar import GrammarSource
from caraserve.tokenizer.grammar_check import WHITESPACE
from caraserve.tokenizer.tool_format import ToolFormat, calls_grammar

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}
_SPACES = {"x-guidance": {"whitespace_pattern": WHITESPACE}}


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool

    def for_template(self) -> dict[str, Any]:
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in described.items() if value is not None}}

    def schema(self, is_strict: bool) -> str:
        """Returns the schema of the arguments as JSON; any object if it is not to be followed."""
        parameters = _NO_ARGUMENTS if self.parameters is None else self.parameters
        return json_text({**_ANY_OBJECT, **_SPACES, **(parameters if is_strict else {})}, "tools")


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The functions that a chat's answer may call.

    `functions`: those that may be called. `must_call`: whether the answer is a call. `kept_special_ids`: special tokens
    that belong to the text of calls. `most_calls`: None without a limit.
    """

    tool_format: ToolFormat
    special_id: Callable[[str], int | None]
    functions: tuple[_Function, ...]
    must_call: bool
    kept_special_ids: frozenset[int]
    most_calls: int | None

    def constraint(self, source: GrammarSource | None) -> GrammarSource | None:
        """Returns what the answer must follow, None if it is free. `source`: what other fields ask for. If that is a
        JSON schema, an answer without calls follows it. Raises InvalidRequest if it contradicts well-formed calls."""
        own_field = "tool_choice" if self.must_call else "tools"
        is_bound = self.must_call or any(function.strict for function in self.functions)
        if source is None and not is_bound:
            return None
        if source is not None and (self.must_call or source.kind != "json_schema"):
            if not is_bound:
                return source
            raise InvalidRequest(
                f"{source.field} and {own_field} both constrain the answer; send one of them.", param=source.field
            )
        text = calls_grammar(
            [(function.name, function.schema(function.strict or self.must_call)) for function in self.functions],
            self.tool_format,
            self.special_id,
            several=self.most_calls is None,
            with_text=not self.must_call and source is None,
            answer_schema=None if source is None else _answer_schema(source),
        )
        return GrammarSource("lark", text, own_field if source is None else source.field)


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a chat. `in_prompt`: for its template. `callable`: for its answer; None if it calls nothing."""

    in_prompt: tuple[dict[str, Any], ...] = ()
    callable: CallableTools | None = None


def _answer_schema(source: GrammarSource) -> str:
    """The JSON schema of a constraint as a part of a Lark grammar, where white space is bounded as in calls."""
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{source.field} must be a JSON schema that is an object.", param=source.field)
    return json_text({**_SPACES, **schema}, source.field)


def parse_tools(fields: Fields, chat_format: ChatFormat) -> ChatTools:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidRequest that names the field."""
    _refuse_functions(fields)
    functions = parse_functions(fields)
    choice = _parse_choice(fields, functions)
    several = body_fields.PARALLEL_TOOL_CALLS.read(fields)
    if not functions:
        return ChatTools()
    in_prompt = for_template(functions)
    if choice == "none":
        return _unused(fields, chat_format, in_prompt)
    tokenizer = chat_format.tokenizer
    if (tool_format := chat_format.tool_format) is None:
        raise InvalidRequest(_why_no_tools(chat_format), param="tools")
    kept = (tokenizer.special_id(text) for text in tool_format.special_tokens)
    return ChatTools(
        in_prompt,
        CallableTools(
            tool_format,
            tokenizer.special_id,
            tuple(functions) if isinstance(choice, str) else (choice,),
            choice != "auto",
            frozenset(token_id for token_id in kept if token_id is not None),
            None if several and isinstance(choice, str) else 1,  # a named function is called once
        ),
    )


def for_template(functions: Sequence[_Function]) -> tuple[dict[str, Any], ...]:
    """Returns functions as a chat template gets them."""
    return tuple(function.for_template() for function in functions)


def _unused(fields: Fields, chat_format: ChatFormat, in_prompt: tuple[dict[str, Any], ...]) -> ChatTools:
    """The tools of an answer that may call none. The prompt has them all the same: clients that read calls themselves
    ask for that, and a conversation keeps its beginning in the prefix cache."""
    if chat_format.tokenizer.excludes_unused_tools:
        return ChatTools()
    if not chat_format.renders_tools:
        fields.skip("tools")
        return ChatTools()
    return ChatTools(in_prompt)


def _why_no_tools(chat_format: ChatFormat) -> str:
    if not chat_format.renders_tools:
        return f"the chat template cannot render tools; leave them out, or {HOW_TO_RENDER_TOOLS}."
    return (
        "the chat template writes calls of tools in a format that is not known here; leave tools out, start the server "
        "with --tool-call-parser if the format is one of those, or with --chat-template and a template in one of them."
    )


def _refuse_functions(fields: Fields) -> None:
    chosen = fields.raw("function_call")
    if fields.raw("functions") and chosen != "none":
        raise InvalidRequest("functions are not supported by this server; send tools instead.", param="functions")
    if chosen not in (None, "none", "auto"):
        raise InvalidRequest("function_call is not supported; send tool_choice instead.", param="function_call")


def parse_functions(fields: Fields) -> list[_Function]:
    """Reads `tools`. Raises InvalidRequest."""
    functions = [_function(tool, f"tools[{at}]") for at, tool in enumerate(body_fields.TOOLS.read(fields))]
    names = [function.name for function in functions]
    if repeated := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise InvalidRequest(f"tools has two functions with the name {shown(repeated)}.", param="tools")
    return functions


def _function(tool: Any, where: str) -> _Function:
    inner = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(inner, dict):
        raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{"name": …}}}}.', param="tools")
    name, description, parameters = inner.get("name"), inner.get("description"), inner.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 64 of a-z, A-Z, 0-9, _, . and -, not {shown(name)}.", param="tools"
        )
    strict = inner.get("strict") or False
    for key, value, kind, what in (
        ("description", description, str, "a string"),
        ("parameters", parameters, dict, "a JSON schema"),
        ("strict", strict, bool, "true or false"),
    ):
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{where}.function.{key} must be {what}, not {shown(value)}.", param="tools")
    return _Function(name, description, parameters, strict)


def _parse_choice(fields: Fields, functions: list[_Function]) -> str | _Function:
    """Returns none, auto, required, or the function that must be called."""
    choice = fields.raw("tool_choice")
    if choice is None or choice == "none" or (choice == "auto" and functions):
        return choice or "auto"
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    is_named = isinstance(function, dict)
    if choice not in ("auto", "required") and not is_named:
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}, not '
            f"{shown(choice)}.",
            param="tool_choice",
        )
    if not functions:
        raise InvalidRequest("tool_choice needs tools; send them, or leave it out.", param="tool_choice")
    if not isinstance(function, dict):
        return str(choice)
    name = function.get("name")
    named = next((function for function in functions if function.name == name), None)
    if named is None:
        raise InvalidRequest(f"tool_choice names {shown(name)}, which is not one of the tools.", param="tool_choice")
    return named


def new_call_id(tool_format: ToolFormat) -> str:
    """Returns an id for a call, as the model's template takes it."""
    return tool_format.id_prefix + secrets.token_hex(16)[: tool_format.id_characters]
