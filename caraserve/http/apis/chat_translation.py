"""What the APIs that are translated into chat completions share.

Their bodies become the fields of a chat, which `chat.py` reads, so that all APIs have the same checks and the same
prompts. Errors are translated back, so that they name the client's own fields.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from caraserve.errors import InvalidRequest
from caraserve.http.body.field_types import Fields, shown
from caraserve.http.body.known_fields import KnownFields
from caraserve.http.body.request_schema import CHAT
from caraserve.util.tasks import in_shared_turns

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
