"""The texts in which models write calls of tools: their detection, their grammars, and an incremental parser.

Hermes, also Qwen: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`. Llama 3: `{"name": "f", "parameters": {…}}`
as the beginning of the answer, or after `<|python_tag|>`. Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, in
newer models `[TOOL_CALLS]f[ARGS]{…}`.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from caraserve.tokenizer.detokenizer import begun_length

_HEAD_CHARACTERS = 512  # no head of a call is longer
_HEAD = re.compile(
    r'\{\s{0,16}"name"\s{0,16}:\s{0,16}"([^"\\\x00-\x1f]{1,256})"\s{0,16},'
    r'\s{0,16}"(?:arguments|parameters)"\s{0,16}:\s{0,16}(?=\{)'
)
_BARE_HEAD = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?(?:\[ARGS\])?\s*")
_MAX_OBJECT_CHARACTERS = 64 << 10  # of a call that is parsed whole, because its head is unusual
_PIECE_CHARACTERS = 1 << 10  # read within 0.6 ms
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE_STRINGS = re.compile(r"[^\s0-9A-Za-z,:.+-]")  # brackets, quotes, and all that is not JSON


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls. `trigger` comes before a call, `close` after it, `separators` between two calls in one
    list. `special_tokens` are kept in the text if they are special tokens of the model."""

    name: str
    trigger: str
    close: str
    arguments_key: str
    special_tokens: tuple[str, ...]
    separators: str = ""
    may_begin_with_object: bool = False  # a `{` at the beginning of the answer is a call too
    may_name_before_object: bool = False  # the name may stand before the arguments, outside of the object
    writes_bare_names: bool = False  # the template writes the name before the arguments
    id_prefix: str = "call_"  # of the ids of calls, of which the template writes those in a conversation
    id_characters: int = 24  # after the prefix


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", ("<tool_call>", "</tool_call>"))
LLAMA3 = ToolFormat(
    *("llama3_json", "<|python_tag|>", "", "parameters", ("<|python_tag|>",)),
    separators=";,",
    may_begin_with_object=True,
)
MISTRAL = ToolFormat(
    *("mistral", "[TOOL_CALLS]", "]", "arguments", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    separators=",",
    may_name_before_object=True,
    id_prefix="",
    id_characters=9,  # Mistral's templates refuse other lengths
)
TOOL_FORMATS = {
    "hermes": HERMES,
    "qwen": HERMES,  # SGLang's name
    "qwen25": HERMES,
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
}


def detect_format(template: str, parser: str | None = None) -> ToolFormat | None:
    """Returns the format that a chat template writes; `parser` is the operator's choice. None if it is not known."""
    found = TOOL_FORMATS[parser] if parser is not None else None
    if found is None and "[TOOL_CALLS]" in template:
        found = MISTRAL
    elif found is None and "<tool_call>" in template:
        is_xml = "<function=" in template or "<arg_key>" in template  # Qwen3-Coder and GLM
        found = None if is_xml else HERMES
    elif found is None and ("<|python_tag|>" in template or '"parameters":' in template):
        found = LLAMA3
    return replace(found, writes_bare_names="[ARGS]" in template) if found is MISTRAL else found


def names_tools(template: str) -> bool:
    """Returns whether a chat template shows the tools of a request."""
    return re.search(r"\btools\b", template) is not None


# --- grammars ---


def calls_grammar(
    tools: Sequence[tuple[str, str]],
    tool_format: ToolFormat,
    special_id: Callable[[str], int | None],
    *,
    several: bool,
    with_text: bool,
    answer_schema: str | None = None,
) -> str:
    """Returns a Lark grammar of calls of `tools`, which are names and JSON schemas of arguments.

    `special_id` gives the id of a special token. With `several`, calls may follow one another. With `with_text`, the
    answer is free text in which calls are well-formed; with `answer_schema`, it is calls, or JSON by this schema; else
    it is one call at least and nothing else.
    """

    def literal(text: str) -> str:
        token_id = special_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    trigger, more = literal(tool_format.trigger), "*" if several else ""
    lines = ["call: " + " | ".join(f"call_{at}" for at in range(len(tools)))]
    for at, (name, schema) in enumerate(tools):
        head = f'{{"name": "{name}", "{tool_format.arguments_key}": '
        before, after = json.dumps(head), '"}"'
        if tool_format.writes_bare_names:
            before, after = f"{json.dumps(name)} {literal('[ARGS]')}", ""
        lines.append(f"call_{at}: {before} %json {schema} {after}")
    if tool_format.name == HERMES.name:
        rest, repeat = f'"\\n" call "\\n" {literal(tool_format.close)}', f'("\\n" {trigger} rest){more}'
    elif tool_format.name == LLAMA3.name:  # its templates render one call in a message
        # The two kinds of objects are told apart by the trigger: the lexer decides at the first character.
        calls = "call" if answer_schema is None else f"{trigger} call"
        return "\n".join([*([_LLAMA_TEXT] if with_text else _start(calls, answer_schema)), *lines])
    elif tool_format.writes_bare_names:
        rest, repeat = "call", f"({trigger} rest){more}"
    else:
        next_calls = '(", " call)*' if several else ""
        rest, repeat = f'"[" call {next_calls} "]"', ""
    lines.append(f"rest: {rest}")
    if not with_text:
        return "\n".join([*_start(f"{trigger} rest {repeat if several else ''}", answer_schema), *lines])
    is_special = special_id(tool_format.trigger) is not None
    begin = f"begin: TEXT {trigger}" if is_special else f"begin[lazy]: TEXT {trigger}"
    return "\n".join([f"start: (begin rest){more or '?'} text", "text: TEXT", "TEXT: /(.|\\n)*/", begin, *lines])


_LLAMA_TEXT = "start: call | text\ntext: TEXT\nTEXT: /([^{\\s](.|\\n)*)?/"


def _start(calls: str, answer_schema: str | None) -> list[str]:
    if answer_schema is None:
        return [f"start: {calls}"]
    return [f"start: {calls} | answer", f"answer: %json {answer_schema}"]


# --- parsing ---


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the answer outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name`; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """Text of the arguments of the call that started last."""

    text: str


ToolEvent = TextPart | CallStart | ArgumentsPart


def pieces(text: str) -> Iterator[str]:
    """Yields a whole answer in pieces, each of which a parser reads within a millisecond."""
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS]


class ToolCallParser:
    """Finds calls in the text of one answer, which may come in pieces; joined events are the same for all pieces.

    A call begins with its first event when its head, up to the arguments, is complete. What only looks like a call is
    text. White space around calls is dropped. `most_calls`: text after so many calls is dropped.
    """

    def __init__(self, tool_format: ToolFormat, most_calls: int | None = None) -> None:
        self.calls = 0
        self._format, self._most_calls = tool_format, most_calls
        self._state: Callable[[], bool] = self._read_text
        if tool_format.may_begin_with_object:
            self._state = self._read_beginning
        self._buffer = ""  # not consumed yet
        self._held = ""  # consumed as part of a call, but text if the call is malformed
        self._in_list = False  # of calls, so that the next one needs no trigger
        self._has_text_after_call = False
        self._scanner, self._scanned = _JsonScanner(), 0
        self._events: list[ToolEvent] = []

    def push(self, text: str) -> list[ToolEvent]:
        """Adds text; returns what it decides."""
        self._buffer += text
        while self._state():
            pass
        return self._taken_events()

    def finish(self) -> list[ToolEvent]:
        """Returns what was held back as text; arguments that are cut off stay as they are."""
        if self._state in (self._read_beginning, self._read_text, self._read_opening, self._read_object):
            self._add_text(self._held + self._buffer)
        self._buffer = self._held = ""
        return self._taken_events()

    def _taken_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _add_text(self, text: str) -> None:
        text = text.lstrip() if self.calls and not self._has_text_after_call else text
        if text:
            self._has_text_after_call = True
            self._events.append(TextPart(text))

    # Each of these consumes a part of the buffer. It returns whether the next state may consume more.

    def _read_beginning(self) -> bool:
        if not (rest := self._buffer.lstrip()):
            return False
        self._state = self._read_opening if rest[0] == "{" else self._read_text
        self._in_list = rest[0] == "{"
        return True

    def _read_text(self) -> bool:
        trigger = self._format.trigger
        at = self._buffer.find(trigger)
        end = at if at >= 0 else len(self._buffer) - begun_length(self._buffer, (trigger,))
        text = self._buffer[:end].rstrip()
        self._add_text(text)
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._consume(len(text), at + len(trigger))
        self._state, self._in_list = self._read_opening, self._format.may_begin_with_object
        return True

    def _consume(self, start: int, end: int) -> None:
        """Consumes the buffer up to `end`, and holds what begins at `start` as part of a call."""
        self._held += self._buffer[start:end]
        self._buffer = self._buffer[end:]

    def _give_up(self, end: int) -> bool:
        """Makes text of the call, up to `end` in the buffer."""
        self._add_text(self._held + self._buffer[:end])
        self._buffer, self._held, self._in_list = self._buffer[end:], "", False
        self._state = self._read_text
        return True

    def _read_opening(self) -> bool:
        """Reads from the trigger, or from the separator in a list, to the call's object."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        spaces = len(self._buffer) - len(rest)
        if rest[0] == "{":
            self._consume(0, spaces)
            self._state, self._scanner, self._scanned = self._read_object, _JsonScanner(), 0
            return True
        if not self._format.may_name_before_object or self._in_list:
            return self._give_up(spaces)
        if rest[0] == "[":
            self._consume(0, spaces + 1)
            self._in_list = True
            return True
        return self._read_bare_name(spaces)

    def _read_bare_name(self, spaces: int) -> bool:
        at = self._buffer.find("{", spaces, spaces + _HEAD_CHARACTERS)
        if at < 0:
            is_too_long = len(self._buffer) >= spaces + _HEAD_CHARACTERS
            return self._give_up(spaces + _HEAD_CHARACTERS) if is_too_long else False
        head = _BARE_HEAD.fullmatch(self._buffer, spaces, at)
        if head is None:
            return self._give_up(at)
        self._start_call(head[1], at, self._read_bare_arguments)
        return True

    def _start_call(self, name: str, end: int, read_arguments: Callable[[], bool]) -> None:
        self.calls += 1
        self._has_text_after_call = False
        self._events.append(CallStart(name))
        self._buffer, self._held = self._buffer[end:], ""
        self._state, self._scanner = read_arguments, _JsonScanner()

    def _read_object(self) -> bool:
        head = _HEAD.match(self._buffer) if self._scanned < _HEAD_CHARACTERS else None
        if head is not None:
            self._start_call(head[1], head.end(), self._read_arguments)
            return True
        length, ended = self._scanner.scan(self._buffer[self._scanned : _MAX_OBJECT_CHARACTERS])
        self._scanned += length
        if not ended:
            return self._scanned >= _MAX_OBJECT_CHARACTERS and self._give_up(self._scanned)
        call = _parse_call(self._buffer[: self._scanned])
        if call is None:
            return self._give_up(self._scanned)
        self._start_call(call[0], self._scanned, self._read_close)
        self._events.append(ArgumentsPart(call[1]))
        return self._end_call()

    def _read_arguments(self) -> bool:
        return self._pass_arguments() and self._continue_with(self._read_object_end)

    def _read_bare_arguments(self) -> bool:
        return self._pass_arguments() and self._end_call()

    def _pass_arguments(self) -> bool:
        """Passes text of the arguments on; returns whether they have ended."""
        length, ended = self._scanner.scan(self._buffer)
        if length:
            self._events.append(ArgumentsPart(self._buffer[:length]))
        self._buffer = self._buffer[length:]
        return ended

    def _continue_with(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _read_object_end(self) -> bool:
        """Reads from the arguments to the end of the call's object, whose brace may be missing."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer[0] == ",":
            self._scanner = _JsonScanner(depth=1)
            return self._continue_with(self._read_other_fields)
        self._buffer = self._buffer.removeprefix("}") if self._buffer[0] == "}" else self._buffer
        return self._end_call()

    def _read_other_fields(self) -> bool:
        length, ended = self._scanner.scan(self._buffer)
        self._buffer = self._buffer[length:]
        return ended and self._end_call()

    def _end_call(self) -> bool:
        is_last = self.calls == self._most_calls
        return self._continue_with(self._ignore if is_last else self._read_close)

    def _ignore(self) -> bool:
        self._buffer = ""
        return False

    def _read_close(self) -> bool:
        """Reads from the end of a call to the next one in its list, or to text."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        first, close = self._buffer[0], self._format.close
        if self._in_list and (first == "{" or first in self._format.separators):
            self._buffer = self._buffer.removeprefix(first) if first != "{" else self._buffer
            return self._continue_with(self._read_opening)
        if close and close.startswith(self._buffer) and close != self._buffer:
            return False
        if self._in_list or close != "]":
            self._buffer = self._buffer.removeprefix(close)
        self._in_list = False
        return self._continue_with(self._read_text)


class _JsonScanner:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._escaped = depth, False, False

    def scan(self, text: str) -> tuple[int, bool]:
        """Returns how many characters belong to the object, and whether it ends after them, or at what is not JSON."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE_STRINGS).search(text, at)
            if found is None:
                break
            at, character = found.end(), found[0]
            if character == '"':
                self._in_string = not self._in_string
            elif character == "\\" and self._in_string:
                self._escaped = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at, True
            else:
                return at - 1, True
        return len(text), False


def _parse_call(text: str) -> tuple[str, str] | None:
    """Returns the name and the arguments, as JSON, of a call in any order of its fields; None if it is none."""
    try:
        call: Any = json.loads(text)
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters"))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        f"{name}{written}".encode()  # refuses half characters, which could not be sent
    except (ValueError, RecursionError):
        return None
    is_call = isinstance(name, str) and name and isinstance(arguments, dict | str)
    return (name, written) if is_call else None
