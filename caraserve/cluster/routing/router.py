"""Which instance takes a request: the frame that all policies share. Pure.

A policy (`policies.py`) proposes an order of instances, from views that are always a little old, and names those whose
exact quotes are worth a round trip. `apply_quotes` puts the quotes in; `next_target` goes through the order while
instances refuse. Where each rule comes from:

- one hop at most: `propose` sends a request that was forwarded already nowhere else, whatever the views say, and
  `check_acceptance` serves or refuses it. No two instances have to agree for that.
- two stages: by the plain least cost of views 1 s old many routers send to the same instance at once, by the better of
  two random ones the ranks mix. Among the best eight by old views, quotes of four come as close as exact views would.
- what this router has itself sent since an instance's last beat is added to its view (`SentRequests`)
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, Protocol, Self, TypeVar, overload

from caraserve.cluster.placement.plan import PlacementPlan
from caraserve.cluster.routing.cost import Arrival, Backlog, CostEstimate, LinkSpeeds, Tier, estimate, row
from caraserve.cluster.routing.perf_model import PerfModel

ATTEMPTS = 3  # instances that may refuse one request
_PATIENCE = 0.2  # share of the time to the first token that may pass with being refused

Reason = Literal["slo", "full", "draining", "no-adapter", "stale-epoch", "failed", "unreachable"]

T = TypeVar("T")

_NAME = attrgetter("name")
_ABSENT = Tier.ABSENT


class Chance(Protocol):
    """The part of random.Random that routing draws from."""

    def random(self) -> float:
        """Uniform in [0, 1)."""


@dataclass(slots=True)
class Instance:
    """One instance as a router sees it. Nobody changes one; a frozen one would take twice as long to make."""

    name: str
    model: PerfModel
    backlog: Backlog = field(default_factory=Backlog)
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    able: bool = True  # alive, not suspected, not draining, finishing iterations
    row: bytes = field(init=False, repr=False, compare=False)  # its numbers, for as long as this view of it holds

    def __post_init__(self) -> None:
        self.row = row(self.model, self.links, self.backlog)

    def estimate(self, arrival: Arrival, tier: Tier, own_weight: float) -> CostEstimate:
        """What the arrival would cost here."""
        links = self.links
        cold_ms = links.cold_ms(tier, arrival.adapter_bytes)
        return estimate(self.model, self.backlog, arrival, cold_ms, links.blocks_batch, own_weight)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that one router knows, itself included."""

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
        """A fleet of these instances, able or not, in any order."""
        return cls(me, {one.name: one for one in sorted(instances, key=_NAME) if one.able}, tiers or {}, plan)

    def named(self, names: Iterable[str]) -> dict[str, Instance]:
        """The able ones of these names, as ordered there; nobody else is looked at."""
        able = self.able
        return {name: able[name] for name in names if name in able}

    def of_adapter(self, adapter: str | None) -> tuple[Mapping[str, Tier], Tier]:
        """Where instances have an adapter, as far as is known, and where those that are not named. The base model is
        with everyone."""
        return ({}, Tier.DEVICE) if adapter is None else (self.tiers.get(adapter, {}), Tier.ABSENT)

    def holders(self, adapter: str | None) -> Mapping[str, Instance]:
        """The able ones that have an adapter."""
        if adapter is None:
            return self.able
        tiers = self.tiers.get(adapter, {})
        return self.named(sorted(name for name, tier in tiers.items() if tier is not _ABSENT))


class LazyOrder(Sequence[str]):
    """Names, best first, each once. All but the first few are wanted only after refusals, so they are put in order when
    somebody asks for them; `rest` may name the first ones again."""

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
        return f"Order({self._all()!r})"

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Proposal:
    """An order of instances, best first, and those of its front whose exact quotes decide between them."""

    order: Sequence[str]
    ask: tuple[str, ...] = ()  # the router's own instance may be among them: its view of itself is its quote
    estimates: Mapping[str, CostEstimate] = field(default_factory=dict)  # by the views, of those asked at least


class Policy(Protocol):
    """A way to order instances. Every able instance belongs into the order, so that a refusal finds a next one."""

    @property
    def enforces_slo(self) -> bool:
        """Whether an instance may refuse what would break the SLO there; otherwise requests insist."""

    @property
    def own_weight(self) -> float:
        """Weight of the request's own time in the estimates that it compares, quotes included."""

    def propose(self, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
        """The order for a request that has not been forwarded."""


def propose(policy: Policy, arrival: Arrival, fleet: Fleet, chance: Chance) -> Proposal:
    """The order for any request. An empty order: no instance is able, which is for the client to know."""
    if arrival.hop > 0:
        return Proposal((fleet.me,))
    return policy.propose(arrival, fleet, chance)


def apply_quotes(proposal: Proposal, quotes: Mapping[str, CostEstimate | None]) -> Sequence[str]:
    """The order once quotes are in. The asked compete for its front; where no quote came in time (None or missing),
    the old estimate stands."""
    if not proposal.ask:
        return proposal.order
    known = {name: quotes.get(name) or proposal.estimates[name] for name in proposal.ask}
    front = sorted(known, key=known.__getitem__)  # stable: ties keep the drawn order
    return LazyOrder(front, lambda: proposal.order)


# --- refusals ---


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an instance did not take a request, and its own exact estimate for it."""

    reason: Reason
    estimate: CostEstimate


@dataclass(frozen=True, slots=True)
class RoutingTarget:
    """Where a request goes next. One that `force` is refused only by who cannot serve it at all."""

    name: str
    force: bool = False


def check_acceptance(
    arrival: Arrival, own: Instance, tier: Tier, force: bool, obtainable: bool = True, draining: bool = False
) -> Refusal | None:
    """The receiver's side, on its exact state: None takes the request. `obtainable`: it has the adapter or knows who
    does. It never names another instance: the request's way is its entry's to decide."""
    here = own.estimate(arrival, tier, 0.0)
    if draining:
        return Refusal("draining", here)
    if tier is Tier.ABSENT and not obtainable:
        return Refusal("no-adapter", here)
    if own.backlog.queue_room <= 0 or here.latency_ms == math.inf:
        return Refusal("full", here)
    if here.cost == math.inf and not force:
        return Refusal("slo", here)
    return None


Attempt = tuple[RoutingTarget, Refusal | None]  # None: it failed without a word


def next_target(
    order: Sequence[str], attempts: Sequence[Attempt], elapsed_ms: float, ttft_ms: float, force: bool = False
) -> RoutingTarget | None:
    """Who to try after these attempts. At most ATTEMPTS instances may refuse, within a share of the time to the first
    token; then the least bad of those who could serve has to. None: nobody can. `force` from the start: for policies
    that know no SLO.

    It ends whatever they answer: nobody is asked twice but one who is then told to, and nobody is told to twice."""
    if not attempts:  # as far as most requests get: what follows wants all of the order
        return RoutingTarget(order[0], force) if order else None
    refusals = {target.name: refusal for target, refusal in attempts}
    insisted = {target.name for target, _ in attempts if target.force}
    untried = [name for name in order if name not in refusals]
    if untried and len(attempts) < ATTEMPTS and elapsed_ms < _PATIENCE * ttft_ms:
        return RoutingTarget(untried[0], force)
    could = {
        name: refusal.estimate
        for name, refusal in refusals.items()
        if refusal and refusal.reason == "slo" and name not in insisted
    }
    if could:
        return RoutingTarget(min(could, key=lambda name: (could[name].latency_ms, name)), force=True)
    if untried and len(attempts) < 2 * ATTEMPTS:
        return RoutingTarget(untried[0], force=True)
    return None


# --- what this router has sent ---


class SentRequests:
    """Requests sent since the beats on which the views rest. One router's own deltas: with many routers they help less
    than quotes do, but they keep a burst at one entry from going to one instance."""

    def __init__(self, transit_s: float = 0.05, most_s: float = 2.0) -> None:
        self._transit_s = transit_s  # a request this much older than a beat's arrival is in the beat
        self._most_s = most_s
        self._sent: dict[str, list[tuple[float, Arrival]]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether anything was sent there that no beat shows yet."""
        return name in self._sent

    def sent(self, name: str, arrival: Arrival, now_s: float) -> None:
        """This request has been forwarded there."""
        self._sent.setdefault(name, []).append((now_s, arrival))

    def beat(self, name: str, now_s: float) -> None:
        """An instance's new backlog has arrived."""
        left = [entry for entry in self._sent.get(name, ()) if entry[0] > now_s - self._transit_s]
        if left:
            self._sent[name] = left
        else:
            self._sent.pop(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """These instances are gone."""
        for name in names:
            self._sent.pop(name, None)

    def backlog(self, name: str, published: Backlog, now_s: float) -> Backlog:
        """The published backlog with what was sent on top."""
        for sent_s, arrival in self._sent.get(name, ()):
            if sent_s > now_s - self._most_s:
                published = published.plus(arrival.rank, arrival.prompt_tokens, arrival.output_tokens)
        return published


# --- chance ---


def shuffled(items: Iterable[T], chance: Chance) -> list[T]:
    """The items in random order."""
    rest = list(items)
    for last in range(len(rest) - 1, 0, -1):
        other = int(chance.random() * (last + 1))
        rest[last], rest[other] = rest[other], rest[last]
    return rest


def drawn(shares: Sequence[tuple[T, float]], chance: Chance) -> T:
    """One item with probability in proportion to its share; equally when all are zero."""
    total = math.fsum(share for _, share in shares)
    if total <= 0:
        return shares[int(chance.random() * len(shares))][0]
    point = chance.random() * total
    for item, share in shares:
        point -= share
        if point < 0:
            return item
    return max(shares, key=lambda entry: entry[1])[0]  # rounding took the last share's end
