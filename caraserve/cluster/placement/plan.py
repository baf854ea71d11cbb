"""A published assignment of adapters to instances: what it is, who may make it, which of two holds. Pure.

LoRAServe's routing table (§IV) has a fraction φ of each adapter's traffic for each instance that stores it. No two
instances need equal views to agree on one: the first live member by the hash of the epoch computes it, the others
adopt what is published, and two plans at once cost efficiency only. `loraserve.py` makes plans; `router.py` reads them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

_WORD = (1 << 64) - 1

Words = np.ndarray[Any, np.dtype[np.uint64]]
W = TypeVar("W", int, Words)


@dataclass(frozen=True, slots=True)
class AdapterDemand:
    """An adapter as a plan sees it."""

    name: str
    rank: int
    num_bytes: int
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Server:
    """An instance as a plan sees it."""

    name: str
    capacity_bytes: int  # of adapters that it stores
    speed: float = 1.0  # relative to the machine of the operating points


class Share(NamedTuple):
    """One instance's part of an adapter's traffic. A tuple, because a plan has a hundred thousand."""

    instance: str
    fraction: float


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Where every adapter is. Of two plans the later epoch holds; of one epoch's two, the greater digest."""

    epoch: int
    shares: Mapping[str, tuple[Share, ...]]  # an adapter's fractions sum to 1; largest first
    classes: Mapping[str, int]  # instance → the rank that it is for
    peak: float = 1.0  # the largest utilisation over the mean: this and the next are promised, see loraserve.py
    strange: float = 0.0  # share of the load on instances for another rank
    overfull: tuple[str, ...] = ()  # instances with more bytes than they store: no room for a first copy anywhere
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
        """A plan with its digest."""
        return cls(epoch, shares, classes, peak, strange, overfull, _digest(shares, classes))

    def holds_over(self, other: "PlacementPlan | None") -> bool:
        """Whether this plan replaces the other. Any two members that know both answer alike."""
        return other is None or (self.epoch, self.digest) > (other.epoch, other.digest)

    def instances(self, adapter: str) -> tuple[str, ...]:
        """Who stores the adapter; nobody if the plan does not know it."""
        return tuple([share.instance for share in self.shares.get(adapter, ())])


def _digest(shares: Mapping[str, tuple[Share, ...]], classes: Mapping[str, int]) -> str:
    texts: dict[tuple[Share, ...], str] = {}  # most adapters have the same places as many others
    content = []
    for name in sorted(shares):
        places = shares[name]
        text = texts.get(places)
        if text is None:
            text = texts[places] = repr([(share.instance, share.fraction) for share in places])
        content.append(f"({name!r}, {text})")
    content.append(repr(sorted(classes.items())))
    return hashlib.sha256("".join(content).encode()).hexdigest()


# --- rendezvous hashing ---


@lru_cache(maxsize=1 << 17)  # each plan of a process that makes several asks for all of them again
def word(key: str) -> int:
    """64 bits of a key's hash."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def words(keys: Iterable[str]) -> Words:
    """The same of many, as uint64 of one dimension."""
    return np.array([word(key) for key in keys], np.uint64)


def mixed(left: W, right: W) -> W:
    """The score of a pair of words, or of arrays of them: one multiplication round, since a plan needs a million."""
    value = ((left ^ right) * 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
    return value ^ (value >> 32)  # type: ignore[return-value]  # a shifted uint64 is one still


def rendezvous(key: str, names: Iterable[str]) -> list[str]:
    """The names in the key's own order. One name less or more leaves the others' order as it was."""
    point = word(key)
    return sorted(names, key=lambda name: (mixed(point, word(name)), name), reverse=True)


def homes(keys: Sequence[str], names: Sequence[str], count: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The first `count` of each key's own order, or all if there are fewer: a row of indices of names for each key."""
    scores = mixed(words(keys)[:, None], words(names)[None, :])
    return np.argsort(scores, axis=1)[:, : -count - 1 : -1]


def planners(epoch: int, members: Iterable[str]) -> list[str]:
    """Who makes the plan of an epoch: the first, and on its silence the next."""
    return rendezvous(f"plan {epoch}", members)


# --- static assignments: S-LoRA on several servers, as LoRAServe's baselines have it ---


def random_plan(adapters: Iterable[AdapterDemand], servers: Iterable[Server], epoch: int = 0) -> PlacementPlan:
    """S-LoRA Random: each adapter on one server, by hash and whatever its rank or demand."""
    known, names = [*adapters], [server.name for server in servers]
    first = homes([adapter.name for adapter in known], names, 1)[:, 0].tolist()
    alone = [(Share(name, 1.0),) for name in names]
    shares = {adapter.name: alone[at] for adapter, at in zip(known, first, strict=True)}
    return PlacementPlan.made(epoch, shares, _largest_ranks(known, shares, names))


def contiguous_plan(adapters: Iterable[AdapterDemand], servers: Iterable[Server], epoch: int = 0) -> PlacementPlan:
    """S-LoRA Contiguous: adapters in order of rank, an equal count on each server."""
    names = sorted(server.name for server in servers)
    ordered = sorted(adapters, key=lambda adapter: (adapter.rank, adapter.name))
    shares = {
        adapter.name: (Share(names[index * len(names) // len(ordered)], 1.0),) for index, adapter in enumerate(ordered)
    }
    return PlacementPlan.made(epoch, shares, _largest_ranks(ordered, shares, names))


def _largest_ranks(
    adapters: Iterable[AdapterDemand], shares: Mapping[str, Sequence[Share]], names: Iterable[str]
) -> dict[str, int]:
    largest = dict.fromkeys(names, 0)
    for adapter in adapters:
        instance = shares[adapter.name][0].instance
        largest[instance] = max(largest[instance], adapter.rank)
    return largest


# --- demand ---


def extrapolated(previous: float | None, latest: float) -> float:
    """The next step's demand from the last two (LoRAServe, step 1): the line through them, within a factor of 2 of the
    last, so that a burst does not empty half a fleet for one adapter."""
    if previous is None:
        return latest
    return min(max(2 * latest - previous, latest / 2), 2 * latest)
