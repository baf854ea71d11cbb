"""The state of a simulated fleet: instances, their adapters, what routers see, and requests on their way.

Instances are numbered in the order of their names. Arrays that may have to grow during a run are pools or rings: see
`with_room`, which compiled code asks for by returning to Python.
"""

from typing import Any, NamedTuple

import numpy as np

from caraserve.bench.simulator.adapter_cache import Caches
from caraserve.bench.simulator.compiled import BACKLOG, MAX_ATTEMPTS, Batches, floats, integers, larger_pool, make_pool
from caraserve.cluster.routing.policy_rules import SHORTLIST
from caraserve.cluster.state.replicated_map import Tier

_I8 = np.int64

SETTING = np.dtype(
    [
        *integers("policy", "routers", "gossip_ns", "quote_ns", "hop_ns", "half_hop_ns"),
        *floats("own_weight", "slo_ms", "ttft_ms", "beat_ms", "beat_jitter", "move_bytes"),
        ("enforces_slo", np.bool_),
        ("central", np.bool_),  # one scheduler, see `ClusterSetting`
    ]
)
COUNTS = np.dtype(
    [
        *integers("arrivals", "beats", "quotes", "deliveries", "refusals", "hops", "migrations", "plans", "lost"),
        *integers("num_events", "sequence"),
        *integers("beats_head", "beats_tail", "changes_head", "changes_tail"),  # of the rings
        *floats("answer_weight", "answer_tokens"),  # of all answers, see `cost.AnswerLengths`
    ]
)
ROUTE = np.dtype(  # the routing of one request
    [
        *integers("request", "router", "target"),
        *floats("rank", "prompt_tokens", "output_tokens", "adapter_bytes"),  # of its `Arrival`
        *integers("attempts"),
        ("force", np.bool_),
        ("partial", np.bool_),  # the rest of the order has not been needed yet
        ("tried", _I8, MAX_ATTEMPTS),
        ("tried_latency_ms", np.float64, MAX_ATTEMPTS),
        ("tried_force", np.uint8, MAX_ATTEMPTS),
        ("missed_slo", np.uint8, MAX_ATTEMPTS),  # the reason of the refusal
    ]
)
SENT = np.dtype(  # a request sent; `after`: the next one from the same router to the same instance; 0: none
    [*floats("at_s", "rank", "prompt_tokens", "output_tokens"), ("after", _I8)]
)
BEAT = np.dtype([*integers("at", "number", "changes"), ("backlog", BACKLOG)])  # a heartbeat on its way
CHANGE = np.dtype([("adapter", np.int32), ("tier", np.uint8)])


class PlanArrays(NamedTuple):
    """A placement plan."""

    starts: Any  # an adapter's shares are from starts[adapter] to starts[adapter + 1]
    instances: Any  # of each share
    in_order: Any  # the same, those of each adapter in order of their numbers
    fractions: Any
    classes: Any  # the rank of each instance; none without a plan


NO_PLAN = PlanArrays(np.zeros(1, _I8), np.zeros(0, _I8), np.zeros(0, _I8), np.zeros(0), np.zeros(0, _I8))


class FleetArrays(NamedTuple):
    """All state of a simulation."""

    setting: Any  # [1]
    counts: Any  # [1]
    batches: Batches
    caches: Caches
    plan: PlanArrays
    moves: Any  # adapters to fetch, by instance
    demand_tokens: Any  # by adapter: of answers since the last plan
    answers: Any  # [adapters + 1, 2]: weight and tokens, see `cost.AnswerLengths`; the last is the base model
    turns: Any  # of each router, for round-robin
    # What routers see.
    published: Any  # backlogs
    tiers: Any  # [adapters, instances]
    sent_first: Any  # [instances, routers]: list of requests sent since the last heartbeat; 0: none
    sent_last: Any
    # For the decision at hand, by instance.
    seen: Any  # backlogs
    members: Any
    ranking: Any
    kept: Any  # another ranking
    shortlist: Any  # [2, SHORTLIST]: those that may be asked for quotes, and those drawn of them
    costs: Any
    latencies_ms: Any
    draws: Any
    estimated: Any
    marked: Any
    # Pools, rings and the heap of events.
    event_keys: Any
    event_items: Any
    route_slots: Any  # a pool of the routes
    routes: Any
    orders: Any  # [routes, instances]
    known: Any  # [routes]: instances in the order
    requests_seen: Any  # [routes, instances]
    held: Any  # [routes, instances]: those that have the adapter
    sent_slots: Any  # a pool of the requests sent
    sent: Any
    beats: Any
    changes: Any


def make_fleet(setting: Any, batches: Batches, caches: Caches, routes: int = 64, sent: int = 256) -> FleetArrays:
    """Returns a fleet before its first event, without adapters."""
    instances, adapters, routers = len(batches.instances), len(caches.entries), int(setting["routers"][0])
    return FleetArrays(
        setting=setting,
        counts=np.zeros(1, COUNTS),
        batches=batches,
        caches=caches,
        plan=NO_PLAN,
        moves=np.zeros(0, _I8),
        demand_tokens=np.zeros(adapters, _I8),
        answers=np.zeros((adapters + 1, 2)),
        turns=np.zeros(routers, _I8),
        published=np.zeros(instances, BACKLOG),
        tiers=np.full((adapters, instances), Tier.ABSENT, np.uint8),
        sent_first=np.zeros((instances, routers), _I8),
        sent_last=np.zeros((instances, routers), _I8),
        seen=np.zeros(instances, BACKLOG),
        members=np.zeros(instances, _I8),
        ranking=np.zeros(instances, _I8),
        kept=np.zeros(instances, _I8),
        shortlist=np.zeros((2, SHORTLIST), _I8),
        costs=np.zeros(instances),
        latencies_ms=np.zeros(instances),
        draws=np.zeros(instances),
        estimated=np.zeros(instances, np.bool_),
        marked=np.zeros(instances, np.bool_),
        event_keys=np.zeros(instances + routes, _I8),
        event_items=np.zeros(instances + routes, _I8),
        route_slots=make_pool(routes),
        routes=np.zeros(routes + 1, ROUTE),
        orders=np.zeros((routes + 1, instances), _I8),
        known=np.zeros(routes + 1, _I8),
        requests_seen=np.zeros((routes + 1, instances)),
        held=np.zeros((routes + 1, instances), np.bool_),
        sent_slots=make_pool(sent),
        sent=np.zeros(sent + 1, SENT),
        beats=np.zeros(2 * instances, BEAT),
        changes=np.zeros(2 * adapters + 1, CHANGE),
    )


def with_room(fleet: FleetArrays) -> FleetArrays:
    """Returns the same state with twice the room in pools, rings and the heap of events."""
    pools = ("event_keys", "event_items", "routes", "orders", "known", "requests_seen", "held", "sent")
    larger: dict[str, Any] = {name: np.concatenate([one := getattr(fleet, name), np.zeros_like(one)]) for name in pools}
    for name in ("route_slots", "sent_slots"):
        larger[name] = larger_pool(getattr(fleet, name))
    for name in ("beats", "changes"):
        ring = getattr(fleet, name)
        larger[name] = np.zeros(2 * len(ring), ring.dtype)
        under_way = np.arange(fleet.counts[f"{name}_head"][0], fleet.counts[f"{name}_tail"][0])
        larger[name][under_way % len(larger[name])] = ring[under_way % len(ring)]
    return fleet._replace(**larger)
