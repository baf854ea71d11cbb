"""A placement plan, which policies follow: LoRAServe's routing table (§IV). `placement/` makes plans.

It has a fraction φ of each adapter's traffic for each instance that stores it. Where nothing else decides, instances
order names by the same hashes.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self, TypeVar

import numpy as np

from caraserve.cluster.routing.shares import Share, Shares

_WORD = (1 << 64) - 1

Words = np.ndarray[Any, np.dtype[np.uint64]]
W = TypeVar("W", int, Words)


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
