"""The routing policies by name, as the server uses them: `policy_rules.py` on the views that a router has."""

from bisect import bisect_left
from functools import cached_property
from random import Random

from caraserve.cluster.routing import policy_rules
from caraserve.cluster.routing.cost import Arrival, CostEstimate, cold_ms, cost_and_latency
from caraserve.cluster.routing.placement_plan import rendezvous
from caraserve.cluster.routing.policy_rules import AUTO, BY_COST, BY_PLAN, POLICIES, SHORTLIST
from caraserve.cluster.routing.router import Fleet, LazyOrder, Proposal
from caraserve.cluster.state.replicated_map import Tier
from caraserve.config import ROUTINGS
from caraserve.errors import ConfigError

_NO_CLASS = -2  # of an instance that the plan lacks


class RoutingView:
    """What one decision works on, in lists by the instances' numbers; see `policy_rules.py`. What few decisions need is
    made when it is read."""

    def __init__(self, arrival: Arrival, fleet: Fleet, own_weight: float) -> None:
        count = len(fleet.able)
        self.count = count
        self.names = [*fleet.able]
        self.costs, self.latencies_ms, self.draws = [0.0] * count, [0.0] * count, [0.0] * count
        self.estimated, self.marked = [False] * count, [False] * count
        self.members, self.ranking, self.kept = [0] * count, [0] * count, [0] * count
        self.pool, self.chosen = [0] * SHORTLIST, [0] * SHORTLIST
        self.order, self.known = [0] * count, [0]
        # The base model pads no request and is everywhere.
        self._plan = fleet.plan if arrival.adapter is not None else None
        self._arrival, self._instances, self._own_weight = arrival, [*fleet.able.values()], own_weight
        self._tiers, self._other_tier = fleet.adapter_tiers(arrival.adapter)
        self.shares: list[int] = []
        self.fractions: list[float] = []
        if self._plan is not None and arrival.adapter is not None:
            for instance, fraction in self._plan.shares.get(arrival.adapter, ()):
                if (number := self.number_of(instance)) >= 0:
                    self.shares.append(number)
                    self.fractions.append(fraction)
        self.planned = sorted(self.shares)

    def number_of(self, name: str) -> int:
        """Returns the number of an instance, or -1 if it is not able."""
        number = bisect_left(self.names, name)
        return number if number < self.count and self.names[number] == name else -1

    @cached_property
    def requests(self) -> list[int]:
        """The number of requests of each instance."""
        return [one.backlog.requests for one in self._instances]

    @cached_property
    def holds(self) -> list[bool]:
        """Whether each instance has the adapter."""
        return [self._tiers.get(name, self._other_tier) is not Tier.ABSENT for name in self.names]

    @cached_property
    def classes(self) -> list[int]:
        """The rank that each instance is for by the plan; empty without a plan."""
        return [] if self._plan is None else [self._plan.classes.get(name, _NO_CLASS) for name in self.names]

    @cached_property
    def class_rank(self) -> int:
        """The class for requests of this rank."""
        return policy_rules.class_for(() if self._plan is None else self._plan.members, self._arrival.rank)

    def estimate(self, number: int) -> tuple[float, float]:
        """Returns cost and latency of the request on an instance, by the load that it last published."""
        one, arrival = self._instances[number], self._arrival
        links = one.links
        wait_ms = cold_ms(links, self._tiers.get(one.name, self._other_tier), arrival.adapter_bytes)
        return cost_and_latency(
            *(one.model, one.backlog, arrival.rank, arrival.prompt_tokens, arrival.output_tokens, arrival.slo_ms),
            *(wait_ms, links.blocks_batch, self._own_weight),
        )

    def known_names(self) -> list[str]:
        """Returns the names in the order so far."""
        return [self.names[number] for number in self.order[: self.known[0]]]


class Policy:
    """A way to order instances. Every able instance is in the order, so that after a refusal there is a next one."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for an unknown name."""
        if name not in POLICIES:
            raise ConfigError(f"unknown routing policy {name!r}; there are {', '.join(ROUTINGS)}")
        self._number, self._turn = POLICIES[name], 0
        # Whether an instance may refuse a request that would miss the SLO there; otherwise requests are forced.
        self.enforces_slo = self._number in BY_COST
        # Weight of the request's own time in the estimates that the policy compares, quotes included.
        self.own_weight = 1.0 if self._number == AUTO else 0.0

    def propose(self, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Returns the order for a client's request; it is empty if no instance is able."""
        if not fleet.able:
            return Proposal(())
        view, policy = RoutingView(arrival, fleet, self.own_weight), self._number
        if policy in BY_COST:
            return self._by_cost(view, arrival, fleet, rng)
        if policy == BY_PLAN and arrival.adapter is not None and not view.shares:
            return Proposal(tuple(rendezvous(arrival.adapter, fleet.able)))
        policy_rules.choose_first(view, policy, self._turn, rng)
        self._turn += 1

        def rest() -> list[str]:
            policy_rules.complete(view, policy, rng)
            return view.known_names()

        return Proposal(LazyOrder(view.known_names(), rest))

    def _by_cost(self, view: RoutingView, arrival: Arrival, fleet: Fleet, rng: Random) -> Proposal:
        """Proposes quotes from some of the best candidates; the rest of the ranking follows, then the others."""
        count = policy_rules.rank_candidates(view, self._number, arrival.slo_ms, rng)
        asked = view.order[: policy_rules.shortlist(view, count, view.number_of(fleet.me), rng)]
        names = tuple(view.known_names())
        estimates = [CostEstimate(view.costs[number], view.latencies_ms[number]) for number in asked]

        def rest() -> list[str]:
            policy_rules.mark_known(view)
            policy_rules.append_ranking(view, count)
            policy_rules.complete(view, self._number, rng)
            return view.known_names()

        return Proposal(LazyOrder(names, rest), names, dict(zip(names, estimates, strict=True)))
