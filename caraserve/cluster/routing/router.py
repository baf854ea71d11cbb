"""What a router knows of its fleet, and how a request goes from instance to instance. No I/O, no clock.

A policy (`policies.py`) orders the instances by views that are always a little old, and names those whose exact quotes
are worth a round trip. `apply_quotes` reorders them by their quotes. `next_target` goes through the order while
instances refuse. Where each rule comes from:

- A request is forwarded once at most: `check_acceptance` accepts or refuses a forwarded request, and names no other
  instance. No two instances have to agree for that.
- Two stages: with the least cost by views 1 s old, many routers choose the same instance at once; with the better of
  two random instances, ranks mix. Quotes of four among the best eight by old views come close to exact views.
- What this router has sent since an instance's last heartbeat is added to its view of that instance (`SentRequests`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, Self, overload

from caraserve.cluster.routing import policy_rules
from caraserve.cluster.routing.cost import Arrival, Backlog, CostEstimate, LinkSpeeds, cold_ms, estimate
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.placement_plan import PlacementPlan
from caraserve.cluster.state.replicated_map import Tier

TRANSIT_S = 0.05  # a request sent this long before a heartbeat arrived is in the heartbeat
SENT_MAX_AGE_S = 2.0  # a request counts no longer than this if no heartbeat arrives

Reason = Literal["slo", "full", "draining", "no-adapter", "stale-epoch", "failed", "unreachable"]

_NAME = attrgetter("name")


@dataclass(slots=True)
class Instance:
    """An instance as a router sees it. Never changed after it was made; `frozen` would double the time to make one."""

    name: str
    model: PerfModel
    backlog: Backlog = field(default_factory=Backlog)
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    able: bool = True  # alive, not suspected, not draining, finishing iterations

    def with_backlog(self, backlog: Backlog) -> "Instance":
        """Returns the same instance with another backlog."""
        return Instance(self.name, self.model, backlog, self.links, self.able)

    def estimate(self, arrival: Arrival, tier: Tier, own_weight: float) -> CostEstimate:
        """Returns what the arrival would cost here. `tier`: where this instance has its adapter."""
        wait_ms = cold_ms(self.links, tier, arrival.adapter_bytes)
        return estimate(self.model, self.backlog, arrival, wait_ms, self.links.blocks_batch, own_weight)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All instances as one router sees them, its own included."""

    me: str
    able: Mapping[str, Instance]  # the candidates, in the order of their names: equal views give equal orders
    tiers: Mapping[str, Mapping[str, Tier]] = field(default_factory=dict)  # adapter → instance → tier, if it has it
    plan: PlacementPlan | None = None

    @classmethod
    def of(
        cls,
        me: str,
        instances: Iterable[Instance],
        tiers: Mapping[str, Mapping[str, Tier]] | None = None,
        plan: PlacementPlan | None = None,
    ) -> Self:
        """Makes a fleet of the able ones of these instances, given in any order."""
        return cls(me, {one.name: one for one in sorted(instances, key=_NAME) if one.able}, tiers or {}, plan)

    def adapter_tiers(self, adapter: str | None) -> tuple[Mapping[str, Tier], Tier]:
        """Returns the tiers of an adapter by instance, and the tier on instances that are not in that mapping. The base
        model is on every device."""
        return ({}, Tier.DEVICE) if adapter is None else (self.tiers.get(adapter, {}), Tier.ABSENT)


class LazyOrder(Sequence[str]):
    """Instance names, best first, each once. All but the first few are read only after refusals, so `rest` is called
    when the first of them is read; it may name the first ones again."""

    __slots__ = ("_known", "_rest")

    def __init__(self, known: Sequence[str], rest: Callable[[], Iterable[str]] | None = None) -> None:
        self._known, self._rest = tuple(known), rest

    def _all(self) -> tuple[str, ...]:
        if self._rest is not None:
            self._known = tuple(dict.fromkeys((*self._known, *self._rest())))
            self._rest = None
        return self._known

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, int) and 0 <= index < len(self._known):
            return self._known[index]
        return self._all()[index]

    def __bool__(self) -> bool:
        return bool(self._known or self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[str]:
        known = self._known
        yield from known
        yield from self._all()[len(known) :]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __repr__(self) -> str:
        return f"LazyOrder({self._all()!r})"

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Proposal:
    """An order of instances, best first, and those at its front whose exact quotes decide between them."""

    order: Sequence[str]
    ask: tuple[str, ...] = ()  # may contain the router's own instance: its view of itself is its quote
    estimates: Mapping[str, CostEstimate] = field(default_factory=dict)  # by the views; of those in `ask` at least


def apply_quotes(proposal: Proposal, quotes: Mapping[str, CostEstimate | None]) -> Sequence[str]:
    """Returns the order by quotes: the instances in `ask` by quote, then the others. Where a quote is None or missing,
    because it did not come in time, the estimate by the view stands."""
    if not proposal.ask:
        return proposal.order
    known = {name: quotes.get(name) or proposal.estimates[name] for name in proposal.ask}
    front = sorted(known, key=known.__getitem__)  # stable: ties keep their random order
    return LazyOrder(front, lambda: proposal.order)


# --- refusals ---


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an instance did not accept a request, and its own exact estimate for it."""

    reason: Reason
    estimate: CostEstimate


@dataclass(frozen=True, slots=True)
class RoutingTarget:
    """The instance to send a request to. With `force`, only an instance that cannot serve it at all refuses it."""

    name: str
    force: bool = False


def check_acceptance(
    arrival: Arrival, own: Instance, tier: Tier, force: bool, draining: bool = False
) -> Refusal | None:
    """Decides for the receiving instance, on its exact state; None: it accepts."""
    here = own.estimate(arrival, tier, 0.0)
    if draining:
        return Refusal("draining", here)
    decision = policy_rules.acceptance(own.backlog.queue_room, here.cost, here.latency_ms, force)
    reasons: dict[int, Reason] = {policy_rules.FULL: "full", policy_rules.MISSES_SLO: "slo"}
    return Refusal(reasons[decision], here) if decision in reasons else None


Attempt = tuple[RoutingTarget, Refusal | None]  # None: it failed without a refusal


def next_target(
    order: Sequence[str], attempts: Sequence[Attempt], elapsed_ms: float, ttft_ms: float, force: bool = False
) -> RoutingTarget | None:
    """Returns the instance to try after these attempts, or None when no instance is left, by `policy_rules.next_step`.
    `force` from the start: for policies that enforce no SLO."""
    if not attempts:  # the case of most requests; the code below reads the whole order
        return RoutingTarget(order[0], force) if order else None
    tried = [target.name for target, _ in attempts]
    forced = [target.force for target, _ in attempts]
    missed_slo = [refusal is not None and refusal.reason == "slo" for _, refusal in attempts]
    latencies_ms = [math.inf if refusal is None else refusal.estimate.latency_ms for _, refusal in attempts]
    untried = next((name for name in order if name not in tried), None)
    best = policy_rules.best_refusal(tried, forced, missed_slo, latencies_ms, len(attempts))
    step = policy_rules.next_step(len(attempts), untried is not None, best >= 0, elapsed_ms, ttft_ms)
    if step == policy_rules.OVERRULE:
        return RoutingTarget(tried[best], force=True)
    if step == policy_rules.END or untried is None:
        return None
    return RoutingTarget(untried, force or step == policy_rules.FORCE)


# --- what this router has sent ---


class SentRequests:
    """The requests that this router has sent since each instance's last heartbeat. With many routers they help less
    than quotes do, but they prevent that a burst at one router goes to one instance."""

    def __init__(self) -> None:
        self._sent: dict[str, list[tuple[float, Arrival]]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether there are requests to an instance that its heartbeats do not include yet."""
        return name in self._sent

    def add(self, name: str, arrival: Arrival, now_s: float) -> None:
        """Counts a request that was forwarded to an instance."""
        self._sent.setdefault(name, []).append((now_s, arrival))

    def on_heartbeat(self, name: str, now_s: float) -> None:
        """Removes the requests that an instance's new heartbeat includes."""
        left = [entry for entry in self._sent.get(name, ()) if entry[0] > now_s - TRANSIT_S]
        if left:
            self._sent[name] = left
        else:
            self._sent.pop(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """Removes all requests sent to instances that have left."""
        for name in names:
            self._sent.pop(name, None)

    def backlog(self, name: str, published: Backlog, now_s: float) -> Backlog:
        """Returns an instance's published backlog plus the requests sent to it since."""
        for sent_s, arrival in self._sent.get(name, ()):
            if sent_s > now_s - SENT_MAX_AGE_S:
                published = published.plus(arrival.rank, arrival.prompt_tokens, arrival.output_tokens)
        return published
