"""The routing policies by name: rank-aware ones, LoRAServe's, and what they are compared with. Pure.

`router.py` has the frame. Each policy says whose it is. Those that go by a plan read the
fleet's; `plan_factory.py` makes it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from operator import attrgetter

from caraserve.cluster.placement.plan import rendezvous
from caraserve.cluster.placement.plan_factory import ROUTINGS
from caraserve.cluster.routing.cost import Arrival
from caraserve.cluster.routing.ranking import Ranking, ranked
from caraserve.cluster.routing.router import Chance, Fleet, Instance, LazyOrder, Policy, Proposal, drawn, shuffled
from caraserve.errors import ConfigError

_REQUESTS = attrgetter("backlog.requests")
_SHORTLIST = 8  # candidates kept after the first stage
_QUOTES = 4  # of them asked, at random: always the same best ones would herd again


def policy(name: str) -> Policy:
    """A policy, fresh: round-robin has a state. Raises ConfigError for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown routing policy {name!r}; there are {', '.join(ROUTINGS)}")
    return _POLICIES[name]()


# --- by cost, in two stages ---


def _two_stage(ranking: Ranking, others: Callable[[], Iterable[str]], me: str, chance: Chance) -> Proposal:
    """Quotes for some of the best; the rest of the ranking and the others behind them."""
    best = range(min(len(ranking), _SHORTLIST))
    within = [place for place in best if ranking.cost(place) < inf]
    if within:
        pool = within if len(within) >= _QUOTES else [*best[:_QUOTES]]
        chosen = shuffled(pool, chance)[:_QUOTES]
        # Our own state is at hand: a fifth quote at no cost, and no hop if it wins.
        chosen += [place for place in pool if ranking.name(place) == me]
    else:  # past the SLO everywhere: here views err most, so more quotes
        chosen = [*best]
    estimates = {ranking.name(place): ranking.estimate(place) for place in sorted(chosen)}
    asked = tuple(estimates)
    return Proposal(LazyOrder(asked, lambda: [*ranking.names(), *others()]), asked, estimates)


class RankAware:
    """Toppings: Algorithm 1 over the whole fleet, the fetch of a missing adapter charged."""

    enforces_slo, own_weight = True, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """The least added cost to those who are there."""
        ranking = ranked(fleet.able, arrival, fleet, self.own_weight, chance)
        return _two_stage(ranking, lambda: (), fleet.me, chance)


class Auto:
    """LoRAServe's plan proposes, Toppings' cost decides, and counts the request's own time as well.

    Candidates are the adapter's copies by the plan; where none of them is within the SLO, all of the rank's class; then
    all. So adapters spread only when their own instances are full, and ranks mix only when their class is. Cost is
    computed only as far out as that goes: most requests stay with a few candidates."""

    enforces_slo, own_weight = True, 1.0

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """The least cost, on the smallest circle of instances that holds the promise."""
        rankings = []
        for circle in filter(None, _circles(arrival, fleet)):
            ranking = ranked(circle, arrival, fleet, self.own_weight, chance)
            least = ranking.estimate(0)
            rankings.append((ranking, least.cost))
            if least.cost < inf and least.latency_ms <= arrival.slo_ms:
                break
        else:  # nobody holds it end to end: stay where at least the iterations do
            if not rankings:
                return Proposal(())
            ranking = next((one for one, cost in rankings if cost < inf), ranking)

        def others() -> list[str]:
            """For refusals: near ones first, and of these the least busy."""
            return [one.name for circle in _circles(arrival, fleet) for one in sorted(circle.values(), key=_REQUESTS)]

        return _two_stage(ranking, others, fleet.me, chance)


def _circles(arrival: Arrival, fleet: Fleet) -> Iterator[Mapping[str, Instance]]:
    """The adapter's instances by the plan; its rank's, which is the class of the next rank up, else of the highest; and
    everybody."""
    if fleet.plan is not None and arrival.adapter is not None:  # the base model pads nobody and is everywhere
        yield fleet.named(sorted(fleet.plan.instances(arrival.adapter)))
        members = fleet.plan.members
        rank = min((rank for rank in members if rank >= arrival.rank), default=max(members, default=0))
        yield fleet.named(members.get(rank, ()))
    yield fleet.able


# --- by a plan alone ---


class ByPlan:
    """LoRAServe: an instance drawn by its fraction φ. S-LoRA's static plans have one instance of fraction 1."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """Draws among the adapter's instances; an adapter that the plan does not know goes by its hash."""
        able = fleet.able
        shares = fleet.plan.shares.get(arrival.adapter, ()) if fleet.plan and arrival.adapter is not None else ()
        left = [(share.instance, share.fraction) for share in shares if share.instance in able]
        order = []
        while left:
            order.append(drawn(left, chance))
            left = [entry for entry in left if entry[0] != order[-1]]
        if order:
            return Proposal(LazyOrder(order, lambda: able))
        if arrival.adapter is None:
            return Proposal(_any([*able.values()], chance))
        return Proposal(tuple(rendezvous(arrival.adapter, able)))


# --- without cost or plan ---


def _any(instances: Sequence[Instance], chance: Chance) -> LazyOrder:
    """A random order of which mostly the first is wanted."""
    first = (instances[int(chance.random() * len(instances))].name,) if instances else ()
    return LazyOrder(first, lambda: shuffled((instance.name for instance in instances), chance))


class RandomChoice:
    """Any instance."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """All in random order."""
        return Proposal(_any([*fleet.able.values()], chance))


class RoundRobin:
    """One after the other, as far as this router sees."""

    enforces_slo, own_weight = False, 0.0

    def __init__(self) -> None:
        self._next = 0

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """In order of names, from where the last request left off."""
        names = [*fleet.able]
        start = self._next % len(names) if names else 0
        self._next += 1
        return Proposal(LazyOrder(names[start : start + 1], lambda: [*names[start:], *names[:start]]))


class FirstFit:
    """Punica: fills instances one by one up to a batch size, which decides its result."""

    enforces_slo, own_weight = False, 0.0

    def __init__(self, most_requests: int = 32) -> None:
        self._most_requests = most_requests

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """The first with room, in order of names; when all are full the least full."""
        able = fleet.able.values()
        fit = [one.name for one in able if one.backlog.requests < self._most_requests]
        return Proposal(LazyOrder(fit, lambda: (one.name for one in sorted(able, key=_REQUESTS))))


def _by_requests(instances: Sequence[Instance], chance: Chance) -> LazyOrder:
    if not instances:
        return LazyOrder(())
    least = min(map(_REQUESTS, instances))
    idlest = [one for one in instances if one.backlog.requests == least]
    return LazyOrder(
        (_any(idlest, chance)[0],), lambda: (one.name for one in sorted(shuffled(instances, chance), key=_REQUESTS))
    )


class MostIdle:
    """CaraServe's baseline: the fewest requests."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """By requests there."""
        return Proposal(_by_requests([*fleet.able.values()], chance))


class Dlora:
    """dLoRA's dispatch: the fewest requests among those who have the adapter. `migration.py` has its rebalancing."""

    enforces_slo, own_weight = False, 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """Holders by requests there, then the others."""
        able, holders = fleet.able, fleet.holders(arrival.adapter)

        def others() -> LazyOrder:
            return _by_requests([one for name, one in able.items() if name not in holders], chance)

        if not holders:
            return Proposal(others())
        nearest = _by_requests([*holders.values()], chance)
        return Proposal(LazyOrder((nearest[0],), lambda: (*nearest, *others())))


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
