"""What placement plans are made from, which instance makes one, static plans, and plans as bytes.

Instances agree on one plan without equal views of the cluster: the first live one by the hash of the epoch makes it,
and the others adopt what it publishes. Two plans at once only cost efficiency. `loraserve.py` makes plans that follow
demand.

Plans travel as bytes to other instances and to the process that makes plans. The bytes do not contain the digest:
`decoded` computes it from the content, and the receiver compares it with the one that was published.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from caraserve.cluster.routing.placement_plan import PlacementPlan, homes, rendezvous
from caraserve.cluster.routing.shares import Share, Shares

MAX_PLAN_BYTES = 64 << 20  # 40,000 adapters with two copies each take 1.4 MB, 0.2 MB packed
_FORMAT = 2


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


def packed(value: Any) -> bytes:
    """Returns a value, which may contain NumPy arrays, as compressed JSON."""
    return zlib.compress(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), 1)


def unpacked(body: bytes) -> Any:
    """Returns the value of compressed JSON. Raises ValueError for other bytes, and for more than 64 MiB of JSON."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(body, MAX_PLAN_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError("it is cut short, or too large")
        return orjson.loads(text)
    except zlib.error as error:
        raise ValueError(str(error)) from None


def encoded(plan: PlacementPlan) -> bytes:
    """Encodes a plan."""
    names = sorted(plan.classes)
    shares = plan.shares.among(plan.shares.adapters, names)
    ranks = [plan.classes[name] for name in names]
    columns = (shares.adapters, shares.counts, shares.places, shares.fractions)
    return packed([_FORMAT, plan.epoch, plan.peak, plan.strange, list(plan.overfull), names, ranks, *columns])


def decoded(body: bytes) -> PlacementPlan:
    """Decodes a plan. Raises ValueError for other bytes: another version of this program may have written them."""
    try:
        written, epoch, peak, strange, overfull, names, ranks, *columns = unpacked(body)
        if written != _FORMAT or type(epoch) is not int or epoch < 0 or len(set(names)) != len(names):
            raise ValueError("it is of another version")
        if {*map(type, ranks)} - {int} or {*map(type, (*names, *overfull))} - {str}:
            raise ValueError("it is no plan")
        classes = dict(zip(names, ranks, strict=True))
        shares = _shares(names, *columns)
        return PlacementPlan.made(epoch, shares, classes, _real(peak), _real(strange), tuple(overfull))
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"it is no plan: {error}") from None


def _shares(names: list[str], adapters: Any, counts: Any, places: Any, fractions: Any) -> Shares:
    if {*map(type, adapters)} - {str} or sorted({*adapters}) != adapters or len(counts) != len(adapters):
        raise ValueError("its adapters are not in order")
    if {*map(type, (*counts, *places))} - {int} or min(counts, default=1) < 1 or sum(counts) != len(places):
        raise ValueError("its shares belong to no adapters")
    if places and not 0 <= min(places) <= max(places) < len(names):
        raise ValueError("it names no instance")
    if {*map(type, fractions)} - {int, float} or len(fractions) != len(places):
        raise ValueError("it has no number where one belongs")
    if not 0 <= min(fractions, default=0) <= max(fractions, default=0) <= 1:
        raise ValueError("its fractions are none")
    return Shares(adapters, names, counts, places, fractions)


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("it has no number where one belongs")
    return float(value)
