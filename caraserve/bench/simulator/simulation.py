"""A simulated cluster under a virtual clock: requests arrive, routers choose by delayed views, instances batch.

An instance is advanced only when its state is read: for a heartbeat, a quote or a delivery. Events at the same time are
processed in the order heartbeat, rebalancing, plan, delivery, arrival. The result depends only on the setting (which
includes the seed) and the requests.
"""

import gc
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from caraserve.bench.records import Workload
from caraserve.bench.simulator.adapter_cache import AdapterCache
from caraserve.bench.simulator.compiled_ranking import PackedInstance, estimates, rank_compiled
from caraserve.bench.simulator.instance import FOREVER, MS, BatchSimulator, IterationRun, SimRequest
from caraserve.bench.simulator.machines import Machine
from caraserve.bench.simulator.placement import SimPlanner
from caraserve.bench.simulator.views import RouterViews
from caraserve.cluster.placement.migration import QueuedRequest, rebalanced
from caraserve.cluster.routing.cost import AnswerLengths, Arrival, CostEstimate, Tier
from caraserve.cluster.routing.policies import policy
from caraserve.cluster.routing.router import (
    Attempt,
    Instance,
    Proposal,
    Refusal,
    RoutingTarget,
    apply_quotes,
    check_acceptance,
    next_target,
)

_BEAT, _REBALANCE, _PLAN, _DELIVERY = range(4)
_S = 1000 * MS
_MOVE_TOKENS = 50.0  # cost of moving a queued request, in tokens: it has no KV yet, only an adapter to load


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster and its parameters."""

    machines: tuple[Machine, ...]
    routing: str
    slo_ms: float  # time per token
    ttft_ms: float = 10_000.0
    routers: int | None = None  # number of instances that clients send requests to; None: all
    copies: int = 2  # of each adapter before the first request, under routings that make no plan
    beat_ms: float = 250.0
    beat_jitter: float = 0.1  # share of the period
    gossip_ms: float = 2.0
    quote_ms: float = 0.5  # round trip of a quote
    hop_ms: float = 0.6
    first_plan_s: float = 10.0
    plan_s: float = 60.0
    rebalance_s: float = 1.0
    move_bytes_per_s: float = 500e6  # at which each instance fetches adapters that a plan assigns to it
    seed: int = 0


class SimInstance:
    """One instance: its batches, its adapters, and the state that it publishes."""

    def __init__(self, name: str, machine: Machine, adapter_bytes: list[int], trace: list[IterationRun] | None) -> None:
        self.name, self.machine = name, machine
        self.batches, self.cache = BatchSimulator(machine, trace), AdapterCache(machine, adapter_bytes)
        self._shown = PackedInstance(name, machine.model, self.batches.backlog(), machine.links)

    def shown(self) -> Instance:
        """Returns the exact current state; the same object until the backlog changes."""
        backlog = self.batches.backlog()
        if backlog is not self._shown.backlog:
            self._shown = self._shown.with_backlog(backlog)
        return self._shown

    def tier(self, request: SimRequest) -> Tier:
        """Returns where a request's adapter is."""
        return Tier.DEVICE if request.adapter < 0 else self.cache.tier(request.adapter)


@dataclass(slots=True)
class SimRouting:
    """The routing of one request: candidates in order, attempts so far, the current target."""

    request: SimRequest
    arrival: Arrival
    router: int
    order: Sequence[str]
    attempts: list[Attempt]
    target: RoutingTarget


@dataclass(slots=True)
class EventCounts:
    """Numbers of events, except those that instances count."""

    arrivals: int = 0
    beats: int = 0
    quotes: int = 0
    deliveries: int = 0
    refusals: int = 0
    hops: int = 0
    migrations: int = 0
    plans: int = 0


class Simulation:
    """One run of a simulated cluster.

    Heartbeats, arrivals and deliveries are appended to `log` if given: (time in ns, kind, request or instance,
    instance).
    """

    def __init__(
        self,
        setting: Setting,
        workload: Workload,
        log: list[tuple[int, str, int, int]] | None = None,
        *,
        trace: bool = False,
    ) -> None:
        self._setting, self._workload, self._log = setting, workload, log
        self._chance = random.Random(setting.seed)
        self.counts = EventCounts()
        self.traces: list[list[IterationRun]] = [[] for _ in setting.machines] if trace else []
        rank_bytes = setting.machines[0].rank_bytes
        adapter_bytes = [rank * rank_bytes for rank in workload.ranks]
        self._adapters = [f"adapter-{number:05}" for number in range(len(workload.ranks))]
        self.nodes = [
            SimInstance(f"i{number:03}", machine, adapter_bytes, self.traces[number] if trace else None)
            for number, machine in enumerate(setting.machines)
        ]
        self._routers = setting.routers or len(self.nodes)
        self._policies = [policy(setting.routing, rank_compiled) for _ in range(self._routers)]
        self._enforces_slo = self._policies[0].enforces_slo
        self._own_weight = self._policies[0].own_weight
        shown = [node.shown() for node in self.nodes]
        self._views = RouterViews(shown, self._adapters, self._routers, round(setting.gossip_ms * MS))
        self._lengths = AnswerLengths()
        self._planner = SimPlanner(
            setting.routing, self.nodes, self._views, workload, self._adapters, setting.slo_ms, setting.copies
        )
        self._events: list[tuple[int, int, int, Any]] = []
        self._sequence = 0
        self.requests = [
            SimRequest(
                planned.index,
                round(planned.at_s * _S),
                -1 if planned.adapter is None else planned.adapter,
                0 if planned.adapter is None else workload.ranks[planned.adapter],
                planned.prompt_tokens,
                planned.output_tokens,
            )
            for planned in workload.requests
        ]
        self.lost: list[SimRequest] = []  # refused by every instance
        self.served_by = [-1] * len(self.requests)

    def run(self) -> None:
        """Simulates from the first arrival until every request has ended.

        Garbage collection is off meanwhile: no reference cycles are created, and looking for them would take up to a
        quarter of the time.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            self._run()
        finally:
            if collects:
                gc.enable()

    def _run(self) -> None:
        end = self.requests[-1].arrived if self.requests else 0
        self._planner.begin()
        self._schedule_first()
        for request in self.requests:
            self._until(request.arrived)
            self._route_arrival(request)
        self._until(end, last=True)
        while self._events:  # only deliveries still matter
            time, kind, _, payload = heappop(self._events)
            if kind == _DELIVERY:
                self._deliver(payload, time)
        for node in self.nodes:
            node.batches.advance(FOREVER - 1)
            self._collect(node)

    def _schedule_first(self) -> None:
        period = round(self._setting.beat_ms * MS)
        for number in range(len(self.nodes)):
            self._push(period * number // len(self.nodes), _BEAT, number)
        if self._setting.routing == "dlora":
            self._push(round(self._setting.rebalance_s * _S), _REBALANCE, None)
        if self._planner.replans:
            self._push(round(self._setting.first_plan_s * _S), _PLAN, None)

    def _push(self, time: int, kind: int, payload: object) -> None:
        self._sequence += 1
        heappush(self._events, (time, kind, self._sequence, payload))

    def _until(self, now: int, *, last: bool = False) -> None:
        """Processes every event up to `now`."""
        events = self._events
        while events and events[0][0] <= now:
            time, kind, _, payload = heappop(events)
            if kind == _BEAT:
                self._beat(payload, time)
            elif kind == _DELIVERY:
                self._deliver(payload, time)
            elif kind == _PLAN:
                self._plan(time)
            else:
                self._rebalance(time)

    # --- periodic events ---

    def _beat(self, number: int, now: int) -> None:
        node, setting = self.nodes[number], self._setting
        node.batches.advance(now)
        self._collect(node)
        self._planner.move(number, now, setting.move_bytes_per_s * setting.beat_ms / 1000)
        changed, node.cache.changed = node.cache.changed, {}
        self._views.publish(number, node.shown(), changed, now)
        self.counts.beats += 1
        if self._log is not None:
            self._log.append((now, "beat", number, number))
        jitter = 1 + setting.beat_jitter * (2 * self._chance.random() - 1)
        self._push(now + round(setting.beat_ms * jitter * MS), _BEAT, number)

    def _plan(self, now: int) -> None:
        self._planner.replan(now)
        self.counts.plans += 1
        self._push(now + round(self._setting.plan_s * _S), _PLAN, None)

    def _rebalance(self, now: int) -> None:
        """Moves requests that wait for memory to other instances, as dLoRA does."""
        stuck: dict[str, list[SimRequest]] = {}
        for node in self.nodes:
            node.batches.advance(now)
            stuck[node.name] = node.batches.stuck()
        if any(stuck.values()):
            queues = {
                name: [QueuedRequest(str(one.index), self._name_of(one), one.prompt + one.output) for one in waiting]
                for name, waiting in stuck.items()
            }
            outstanding = {node.name: float(node.batches.outstanding_tokens) for node in self.nodes}
            wanted = {self._name_of(one) for waiting in stuck.values() for one in waiting}
            holders: dict[str | None, Iterable[str]] = {
                name: list(self._views.tiers.get(name, ())) for name in wanted if name is not None
            }
            for move in rebalanced(queues, outstanding, holders, _MOVE_TOKENS):
                self._move(self.requests[int(move.request_id)], move.source, move.target, now)
        self._push(now + round(self._setting.rebalance_s * _S), _REBALANCE, None)

    def _move(self, request: SimRequest, source: str, target: str, now: int) -> None:
        node = self.nodes[self._views.number(source)]
        node.batches.take_back(request)
        if request.adapter >= 0:
            node.cache.release(request.adapter)
        self.counts.migrations += 1
        arrival = self._arrival(request)
        routed = SimRouting(
            request, arrival, self._views.number(source), (target,), [], RoutingTarget(target, force=True)
        )
        self._push(now + round(self._setting.hop_ms * MS), _DELIVERY, routed)

    # --- requests ---

    def _name_of(self, request: SimRequest) -> str | None:
        return None if request.adapter < 0 else self._adapters[request.adapter]

    def _arrival(self, request: SimRequest) -> Arrival:
        name = self._name_of(request)
        size = 0 if request.adapter < 0 else request.rank * self._setting.machines[0].rank_bytes
        return Arrival(name, request.rank, request.prompt, self._lengths.expected(name), size, self._setting.slo_ms)

    def _route_arrival(self, request: SimRequest) -> None:
        now, chance = request.arrived, self._chance
        self.counts.arrivals += 1
        self._views.arrive(now)
        router = int(chance.random() * self._routers)
        own = self.nodes[router]
        own.batches.advance(now)
        arrival = self._arrival(request)
        self._planner.observe(request)
        fleet = self._views.of(router, own.shown(), now)
        proposal = self._policies[router].propose(arrival, fleet, chance)
        order = apply_quotes(proposal, self._quotes(proposal, arrival, request, now))
        quote_ns = round(self._setting.quote_ms * MS) if proposal.ask else 0
        target = next_target(order, [], 0.0, self._setting.ttft_ms, force=not self._enforces_slo)
        if self._log is not None:
            self._log.append((now, "arrival", request.index, router))
        if target is None:
            self.lost.append(request)
        else:
            self._send(SimRouting(request, arrival, router, order, [], target), now + quote_ns)

    def _quotes(self, proposal: Proposal, arrival: Arrival, request: SimRequest, now: int) -> dict[str, CostEstimate]:
        if not proposal.ask:
            return {}
        nodes = [self.nodes[self._views.number(name)] for name in proposal.ask]
        for node in nodes:
            node.batches.advance(now)
        self.counts.quotes += len(nodes)
        tiers = [node.tier(request) for node in nodes]
        quotes = estimates([node.shown() for node in nodes], tiers, arrival, self._own_weight)
        return dict(zip(proposal.ask, quotes, strict=True))

    def _send(self, routed: SimRouting, now: int) -> None:
        number = self._views.number(routed.target.name)
        if number == routed.router:
            self._push(now, _DELIVERY, routed)
            return
        self.counts.hops += 1
        self._views.sent(routed.router, number, routed.arrival, now)
        self._push(now + round(self._setting.hop_ms * MS), _DELIVERY, routed)

    def _deliver(self, routed: SimRouting, now: int) -> None:
        request, number = routed.request, self._views.number(routed.target.name)
        node = self.nodes[number]
        node.batches.advance(now)
        self._collect(node)
        self.counts.deliveries += 1
        refusal = check_acceptance(routed.arrival, node.shown(), node.tier(request), routed.target.force)
        if refusal is not None:
            self._refused(routed, refusal, now)
            return
        ready = now if request.adapter < 0 else node.cache.acquire(request.adapter, now)
        node.batches.deliver(request, now, ready)
        self.served_by[request.index] = number
        if self._log is not None:
            self._log.append((now, "delivery", request.index, number))

    def _refused(self, routed: SimRouting, refusal: Refusal, now: int) -> None:
        self.counts.refusals += 1
        routed.attempts.append((routed.target, refusal))
        elapsed_ms = (now - routed.request.arrived) / MS
        target = next_target(
            routed.order, routed.attempts, elapsed_ms, self._setting.ttft_ms, force=not self._enforces_slo
        )
        if target is None:
            self.lost.append(routed.request)
            return
        routed.target = target
        self._send(routed, now + round(self._setting.hop_ms / 2 * MS))

    def _collect(self, node: SimInstance) -> None:
        for request in node.batches.finished:
            self._lengths.observe(self._name_of(request), request.output)
            if request.adapter >= 0:
                node.cache.release(request.adapter)
        node.batches.finished.clear()
