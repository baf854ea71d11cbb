"""Chooses the instance that answers a request: this one or a peer.

    attempts = await selector.begin(arrival)
    while (target := attempts.next()):      LocalTarget, or a PeerTarget to forward to
        …                                   and attempts.failed(refusal), unless it was answered

A decision uses the load that peers last published, and waits at most 5 ms for exact quotes where the policy wants
them. A request that has been forwarded once is never routed again: `refusal` only decides whether it is accepted.

A request for an adapter that is still being uploaded goes to the instance that receives it, under any policy.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Protocol

from caraserve.cluster.membership.member import Member, QueryBody
from caraserve.cluster.membership.swim import MemberState
from caraserve.cluster.routing.advertised import InstanceViews
from caraserve.cluster.routing.cost import AnswerLengths, Arrival, CostEstimate
from caraserve.cluster.routing.fleet_view import FleetView
from caraserve.cluster.routing.forward_auth import from_json_number, to_json_number
from caraserve.cluster.routing.placement_plan import PlacementPlan
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.router import (
    Attempt,
    Proposal,
    Refusal,
    RoutingTarget,
    apply_quotes,
    check_acceptance,
    next_target,
)
from caraserve.cluster.routing.routing_metrics import RoutingMetrics
from caraserve.cluster.state.replicated_map import RegisteredAdapter, Tier
from caraserve.core.combined_names import members_of
from caraserve.loop import Engine
from caraserve.lora.registry import UPLOADING, AdapterInfo

LOCAL = "local"  # the routing that forwards nothing: the client or its load balancer has chosen the instance

_QUOTE_S = 0.005
_ALONE_AFTER_S = 5.0  # an instance that has received no registry by then counts as the cluster's first
_MOST_FAILURES = 2  # devices that may fail with one request, before the request is taken for the cause
_NEVER = CostEstimate(inf, inf)

ResolvedAdapter = RegisteredAdapter | AdapterInfo  # what an adapter's name stands for


def refuses_new_requests(engine: Engine) -> bool:
    """Whether the engine is draining or its device has failed. A failed one looks idle: it would be sent everything."""
    return engine.draining or engine.failure is not None


class AdapterFetcher(Protocol):
    """Downloads adapters from other instances."""

    async def ensure(self, name: str) -> None:
        """Returns when this instance can serve the adapter. Raises CaraServeError when it cannot."""

    def can_get(self, name: str) -> bool:
        """Whether the adapter's bytes are on this instance, or on another one that is alive."""


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """The latencies that the fleet promises, in ms; infinite: no promise."""

    ttft_ms: float = inf
    tpot_ms: float = inf


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """The request is answered by this instance."""


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """The request is forwarded to another instance."""

    name: str
    address: str
    attempt: int
    force: bool


class InstanceSelector:
    """Routes the requests of one instance, and accepts or refuses those that other instances forward to it."""

    def __init__(
        self,
        member: Member,
        views: InstanceViews,
        policy: Policy | None,
        slo: LatencyTargets,
        find: Callable[[str], ResolvedAdapter | None],
        draining: Callable[[], bool],
        *,
        fetcher: AdapterFetcher | None,
        rng: Random,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy`: None for the `local` routing. `find`: returns an adapter of this instance by name. `fetcher`: None
        where adapters cannot be downloaded, so requests go only to instances with their adapter."""
        self.routing_metrics = RoutingMetrics()
        self._member, self._slo, self._find, self._draining = member, slo, find, draining
        self._policy, self._fetcher, self._rng = policy, fetcher, rng
        self._joined_s: float | None = None
        self.now = now
        self._view = FleetView(member, views, now)
        self._lengths = AnswerLengths()

    # ---- for both sides

    @property
    def name(self) -> str:
        """This instance's name."""
        return self._member.name

    def join(self) -> None:
        """Starts forwarding: this instance is a member of the cluster and has registered its adapters."""
        self._joined_s = self.now()

    @property
    def joined(self) -> bool:
        """Whether this instance has joined its cluster."""
        return self._joined_s is not None

    @property
    def is_registry_known(self) -> bool:
        """Whether another instance's registry has arrived, or none has within 5 s of joining."""
        if self._joined_s is None:
            return False
        return self._member.has_registry or self.now() >= self._joined_s + _ALONE_AFTER_S

    @property
    def forwards(self) -> bool:
        """Whether requests may be forwarded to other instances."""
        return self._policy is not None and self.joined

    def adopt(self, plan: PlacementPlan | None) -> None:
        """Sets the placement that policies use from now on."""
        self._view.plan = plan

    def resolve(self, name: str) -> ResolvedAdapter | None:
        """Returns the adapter that a name stands for: by the registry, or else on this instance alone, or else where
        it is being uploaded."""
        meant = (self._member.adapter(name) if self.joined else None) or self._find(name)
        return meant or next(iter(self._member.uploads(name).values()), None)

    def _uploading(self, name: str | None) -> tuple[str, ...]:
        """Returns the instances, this one or others, that take requests for an adapter while it is uploaded to them;
        none once the name stands for a whole adapter."""
        if name is None or not self.joined or self._member.adapter(name) is not None:
            return ()
        if (here := self._find(name)) is not None:
            return (self.name,) if isinstance(here, AdapterInfo) and here.state == UPLOADING else ()
        return tuple(sorted(self._member.uploads(name)))

    def has(self, name: str) -> bool:
        """Whether this instance has the adapter that the name stands for, by digest."""
        here, meant = self._find(name), self.resolve(name)
        return here is not None and meant is not None and here.digest == meant.digest

    async def obtain(self, adapter: str | None) -> None:
        """Downloads an adapter if only other instances have it. Raises CaraServeError if that fails."""
        if adapter is not None and self._fetcher is not None:
            await self._fetcher.ensure(adapter)

    def arrival(self, adapter: str | None, prompt_tokens: int, max_tokens: int) -> Arrival:
        """Describes a request for routing, with the expected length of its answer, at most `max_tokens`."""
        output_tokens = max(1.0, min(self._lengths.expected(adapter), max_tokens))
        meant = None if adapter is None else self.resolve(adapter)
        rank, num_bytes = (meant.rank, meant.num_bytes) if meant else (0, 0)
        return Arrival(adapter, rank, prompt_tokens, output_tokens, num_bytes, self._slo.tpot_ms)

    def began(self, name: str, arrival: Arrival) -> float:
        """Adds a request to an instance's load as seen here. Returns its predicted time per token in ms."""
        seen = self._view.instance(name)
        self._view.add_sent(name, arrival)
        return inf if seen is None else seen.estimate(arrival, self._tier(name, arrival.adapter), 0.0).latency_ms

    def draw_seed(self) -> int:
        """Draws a seed for a request without one, so that each instance that tries it samples the same tokens."""
        return self._rng.getrandbits(63)

    def answered(self, adapter: str | None, output_tokens: int) -> None:
        """Records the length of one answer, from which those of later ones are predicted."""
        self._lengths.observe(adapter, output_tokens)

    # ---- requests and quotes of other instances

    def refusal(self, arrival: Arrival, *, force: bool, digest: str | None = None) -> Refusal | None:
        """Returns why this instance refuses a request, by its exact state, or None if it accepts the request.
        `digest`: of the adapter that the forwarding instance means by the name."""
        if arrival.adapter is not None and digest is not None and self._digest(arrival.adapter) != digest:
            return Refusal("no-adapter", _NEVER)
        if not self._can_answer(arrival.adapter):
            return Refusal("no-adapter", _NEVER)
        own = self._view.instance(self.name)
        if own is None:  # nothing is known of this machine's speed
            return Refusal("draining", _NEVER) if self._draining() else None
        tier = self._tier(self.name, arrival.adapter)
        return check_acceptance(arrival, own, tier, force, draining=self._draining())

    def quote(self, peer: str, body: QueryBody) -> QueryBody:
        """Answers another instance's query: returns cost and time per token of a request here; empty: not a query."""
        match body:
            case ("route", str(adapter), int(tokens), float(output_tokens) | int(output_tokens)) if output_tokens >= 1:
                name = adapter or None
                meant = None if name is None else self.resolve(name)
                rank, num_bytes = (meant.rank, meant.num_bytes) if meant else (0, 0)
                arrival = Arrival(name, rank, tokens, output_tokens, num_bytes, self._slo.tpot_ms)
                return tuple(map(to_json_number, self._estimate(arrival)))
        return ()

    def _estimate(self, arrival: Arrival) -> CostEstimate:
        own, tier = self._view.instance(self.name), self._tier(self.name, arrival.adapter)
        if own is None or self._draining() or not self._can_answer(arrival.adapter):
            return _NEVER
        return own.estimate(arrival, tier, self._policy.own_weight if self._policy else 0.0)

    # ---- this instance's own requests

    async def begin(self, arrival: Arrival) -> "RoutingAttempts":
        """Orders the instances for a request that has not been forwarded, with their quotes where they are wanted."""
        if uploading := self._uploading(arrival.adapter):
            return RoutingAttempts(self, arrival, uploading, force=True)
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
        """Returns the policy's order of instances, by the load that they last published."""
        if uploading := self._uploading(arrival.adapter):
            return Proposal(uploading)
        assert self._policy is not None
        digests = () if arrival.adapter is None else self._digests(arrival.adapter)
        fleet = self._view.fleet(arrival.adapter, digests, holders_only=self._fetcher is None)
        return self._policy.propose(arrival, fleet, self._rng)

    def outstanding(self, adapters: Iterable[str | None]) -> tuple[dict[str, float], dict[str | None, set[str]]]:
        """Returns the tokens that each able instance still has to compute, estimated; and each adapter's holders."""
        able = self._view.fleet(None, (), holders_only=False).able.values()
        mean = self._lengths.expected(None)
        tokens = {one.name: one.backlog.queued_tokens + one.backlog.requests * mean for one in able}
        tokens.setdefault(self.name, 0.0)
        tiers = {adapter: self._view.tiers(self._digests(adapter)) for adapter in adapters if adapter is not None}
        return tokens, {adapter: set(held) & tokens.keys() for adapter, held in tiers.items()}

    def holders(self, adapter: str | None) -> Collection[str]:
        """Returns the names of the instances that are known to have an adapter's bytes."""
        return () if adapter is None else self._view.tiers(self._digests(adapter)).keys()

    def mark_unreachable(self, name: str) -> None:
        """Leaves an instance out of routing for a while, after a connection to it failed or broke."""
        self._view.mark_unreachable(name)

    def mark_reached(self, name: str) -> None:
        """Records that an instance has answered or refused a request as it should."""
        self._view.mark_reached(name)

    async def _quotes(self, proposal: Proposal, arrival: Arrival) -> Mapping[str, CostEstimate | None]:
        asked = [name for name in proposal.ask if name != self.name]
        if not asked or len(proposal.ask) == 1:
            return {}
        body = ("route", arrival.adapter or "", arrival.prompt_tokens, float(arrival.output_tokens))
        answers = await asyncio.gather(*(self._member.query(name, body, _QUOTE_S) for name in asked))
        self.routing_metrics.unquoted += answers.count(None)
        return dict(zip(asked, map(_quoted, answers), strict=True))

    def peer(self, target: RoutingTarget, attempt: int) -> PeerTarget | None:
        """Returns where to reach an instance, or None if it is not alive."""
        record = self._member.record(target.name)
        if record is None or record.state != MemberState.ALIVE:
            return None
        return PeerTarget(target.name, record.address, attempt, target.force)

    @property
    def ttft_ms(self) -> float:
        """The promised time to the first token."""
        return self._slo.ttft_ms

    def could_answer(self, adapter: str | None) -> bool:
        """Whether this instance has the adapter, or could download it if another instance had all of it."""
        if adapter is None or self.has(adapter):
            return True
        return self._fetcher is not None and all(self._member.adapter(one) for one, _ in members_of(adapter))

    def _can_answer(self, adapter: str | None) -> bool:
        """Whether this instance has the adapter or can download it now. A request for one that no live instance holds
        would only wait here, so it is refused."""
        if adapter is None or self._fetcher is None:
            return self.could_answer(adapter)
        return self._fetcher.can_get(adapter)

    def _digest(self, adapter: str) -> str:
        meant = self.resolve(adapter)
        return meant.digest if meant else ""

    def _digests(self, adapter: str) -> list[str]:
        """Returns the digest of an adapter, or those of all in a combination."""
        return [self._digest(member) for member, _ in members_of(adapter)] or [""]

    def _tier(self, name: str, adapter: str | None) -> Tier:
        if adapter is None:
            return Tier.DEVICE
        return self._view.tiers(self._digests(adapter)).get(name, Tier.ABSENT)


class RoutingAttempts:
    """Tries instances for one request until one of them answers. `id` is the same at every attempt."""

    def __init__(self, selector: InstanceSelector, arrival: Arrival, order: Sequence[str], *, force: bool) -> None:
        self.id = uuid.uuid4().hex
        self._selector, self._arrival, self._order, self._force = selector, arrival, order, force
        self._began_s = selector.now()
        self._attempts: list[Attempt] = []
        self._target: RoutingTarget | None = None
        self.tried_local = False
        self._has_failed = False
        self._num_forwards = 0

    def next(self) -> LocalTarget | PeerTarget | None:
        """Returns where the request goes next, or None if no instance is left that would accept it."""
        target = None if self._has_failed else self._choose()
        if self._attempts and target is not None:
            self._selector.routing_metrics.retried += 1
        return target

    def failed(self, refusal: Refusal | None) -> None:
        """Records that the last target did not answer. `refusal`: its reason; None if it gave none."""
        assert self._target is not None
        self._attempts.append((self._target, refusal))
        if refusal is not None and refusal.reason == "stale-epoch":  # it waited there, and loads have changed since
            self.tried_local = False
            self._order = self._selector.propose(self._arrival).order
        if refusal is not None and refusal.reason == "unreachable":
            self._keep_holders()
        reasons = [refusal.reason for _, refusal in self._attempts if refusal is not None]
        self._has_failed = reasons.count("failed") == _MOST_FAILURES

    def _keep_holders(self) -> None:
        """Keeps only the adapter's holders: other instances could not download it either."""
        holders = self._selector.holders(self._arrival.adapter)
        self._order = [name for name in self._order if name in holders]
        self.tried_local = self.tried_local or self._selector.name not in holders

    def _next_target(self) -> RoutingTarget | None:
        elapsed_ms = 1000 * (self._selector.now() - self._began_s)
        return next_target(self._order, self._attempts, elapsed_ms, self._selector.ttft_ms, self._force)

    def _choose(self) -> LocalTarget | PeerTarget | None:
        while (target := self._next_target()) is not None:
            self._target = target
            if target.name != self._selector.name:
                self._num_forwards += 1
                if (peer := self._selector.peer(target, self._num_forwards)) is not None:
                    return peer
                self.failed(None)
            elif (refusal := self._selector.refusal(self._arrival, force=target.force)) is not None:
                self.failed(refusal)
            else:
                self.tried_local = True
                return LocalTarget()
        # All instances in the order have been tried. This one answers the request itself if it has not tried yet.
        if self.tried_local or not self._selector.could_answer(self._arrival.adapter):
            return None
        self._target, self.tried_local = RoutingTarget(self._selector.name, force=True), True
        return LocalTarget()


def _quoted(body: QueryBody | None) -> CostEstimate | None:
    match body:
        case (float(cost) | int(cost), float(latency_ms) | int(latency_ms)):
            return CostEstimate(from_json_number(cost), from_json_number(latency_ms))
    return None
