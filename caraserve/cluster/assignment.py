"""A published assignment of adapters to instances: what it is, who may make it, which of two holds. Pure; level 4.

LoRAServe's routing table (§IV) has a fraction φ of each adapter's traffic for each instance that stores it. No two
instances need equal views to agree on one: the first live member by the hash of the epoch computes it, the others
adopt what is published, and two plans at once cost efficiency only. `placement.py` makes plans; `router.py` reads them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Self

_WORD = (1 << 64) - 1


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


@dataclass(frozen=True, slots=True)
class Share:
    """One instance's part of an adapter's traffic."""

    instance: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every adapter is. Of two plans the later epoch holds; of one epoch's two, the greater digest."""

    epoch: int
    shares: Mapping[str, tuple[Share, ...]]  # an adapter's fractions sum to 1; largest first
    classes: Mapping[str, int]  # instance → the rank that it is for
    peak: float = 1.0  # the largest utilisation over the mean: this and the next are promised, see placement.py
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

    def holds_over(self, other: "Plan | None") -> bool:
        """Whether this plan replaces the other. Any two members that know both answer alike."""
        return other is None or (self.epoch, self.digest) > (other.epoch, other.digest)

    def instances(self, adapter: str) -> tuple[str, ...]:
        """Who stores the adapter; nobody if the plan does not know it."""
        return tuple(share.instance for share in self.shares.get(adapter, ()))


def _digest(shares: Mapping[str, tuple[Share, ...]], classes: Mapping[str, int]) -> str:
    content = hashlib.sha256()
    for name in sorted(shares):
        content.update(repr((name, [(share.instance, share.fraction) for share in shares[name]])).encode())
    content.update(repr(sorted(classes.items())).encode())
    return content.hexdigest()


# --- rendezvous hashing ---


def word(key: str) -> int:
    """64 bits of a key's hash."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def mixed(left: int, right: int) -> int:
    """The score of a pair of words: one multiplication round, since a plan needs a million of them."""
    value = ((left ^ right) * 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
    return value ^ (value >> 32)


def points_of(names: Iterable[str]) -> dict[str, int]:
    """Names for `rendezvous`, hashed once for however many keys."""
    return {name: word(name) for name in names}


def rendezvous(key: str, points: Mapping[str, int], most: int | None = None) -> list[str]:
    """The names in the key's own order, or the first so many of them. One name less or more leaves the others' order
    as it was."""
    point = word(key)
    scores = [(mixed(point, there), name) for name, there in points.items()]
    return [name for _, name in nlargest(len(scores) if most is None else most, scores)]


def planners(epoch: int, members: Iterable[str]) -> list[str]:
    """Who makes the plan of an epoch: the first, and on its silence the next."""
    return rendezvous(f"plan {epoch}", points_of(members))


# --- static assignments: S-LoRA on several servers, as LoRAServe's baselines have it ---


def random_plan(adapters: Iterable[AdapterDemand], servers: Iterable[Server], epoch: int = 0) -> Plan:
    """S-LoRA Random: each adapter on one server, by hash and whatever its rank or demand."""
    points = points_of(server.name for server in servers)
    shares = {}
    for adapter in adapters:
        (first,) = rendezvous(adapter.name, points, 1)
        shares[adapter.name] = (Share(first, 1.0),)
    return Plan.made(epoch, shares, _largest_ranks(adapters, shares, points))


def contiguous_plan(adapters: Iterable[AdapterDemand], servers: Iterable[Server], epoch: int = 0) -> Plan:
    """S-LoRA Contiguous: adapters in order of rank, an equal count on each server."""
    names = sorted(server.name for server in servers)
    ordered = sorted(adapters, key=lambda adapter: (adapter.rank, adapter.name))
    shares = {
        adapter.name: (Share(names[index * len(names) // len(ordered)], 1.0),) for index, adapter in enumerate(ordered)
    }
    return Plan.made(epoch, shares, _largest_ranks(ordered, shares, names))


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
