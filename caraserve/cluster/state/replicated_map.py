"""State that all instances share: the adapter registry, each instance's advertised values, and loads. No I/O, no clock.

The registry is one map that every instance writes: adapters by name, and settings such as aliases. The values that an
instance advertises are a map that only this instance writes. Both are `LwwMap`s: the newer entry of a key wins, by a
hybrid logical clock, and a removed key leaves a tombstone. Two copies are compared by one checksum, then by 256, and
only buckets that differ are sent: 40,000 names are 5 MB. Loads are not merged: the newest of each instance counts, with
its age.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from caraserve.cluster.state.lww_map import (
    MAX_KEY,
    MOST_EXPIRED,
    SETTING_SEPARATOR,
    Count,
    Entry,
    EntryValue,
    Integer,
    LwwMap,
    entry_fits,
    is_expired,
    is_setting,
)
from caraserve.core.adapter_facts import NO_FACTS, AdapterFacts, read_facts
from caraserve.core.adapter_rules import ADAPTER_NAME, DIGEST
from caraserve.errors import InvalidRequest
from caraserve.util.hybrid_clock import HybridClock

REGISTRY = ""  # the owner of the map of adapter names; no instance has an empty name
MAX_AHEAD_S = 3600.0  # an entry from further in the future has a wrong clock's time, and would win until then
_MOST_ANSWERS = 200  # entries about this instance corrected at once: takes some milliseconds
_MOST_RANK, _MOST_BYTES = 1 << 16, 1 << 50  # of an adapter; far more than any instance serves
_UPLOAD = ":upload:"  # in a key of an instance's own map; then the name of an adapter that is uploaded to it
_SETTING_KEY = re.compile(rf"[a-z]{{1,32}}{SETTING_SEPARATOR}{ADAPTER_NAME.pattern}")
ServingStatus = Literal["starting", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """The adapter that a name stands for on all instances."""

    name: str
    digest: str  # empty while it is uploaded
    rank: int
    num_bytes: int
    facts: AdapterFacts = NO_FACTS


class Tier(IntEnum):
    """The nearest place to an instance's device where it has an adapter."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    ABSENT = 3


def tier_of(value: EntryValue) -> Tier:
    """Returns the tier in the value that an instance advertises for a digest; DISK if it is none that is known."""
    match value:
        case (int(number), *_) if number in (Tier.DEVICE, Tier.HOST):
            return Tier(number)
    return Tier.DISK


def upload_key(name: str) -> str:
    """Returns the key under which an instance advertises an adapter that takes requests while it is uploaded to it."""
    return _UPLOAD + name


def upload_of(name: str, value: EntryValue) -> RegisteredAdapter | None:
    """Returns the adapter in the value of an upload, or None. Its digest is empty: it is not known yet."""
    match value:
        case (int(rank), int(num_bytes), *_) if rank > 0 and num_bytes > 0:
            return RegisteredAdapter(name, "", rank, num_bytes)
    return None


class InstanceLoad(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An instance's load, sent with every heartbeat: what a router needs to predict its times."""

    status: ServingStatus = "starting"
    running: Count = 0
    queued: Count = 0
    # (rank, requests): counts, so that the largest rank falls when its last request ends
    ranks: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=64)] = ()
    queued_tokens: Count = 0  # of prompts not yet prefilled
    queued_token_ranks: Count = 0  # Σ tokens · rank of them
    kv_tokens: Count = 0  # for which there are KV blocks
    kv_free_tokens: Integer = 0  # of them, less those that queued requests will need: below zero while these wait
    queue_room: Count = 0  # requests that it accepts before it refuses
    response_tokens: float = 0.0  # recent mean length of answers
    iteration_age_s: float = 0.0  # since the last iteration ended: an engine may hang while its event loop answers
    lag_s: float = 0.0  # of the event loop


class ReplicatedState:
    """All maps of one instance, and the newest load of each other instance."""

    def __init__(self, me: str, base_name: str = "") -> None:
        """`base_name`: the base model's name, which no adapter can have."""
        self.refused = 0  # entries of other instances that are not valid
        self.objection = ""  # why the last of them was refused
        # True if others take another instance of this name for this one. Then its entries are not corrected, because
        # the two would correct each other without end.
        self.is_outbid = False
        self.agreed = False  # whether another instance's registry has once had nothing that this one lacked
        self.me, self._base_name = me, base_name
        self._clock = HybridClock()
        self._maps = {owner: LwwMap(partial(self._on_evicted, owner)) for owner in (REGISTRY, me)}
        self.registry = self._maps[REGISTRY]  # adapters by name, and settings
        self._contested: dict[str, None] = {}  # keys of this instance's map for which others sent another entry
        self._held: dict[str, EntryValue] = {}  # the true values of this instance, whatever an earlier run advertised
        self._holders: dict[str, dict[str, EntryValue]] = {}  # key → instance → value: an index of advertised values
        self._loads: dict[str, tuple[tuple[int, int], InstanceLoad, float]] = {}

    def map_of(self, owner: str) -> LwwMap | None:
        """Returns the registry (owner REGISTRY), or the map of what an instance advertises."""
        return self._maps.get(owner)

    def roots(self) -> tuple[tuple[str, int], ...]:
        """Returns (owner, root) of every map."""
        return tuple((owner, lww_map.root) for owner, lww_map in self._maps.items())

    def add_owner(self, owner: str) -> None:
        """Adds a map for what one more instance advertises."""
        self._maps.setdefault(owner, LwwMap(partial(self._on_evicted, owner)))

    def forget(self, owner: str) -> None:
        """Removes the map and load of an instance that is gone for good."""
        if owner not in (REGISTRY, self.me):
            for entry in self._maps.pop(owner, ()):
                self._update_holders(owner, replace(entry, deleted=True))
            self._loads.pop(owner, None)

    # ---- own entries

    def register(self, adapter: RegisteredAdapter, wall_ms: int) -> list[Entry]:
        """Registers an adapter by name. Raises InvalidRequest for an entry that other instances would refuse."""
        facts = (adapter.facts.text,) if adapter.facts.text else ()
        return self._write(REGISTRY, adapter.name, (adapter.digest, adapter.rank, adapter.num_bytes, *facts), wall_ms)

    def remove(self, name: str, wall_ms: int) -> list[Entry]:
        """Removes a name from the registry. Returns the entries to push; none if the name is not registered."""
        entry = self.registry.get(name)
        return [] if entry is None or entry.deleted else self._write(REGISTRY, name, None, wall_ms)

    def advertise(self, key: str, value: EntryValue, wall_ms: int) -> list[Entry]:
        """Advertises a value of this instance, such as the tier of a digest whose bytes it has."""
        entries = self._write(self.me, key, value, wall_ms)
        self._held[key] = value
        return entries

    def withdraw(self, key: str, wall_ms: int) -> list[Entry]:
        """Withdraws the value that was advertised under a key."""
        return [] if self._held.pop(key, None) is None else self._write(self.me, key, None, wall_ms)

    def _write(self, owner: str, key: str, value: EntryValue | None, wall_ms: int) -> list[Entry]:
        if not entry_fits(key, value or ()):
            raise InvalidRequest(f"the cluster shares names of 1 to {MAX_KEY} characters; {key[:80]!r} is not one")
        old = self._maps[owner].get(key)
        if old is not None and old.value == (value or ()) and old.deleted == (value is None):
            return []  # the same value again would only cost messages
        entry = Entry(key, value or (), self._clock.next(wall_ms), self.me, deleted=value is None)
        if (limit := self._maps[owner].lacks_room(entry)) is not None:
            raise InvalidRequest(f"the cluster shares {limit}; remove some before {key[:80]!r}")
        self._maps[owner].merge(entry)
        self._update_holders(owner, entry)
        return [entry]

    # ---- entries of other instances

    def merge(self, owner: str, entries: Iterable[Entry], wall_ms: int) -> tuple[list[Entry], list[Entry]]:
        """Merges entries. Returns those that were new, and the corrections of wrong entries about this instance."""
        lww_map = self._maps.get(owner)
        news: list[Entry] = []
        for entry in entries if lww_map is not None else ():
            if (objection := self._objection(owner, entry, wall_ms)) is not None:
                self.refused, self.objection = self.refused + 1, objection
            elif not is_expired(entry, wall_ms) and lww_map is not None and lww_map.merge(entry):
                self._clock.observe(entry.hlc)
                self._update_holders(owner, entry)
                news.append(entry)
                if owner == self.me:
                    self._contested[entry.key] = None
        return news, self.correct_own_entries(wall_ms) if owner == self.me else []

    def _objection(self, owner: str, entry: Entry, wall_ms: int) -> str | None:
        """Returns why an entry of another instance is refused, for a log, or None if it is accepted.

        A value of an unknown shape may be a later version's: it is kept for other instances and not used by this one.
        """
        if entry.time_ms - wall_ms > MAX_AHEAD_S * 1000:
            return (
                f"{entry.node} wrote it over an hour ahead of this instance's clock: is a clock wrong, here or there?"
            )
        if owner != REGISTRY:
            return None if entry.node == owner else f"{entry.node} wrote it, and only {owner} may"
        if _SETTING_KEY.fullmatch(entry.key):
            return None
        if not ADAPTER_NAME.fullmatch(entry.key) or entry.key == self._base_name:
            return f"{entry.node} gave the name {entry.key[:80]!r}, which no adapter can have"
        adapter = _adapter(entry)
        if adapter is not None and not _is_possible(adapter):
            return f"{entry.node} gave {entry.key!r} a digest, rank or size that no adapter has: {entry.value!r:.200}"
        return None

    def has_room(self, entry: Entry) -> bool:
        """Whether an entry fits into the registry without the eviction of another one."""
        return self.registry.lacks_room(entry) is None

    def correct_own_entries(self, wall_ms: int) -> list[Entry]:
        """Corrects wrong entries of others about this instance, at most 200 per call. Returns the corrections."""
        answers: list[Entry] = []
        for key in () if self.is_outbid else list(islice(self._contested, _MOST_ANSWERS)):
            del self._contested[key]
            # The entry is of an earlier run, whose clock may have been ahead. The correction has a later time.
            answers += self._write(self.me, key, self._held.get(key), wall_ms)
        return answers

    def take_load(self, name: str, epoch: int, sequence: int, load: InstanceLoad, now: float) -> bool:
        """Sets the load of an instance, if newer by (epoch, sequence). Returns whether it was."""
        old = self._loads.get(name)
        if old is not None and old[0] >= (epoch, sequence):
            return False
        self._loads[name] = ((epoch, sequence), load, now)
        return True

    def expire(self, wall_ms: int) -> None:
        """Removes expired tombstones, at most 200 per call."""
        most = MOST_EXPIRED
        for lww_map in self._maps.values():
            most -= lww_map.expire(wall_ms, most)

    # ---- queries

    @property
    def dropped(self) -> int:
        """The number of tombstones that were removed before their time, for lack of room."""
        return sum(lww_map.dropped for lww_map in self._maps.values())

    def load(self, name: str, now: float) -> tuple[InstanceLoad, float] | None:
        """Returns the newest load of another instance and its age in seconds."""
        found = self._loads.get(name)
        return (found[1], now - found[2]) if found else None

    def adapter(self, name: str) -> RegisteredAdapter | None:
        """Returns the adapter that a name stands for, or None."""
        entry = self.registry.get(name)
        return _adapter(entry) if entry else None

    def adapters(self) -> Iterator[RegisteredAdapter]:
        """Yields all adapters, in no order."""
        for entry in self.registry:
            if (adapter := _adapter(entry)) is not None:
                yield adapter

    def holders(self, key: str) -> dict[str, EntryValue]:
        """Returns the advertised value under a key for each instance that has one, dead instances included until
        forgotten."""
        return dict(self._holders.get(key, ()))

    def _update_holders(self, owner: str, entry: Entry) -> None:
        """Updates the index of advertised values."""
        if owner == REGISTRY:
            return
        holders = self._holders.setdefault(entry.key, {})
        if entry.deleted:
            holders.pop(owner, None)
        else:
            holders[owner] = entry.value
        if not holders:
            del self._holders[entry.key]

    def _on_evicted(self, owner: str, entry: Entry) -> None:
        """Handles the removal of an entry for lack of room, which only entries of other instances cause."""
        self.refused += 1
        full = f"map of {owner}" if owner else "registry"
        self.objection = f"{entry.key[:80]!r} was the oldest entry in a full {full}"
        self._update_holders(owner, replace(entry, deleted=True))


def _adapter(entry: Entry) -> RegisteredAdapter | None:
    """Returns the adapter in an entry, or None for a tombstone, a setting, or a value of another shape, as of a later
    version."""
    match entry.value:
        case (str(digest), int(rank), int(num_bytes), *rest) if not (entry.deleted or is_setting(entry.key)):
            return RegisteredAdapter(entry.key, digest, rank, num_bytes, _facts(rest))
    return None


def _facts(rest: list[str | int]) -> AdapterFacts:
    """Returns the facts behind an adapter's size; none if they are not valid, or another version's."""
    try:
        return read_facts(rest[0]) if rest and isinstance(rest[0], str) else NO_FACTS
    except ValueError:
        return NO_FACTS


def _is_possible(adapter: RegisteredAdapter) -> bool:
    has_digest = DIGEST.fullmatch(adapter.digest) is not None
    return has_digest and 0 < adapter.rank <= _MOST_RANK and 0 < adapter.num_bytes <= _MOST_BYTES
