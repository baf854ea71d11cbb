"""Chat templates: render a conversation as the prompt's text, in a sandbox with bounds.

A template is a program from a model's folder. It runs in Jinja's immutable sandbox, with the names that Hugging Face
defines. Its output, the ranges it walks and the strings it multiplies are bounded; its errors become the client's
answer, never a traceback.
"""

import datetime as dt
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from caraserve.errors import InvalidRequest, ModelLoadError
from caraserve.tokenizer.tool_format import HERMES, MISTRAL, ToolFormat, detect_format, names_tools

_MAX_OUTPUT_CHARS = 8 << 20
_MAX_RANGE_STEPS = 1 << 20  # over all ranges of one rendering: 0.1 s of empty loops
_MAX_EXPONENT = 1 << 10
# Plain letters, which filters such as `tojson` do not change; the space shows whether the template trims.
_FINAL_MARK = "CARASERVE_FINAL_MESSAGE_ENDS_HERE "
_SYSTEM_MARK = "CARASERVE_SYSTEM_MESSAGE"
HOW_TO_RENDER_TOOLS = (
    "start the server with --tool-call-parser hermes, which writes tools into its prompts, or with --chat-template and "
    "a template that renders them"
)
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
_SYSTEM = ("system", "developer")


class _TemplateRejection(jinja2.TemplateError):
    """`raise_exception(...)` in a template, or a bound that it exceeded."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which no single operator can make a value much larger than a prompt."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= _MAX_EXPONENT):
            raise _TemplateRejection(f"an exponent is larger than {_MAX_EXPONENT}")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and len(value) * times > _MAX_OUTPUT_CHARS:
                    raise _TemplateRejection(f"a repeated value is longer than {_MAX_OUTPUT_CHARS}")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """Renders `{% generation %}…{% endgeneration %}`, which marks the assistant's part for training, as its content."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Ranges:
    """The function `range` of one rendering, with a bound on all steps together."""

    def __init__(self) -> None:
        self._left = _MAX_RANGE_STEPS

    def __call__(self, *bounds: int) -> range:
        steps = range(*bounds)
        self._left -= len(steps)
        if self._left < 0:
            raise _TemplateRejection(f"its ranges have more than {_MAX_RANGE_STEPS} steps together")
        return steps


class ChatTemplate:
    """A compiled template with the special tokens that it may use."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], where: str, tool_call_parser: str | None = None
    ) -> None:
        """Compiles the template. `tool_call_parser`: of `TOOL_FORMATS`, in which calls are written; a template without
        tools then gets them as text. Raises ModelLoadError when the template does not compile."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special_tokens = dict(special_tokens)
        self._roles = set(re.findall(r"['\"](developer|tool)['\"]", source))  # the rarer roles that the template names
        self._names_tool_calls = "tool_calls" in source
        self.tool_format = detect_format(source, tool_call_parser)  # None if it is not known
        self._gets_tools_as_text = tool_call_parser is not None and not names_tools(source)
        self.renders_tools = self._gets_tools_as_text or names_tools(source)
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.arguments = frozenset(find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"{where}: the chat template does not compile: {error}") from None

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: Mapping[str, Any],
        given: Path | None,
        special_tokens: Mapping[str, str],
        tool_call_parser: str | None = None,
    ) -> "ChatTemplate | None":
        """Loads the operator's template, else the model's own (a file, or in tokenizer_config.json), else None."""
        if given is not None:
            try:
                return cls(given.read_text(encoding="utf-8"), special_tokens, str(given), tool_call_parser)
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"--chat-template {given} cannot be read: {error}") from None
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), special_tokens, path.name, tool_call_parser)
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from None
        source = settings.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, special_tokens, "tokenizer_config.json", tool_call_parser)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt's text. Raises InvalidRequest with the template's own message."""
        if tools and not self.renders_tools:
            raise InvalidRequest(f"the chat template cannot render tools; {HOW_TO_RENDER_TOOLS}.", param="tools")
        if self._gets_tools_as_text and self.tool_format is not None:
            has_system = bool(tools) and self._has_system  # without tools it makes no difference
            messages = with_tools_as_text(messages, tools or (), self.tool_format, has_system=has_system)
            tools = None
        shown = [
            {**message, "content": _flat(message["content"])} if "content" in message else message
            for message in self._with_known_roles(messages)
        ]
        if continue_final_message:
            shown = _with_mark(shown)
        values = {**kwargs, **({"tools": tools} if tools else {}), "add_generation_prompt": add_generation_prompt}
        try:
            text = self._generate(shown, values)
        except _TEMPLATE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template refuses the messages: {reason}", param="messages") from None
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def _has_system(self) -> bool:
        """Whether the template shows a system's message. Gemma's names the role only to refuse it.

        It is rendered when this is first asked, so under the same limits as a prompt of the template.
        """
        conversation = [{"role": "system", "content": _SYSTEM_MARK}, {"role": "user", "content": "Hello"}]
        try:
            return _SYSTEM_MARK in self._generate(conversation, {"add_generation_prompt": True})
        except _TEMPLATE_ERRORS:
            return False

    def _with_known_roles(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yields the messages, with role `developer` (OpenAI's newer name) as `system` unless the template names it.

        Raises InvalidRequest for messages of tools that the template does not render.
        """
        for position, message in enumerate(messages):
            role = message.get("role")
            if message.get("tool_calls") and not self._names_tool_calls:
                raise InvalidRequest(
                    f"messages[{position}] has tool_calls, which the chat template cannot render; "
                    f"{HOW_TO_RENDER_TOOLS}.",
                    param="messages",
                )
            if role == "tool" and role not in self._roles:
                raise InvalidRequest(
                    f"messages[{position}] has the role tool, which the chat template cannot render; "
                    f"{HOW_TO_RENDER_TOOLS}.",
                    param="messages",
                )
            is_system = role == "developer" and role not in self._roles
            yield {**message, "role": "system"} if is_system else message

    def _generate(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """Returns the text of messages as the template takes them. `values`: of its other arguments."""
        defaults = {**self._special_tokens, "tools": None, "documents": None}
        arguments = {**defaults, **values, "messages": messages, "range": _Ranges()}
        parts: list[str] = []
        size = 0
        for part in self._template.generate(arguments):
            size += len(part)
            if size > _MAX_OUTPUT_CHARS:
                raise _TemplateRejection(f"the prompt is longer than {_MAX_OUTPUT_CHARS} characters")
            parts.append(part)
        return "".join(parts)


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Appends a mark to the last message. Raises InvalidRequest when it has no text to continue."""
    final = messages[-1] if messages else {}
    if not isinstance(final.get("content"), str):
        raise InvalidRequest("continue_final_message: the last message has no content to continue", param="messages")
    return [*messages[:-1], {**final, "content": final["content"] + _FINAL_MARK}]


def _cut_at_mark(text: str) -> str:
    """Cuts the text at the mark. Raises InvalidRequest when the template leaves out the final message."""
    at = text.rfind(_FINAL_MARK.strip())
    if at < 0:
        raise InvalidRequest("continue_final_message: the chat template drops the last message", param="messages")
    kept = text[:at]
    return kept if text.startswith(_FINAL_MARK, at) else kept.rstrip()


def _flat(content: Any) -> Any:
    """Joins text parts by newlines, because templates expect strings."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, Mapping) and "text" in part)
    return content


def _refuse(message: str) -> NoReturn:
    raise _TemplateRejection(message)


def _now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat,
    *,
    has_system: bool,
) -> list[Mapping[str, Any]]:
    """Returns the messages with tools, calls and results in their texts, for a model whose template cannot show them
    where the operator says how it is to write calls. The tools are described in the system's message, or in the first
    one if the template has none (`has_system`)."""
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
