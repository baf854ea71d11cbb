"""Plans which instances store and serve which adapters: LoRAServe §IV-A, Algorithm 1, with corrections.

Instances are divided among ranks by demand, so that requests of one rank share batches; an adapter's traffic is divided
among instances of its rank. The steps are the paper's, with these corrections:

- budgets of servers (step 2) sum to the number of servers: largest remainder, not rounding; and the highest rank with
  demand gets a server, because its requests would pad those of any lower class
- packing (step 3) has a second dimension, bytes, and adapters without demand are spread by hash within their class
  instead of all going to its last server
- load that a class cannot serve (step 4) goes to the next higher rank with room, and only then to lower ones
- the previous plan is a constraint, where the paper permutes towards it afterwards (step 5): instances keep their class
  and adapters their instances while the budgets and the target allow it
- every adapter has copies inside its class, more when it is hot, so that routing by outdated loads does little harm

`bin_packing.py` has steps 3 and 4. Hysteresis: a plan is kept while its two measures, the largest utilisation over the
mean and the share of the load on instances for another rank, stay near those of the time when it was made.

`make_plan` makes the plan of any routing that needs one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from caraserve.cluster.placement.bin_packing import Packing, PlacementOptions
from caraserve.cluster.placement.cold_adapters import AdapterTable, ServerLoad
from caraserve.cluster.placement.plan import AdapterDemand, Server, contiguous_plan, random_plan
from caraserve.cluster.routing.placement_plan import PlacementPlan, Shares, word


def place(
    adapters: Iterable[AdapterDemand],
    servers: Iterable[Server],
    operating_points: Mapping[int, float],
    epoch: int,
    previous: PlacementPlan | None = None,
    options: PlacementOptions | None = None,
    *,
    one_class: bool = False,
) -> PlacementPlan:
    """Makes the plan of an epoch. `operating_points`: rank → tokens/s of one server within the SLO. `one_class`: counts
    all demand as of the largest rank. The order of adapters and servers does not matter. Raises ValueError without
    servers, or for a rank without an operating point.
    """
    options = options or PlacementOptions()
    known = sorted(adapters, key=attrgetter("name"))  # sums of floats depend on their order
    machines = sorted(servers, key=lambda server: server.name)
    if not machines:
        raise ValueError("no instance to place adapters on")
    if missing := {adapter.rank for adapter in known} - operating_points.keys():
        raise ValueError(f"no operating point for rank {min(missing)}")
    table, names = _table(known, operating_points, one_class), [machine.name for machine in machines]
    shares = (previous.shares if previous else Shares.of({})).among(table.names, names)
    kept = _kept(table, machines, shares, previous, options) if previous else None
    if kept and previous and _as_good(kept, previous, options):
        return replace(kept, epoch=epoch, peak=previous.peak, strange=previous.strange)
    packing = Packing(_loaded(machines, _divided(table, machines, previous)), table, shares, options)
    packing.fill(np.arange(len(known)))
    plan = packing.plan(epoch, previous)
    if kept and _as_good(kept, plan, options):
        return replace(kept, epoch=epoch)  # a new plan would be no better: its present measures are the new promise
    return plan


def _as_good(plan: PlacementPlan, other: PlacementPlan, options: PlacementOptions) -> bool:
    level = plan.peak <= other.peak * (1 + options.hysteresis)
    return level and plan.strange <= other.strange + options.strangers


def _table(adapters: Sequence[AdapterDemand], operating_points: Mapping[int, float], one_class: bool) -> AdapterTable:
    ranks = np.array([adapter.rank for adapter in adapters], np.int64)
    points = np.array([operating_points[adapter.rank] for adapter in adapters])
    rates = np.array([adapter.tokens_per_s for adapter in adapters])
    if one_class and adapters:
        top = int(ranks.max())
        rates = rates * operating_points[top] / points
        ranks, points = np.full_like(ranks, top), np.full_like(points, operating_points[top])
    num_bytes = np.array([adapter.num_bytes for adapter in adapters], np.int64)
    return AdapterTable([adapter.name for adapter in adapters], ranks, num_bytes, rates / points)


def _loaded(machines: Sequence[Server], ranks: Mapping[str, int]) -> list[ServerLoad]:
    return [ServerLoad(one, place, word(one.name), ranks[one.name]) for place, one in enumerate(machines)]


def _kept(
    table: AdapterTable, machines: Sequence[Server], shares: Shares, previous: PlacementPlan, options: PlacementOptions
) -> PlacementPlan | None:
    """Returns the previous plan with new adapters added and removed ones left out, or None if the instances have
    changed or bytes are short."""
    if previous.overfull or previous.classes.keys() != {machine.name for machine in machines}:
        return None
    packing = Packing(_loaded(machines, previous.classes), table, shares, options)
    packing.adopt()
    packing.fill(np.flatnonzero(shares.counts == 0))
    plan = packing.plan(previous.epoch, previous)
    return None if plan.overfull else plan


# --- step 2 ---


def budgets(loads: Mapping[int, float], servers: int) -> dict[int, int]:
    """Returns rank → number of servers, in proportion to the rank's load. The numbers sum to `servers`."""
    total = math.fsum(loads.values())
    quotas = {rank: servers * load / total for rank, load in loads.items()}
    counts = {rank: math.floor(quota) for rank, quota in quotas.items()}
    top = max(rank for rank, load in loads.items() if load > 0)
    counts[top] = max(counts[top], 1)
    while (given := sum(counts.values())) != servers:
        if given < servers:
            counts[max(counts, key=lambda rank: (quotas[rank] - counts[rank], rank))] += 1
        else:  # the highest rank's server comes from the rank furthest above its quota
            others = [rank for rank in counts if counts[rank] > 0 and rank != top]
            counts[max(others, key=lambda rank: (counts[rank] - quotas[rank], rank))] -= 1
    return counts


def _divided(table: AdapterTable, machines: Sequence[Server], previous: PlacementPlan | None) -> dict[str, int]:
    """Returns instance → the rank that it is for."""
    if not table.names:
        return {machine.name: 0 for machine in machines}
    weights = table.loads if table.loads.any() else table.num_bytes + 1.0  # without demand by bytes
    found, which = np.unique(table.ranks, return_inverse=True)
    left = budgets(dict(zip(found.tolist(), np.bincount(which, weights).tolist(), strict=True)), len(machines))
    before = previous.classes if previous else {}
    ranks: dict[str, int] = {}
    for machine in machines:
        rank = before.get(machine.name, 0)
        if left.get(rank, 0) > 0:
            ranks[machine.name] = rank
            left[rank] -= 1
    # Both in order of rank, so that an instance that changes its class moves to a near one.
    free = sorted((before.get(m.name, 0), m.name) for m in machines if m.name not in ranks)
    wanted = sorted(rank for rank, count in left.items() for _ in range(count))
    ranks.update((name, rank) for (_, name), rank in zip(free, wanted, strict=True))
    return ranks


def make_plan(
    routing: str,
    adapters: Iterable[AdapterDemand],
    servers: Iterable[Server],
    operating_points: Mapping[int, float],
    epoch: int,
    previous: PlacementPlan | None = None,
    padded: bool = True,
    seed: int = 0,
) -> PlacementPlan | None:
    """Makes the plan for a routing, or returns None if it needs none. `padded`: whether the largest rank in a batch
    slows down the other requests in it. `seed`: of a random plan."""
    if routing == "s-lora-random":
        return random_plan([*adapters], [*servers], epoch, seed)
    if routing == "s-lora-contiguous":
        return contiguous_plan([*adapters], [*servers], epoch)
    if routing in ("auto", "loraserve"):
        # Where ranks do not slow one another down, classes would only divide the fleet into parts that cannot share
        # their load.
        one_class = routing == "auto" and not padded
        return place(adapters, servers, operating_points, epoch, previous, one_class=one_class)
    return None
