"""What instances say to each other, as frozen dataclasses; to bytes and back. No I/O, no clock.

A message is JSON: `["beat", …]`, its fields in order. Whatever does not decode to a message, all the way down, is a
`Malformed` and never an exception: it comes from outside. seal.py makes frames of messages.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar, cast, get_args

import orjson

from caraserve.cluster.membership.swim import MAX_KNOWN, MAX_UPDATES, MemberRecord, MemberState, MemberUpdate
from caraserve.cluster.state.replicated_map import (
    BUCKETS,
    MAX_KEY,
    MAX_VALUE,
    Entry,
    EntryValue,
    InstanceLoad,
    ServingStatus,
    entry_fits,
)
from caraserve.util.endpoints import split_address

PROTOCOL_VERSION = 3  # raised whenever instances of before and after could not work together
MAX_NAME, MAX_ADDRESS = 64, 256  # characters
MAX_FRAME = 128 * 1024  # bytes; the largest are 256 records with long addresses, and entries, which are cut to fit
MAX_BATCH = 200  # entries in one frame: about a millisecond to take in
BATCH_BYTES = 96 * 1024
_PLAIN = re.compile(r"[ !#-\[\]-~]*")  # one byte each in JSON, so that the largest message fits into a frame
_MAX_QUOTE = 64
_MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Hello:
    """The first word on a connection, said again until both are `ready`: have seen the other repeat their nonce.

    Every version begins with these fields.
    """

    protocol: int
    cluster: str
    model: str  # digest of the base model
    name: str
    address: str
    epoch: int
    nonce: str
    echo: str  # the other's nonce, empty as long as it is not known
    ready: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """Instead of a session. `echo` is the refused one's nonce, so that nobody else's word can turn it away."""

    echo: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live, this is my load, and these are the roots of the names and of what I hold."""

    record: MemberRecord
    sequence: int
    load: InstanceLoad
    names_root: int
    held_root: int
    rumours: tuple[MemberUpdate, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with an `Ack`."""

    number: int
    rumours: tuple[MemberUpdate, ...]


@dataclass(frozen=True, slots=True)
class PingReq:
    """Ping `target` for me; its `Ack`, or your `Nack`."""

    number: int
    target: str
    rumours: tuple[MemberUpdate, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """The record of the one pinged."""

    number: int
    record: MemberRecord


@dataclass(frozen=True, slots=True)
class Nack:
    """I did what you asked, and it did not answer me either."""

    number: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Push-pull: all I know of members, and the roots of all my maps. `answer`: no answer is wanted to this one."""

    answer: bool
    records: tuple[MemberRecord, ...]
    roots: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """These are the sums of my copy of a lww_map: send me what yours has in the buckets that differ."""

    number: int
    owner: str
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of one lww_map: news when `number` is 0, else part of an answer of `total` entries.

    `whole`: all that differs is in that answer.
    """

    number: int
    owner: str
    entries: tuple[Entry, ...]
    total: int
    whole: bool


@dataclass(frozen=True, slots=True)
class PeerQuery:
    """A question to the instance itself (what would this request cost you?), or its answer. Not read here."""

    number: int
    answer: bool
    body: tuple[str | int | float, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """I go now: this connection ends without a suspicion."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class Malformed:
    """What came instead of a message, in words for a log."""

    reason: str


Message = Hello | Refuse | Heartbeat | Ping | PingReq | Ack | Nack | Sync | Compare | Entries | PeerQuery | Leave

# ---- reading


class _WrongError(ValueError):
    """A value that is not what the message has in that place."""


T = TypeVar("T")
Check = Callable[[object], T]


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise _WrongError("a count")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or abs(value) >= 2**62:
        raise _WrongError("a whole number")
    return value


def _word(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise _WrongError("a 64-bit number")
    return value


def _real(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(number := float(cast(float, value))):
        raise _WrongError("a number")
    return number


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _WrongError("true or false")
    return value


def _text(longest: int, shortest: int = 1) -> Check[str]:
    def check(value: object) -> str:
        if not isinstance(value, str) or not shortest <= len(value) <= longest or not _PLAIN.fullmatch(value):
            raise _WrongError(f"{shortest} to {longest} plain characters")
        return value

    return check


_any_address = _text(MAX_ADDRESS)


def _address(value: object) -> str:
    """Where an instance can be reached. The text goes into URLs that this instance asks for."""
    address = _any_address(value)
    try:
        split_address(address)
    except ValueError:
        raise _WrongError("HOST:PORT") from None
    return address


def _many(check: Check[T], most: int, least: int = 0) -> Check[tuple[T, ...]]:
    def check_all(value: object) -> tuple[T, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise _WrongError(f"a list of {least} to {most}")
        return tuple(map(check, value))

    return check_all


def _shape(make: Callable[..., T], *checks: Check[object]) -> Check[T]:
    def read(value: object) -> T:
        if not isinstance(value, list) or len(value) != len(checks):
            raise _WrongError(f"{len(checks)} fields")
        return make(*(check(item) for check, item in zip(checks, value, strict=True)))

    return read


def _state(value: object) -> MemberState:
    if type(value) is not int or value not in MemberState.__members__.values():
        raise _WrongError("a state")
    return MemberState(value)


def _status(value: object) -> ServingStatus:
    if value not in get_args(ServingStatus):
        raise _WrongError("a status")
    return cast(ServingStatus, value)


def _pair(one: Check[T], two: Check[object]) -> Check[tuple[T, object]]:
    return _shape(lambda first, second: (first, second), one, two)


def _quoted(value: object) -> str | int | float:
    if isinstance(value, str) and len(value) <= MAX_VALUE:
        return value
    return value if type(value) is int and abs(value) < 2**62 else _real(value)


def _entry(value: object) -> Entry:
    entry = _raw_entry(value)
    if not entry_fits(entry.key, entry.value) or (entry.deleted and entry.value):
        raise _WrongError("a entry")
    return entry


def _value_item(value: object) -> str | int:
    if not isinstance(value, str) and type(value) is not int:
        raise _WrongError("a text or a whole number")
    return value


def _key(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_KEY:
        raise _WrongError("a key")
    return value


_NAME, _OWNER, _NONCE = _text(MAX_NAME), _text(MAX_NAME, 0), _text(64)
_MEMBER: Check[MemberRecord] = _shape(MemberRecord, _NAME, _address, _count, _count, _state)
_RUMOURS = _many(_shape(MemberUpdate, _MEMBER, _OWNER), MAX_UPDATES)
_LOAD: Check[InstanceLoad] = _shape(
    *(InstanceLoad, _status, _count, _count, _many(_pair(_count, _count), _MAX_RANKS)),
    *(_count, _count, _count, _whole, _count, _real, _real, _real),
)
_VALUE: Check[EntryValue] = _many(_value_item, 8)
_raw_entry: Check[Entry] = _shape(Entry, _key, _VALUE, _count, _NAME, _flag)

_own_hello = _shape(Hello, _count, _OWNER, _text(256, 0), _NAME, _address, _count, _NONCE, _text(64, 0), _flag)


def _hello(value: object) -> Hello:
    """One of another version is read as far as it is known here, so that both sides can say which theirs is."""
    if isinstance(value, list) and value and value[0] != PROTOCOL_VERSION:
        value = value[: len(fields(Hello))]
    return _own_hello(value)


_READERS: dict[str, Check[Message]] = {
    "hello": _hello,
    "refuse": _shape(Refuse, _NONCE, _text(1000)),
    "beat": _shape(Heartbeat, _MEMBER, _count, _LOAD, _word, _word, _RUMOURS),
    "ping": _shape(Ping, _count, _RUMOURS),
    "ping-req": _shape(PingReq, _count, _NAME, _RUMOURS),
    "ack": _shape(Ack, _count, _MEMBER),
    "nack": _shape(Nack, _count),
    "sync": _shape(Sync, _flag, _many(_MEMBER, MAX_KNOWN), _many(_pair(_OWNER, _word), MAX_KNOWN + 1)),
    "compare": _shape(Compare, _count, _OWNER, _many(_word, BUCKETS, BUCKETS)),
    "entries": _shape(Entries, _count, _OWNER, _many(_entry, MAX_BATCH), _count, _flag),
    "quote": _shape(PeerQuery, _count, _flag, _many(_quoted, _MAX_QUOTE)),
    "leave": _shape(Leave, _MEMBER),
}
_KINDS: dict[type[Message], str] = {
    Hello: "hello",
    Refuse: "refuse",
    Heartbeat: "beat",
    Ping: "ping",
    PingReq: "ping-req",
    Ack: "ack",
    Nack: "nack",
    Sync: "sync",
    Compare: "compare",
    Entries: "entries",
    PeerQuery: "quote",
    Leave: "leave",
}


def decode(body: bytes) -> Message | Malformed:
    """The message in a frame's body. Never raises."""
    if len(body) > MAX_FRAME:
        return Malformed(f"a frame of {len(body)} bytes; {MAX_FRAME} is the limit")
    try:
        value = orjson.loads(body)
        if not isinstance(value, list) or not value or not isinstance(value[0], str) or value[0] not in _READERS:
            raise _WrongError("a message of a known kind")
        return _READERS[value[0]](value[1:])
    except _WrongError as error:
        return Malformed(f"not {error} where the message has one")
    except ValueError as error:
        return Malformed(f"not JSON: {error}")


def is_valid_identity(name: str, address: str) -> bool:
    """Whether others could read an instance's name and address."""
    try:
        return bool(_NAME(name) and _address(address))
    except _WrongError:
        return False


def entry_from_fields(value: object) -> Entry | None:
    """A entry from elsewhere than a frame, as the list of its fields; None unless it could have come in a frame."""
    try:
        return _entry(value)
    except _WrongError:
        return None


def encode(message: Message) -> bytes:
    """The body of a frame. Our own messages are within the limits that `decode` holds others to."""
    return orjson.dumps(
        [_KINDS[type(message)], *_plain(message)], default=_plain, option=orjson.OPT_PASSTHROUGH_DATACLASS
    )


def entry_batches(entries: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Entries in order, cut so that each piece fits into a frame. Reads no further than the pieces that are taken."""
    piece: list[Entry] = []
    room = BATCH_BYTES
    for entry in entries:
        # JSON escapes at worst six characters for one; a field around them costs a few more
        size = 6 * (len(entry.key) + len(entry.node) + sum(len(str(item)) + 4 for item in entry.value)) + 40
        if piece and (len(piece) == MAX_BATCH or size > room):
            yield tuple(piece)
            piece, room = [], BATCH_BYTES
        piece.append(entry)
        room -= size
    if piece:
        yield tuple(piece)


def _plain(value: object) -> list[object]:
    """A dataclass as the list of its fields; orjson asks for each one it meets."""
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    raise TypeError(f"{type(value)} is in no message")
