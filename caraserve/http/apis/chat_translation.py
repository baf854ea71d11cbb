"""What the APIs that are translated into chat completions share.

Their bodies become the fields of a chat, which `chat.py` reads, so that all APIs have the same checks and the same
prompts. Errors are translated back, so that they name the client's own fields.

An answer that `max_tokens` cut off may have a call of a tool with arguments that are no JSON, and so may one that the
model wrote wrongly. Clients send it back with every later request, so refusing it once would refuse the conversation
for good; templates need an object, which is made of what has come.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from caraserve.errors import InvalidRequest
from caraserve.http.body.field_types import Fields, shown
from caraserve.http.body.json_reader import NoObjectError, parse_object
from caraserve.http.body.known_fields import KnownFields
from caraserve.http.body.request_schema import CHAT
from caraserve.util.tasks import in_shared_turns, in_turns, slices

_AT_ONCE_CHARACTERS = 64 << 10  # parsed in up to 4 ms
_MAX_NUMBERS = 1 << 16  # in lists of larger ones; a template takes 5 ms to write them
_MARKS_AT_ONCE = 256
# A string, which ends before an escape that is not complete, with its closing quote if it has one; or a mark outside.
_MARK = re.compile(
    r'"(?:[^"\\]++|\\[^u]|\\u(?![dD][89aAbB])[0-9a-fA-F]{4}|\\u[dD][89aAbB].{2}\\u[0-9a-fA-F]{4})*+("?)|[{}\[\],]'
)
_CLOSING = {"{": "}", "[": "]"}
_MESSAGE = re.compile(r"\bmessages\[\d+\]")


def shared_values(fields: Fields, known: KnownFields) -> dict[str, Any]:
    """The values of the fields that a table has in common with that of chat completions."""
    return {name: fields.raw(name) for name, entry in known.types.items() if CHAT.types.get(name) is entry}


@contextmanager
def client_names(chat: Fields) -> Iterator[None]:
    """Replaces names of chat fields in errors by the client's, in the order of `client_names`. Positions are left out,
    for the messages are not numbered as the client's."""
    try:
        yield
    except InvalidRequest as error:
        message, param = _MESSAGE.sub("messages", error.message), error.param or ""
        for ours, theirs in chat.client_names.items():
            message, param = message.replace(ours, theirs), param.replace(ours, theirs)
        raise type(error)(message, param=param or None) from None


def skip_unread(fields: Fields, chat: Fields) -> None:
    """Lists what was not used of the chat among the client's fields, by the client's names."""
    for name in chat.unread():
        fields.skip(chat.client_names.get(name, name))


async def joined_text(
    content: object, name: str, kinds: Mapping[str, str], param: str, *, may_be_absent: bool = False
) -> str:
    """Content as one string, with which templates concatenate: a string, or a list of parts with text. `kinds`: the
    key of the text by the type of the part. Empty for none if it `may_be_absent`. Raises InvalidRequest."""
    if content is None and may_be_absent:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a string or a list of parts, not {shown(content)}.", param=param)
    texts = [_part_text(part, f"{name}[{at}]", kinds, param) async for at, part in in_shared_turns(enumerate(content))]
    return "\n".join(texts)


def _part_text(part: object, name: str, kinds: Mapping[str, str], param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kinds[kind]) if isinstance(part, dict) and isinstance(kind, str) and kind in kinds else None
    if not isinstance(text, str):
        wanted = " or ".join(f'{{"type": "{kind}", "{key}": …}}' for kind, key in kinds.items())
        raise InvalidRequest(f"{name} must be {wanted}; only text is served.", param=param)
    return text


def checked_object(value: object, name: str, param: str) -> dict[str, Any]:
    """A value that must be an object. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object, not {shown(value)}.", param=param)
    return value


def checked_text(values: Mapping[str, Any], key: str, name: str, param: str) -> str:
    """A string that an object must have. Raises InvalidRequest."""
    value = values.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}.{key} must be a string, not {shown(value)}.", param=param)
    return value


def checked_choice(value: object, known: Collection[str], name: str, param: str) -> str:
    """A string that must be one of `known`. Raises InvalidRequest."""
    if not isinstance(value, str) or value not in known:
        raise InvalidRequest(f"{name} must be one of {', '.join(known)}, not {shown(value)}.", param=param)
    return value


# --- arguments of calls ---


async def read_arguments(arguments: object, name: str, param: str) -> dict[str, Any]:
    """Returns the arguments of a call, given as an object or as its text. Of a text that is cut off or malformed: the
    object that it begins, see `_closed`. Raises InvalidRequest for other types and for too large objects."""
    arguments = arguments or {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise InvalidRequest(f"{name} must be a JSON object, or its text, not {shown(arguments)}.", param=param)
    try:
        whole = await _object(arguments, name)
        return await _closed(arguments, name) if whole is None else whole
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=param) from None


async def _closed(text: str, name: str) -> dict[str, Any]:
    """Returns the object that a text begins, with what is open closed: of `{"city": "Tro` it is `{"city": "Tro"}`, and
    of `{"city": "Oslo", "uni` it is `{"city": "Oslo"}`. Empty if the text begins none."""
    closing: list[str] = []
    before, end = 0, len(text)  # where the last mark ends, or before a comma; where the text is cut off
    quote = ""
    async for marks in in_turns(slices(_MARK.finditer(text), _MARKS_AT_ONCE)):
        for found in marks:
            mark = found[0][0]
            if mark == '"':
                if not found[1]:
                    end, quote = found.end(), '"'
                    break
            elif mark == ",":
                before = found.start()
            else:
                before = found.end()
                if mark in _CLOSING:
                    closing.append(_CLOSING[mark])
                elif not closing or closing.pop() != mark:
                    return {}
        if quote:
            break
    ending = "".join(reversed(closing))
    for candidate in (text[:end] + quote + ending, text[:before] + ending):
        if (found_object := await _object(candidate, name)) is not None:
            return found_object
    return {}


async def _object(text: str, name: str) -> dict[str, Any] | None:
    """Returns the JSON object that a text is; None if it is none, or one that could not be written again (NaN, half
    characters). Raises InvalidRequest for one that is too large, or is large and has equal keys."""
    try:
        if len(text) > _AT_ONCE_CHARACTERS:
            return await parse_object(text.encode(), _MAX_NUMBERS, name=name)
        value = orjson.loads(text)
    except (ValueError, NoObjectError):
        return None
    return value if isinstance(value, dict) else None
