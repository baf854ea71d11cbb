"""A last-writer-wins map: the newer entry of a key wins, and a removed key leaves a tombstone. No I/O, no clock."""

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from caraserve.core.adapter_rules import MAX_SETTING, SETTING_KINDS
from caraserve.core.adapter_rules import TOMBSTONE_S as TOMBSTONE_S
from caraserve.util.hybrid_clock import wall_ms_of

# Types of the fields of entries and messages, with bounds that msgspec checks when it decodes them.
MAX_NAME, MAX_ADDRESS = 64, 256  # characters
# Printable ASCII without quote and backslash: one byte each in JSON, so that the largest message fits into a frame.
PLAIN = r"\A[ !#-\[\]-~]*\Z"
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Integer = Annotated[int, Meta(gt=-(2**62), lt=2**62)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=PLAIN)]
NameOrEmpty = Annotated[str, Meta(max_length=MAX_NAME, pattern=PLAIN)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS, pattern=PLAIN)]  # HOST:PORT; `messages.decode` checks the form

BUCKETS = 256
MAX_ENTRIES = 100_000  # keys in one map
MAX_TOMBSTONES = 100_000  # in one map, beside its keys
MAX_KEY, MAX_VALUE = 256, 4096  # characters of a key, and of a value's texts together
MAX_ITEMS = 8  # in a value
# Of the values of all entries in one map: of names, 200 bytes for each at least; of settings of the kinds that this
# version knows; and of those that only later ones do.
MOST_VALUE_BYTES = (32 << 20, 32 << 20, 1 << 20)
_BUDGETS = ("adapters", "settings", "settings of kinds that this version does not know")
SETTING_SEPARATOR = "/"  # between a setting's kind and name, its key in the registry; no adapter's name has one
MOST_EXPIRED = 200  # tombstones removed at once: takes a millisecond
_MASK = 2**64 - 1
_PACKED = re.compile(rf"[A-Za-z0-9+/=]{{1,{MAX_SETTING}}}")

EntryValue: TypeAlias = tuple[str | int, ...]


class Entry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A key's newest value, or its tombstone (`deleted`, with an empty value), written by instance `node` at `hlc`."""

    key: Annotated[str, Meta(max_length=MAX_KEY)]
    value: Annotated[EntryValue, Meta(max_length=MAX_ITEMS)]
    hlc: Count  # ms since 1970, then 16 bits that count within one ms
    node: Name
    deleted: bool = False

    @property
    def order(self) -> tuple[int, str, bool, str]:
        """The key by which entries of a key are ordered. The order is total, so that merging in any sequence gives one
        result."""
        return (self.hlc, self.node, self.deleted, repr(self.value))

    @property
    def time_ms(self) -> int:
        """When it was written, in ms since 1970 by its writer's clock."""
        return wall_ms_of(self.hlc)


def is_setting(key: str) -> bool:
    """Whether a key of the registry is a setting's, not an adapter's name."""
    return SETTING_SEPARATOR in key


def entry_fits(key: str, value: EntryValue) -> bool:
    """Whether other instances would accept an entry: sizes within bounds, and text without lone surrogates."""
    if value and is_setting(key):
        return len(key) <= MAX_KEY and len(value) == 1 and _PACKED.fullmatch(str(value[0])) is not None
    texts = [key, *(item for item in value if isinstance(item, str))]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    numbers = all(0 <= item < 2**62 for item in value if not isinstance(item, str))
    sized = 0 < len(key) <= MAX_KEY and len(value) <= MAX_ITEMS and sum(map(len, texts)) <= len(key) + MAX_VALUE
    return sized and numbers


def is_valid_entry(entry: Entry) -> bool:
    """Whether other instances would accept an entry, beyond what the types of its fields express."""
    return entry_fits(entry.key, entry.value) and not (entry.deleted and entry.value)


def entry_from_fields(fields: object) -> Entry | None:
    """Returns the entry with a list of fields, or None unless a message could contain it."""
    try:
        entry = msgspec.convert(fields, Entry)
    except msgspec.ValidationError:
        return None
    return entry if is_valid_entry(entry) else None


class _ByAge:
    """A heap of a map's entries, oldest first, by (hlc, key). It also has outdated items, which do not count."""

    def __init__(self, is_current: Callable[[int, str], bool]) -> None:
        self._is_current = is_current
        self._heap: list[tuple[int, str]] = []

    def add(self, hlc: int, key: str, count: int) -> None:
        """Adds an entry. `count`: how many items are current."""
        heapq.heappush(self._heap, (hlc, key))
        if len(self._heap) > 2 * count + MOST_EXPIRED:
            # A sorted list is a heap.
            self._heap = sorted({item for item in self._heap if self._is_current(*item)})

    def oldest(self) -> tuple[int, str] | None:
        """Returns the oldest entry's time and key."""
        while self._heap and not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> None:
        """Takes out the item that `oldest` has returned, and its repetitions."""
        item = self._heap[0]
        while self._heap and self._heap[0] == item:
            heapq.heappop(self._heap)


class LwwMap:
    """A last-writer-wins map that can be compared with another copy bucket by bucket.

    It is bounded, and a full map keeps the newest entries: for a newer one, the oldest ones are removed. So copies that
    exchange their entries become equal in whatever order these arrive.
    """

    def __init__(self, evicted: Callable[[Entry], None] = lambda entry: None) -> None:
        """`evicted` is called with each value that is removed for lack of room."""
        self.root = 0  # equal on two copies exactly if their entries are equal, except for a chance of 2⁻⁶⁴
        self.dropped = 0  # tombstones removed before their time: an instance with the old entry would restore it
        self._buckets: list[dict[str, Entry]] = [{} for _ in range(BUCKETS)]
        self._sums = [0] * BUCKETS
        self._size = 0
        self._tombstones = 0
        self._value_bytes = [0] * len(MOST_VALUE_BYTES)
        self._evicted = evicted
        self._buried = _ByAge(partial(self._is_current, True))
        self._kept = [_ByAge(partial(self._is_current, False)) for _ in MOST_VALUE_BYTES]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        for bucket in self._buckets:
            yield from tuple(bucket.values())  # a copy: the map may change during the iteration

    @property
    def sums(self) -> tuple[int, ...]:
        """One checksum for each bucket."""
        return tuple(self._sums)

    def get(self, key: str) -> Entry | None:
        """Returns the entry or tombstone of a key, or None."""
        return self._buckets[_bucket(key)].get(key)

    def merge(self, entry: Entry) -> bool:
        """Adds an entry if it is newer. Returns whether it was.

        The operation is idempotent. It is commutative and associative while there is room, and in a full map of values
        of one size, as adapters' are. With several sizes, an evicted entry might fit again, and is lost if no copy has
        it; but copies that exchange their entries until nothing is new are equal. An entry that would be the oldest
        in a full map is not kept; an older value of its key is removed all the same.
        """
        index = _bucket(entry.key)
        old = self._buckets[index].get(entry.key)
        if old is not None and old.order >= entry.order:
            return False
        if entry.deleted:
            if self._is_too_old(entry) and (old is None or old.deleted):
                return False
        elif (victims := self._victims(entry, old)) is None:
            self._evict(old)
            return False
        else:
            for victim in victims:
                self._evict(victim)
        self._take_out(index, old)
        self._put_in(index, entry)
        return True

    def lacks_room(self, entry: Entry) -> str | None:
        """Returns the limit that leaves no room for an entry unless an older one is evicted, in words, or None."""
        old, budget = self.get(entry.key), _budget(entry.key)
        if self._num_excess(entry, old) > 0:
            return f"{MAX_ENTRIES:,} names and settings at most"
        if self._num_excess_bytes(entry, old) > 0:
            return f"{MOST_VALUE_BYTES[budget]:,} bytes of {_BUDGETS[budget]} at most"
        return None

    def differing(self, sums: Iterable[int]) -> list[int]:
        """Returns the buckets in which another copy, given by its sums, differs."""
        return [index for index, (mine, theirs) in enumerate(zip(self._sums, sums, strict=True)) if mine != theirs]

    def bucket(self, index: int) -> list[Entry]:
        """Returns all entries of a bucket."""
        return list(self._buckets[index].values())

    def expire(self, wall_ms: int, most: int) -> int:
        """Removes up to `most` expired tombstones. Returns how many."""
        for count in range(most):
            oldest = self._buried.oldest()
            tombstone = self.get(oldest[1]) if oldest is not None else None
            if tombstone is None or not is_expired(tombstone, wall_ms):
                return count
            self._take_out(_bucket(tombstone.key), tombstone)
        return most

    def _is_too_old(self, tombstone: Entry) -> bool:
        """Whether there is no room for a tombstone; a newer one replaces the oldest."""
        oldest = self._buried.oldest() if self._tombstones >= MAX_TOMBSTONES else None
        return oldest is not None and oldest >= (tombstone.hlc, tombstone.key)

    def _num_excess(self, entry: Entry, old: Entry | None) -> int:
        is_another = not entry.deleted and (old is None or old.deleted)
        return self._size - self._tombstones + 1 - MAX_ENTRIES if is_another else 0

    def _num_excess_bytes(self, entry: Entry, old: Entry | None) -> int:
        budget, more = _budget(entry.key), _value_bytes(entry) - _value_bytes(old)
        return self._value_bytes[budget] + more - MOST_VALUE_BYTES[budget] if more > 0 else 0

    def _victims(self, entry: Entry, old: Entry | None) -> list[Entry] | None:
        """Returns the oldest entries, which have to be evicted for another one, or None if they are not all older."""
        excess, excess_bytes = self._num_excess(entry, old), self._num_excess_bytes(entry, old)
        victims: list[Entry] = []
        while excess > 0 or excess_bytes > 0:
            kinds = self._kept if excess_bytes <= 0 else [self._kept[_budget(entry.key)]]
            found = [(oldest, kind) for kind in kinds if (oldest := kind.oldest()) is not None]
            item, kind = min(found, key=lambda one: one[0], default=(None, None))
            if item is None or kind is None or item >= (entry.hlc, entry.key):
                for victim in victims:
                    self._kept[_budget(victim.key)].add(victim.hlc, victim.key, self._size - self._tombstones)
                return None
            kind.pop()
            victim = self._buckets[_bucket(item[1])][item[1]]
            if victim is not old:
                victims.append(victim)
                excess, excess_bytes = excess - 1, excess_bytes - _value_bytes(victim)
        return victims

    def _is_current(self, deleted: bool, hlc: int, key: str) -> bool:
        entry = self.get(key)
        return entry is not None and entry.deleted == deleted and entry.hlc == hlc

    def _evict(self, entry: Entry | None) -> None:
        if entry is not None and not entry.deleted:
            self._take_out(_bucket(entry.key), entry)
            self._evicted(entry)

    def _put_in(self, index: int, entry: Entry) -> None:
        self._buckets[index][entry.key] = entry
        self._add(index, _print(entry))
        self._size += 1
        budget = _budget(entry.key)
        self._value_bytes[budget] += _value_bytes(entry)
        if not entry.deleted:
            self._kept[budget].add(entry.hlc, entry.key, self._size - self._tombstones)
            return
        self._tombstones += 1
        self._buried.add(entry.hlc, entry.key, self._tombstones)
        if self._tombstones > MAX_TOMBSTONES and (oldest := self._buried.oldest()) is not None:
            self._take_out(_bucket(oldest[1]), self.get(oldest[1]))
            self.dropped += 1

    def _take_out(self, index: int, entry: Entry | None) -> None:
        if entry is not None:
            del self._buckets[index][entry.key]
            self._add(index, -_print(entry))
            self._size -= 1
            self._value_bytes[_budget(entry.key)] -= _value_bytes(entry)
            self._tombstones -= entry.deleted

    def _add(self, index: int, number: int) -> None:
        self._sums[index] = (self._sums[index] + number) & _MASK
        self.root = (self.root + number) & _MASK


def is_expired(entry: Entry, wall_ms: int) -> bool:
    """Returns whether this is a tombstone older than TOMBSTONE_S."""
    return entry.deleted and wall_ms - entry.time_ms > TOMBSTONE_S * 1000


def _budget(key: str) -> int:
    """Returns the place in MOST_VALUE_BYTES of the limit that counts for a key's value."""
    kind, separator, _ = key.partition(SETTING_SEPARATOR)
    return 0 if not separator else 1 if kind in SETTING_KINDS else 2


def _value_bytes(entry: Entry | None) -> int:
    if entry is None or entry.deleted:
        return 0
    return sum([len(item) if isinstance(item, str) else 8 for item in entry.value])


def _bucket(key: str) -> int:
    return blake2b(key.encode(), digest_size=1).digest()[0]


def _print(entry: Entry) -> int:
    return int.from_bytes(blake2b(repr((entry.key, entry.order)).encode(), digest_size=8).digest())
