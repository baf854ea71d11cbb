"""What placement plans are made from, which instance makes one, static plans, and plans as bytes.

Instances agree on one plan without equal views of the cluster: the first live one by the hash of the epoch makes it,
and the others adopt what it publishes. Two plans at once only cost efficiency. `loraserve.py` makes plans that follow
demand.

Plans travel as bytes to other instances and to the process that makes plans. The bytes do not contain the digest:
`decoded` computes it from the content, and the receiver compares it with the one that was published.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from caraserve.cluster.routing.placement_plan import PlacementPlan, Share, Shares, homes, rendezvous

MAX_PLAN_BYTES = 64 << 20  # 40,000 adapters with two copies each take 1.4 MB, 0.2 MB packed


@dataclass(frozen=True, slots=True)
class AdapterDemand:
    """What a plan needs to know about an adapter."""

    name: str
    rank: int
    num_bytes: int
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Server:
    """What a plan needs to know about an instance."""

    name: str
    capacity_bytes: int  # of adapters that it stores
    speed: float = 1.0  # relative to the machine of the operating points


def planners(epoch: int, members: Iterable[str]) -> list[str]:
    """Orders the members that may make an epoch's plan: the first one does, and each next one if those before fail."""
    return rendezvous(f"plan {epoch}", members)


# --- static assignments: S-LoRA on several servers, the baselines of LoRAServe ---


def random_plan(
    adapters: Iterable[AdapterDemand], servers: Iterable[Server], epoch: int = 0, seed: int = 0
) -> PlacementPlan:
    """Makes the plan of S-LoRA Random: each adapter on one server, whatever its rank or demand, and equal counts on all
    servers, give or take one. By name, each is placed on the first server of its own order, by hash, that is not full,
    so that a new adapter moves few others. `seed`: chooses one of many such plans."""
    known, names = sorted(adapters, key=lambda adapter: adapter.name), [server.name for server in servers]
    orders = homes([f"{seed}/{adapter.name}" if seed else adapter.name for adapter in known], names, len(names))
    alone = [(Share(name, 1.0),) for name in names]
    each, extra = divmod(len(known), len(names))
    counts = [0] * len(names)
    shares: dict[str, tuple[Share, ...]] = {}
    for adapter, order in zip(known, orders.tolist(), strict=True):
        at = next(index for index in order if counts[index] < each + (extra > 0))
        extra -= counts[at] == each
        counts[at] += 1
        shares[adapter.name] = alone[at]
    return PlacementPlan.made(epoch, shares, _largest_ranks(known, shares, names))


def contiguous_plan(adapters: Iterable[AdapterDemand], servers: Iterable[Server], epoch: int = 0) -> PlacementPlan:
    """Makes the plan of S-LoRA Contiguous: adapters in order of rank, an equal count on each server."""
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
    """Predicts the next step's demand from the last two (LoRAServe, step 1) by the line through them. The result is
    within a factor of 2 of the last, so that one adapter's burst does not displace half a fleet's adapters."""
    if previous is None:
        return latest
    return min(max(2 * latest - previous, latest / 2), 2 * latest)


# --- encoding ---


class _EncodedPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A plan as an array. The shares of one adapter follow those of the one before: `counts` of each, and of each share
    its instance, as an index, and its fraction."""

    format: Literal[2]
    epoch: Annotated[int, Meta(ge=0)]
    peak: float
    strange: float
    overfull: tuple[str, ...]
    instances: list[str]
    ranks: list[int]
    adapters: list[str]
    counts: list[Annotated[int, Meta(ge=1)]]
    places: list[Annotated[int, Meta(ge=0)]]
    fractions: list[Annotated[float, Meta(ge=0, le=1)]]

    def __post_init__(self) -> None:
        if len(set(self.instances)) != len(self.instances) or len(self.ranks) != len(self.instances):
            raise ValueError("its instances are not distinct, or have no ranks")
        if sorted(set(self.adapters)) != self.adapters or len(self.counts) != len(self.adapters):
            raise ValueError("its adapters are not in order, or have no shares")
        if not sum(self.counts) == len(self.places) == len(self.fractions):
            raise ValueError("its shares belong to no adapters")
        if max(self.places, default=-1) >= len(self.instances):
            raise ValueError("it names no instance")


def packed(value: Any) -> bytes:
    """Returns a value, which may contain NumPy arrays, as compressed JSON."""
    return zlib.compress(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), 1)


def encoded(plan: PlacementPlan) -> bytes:
    """Encodes a plan."""
    names = sorted(plan.classes)
    shares = plan.shares.among(plan.shares.adapters, names)
    ranks = [plan.classes[name] for name in names]
    columns = (shares.adapters, shares.counts, shares.places, shares.fractions)
    return packed([2, plan.epoch, plan.peak, plan.strange, list(plan.overfull), names, ranks, *columns])


def decoded(body: bytes) -> PlacementPlan:
    """Decodes a plan. Raises ValueError for other bytes, as another version of this program may have written them, and
    for more than 64 MiB of JSON."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(body, MAX_PLAN_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("it is cut short, or too large")
    plan = msgspec.json.decode(text, type=_EncodedPlan)
    shares = Shares(plan.adapters, plan.instances, plan.counts, plan.places, plan.fractions)
    classes = dict(zip(plan.instances, plan.ranks, strict=True))
    return PlacementPlan.made(plan.epoch, shares, classes, plan.peak, plan.strange, plan.overfull)
