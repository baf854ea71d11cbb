"""Who answers a request: this instance or another one.

    trip = await forwarding.begin(arrival)
    while (stop := await trip.next()):      Here, or a Peer to forward to
        …                                   and trip.failed(refusal), unless it was answered

A decision takes views that are at hand, and a few milliseconds at most where exact quotes of others are worth it. A
request that was forwarded already never gets here: `refusal` says whether this instance takes it, and that is all.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Protocol

from caraserve.cluster.membership.swim import MemberState
from caraserve.cluster.placement.plan import PlacementPlan
from caraserve.cluster.routing.cost import AnswerLengths, Arrival, CostEstimate, Tier
from caraserve.cluster.routing.fleet_view import FleetView, PeerStates
from caraserve.cluster.routing.forward_auth import from_json_number, to_json_number
from caraserve.cluster.routing.router import (
    Attempt,
    Policy,
    Proposal,
    Refusal,
    RoutingTarget,
    apply_quotes,
    check_acceptance,
    next_target,
)
from caraserve.cluster.routing.routing_metrics import RoutingMetrics
from caraserve.cluster.state.replicated_map import RegisteredAdapter

LOCAL = "local"  # the routing that forwards nothing: whoever sends requests has chosen

_QUOTE_S = 0.005
_MOST_FAILURES = 2  # devices that may fail with one request: it may be what they fail of
_NEVER = CostEstimate(inf, inf)

Body = tuple[str | int | float, ...]


class ClusterNode(PeerStates, Protocol):
    """The part of `cluster.Node` that is asked."""

    def adapter(self, name: str) -> RegisteredAdapter | None: ...

    async def query(self, peer: str, body: Body, timeout_s: float) -> Body | None: ...


class ResolvedAdapter(Protocol):
    """An adapter of this instance."""

    @property
    def digest(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class EngineStatus(Protocol):
    """The part of an engine that says whether it goes on."""

    @property
    def draining(self) -> bool: ...

    @property
    def failure(self) -> str | None: ...


def refuses_new_requests(engine: EngineStatus) -> bool:
    """Whether new requests belong elsewhere. An engine whose device has failed looks idle, and would draw them all."""
    return engine.draining or engine.failure is not None


class AdapterFetcher(Protocol):
    """Gets what other instances have."""

    async def ensure(self, name: str) -> None:
        """Returns when this instance can serve the adapter. Raises CaraServeError when it cannot."""

    def can_get(self, name: str) -> bool:
        """Whether its bytes are here, or with somebody who is there."""


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """What the fleet promises; infinite: nothing."""

    ttft_ms: float = inf
    tpot_ms: float = inf


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """This instance answers."""


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """Another one does."""

    name: str
    address: str
    attempt: int
    force: bool


class Forwarding:
    """One instance's router, and what it says when others route to it."""

    def __init__(
        self,
        cluster: ClusterNode,
        policy: Policy | None,
        slo: LatencyTargets,
        find: Callable[[str], ResolvedAdapter | None],
        draining: Callable[[], bool],
        *,
        rng: Random,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy`: none where whoever sends requests has chosen. `find`: an adapter of this instance by name."""
        self.fetcher: AdapterFetcher | None = None  # without one, requests go only to those who have their adapter
        self.routing_metrics = RoutingMetrics()
        self.joined = False  # nobody is known before
        self.introduced: Callable[[], bool] = lambda: False  # whether the cluster's names are known
        self._cluster, self._slo, self._find, self._draining = cluster, slo, find, draining
        self._policy = policy
        self._rng = rng
        self.now = now
        self._view = FleetView(cluster, now)
        self._lengths = AnswerLengths()

    # ---- for both sides

    @property
    def name(self) -> str:
        """This instance's."""
        return self._cluster.name

    @property
    def forwards(self) -> bool:
        """Whether requests may go elsewhere."""
        return self._policy is not None and self.joined

    def adopt(self, plan: PlacementPlan | None) -> None:
        """The placement that policies go by from now on."""
        self._view.plan = plan

    def resolve(self, name: str) -> ResolvedAdapter | None:
        """What an adapter's name means: to the cluster, else to this instance alone."""
        return (self._cluster.adapter(name) if self.joined else None) or self._find(name)

    def has(self, name: str) -> bool:
        """Whether this instance has what the name means."""
        here, meant = self._find(name), self.resolve(name)
        return here is not None and meant is not None and here.digest == meant.digest

    async def obtain(self, adapter: str | None) -> None:
        """Before this instance answers: gets an adapter that others have. Raises CaraServeError."""
        if adapter is not None and self.fetcher is not None:
            await self.fetcher.ensure(adapter)

    def arrival(self, adapter: str | None, prompt_tokens: int, max_tokens: int, hop: int = 0) -> Arrival:
        """A request as routing sees it. `max_tokens`: of its answer."""
        output_tokens = max(1.0, min(self._lengths.expected(adapter), max_tokens))
        meant = None if adapter is None else self.resolve(adapter)
        rank, num_bytes = (meant.rank, meant.num_bytes) if meant else (0, 0)
        return Arrival(adapter, rank, prompt_tokens, output_tokens, num_bytes, self._slo.tpot_ms, hop)

    def began(self, name: str, arrival: Arrival) -> float:
        """A request goes to an instance. Gives the predicted time per token in ms."""
        seen = self._view.instance(name)
        self._view.add_sent(name, arrival)
        return inf if seen is None else seen.estimate(arrival, self._tier(name, arrival.adapter), 0.0).latency_ms

    def draw_seed(self) -> int:
        """For a request that gives none: wherever it is tried, it draws the same tokens."""
        return self._rng.getrandbits(63)

    def answered(self, adapter: str | None, output_tokens: int) -> None:
        """How long an answer of this instance was."""
        self._lengths.observe(adapter, output_tokens)

    # ---- as the one who is asked

    def refusal(self, arrival: Arrival, *, force: bool, digest: str | None = None) -> Refusal | None:
        """Why this instance does not take a request, on its exact state; None: it does. `digest`: of the adapter, as
        the one who forwards it knows it."""
        if arrival.adapter is not None and digest is not None and self._digest(arrival.adapter) != digest:
            return Refusal("no-adapter", _NEVER)
        if not self._can_answer(arrival.adapter):
            return Refusal("no-adapter", _NEVER)
        own = self._view.instance(self.name)
        if own is None:  # nothing is known of this machine's speed
            return Refusal("draining", _NEVER) if self._draining() else None
        tier = self._tier(self.name, arrival.adapter)
        return check_acceptance(arrival, own, tier, force, draining=self._draining())

    def quote(self, peer: str, body: Body) -> Body:
        """For `NodeListener.answer_query`: what a request would cost here."""
        match body:
            case ("route", str(adapter), int(tokens), float(output_tokens) | int(output_tokens)) if output_tokens >= 1:
                name = adapter or None
                meant = None if name is None else self.resolve(name)
                rank, num_bytes = (meant.rank, meant.num_bytes) if meant else (0, 0)
                arrival = Arrival(name, rank, tokens, output_tokens, num_bytes, self._slo.tpot_ms, hop=1)
                return tuple(map(to_json_number, self._estimate(arrival)))
        return ()

    def _estimate(self, arrival: Arrival) -> CostEstimate:
        own, tier = self._view.instance(self.name), self._tier(self.name, arrival.adapter)
        if own is None or self._draining() or not self._can_answer(arrival.adapter):
            return _NEVER
        return own.estimate(arrival, tier, self._policy.own_weight if self._policy else 0.0)

    # ---- as the one who asks

    async def begin(self, arrival: Arrival) -> "RoutingAttempts":
        """Chooses for a request that has not been forwarded."""
        if self._policy is None or not self.joined:
            return RoutingAttempts(self, arrival, (), force=True)
        started_s = time.perf_counter()
        proposal = self.propose(arrival)
        decided_s = time.perf_counter()
        self.routing_metrics.decisions.observe(decided_s - started_s)
        quotes = await self._quotes(proposal, arrival)
        if quotes:
            self.routing_metrics.quotes.observe(time.perf_counter() - decided_s)
        return RoutingAttempts(self, arrival, apply_quotes(proposal, quotes), force=not self._policy.enforces_slo)

    def propose(self, arrival: Arrival) -> Proposal:
        """The order by the views at hand; the policy's own part of a decision."""
        assert self._policy is not None
        digest = "" if arrival.adapter is None else self._digest(arrival.adapter)
        fleet = self._view.fleet(arrival.adapter, digest, holders_only=self.fetcher is None)
        return self._policy.propose(arrival, fleet, self._rng)

    def outstanding(self, adapters: Iterable[str | None]) -> tuple[dict[str, float], dict[str | None, set[str]]]:
        """Tokens that every able instance still has to do, about; and who of them has which of these adapters."""
        able = self._view.fleet(None, "", holders_only=False).able.values()
        mean = self._lengths.expected(None)
        tokens = {one.name: one.backlog.queued_tokens + one.backlog.requests * mean for one in able}
        tokens.setdefault(self.name, 0.0)
        tiers = {adapter: self._view.tiers(self._digest(adapter)) for adapter in adapters if adapter is not None}
        return tokens, {adapter: set(held) & tokens.keys() for adapter, held in tiers.items()}

    def holders(self, adapter: str | None) -> Collection[str]:
        """Who has an adapter's bytes, as far as is known."""
        return () if adapter is None else self._view.tiers(self._digest(adapter)).keys()

    def mark_unreachable(self, name: str) -> None:
        """Nothing comes from there just now."""
        self._view.mark_unreachable(name)

    async def _quotes(self, proposal: Proposal, arrival: Arrival) -> Mapping[str, CostEstimate | None]:
        asked = [name for name in proposal.ask if name != self.name]
        if not asked or len(proposal.ask) == 1:
            return {}
        body = ("route", arrival.adapter or "", arrival.prompt_tokens, float(arrival.output_tokens))
        answers = await asyncio.gather(*(self._cluster.query(name, body, _QUOTE_S) for name in asked))
        self.routing_metrics.unquoted += answers.count(None)
        return dict(zip(asked, map(_quoted, answers), strict=True))

    def peer(self, target: RoutingTarget, attempt: int) -> PeerTarget | None:
        """Where to reach an instance; None for one that is gone."""
        record = self._cluster.record(target.name)
        if record is None or record.state != MemberState.ALIVE:
            return None
        return PeerTarget(target.name, record.address, attempt, target.force)

    def next_target(
        self, order: Sequence[str], attempts: Sequence[Attempt], elapsed_ms: float, force: bool
    ) -> RoutingTarget | None:
        """`router.next_target` under this fleet's promise."""
        return next_target(order, attempts, elapsed_ms, self._slo.ttft_ms, force)

    def could_answer(self, adapter: str | None) -> bool:
        """Whether this instance has what it takes, or could get it."""
        return adapter is None or self.fetcher is not None or self.has(adapter)

    def _can_answer(self, adapter: str | None) -> bool:
        """The same now: whoever is asked takes nothing that would wait here for bytes which nobody has."""
        if adapter is None or self.fetcher is None:
            return self.could_answer(adapter)
        return self.fetcher.can_get(adapter)

    def _digest(self, adapter: str) -> str:
        meant = self.resolve(adapter)
        return meant.digest if meant else ""

    def _tier(self, name: str, adapter: str | None) -> Tier:
        if adapter is None:
            return Tier.DEVICE
        return self._view.tiers(self._digest(adapter)).get(name, Tier.ABSENT)


class RoutingAttempts:
    """One request's way to whoever answers it. `id` is the same at every attempt."""

    def __init__(self, forwarding: Forwarding, arrival: Arrival, order: Sequence[str], *, force: bool) -> None:
        self.id = uuid.uuid4().hex
        self._forwarding, self._arrival, self._order, self._insists = forwarding, arrival, order, force
        self._began_s = forwarding.now()
        self._attempts: list[Attempt] = []
        self._target: RoutingTarget | None = None
        self.tried_local = False
        self._given_up = False
        self._stops = 0

    def next(self) -> LocalTarget | PeerTarget | None:
        """Where the request goes now. None: nobody takes it."""
        stop = None if self._given_up else self._choose()
        if self._attempts and stop is not None:
            self._forwarding.routing_metrics.retried += 1
        return stop

    def failed(self, refusal: Refusal | None) -> None:
        """It was not answered there: refused, or (None) nobody knows why."""
        assert self._target is not None
        self._attempts.append((self._target, refusal))
        if refusal is not None and refusal.reason == "stale-epoch":  # it waited there for a while, in vain
            self.tried_local = False
            self._order = self._forwarding.propose(self._arrival).order
        if refusal is not None and refusal.reason == "unreachable":
            self._leave_to_holders()
        reasons = [why.reason for _, why in self._attempts if why is not None]
        self._given_up = reasons.count("failed") == _MOST_FAILURES

    def _leave_to_holders(self) -> None:
        """Whoever has not got the adapter would wait for it in vain, too."""
        holders = self._forwarding.holders(self._arrival.adapter)
        self._order = [name for name in self._order if name in holders]
        self.tried_local = self.tried_local or self._forwarding.name not in holders

    def _next_target(self) -> RoutingTarget | None:
        elapsed_ms = 1000 * (self._forwarding.now() - self._began_s)
        return self._forwarding.next_target(self._order, self._attempts, elapsed_ms, self._insists)

    def _choose(self) -> LocalTarget | PeerTarget | None:
        while (target := self._next_target()) is not None:
            self._target = target
            if target.name != self._forwarding.name:
                self._stops += 1
                if (peer := self._forwarding.peer(target, self._stops)) is not None:
                    return peer
                self.failed(None)
            elif (refusal := self._forwarding.refusal(self._arrival, force=target.force)) is not None:
                self.failed(refusal)
            else:
                self.tried_local = True
                return LocalTarget()
        # All were asked that would be asked; the one that has the request in hand may still do it.
        if self.tried_local or not self._forwarding.could_answer(self._arrival.adapter):
            return None
        self._target, self.tried_local = RoutingTarget(self._forwarding.name, force=True), True
        return LocalTarget()


def _quoted(body: Body | None) -> CostEstimate | None:
    match body:
        case (float(cost) | int(cost), float(latency_ms) | int(latency_ms)):
            return CostEstimate(from_json_number(cost), from_json_number(latency_ms))
    return None
