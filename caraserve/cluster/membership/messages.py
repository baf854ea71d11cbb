"""Messages between instances, and their JSON form. No I/O, no clock.

A message is a JSON array: its kind, then its fields in order. `auth.py` makes frames of messages. The types of the
fields state their bounds, and `decode` returns `Malformed` for a message outside them.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from caraserve.cluster.membership.swim import MAX_KNOWN, MAX_UPDATES, MemberRecord, MemberUpdate
from caraserve.cluster.state.lww_map import (
    BUCKETS,
    MAX_VALUE,
    PLAIN,
    Address,
    Count,
    Entry,
    Integer,
    Name,
    NameOrEmpty,
    is_valid_entry,
)
from caraserve.cluster.state.replicated_map import InstanceLoad
from caraserve.util.option_values import split_address

PROTOCOL_VERSION = 6  # raised with each change after which old and new instances cannot work together
MAX_FRAME = 128 * 1024  # bytes; the largest are 256 records with long addresses, and entries, which are cut to fit
MAX_BATCH = 200  # entries in one frame: about a millisecond to merge
BATCH_BYTES = 96 * 1024

Word = Annotated[int, Meta(ge=0)]  # of 64 bits; msgspec has no bounds that large, so `decode` checks the upper one
Updates = Annotated[tuple[MemberUpdate, ...], Meta(max_length=MAX_UPDATES)]
QueryItem = Annotated[str, Meta(max_length=MAX_VALUE)] | Integer | float


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages whose number of fields is fixed."""


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message on a connection, repeated until both sides are `ready`: have received their own nonce back.

    Every protocol version begins with these fields; further ones are ignored, so that both sides can log both versions.
    """

    protocol: Count
    cluster: NameOrEmpty
    model: Annotated[str, Meta(max_length=256, pattern=PLAIN)]  # digest of the base model
    name: Name
    address: Address
    epoch: Count
    nonce: Name
    echo: NameOrEmpty  # the receiver's nonce, empty while it is not known
    ready: bool


class _ExactHello(Hello, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """A `Hello` of this protocol version."""


class Refuse(_Message, frozen=True, tag="refuse"):
    """Refuses a session. `echo` is the receiver's nonce, so that only the peer of this connection can refuse it."""

    echo: Name
    reason: Annotated[str, Meta(min_length=1, max_length=1000, pattern=PLAIN)]


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """The sender's load, and the roots of its registry and of the entries that it advertises."""

    record: MemberRecord
    sequence: Count
    load: InstanceLoad
    registry_root: Word
    advertised_root: Word
    updates: Updates


class Ping(_Message, frozen=True, tag="ping"):
    """A probe; the receiver answers with an `Ack`."""

    number: Count
    updates: Updates


class PingRequest(_Message, frozen=True, tag="ping-req"):
    """Makes the receiver ping `target`, and forward its `Ack` or send a `Nack`."""

    number: Count
    target: Name
    updates: Updates


class Ack(_Message, frozen=True, tag="ack"):
    """The record of the instance that was pinged."""

    number: Count
    record: MemberRecord


class Nack(_Message, frozen=True, tag="nack"):
    """The target of a `PingRequest` has not answered its sender either."""

    number: Count


class Sync(_Message, frozen=True, tag="sync"):
    """Push-pull: all records that the sender has, and the roots of all its maps. An answer gets no answer."""

    is_answer: bool
    records: Annotated[tuple[MemberRecord, ...], Meta(max_length=MAX_KNOWN)]
    roots: Annotated[tuple[tuple[NameOrEmpty, Word], ...], Meta(max_length=MAX_KNOWN + 1)]


class Compare(_Message, frozen=True, tag="compare"):
    """The sums of the sender's copy of a map; the receiver sends its entries of the buckets that differ."""

    number: Count
    owner: NameOrEmpty
    sums: Annotated[tuple[Word, ...], Meta(min_length=BUCKETS, max_length=BUCKETS)]


class Entries(_Message, frozen=True, tag="entries"):
    """Entries of one map: news when `number` is 0, else part of the answer, of `total` entries, to that `Compare`.

    `is_complete`: the answer has everything that differs.
    """

    number: Count
    owner: NameOrEmpty
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_BATCH)]
    total: Count
    is_complete: bool


class PeerQuery(_Message, frozen=True, tag="query"):
    """A query to another instance, such as for the cost of a request, or the answer to one."""

    number: Count
    is_answer: bool
    body: Annotated[tuple[QueryItem, ...], Meta(max_length=64)]


class Leave(_Message, frozen=True, tag="leave"):
    """The sender shuts down: its connection ends without a suspicion."""

    record: MemberRecord


class Malformed(Struct, frozen=True):
    """The result of decoding anything that is not a message, with the reason for a log."""

    reason: str


Message = Hello | Refuse | Heartbeat | Ping | PingRequest | Ack | Nack | Sync | Compare | Entries | PeerQuery | Leave
_decoder = msgspec.json.Decoder(Message)
_encoder = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """Returns the body of a frame. This instance's own messages are within the bounds that `decode` checks."""
    return _encoder.encode(message)


def decode(body: bytes) -> Message | Malformed:
    """Returns the message in a frame's body. Never raises."""
    if len(body) > MAX_FRAME:
        return Malformed(f"a frame of {len(body)} bytes; {MAX_FRAME} is the limit")
    try:
        message = _decoder.decode(body)
        if isinstance(message, Hello) and message.protocol == PROTOCOL_VERSION:
            msgspec.json.decode(body, type=_ExactHello)
    except (ValueError, RecursionError) as error:
        return Malformed(str(error))
    return message if _is_valid(message) else Malformed("an address, entry or 64-bit number out of bounds")


def _is_valid(message: Message) -> bool:
    """Checks what the types of the fields cannot express."""
    match message:
        case Hello(address=address):
            return _is_address(address)
        case Heartbeat(record=record, updates=updates, registry_root=one, advertised_root=other):
            return _is_address(record.address) and _are_valid(updates) and max(one, other) < 2**64
        case Ping(updates=updates) | PingRequest(updates=updates):
            return _are_valid(updates)
        case Ack(record=record) | Leave(record=record):
            return _is_address(record.address)
        case Sync(records=records, roots=roots):
            return all(_is_address(record.address) for record in records) and all(root < 2**64 for _, root in roots)
        case Compare(sums=sums):
            return max(sums) < 2**64
        case Entries(entries=entries):
            return all(map(is_valid_entry, entries))
    return True


def _are_valid(updates: tuple[MemberUpdate, ...]) -> bool:
    return all(_is_address(update.record.address) for update in updates)


@lru_cache(maxsize=1024)  # every heartbeat repeats the addresses of instances
def _is_address(address: str) -> bool:
    """Whether this is HOST:PORT and nothing else, because it becomes part of URLs that this instance requests."""
    try:
        split_address(address)
    except ValueError:
        return False
    return True


def is_valid_identity(name: str, address: str) -> bool:
    """Whether other instances would accept an instance's name and address."""
    try:
        msgspec.convert((name, address), tuple[Name, Address])
    except msgspec.ValidationError:
        return False
    return _is_address(address)


def entry_batches(entries: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Yields the entries in order, in batches that each fit into a frame. Consumes only the batches that are taken."""
    batch: list[Entry] = []
    free = BATCH_BYTES
    for entry in entries:
        # JSON escapes need at worst six bytes for a character, and the fields around them a few more.
        size = 6 * (len(entry.key) + len(entry.node) + sum(len(str(item)) + 4 for item in entry.value)) + 40
        if batch and (len(batch) == MAX_BATCH or size > free):
            yield tuple(batch)
            batch, free = [], BATCH_BYTES
        batch.append(entry)
        free -= size
    if batch:
        yield tuple(batch)
