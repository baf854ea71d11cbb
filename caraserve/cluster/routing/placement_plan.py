"""A placement plan, which policies follow: LoRAServe's routing table (§IV). `placement/` makes plans.

It has a fraction φ of each adapter's traffic for each instance that stores it. A plan of 40,000 adapters has a hundred
thousand of these shares: they are kept in arrays, which are compared, encoded and searched at once. Where nothing else
decides, instances order names by the same hashes.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import orjson

_WORD = (1 << 64) - 1

Integers = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
W = TypeVar("W", int, Words)


class Share(NamedTuple):
    """One instance's part of an adapter's traffic."""

    instance: str
    fraction: float


class Shares(Mapping[str, tuple[Share, ...]]):
    """Adapter → its shares, which are made when they are read, in order of the adapters' names. Never changed after it
    was made."""

    def __init__(
        self,
        adapters: Sequence[str],
        instances: Sequence[str],
        counts: Sequence[int] | Integers,
        places: Sequence[int] | Integers,
        fractions: Sequence[float] | Floats,
    ) -> None:
        """`adapters`, `instances`: names, ascending. `counts`: shares of each adapter. `places`, `fractions`: of each
        share its instance, as an index, and its part; the shares of one adapter follow those of the one before."""
        self.adapters, self.instances = list(adapters), list(instances)
        self.counts: Integers = np.asarray(counts, np.int64)
        self.places: Integers = np.asarray(places, np.int64)
        self.fractions: Floats = np.asarray(fractions, np.float64)
        self.starts: Integers = np.concatenate([[0], np.cumsum(self.counts)])

    @classmethod
    def of(cls, shares: Mapping[str, Sequence[Share]]) -> Self:
        """Makes them of a mapping."""
        adapters = sorted(shares)
        flat = [share for adapter in adapters for share in shares[adapter]]
        instances = sorted({share.instance for share in flat})
        at = {name: index for index, name in enumerate(instances)}
        counts = [len(shares[adapter]) for adapter in adapters]
        return cls(adapters, instances, counts, [at[one.instance] for one in flat], [one.fraction for one in flat])

    @cached_property
    def owners(self) -> Integers:
        """The adapter of each share, as an index."""
        return np.repeat(np.arange(len(self.adapters)), self.counts)

    @cached_property
    def _rows(self) -> Mapping[str, int]:
        return {name: row for row, name in enumerate(self.adapters)}

    def places_of(self, row: int) -> list[int]:
        """Returns the instances of the adapter of this index, as indices."""
        places: list[int] = self.places[self.starts[row] : self.starts[row + 1]].tolist()
        return places

    def __getitem__(self, adapter: str) -> tuple[Share, ...]:
        row = self._rows[adapter]
        fractions = self.fractions[self.starts[row] : self.starts[row + 1]].tolist()
        return tuple(map(Share, self.names(adapter), fractions))

    def __iter__(self) -> Iterator[str]:
        return iter(self.adapters)

    def __len__(self) -> int:
        return len(self.adapters)

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._rows

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Shares) and (self.adapters, self.instances) == (other.adapters, other.instances):
            return bool(self.equal_rows(other).all())
        return isinstance(other, Mapping) and dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment]

    def equal_rows(self, other: "Shares") -> Booleans:
        """Returns for each adapter whether its shares are the same in other shares of the same adapters and
        instances, `[adapters]`."""
        same: Booleans = self.counts == other.counts
        mine, theirs = same[self.owners], same[other.owners]
        equal = self.places[mine] == other.places[theirs]
        equal &= self.fractions[mine] == other.fractions[theirs]
        same[self.owners[mine][~equal]] = False
        return same

    def names(self, adapter: str) -> tuple[str, ...]:
        """Returns the instances of an adapter; none if it is unknown."""
        if adapter not in self._rows:
            return ()
        return tuple([self.instances[place] for place in self.places_of(self._rows[adapter])])

    def adapters_on(self, instance: str) -> list[str]:
        """Returns the adapters with a share on an instance."""
        if instance not in self.instances:
            return []
        rows = np.unique(self.owners[self.places == self.instances.index(instance)])
        return [self.adapters[row] for row in rows.tolist()]

    def among(self, adapters: Sequence[str], instances: Sequence[str]) -> "Shares":
        """Returns the shares of these adapters on these instances, both given in order of their names. An adapter
        that is unknown, or on none of them, has no share in the result."""
        if (self.adapters, self.instances) == (adapters, instances):
            return self
        rows = np.array([self._rows.get(name, -1) for name in adapters], np.int64)
        counts = np.append(self.counts, 0)[rows]
        owners = np.repeat(np.arange(len(rows)), counts)
        first = np.cumsum(counts) - counts  # of each adapter in the result
        taken = self.starts[rows[owners]] + np.arange(len(owners)) - first[owners]
        columns = {name: column for column, name in enumerate(instances)}
        places = np.array([columns.get(name, -1) for name in self.instances], np.int64)[self.places[taken]]
        known = places >= 0
        counts = np.bincount(owners[known], minlength=len(rows))
        return Shares(adapters, instances, counts, places[known], self.fractions[taken][known])

    def digest(self, classes: Mapping[str, int]) -> str:
        """Returns a SHA-256 of the shares and of the instances' classes."""
        used = np.bincount(self.places, minlength=len(self.instances)) > 0
        instances = [name for name, is_used in zip(self.instances, used.tolist(), strict=True) if is_used]
        content = hashlib.sha256(orjson.dumps([self.adapters, instances, sorted(classes.items())]))
        for array in (self.counts, (np.cumsum(used) - 1)[self.places]):
            content.update(array.astype("<i8").tobytes())
        content.update(self.fractions.astype("<f8").tobytes())
        return content.hexdigest()

    def __repr__(self) -> str:
        return f"Shares.of({dict(self.items())!r})"


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The instances of every adapter. Of two plans the one of the later epoch is in force; of one epoch's two, the one
    with the greater digest."""

    epoch: int
    shares: Shares  # an adapter's fractions sum to 1; largest first
    classes: Mapping[str, int]  # instance → the rank that it is for
    peak: float = 1.0  # largest utilisation ÷ mean; `loraserve.py` keeps the plan while this and `strange` stay low
    strange: float = 0.0  # share of the load on instances for another rank
    overfull: tuple[str, ...] = ()  # instances with more bytes than they store: no instance had room for a first copy
    digest: str = ""
    members: Mapping[int, tuple[str, ...]] = field(init=False)  # rank → its class's instances, by name

    def __post_init__(self) -> None:
        members: dict[int, list[str]] = {}
        for name in sorted(self.classes):
            members.setdefault(self.classes[name], []).append(name)
        object.__setattr__(self, "members", {rank: tuple(names) for rank, names in members.items()})

    @classmethod
    def made(
        cls,
        epoch: int,
        shares: Mapping[str, tuple[Share, ...]],
        classes: Mapping[str, int],
        peak: float = 1.0,
        strange: float = 0.0,
        overfull: tuple[str, ...] = (),
    ) -> Self:
        """Makes a plan and computes its digest."""
        kept = shares if isinstance(shares, Shares) else Shares.of(shares)
        return cls(epoch, kept, classes, peak, strange, overfull, kept.digest(classes))

    def holds_over(self, other: "PlacementPlan | None") -> bool:
        """Whether this plan replaces the other. The answer is the same on every instance."""
        return other is None or (self.epoch, self.digest) > (other.epoch, other.digest)

    def instances(self, adapter: str) -> tuple[str, ...]:
        """Returns the names of the instances that store the adapter; none if it is not in the plan."""
        return self.shares.names(adapter)

    def restricted(self, adapters: Iterable[str]) -> "PlacementPlan":
        """Returns the part of this plan for some adapters, with the digest of the whole plan."""
        known = sorted(name for name in adapters if name in self.shares)
        return replace(self, shares=self.shares.among(known, self.shares.instances))


# --- rendezvous hashing ---


@lru_cache(maxsize=1 << 17)  # the simulator makes several plans in one process, each with all these keys
def word(key: str) -> int:
    """Returns 64 bits of a key's hash."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def words(keys: Iterable[str]) -> Words:
    """Returns 64 bits of each key's hash, as a uint64 array `[keys]`."""
    return np.array([word(key) for key in keys], np.uint64)


def mixed(left: W, right: W) -> W:
    """Returns the score of a pair of hashes, or of arrays of them. It takes two multiplications, since a plan needs a
    million scores."""
    value = ((left ^ right) * 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
    return value ^ (value >> 32)  # type: ignore[return-value]  # a shifted uint64 is one still


def rendezvous(key: str, names: Iterable[str]) -> list[str]:
    """Returns the names in the key's own order. Adding or removing a name does not change the order of the others."""
    point = word(key)
    return sorted(names, key=lambda name: (mixed(point, word(name)), name), reverse=True)


def homes(keys: Sequence[str], names: Sequence[str], count: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Returns the first `count` names in each key's own order, or all if there are fewer, as indices
    `[keys, min(count, names)]`."""
    scores = mixed(words(keys)[:, None], words(names)[None, :])
    return np.argsort(scores, axis=1)[:, : -count - 1 : -1]
