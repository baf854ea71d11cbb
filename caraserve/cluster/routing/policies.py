"""The routing policies by name, as the server uses them: `policy_rules.py` on the views that a router has."""

from collections.abc import Callable, Sequence
from random import Random

from caraserve.cluster.routing import policy_rules
from caraserve.cluster.routing.cost import Arrival, CostEstimate
from caraserve.cluster.routing.placement_plan import PlacementPlan, rendezvous
from caraserve.cluster.routing.policy_rules import AUTO, BY_COST, BY_PLAN, POLICIES, SHORTLIST
from caraserve.cluster.routing.router import Fleet, LazyOrder, Proposal
from caraserve.cluster.state.replicated_map import Tier
from caraserve.config import ROUTINGS
from caraserve.errors import ConfigError

_NO_CLASS = -2  # of an instance that the plan lacks


class RoutingView:
    """What one decision works on, in lists by the instances' numbers; see `policy_rules.py`."""

    def __init__(self, arrival: Arrival, fleet: Fleet, own_weight: float) -> None:
        tiers, others = fleet.adapter_tiers(arrival.adapter)
        instances = [*fleet.able.values()]
        count = len(instances)
        self.names = [*fleet.able]
        self.requests = [one.backlog.requests for one in instances]
        self.holds = [tiers.get(name, others) is not Tier.ABSENT for name in self.names]
        self.planned: Sequence[int] = ()
        self.shares: list[int] = []
        self.fractions: list[float] = []
        self.classes: list[int] = []
        self.class_rank = -1
        if fleet.plan is not None and arrival.adapter is not None:  # the base model pads no request and is everywhere
            self._add_plan(arrival.adapter, arrival.rank, fleet.plan)
        self.costs, self.latencies_ms, self.draws = [0.0] * count, [0.0] * count, [0.0] * count
        self.estimated, self.marked = [False] * count, [False] * count
        self.members, self.ranking, self.kept = [0] * count, [0] * count, [0] * count
        self.pool, self.chosen = [0] * SHORTLIST, [0] * SHORTLIST
        self.order, self.known = [0] * count, [0]
        self.estimate: Callable[[int], CostEstimate] = lambda number: instances[number].estimate(
            arrival, tiers.get(self.names[number], others), own_weight
        )

    def _add_plan(self, adapter: str, rank: int, plan: PlacementPlan) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        for instance, fraction in plan.shares.get(adapter, ()):
            if instance in numbers:
                self.shares.append(numbers[instance])
                self.fractions.append(fraction)
        self.planned = sorted(self.shares)
        self.classes = [plan.classes.get(name, _NO_CLASS) for name in self.names]
        self.class_rank = policy_rules.class_for(plan.members, rank)

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
        me = view.names.index(fleet.me) if fleet.me in fleet.able else -1
        asked = view.order[: policy_rules.shortlist(view, count, me, rng)]
        names = tuple(view.known_names())
        estimates = [CostEstimate(view.costs[number], view.latencies_ms[number]) for number in asked]

        def rest() -> list[str]:
            policy_rules.mark_known(view)
            policy_rules.append_ranking(view, count)
            policy_rules.complete(view, self._number, rng)
            return view.known_names()

        return Proposal(LazyOrder(names, rest), names, dict(zip(names, estimates, strict=True)))
