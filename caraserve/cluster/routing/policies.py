"""The routing policies by name: rank-aware ones, LoRAServe's, and their baselines. No I/O, no clock.

`router.py` has what they share. Each policy names the paper it is from. Those that follow a placement read the plan
in the `Fleet`; `placement/loraserve.py` makes it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from operator import attrgetter
from random import Random

from caraserve.cluster.placement.plan import rendezvous
from caraserve.cluster.routing.cost import Arrival, CostEstimate
from caraserve.cluster.routing.router import (
    Candidate,
    Fleet,
    Instance,
    LazyOrder,
    Policy,
    Proposal,
    rank_candidates,
)
from caraserve.config import ROUTINGS
from caraserve.errors import ConfigError

_REQUESTS = attrgetter("backlog.requests")
SHORTLIST = 8  # candidates kept after the first stage
QUOTES = 4  # of them asked, at random: always asking the same best ones would send all requests there
FIRST_FIT_REQUESTS = 32  # to which first-fit fills an instance


def policy(name: str) -> Policy:
    """Makes a policy; round-robin has a state. Raises ConfigError for an unknown name."""
    if name in _POLICIES:
        return _POLICIES[name]()
    raise ConfigError(f"unknown routing policy {name!r}; there are {', '.join(ROUTINGS)}")


# --- by cost, in two stages ---


def _two_stage(ranking: Sequence[Candidate], others: Callable[[], Iterable[str]], me: str, rng: Random) -> Proposal:
    """Proposes quotes from some of the best candidates; the rest of the ranking follows, then the others."""
    best = ranking[:SHORTLIST]
    within_slo = [one for one in best if one.estimate.cost < inf]
    if within_slo:
        pool = within_slo if len(within_slo) >= QUOTES else best[:QUOTES]
        chosen = {one.name for one in rng.sample(pool, min(QUOTES, len(pool)))}
        chosen.add(me)  # its own state is at hand: a fifth quote at no cost, and no forwarding if it is the best
    else:
        pool, chosen = best, {one.name for one in best}  # views err most here, so there are more quotes
    estimates = {one.name: one.estimate for one in pool if one.name in chosen}
    asked = tuple(estimates)
    return Proposal(LazyOrder(asked, lambda: [*(one.name for one in ranking), *others()]), asked, estimates)


class RankAware:
    """Toppings: Algorithm 1 over the whole fleet, with the download of a missing adapter as part of the cost."""

    enforces_slo, own_weight = True, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Orders by the cost added to the requests already there."""
        ranking = rank_candidates(fleet.able, arrival, fleet, self.own_weight, rng)
        return _two_stage(ranking, lambda: (), fleet.me, rng)


class Auto:
    """LoRAServe's plan names the candidates, Toppings' cost chooses among them and counts the request's own time too.

    Candidates are the instances that have the adapter by the plan; where none of them is within the SLO, all instances
    of the rank's class; then all. So adapters spread only when their own instances are full, and ranks mix only when
    their class is full. Cost is computed only as far as that goes: most requests compare a few candidates.
    """

    enforces_slo, own_weight = True, 1.0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Orders by cost within the smallest group of instances that meets the SLO."""
        rankings = []
        known: dict[str, CostEstimate] = {}  # the groups share instances
        for group in filter(None, _candidate_groups(arrival, fleet)):
            ranking = rank_candidates(group, arrival, fleet, self.own_weight, rng, known)
            least = ranking[0].estimate
            rankings.append((ranking, least.cost))
            if least.cost < inf and least.latency_ms <= arrival.slo_ms:
                break
        else:  # no group meets the SLO with waiting included: uses the first group whose iterations meet it
            if not rankings:
                return Proposal(())
            ranking = next((one for one, cost in rankings if cost < inf), ranking)

        def others() -> list[str]:
            """Returns all instances, for use after refusals: smaller groups first, in each the least busy first."""
            groups = _candidate_groups(arrival, fleet)
            return [one.name for group in groups for one in sorted(group.values(), key=_REQUESTS)]

        return _two_stage(ranking, others, fleet.me, rng)


def _candidate_groups(arrival: Arrival, fleet: Fleet) -> Iterator[Mapping[str, Instance]]:
    """Yields the adapter's instances by the plan, then its rank's class (the next rank up, else the highest), then all
    instances."""
    if fleet.plan is not None and arrival.adapter is not None:  # the base model pads no request and is everywhere
        yield fleet.named(sorted(fleet.plan.instances(arrival.adapter)))
        members = fleet.plan.members
        rank = min((rank for rank in members if rank >= arrival.rank), default=max(members, default=0))
        yield fleet.named(members.get(rank, ()))
    yield fleet.able


# --- by a plan alone ---


class ByPlan:
    """LoRAServe: draws an instance by its fraction φ. S-LoRA's static plans have one instance of fraction 1."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Draws among the adapter's instances. An adapter that the plan does not contain is ordered by its hash."""
        able = fleet.able
        shares = fleet.plan.shares.get(arrival.adapter, ()) if fleet.plan and arrival.adapter is not None else ()
        left = {share.instance: share.fraction for share in shares if share.instance in able}
        order = []
        while left:
            names, fractions = list(left), list(left.values())
            order.append(rng.choices(names, fractions)[0] if any(fractions) else rng.choice(names))
            del left[order[-1]]
        if order:
            return Proposal(LazyOrder(order, lambda: able))
        if arrival.adapter is None:
            return Proposal(_random_order([*able.values()], rng))
        return Proposal(tuple(rendezvous(arrival.adapter, able)))


# --- without cost or plan ---


def _random_order(instances: Sequence[Instance], rng: Random) -> LazyOrder:
    """Returns a random order. Mostly only its first name is read, so the others are drawn later."""
    first = (rng.choice(instances).name,) if instances else ()
    return LazyOrder(first, lambda: (one.name for one in rng.sample(instances, len(instances))))


class RandomChoice:
    """Chooses an instance at random."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Orders all instances at random."""
        return Proposal(_random_order([*fleet.able.values()], rng))


class RoundRobin:
    """Chooses one instance after the other, for the requests of this router."""

    enforces_slo, own_weight = False, 0.0

    def __init__(self) -> None:
        self._next = 0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Orders by name, from the successor of the last request's first choice."""
        names = [*fleet.able]
        start = self._next % len(names) if names else 0
        self._next += 1
        return Proposal(LazyOrder(names[start : start + 1], lambda: [*names[start:], *names[:start]]))


class FirstFit:
    """Punica: fills instances one by one up to a batch size, which decides its result."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Orders those with room by name; when all are full, all by number of requests."""
        able = fleet.able.values()
        fit = [one.name for one in able if one.backlog.requests < FIRST_FIT_REQUESTS]
        return Proposal(LazyOrder(fit, lambda: (one.name for one in sorted(able, key=_REQUESTS))))


def _by_requests(instances: Sequence[Instance], rng: Random) -> LazyOrder:
    """Orders by number of requests, ties at random."""
    if not instances:
        return LazyOrder(())
    least = min(map(_REQUESTS, instances))
    idlest = [one for one in instances if one.backlog.requests == least]

    def rest() -> Iterator[str]:
        return (one.name for one in sorted(rng.sample(instances, len(instances)), key=_REQUESTS))

    return LazyOrder((rng.choice(idlest).name,), rest)


class MostIdle:
    """Toppings' baseline: the instance with the fewest requests."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Orders by number of requests."""
        return Proposal(_by_requests([*fleet.able.values()], rng))


class Dlora:
    """dLoRA's dispatch: the fewest requests among the adapter's holders. `migration.py` has its rebalancing."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Orders the holders by number of requests, then the others."""
        able, holders = fleet.able, fleet.holders(arrival.adapter)

        def others() -> LazyOrder:
            return _by_requests([one for name, one in able.items() if name not in holders], rng)

        if not holders:
            return Proposal(others())
        nearest = _by_requests([*holders.values()], rng)
        return Proposal(LazyOrder((nearest[0],), lambda: (*nearest, *others())))


# One for each name in `ROUTINGS`.
_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "auto": Auto,
    "rank-aware": RankAware,
    "loraserve": ByPlan,
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "first-fit": FirstFit,
    "most-idle": MostIdle,
    "dlora": Dlora,
    "s-lora-random": ByPlan,
    "s-lora-contiguous": ByPlan,
}
