"""Reads the arguments of a tool call in a conversation, which templates need as an object.

An answer that `max_tokens` cut off has arguments that are no JSON, and so has a call that the model wrote wrongly.
Clients send it back with every later request, so refusing it once would refuse the conversation for good.
"""

import re
from typing import Any

import orjson

from caraserve.errors import InvalidRequest
from caraserve.http.body.field_types import shown
from caraserve.http.body.json_reader import NoObjectError, parse_object
from caraserve.util.tasks import in_turns, slices

_AT_ONCE_CHARACTERS = 64 << 10  # parsed in up to 4 ms
_MAX_NUMBERS = 1 << 16  # in lists of larger ones; a template takes 5 ms to write them
_MARKS_AT_ONCE = 256
# A string, which ends before an escape that is not complete, with its closing quote if it has one; or a mark outside.
_MARK = re.compile(
    r'"(?:[^"\\]++|\\[^u]|\\u(?![dD][89aAbB])[0-9a-fA-F]{4}|\\u[dD][89aAbB].{2}\\u[0-9a-fA-F]{4})*+("?)|[{}\[\],]'
)
_CLOSING = {"{": "}", "[": "]"}


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
