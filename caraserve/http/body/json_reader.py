"""Parses JSON bodies strictly, and without blocking the event loop, however large they are.

A small body is parsed at once. In a large one, this module reads the structure and has orjson parse the pieces in
between, with turns of the event loop: orjson takes tens of milliseconds for 16 MB of text and seconds for 16 MB of
`[]`, and keeps the interpreter lock. The number of values is limited, since freeing them blocks the event loop too.
"""

import json
import re
from collections.abc import Generator
from mmap import mmap
from typing import Any

import orjson

from caraserve.errors import InvalidRequest
from caraserve.http.body.field_types import shown
from caraserve.util.tasks import in_shared_turns

MOST_NUMBERS = 1 << 19  # 10 ms to free
_MOST_VALUES = 1 << 16  # strings, objects, lists and fields; numbers in lists are counted apart
_MOST_CHARACTERS = 1 << 22  # in one string: 16 MiB in memory if one of them is an emoji
_MOST_DEPTH = 1000  # about the limit of small bodies
_AT_ONCE_BYTES = 16 << 10  # parsed in up to 2 ms, with the search for equal keys
_PIECE_BYTES = 16 << 10

_BLANKS = re.compile(rb"[ \t\n\r]{0,65536}+")
_SHORT_STRING = re.compile(rb'"[^"\\]{0,1000}+"')
_SCALAR = re.compile(rb'[^\[\]{}",: \t\n\r]++')
_SCALARS = re.compile(rb'[^\[\]{}"]++')
# Never splits a pair of escapes for one character.
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\[^u]|\\u(?![dD][89aAbB]).{4}|\\u[dD][89aAbB].{2}\\u.{4})*+', re.DOTALL)

Body = bytes | mmap  # large bodies are mapped: a bytes object would take 15 ms to allocate
_List = list[Any]
_Object = dict[str, Any]


class NoObjectError(InvalidRequest):
    """The text is no JSON object, or is nested too deeply to be read as one."""


async def parse_object(body: Body, most_numbers: int = MOST_NUMBERS, *, name: str = "The body") -> _Object:
    """Parses one JSON object without equal keys and with a limited size. Raises NoObjectError, or InvalidRequest for an
    object with equal keys or of a larger size. `name`: of the text, in errors."""
    value = _parse_at_once(body[:], name) if len(body) <= _AT_ONCE_BYTES else await _read_all(body, most_numbers, name)
    if not isinstance(value, dict):
        raise NoObjectError(f"{name} must be a JSON object.")
    return value


def _parse_at_once(body: bytes, name: str) -> Any:
    def refuse_equal_keys(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _equal_keys(name, key)
            seen.add(key)

    try:
        value = orjson.loads(body)
        if _num_keys(value) < body.count(b":"):  # orjson keeps the last of two equal keys
            json.loads(body, object_pairs_hook=refuse_equal_keys)
    except RecursionError:
        raise NoObjectError(f"{name} is not valid JSON: it is nested too deeply.") from None
    except ValueError as error:
        _check_memory(error)
        raise NoObjectError(f"{name} is not valid JSON: {error}.") from None
    return value


def _num_keys(value: Any) -> int:
    """Counts the keys of a parsed value and of all objects in it, but of those in lists that begin with another kind of
    value. A text without equal keys has as many colons, and more if its strings have some."""
    count, left = 0, [value]
    while left:
        one = left.pop()
        if type(one) is dict:
            count += len(one)
            left += one.values()
        elif type(one) is list and one and type(one[0]) in (dict, list):
            left += one
    return count


def _check_memory(error: ValueError) -> None:
    """Raises MemoryError if orjson ran out of memory: then the body is not at fault."""
    if str(error).startswith("Not enough memory"):
        raise MemoryError from None


def _equal_keys(name: str, key: str) -> InvalidRequest:
    return InvalidRequest(f"{name} has {shown(key)} twice in one object.", param=key[:64])


async def _read_all(body: Body, most_numbers: int, name: str) -> Any:
    reader = _Reader(body, most_numbers, name)
    async for _ in in_shared_turns(reader.read()):
        pass
    return reader.value


class _Reader:
    """Reads one document. `read` yields after each piece."""

    def __init__(self, body: Body, most_numbers: int, name: str) -> None:
        self.value: Any = None
        self._body, self._name = body, name
        self._at = 0
        self._numbers_left, self._most_numbers = most_numbers, most_numbers
        self._values_left = _MOST_VALUES
        self._open: list[tuple[_List | _Object, str]] = []  # the containers around `_inside`, each with its current key
        self._root: _List = []
        self._inside: _List | _Object = self._root
        self._key = ""

    def read(self) -> Generator[None]:
        self._skip_blanks()
        yield from self._read_value()
        while self._inside is not self._root:
            yield from self._read_next()
        self.value = self._root[0]
        if self._at < len(self._body):
            raise self._invalid("there is something after its end")

    def _read_next(self) -> Generator[None]:
        """Reads the end of a list or object, or its next value."""
        byte = self._peek()
        closing = b"]" if isinstance(self._inside, list) else b"}"
        if byte == closing:
            self._skip_byte()
            self._inside, self._key = self._open.pop()
            return
        if self._inside:
            if byte != b",":
                raise self._invalid(f"a comma or {closing.decode()} is missing")
            self._skip_byte()
        if isinstance(self._inside, dict):
            yield from self._read_key()
        yield from self._read_value()

    def _read_key(self) -> Generator[None]:
        if self._peek() != b'"':
            raise self._invalid("a key in double quotes is missing")
        key = self._short_string()
        self._key = (yield from self._read_string()) if key is None else key
        if isinstance(self._inside, dict) and self._key in self._inside:
            raise _equal_keys(self._name, self._key)
        if self._peek() != b":":
            raise self._invalid("a colon is missing")
        self._skip_byte()

    def _read_value(self) -> Generator[None]:
        byte = self._peek()
        if byte == b'"':
            text = self._short_string()
            self._put((yield from self._read_string()) if text is None else text)
        elif byte in (b"[", b"{"):
            self._skip_byte()
            self._enter([] if byte == b"[" else {})
        elif isinstance(self._inside, list) and self._inside is not self._root:
            self._read_scalars(self._inside)
        else:
            self._put(self._loads(self._read_match(_SCALAR)))
            self._skip_blanks()
        yield

    def _read_scalars(self, into: _List) -> None:
        """Reads numbers, true, false and null up to the next string, list or object, at most one piece."""
        start = self._at
        run = self._read_match(_SCALARS)
        if self._peek() != b"]":  # the last value may be cut, and the next one needs its comma
            run = run[: run.rfind(b",")] if b"," in run else b""
            self._at = start + len(run)
        values = self._loads(b"[%b]" % run)
        if not values:
            raise self._invalid("a value is missing")
        self._numbers_left -= len(values)
        if self._numbers_left < 0:
            raise InvalidRequest(
                f"{self._name} has more than {self._most_numbers} numbers in lists; send fewer in one request."
            )
        into += values

    def _short_string(self) -> str | None:
        """Reads a string that is short and has no escapes, as nearly all keys are; None for another one."""
        found = _SHORT_STRING.match(self._body, self._at)
        if found is None:
            return None
        self._at = found.end()
        self._skip_blanks()
        return str(self._loads(found.group()))

    def _read_string(self) -> Generator[None, None, str]:
        """Reads a string from its opening quote past its closing one."""
        self._at += 1
        parts, characters = [], 0
        while True:
            start = self._at
            part = str(self._loads(b'"%b"' % self._read_match(_IN_STRING)))
            characters += len(part)
            if characters > _MOST_CHARACTERS:
                raise InvalidRequest(f"{self._name} has a string of more than {_MOST_CHARACTERS} characters.")
            parts.append(part)
            if self._peek() == b'"':
                break
            if self._at == start:
                raise self._invalid("a string has no end, or a wrong escape")
            yield
        self._skip_byte()
        return "".join(parts)

    def _enter(self, container: _List | _Object) -> None:
        if len(self._open) >= _MOST_DEPTH:
            raise NoObjectError(f"{self._name} is not valid JSON: it is nested too deeply.")
        self._put(container)
        self._open.append((self._inside, self._key))
        self._inside = container

    def _put(self, value: Any) -> None:
        self._values_left -= 1
        if self._values_left < 0:
            raise InvalidRequest(f"{self._name} has more than {_MOST_VALUES} values, numbers in lists not counted.")
        if isinstance(self._inside, list):
            self._inside.append(value)
        else:
            self._inside[self._key] = value

    def _peek(self) -> bytes:
        return self._body[self._at : self._at + 1]

    def _skip_byte(self) -> None:
        """Skips one byte and the blanks after it."""
        self._at += 1
        self._skip_blanks()

    def _skip_blanks(self) -> None:
        blanks = _BLANKS.match(self._body, self._at)
        assert blanks is not None
        self._at = blanks.end()

    def _read_match(self, pattern: "re.Pattern[bytes]") -> bytes:
        """Reads the bytes that match, at most one piece, which ends with a whole character."""
        start, end = self._at, self._at + _PIECE_BYTES
        while end < len(self._body) and end > start + _PIECE_BYTES - 4 and self._body[end] & 0xC0 == 0x80:
            end -= 1
        found = pattern.match(self._body, start, end)
        if found is not None:
            self._at = found.end()
        return self._body[start : self._at]

    def _loads(self, piece: bytes) -> Any:
        try:
            return orjson.loads(piece)
        except ValueError as error:
            _check_memory(error)
            raise self._invalid(str(error).partition(": line")[0]) from None

    def _invalid(self, why: str) -> NoObjectError:
        return NoObjectError(f"{self._name} is not valid JSON: {why}, near byte {self._at}.")
