"""The events of a simulated fleet: heartbeats, deliveries and arrivals. Plans and rebalancing are left to the caller.

An instance is advanced only when its state is read: for a heartbeat, a quote or a delivery. Events at the same time are
processed in the order heartbeat, rebalancing, plan, delivery, arrival.

All functions are compiled; those with `entry` are called from Python.
"""

# mypy: disable-error-code="no-untyped-def"

from caraserve.bench.simulator import adapter_cache, batching, routing, views
from caraserve.bench.simulator.compiled import (
    FOREVER,
    MS,
    entry,
    free_slot,
    has_slot,
    heap_pop,
    heap_push,
    kernel,
    take_slot,
)
from caraserve.cluster.routing.cost import ALL_ANSWERS, OWN_ANSWERS, expected_tokens, with_answer
from caraserve.cluster.state.replicated_map import Tier

BEAT, REBALANCE, PLAN, DELIVERY = range(4)
ENDED, NO_ROOM = 4, 5  # reasons for returning to Python, besides REBALANCE and PLAN
_KINDS = 4
_PAYLOADS = 1 << 24
_ABSENT = int(Tier.ABSENT)


@kernel
def _push(fleet, time, kind, payload):
    counts = fleet.counts[0]
    counts.sequence += 1
    key, item = time * _KINDS + kind, counts.sequence * _PAYLOADS + payload
    heap_push(fleet.event_keys, fleet.event_items, counts.num_events, key, item)
    counts.num_events += 1


@kernel
def _has_room(fleet):
    """Whether there is room for what one event or arrival may add."""
    counts, beats = fleet.counts[0], fleet.counts[0].beats_tail - fleet.counts[0].beats_head
    return (
        counts.num_events < fleet.event_keys.size
        and has_slot(fleet.route_slots)
        and has_slot(fleet.sent_slots)
        and beats < fleet.beats.size
        and counts.changes_tail - counts.changes_head + len(fleet.tiers) <= fleet.changes.size
    )


@kernel
def _collect(fleet, number):
    """Takes the requests that have ended on an instance: their adapters are unpinned, their lengths remembered."""
    counts, one, requests = fleet.counts[0], fleet.batches.instances[number], fleet.batches.requests
    while one.ended_head >= 0:
        request = requests[one.ended_head]
        one.ended_head = request.next_ended
        own = fleet.answers[request.adapter]
        weight, tokens = with_answer(counts.answer_weight, counts.answer_tokens, request.output, ALL_ANSWERS)
        counts.answer_weight, counts.answer_tokens = weight, tokens
        own[0], own[1] = with_answer(own[0], own[1], request.output, OWN_ANSWERS)
        if request.adapter >= 0:
            adapter_cache.release(fleet.caches, number, request.adapter)


# --- heartbeats ---


@kernel
def _beat(fleet, number, now, rng):
    setting = fleet.setting[0]
    batching.advance(fleet.batches, number, now)
    _collect(fleet, number)
    _move(fleet, number, now)
    views.publish(fleet, number, now)
    fleet.counts[0].beats += 1
    jitter = 1 + setting.beat_jitter * (2 * rng.random() - 1)
    _push(fleet, now + round(setting.beat_ms * jitter * MS), BEAT, number)


@kernel
def _move(fleet, number, now):
    """Fetches adapters that the plan assigns to an instance, as far as the bytes since its last heartbeat allow."""
    one, caches = fleet.batches.instances[number], fleet.caches
    if one.moves_next == one.moves_end:
        one.credit_bytes = 0.0
        return
    one.credit_bytes += fleet.setting[0].move_bytes
    while one.moves_next < one.moves_end and one.credit_bytes > 0:
        adapter = fleet.moves[one.moves_next]
        one.moves_next += 1
        if adapter_cache.tier(caches, number, adapter) == _ABSENT:
            one.credit_bytes -= caches.num_bytes[adapter]  # below 0 after a large one: then later ones wait
            one.fetches += 1
            one.fetched_bytes += caches.num_bytes[adapter]
        adapter_cache.add(caches, number, adapter, now, True)


# --- requests ---


@kernel
def _make_route(fleet, index, router):
    """Takes a route from the pool for a request."""
    counts, request = fleet.counts[0], fleet.batches.requests[index]
    slot = take_slot(fleet.route_slots)
    route, adapter = fleet.routes[slot], request.adapter
    own = fleet.answers[adapter]
    route.request, route.router, route.attempts = index, router, 0
    route.rank, route.prompt_tokens = request.rank, request.prompt
    route.output_tokens = expected_tokens(own[0], own[1], counts.answer_weight, counts.answer_tokens)
    route.adapter_bytes = fleet.caches.num_bytes[adapter] if adapter >= 0 else 0
    return slot


@kernel
def _arrive(fleet, index, rng):
    """Routes a client's request."""
    setting, counts, request = fleet.setting[0], fleet.counts[0], fleet.batches.requests[index]
    now = request.arrived
    counts.arrivals += 1
    views.arrive(fleet, now)
    router = int(rng.random() * setting.routers)
    if not setting.central:
        batching.advance(fleet.batches, router, now)
    slot = _make_route(fleet, index, router)
    if request.adapter >= 0:
        fleet.demand_tokens[request.adapter] += request.output
    ready = routing.propose(fleet, slot, now, rng)
    routing.choose_next(fleet, slot, now, rng)
    _send(fleet, slot, ready)


@kernel
def _send(fleet, slot, now):
    route = fleet.routes[slot]
    if route.target != route.router and not fleet.setting[0].central:
        fleet.counts[0].hops += 1
        views.add_sent(fleet, route.target, route, now)
        now += fleet.setting[0].hop_ns
    _push(fleet, now, DELIVERY, slot)


@kernel
def _deliver(fleet, slot, now, rng):
    counts, route = fleet.counts[0], fleet.routes[slot]
    index, number = route.request, route.target
    batching.advance(fleet.batches, number, now)
    _collect(fleet, number)
    counts.deliveries += 1
    if routing.refuses(fleet, slot):
        counts.refusals += 1
        if routing.choose_next(fleet, slot, now, rng):
            _send(fleet, slot, now + fleet.setting[0].half_hop_ns)
            return
        counts.lost += 1
    else:
        adapter = fleet.batches.requests[index].adapter
        ready = now if adapter < 0 else adapter_cache.acquire(fleet.caches, number, adapter, now)
        received = now + round(fleet.batches.machines[number].request_ms * MS)
        batching.deliver(fleet.batches, number, index, now, max(ready, received))
    route.partial = False
    free_slot(fleet.route_slots, slot)


# --- the loop ---


@kernel
def _next_event(fleet):
    """Removes the next event from the heap. Returns its time, kind and payload."""
    counts = fleet.counts[0]
    key, item = fleet.event_keys[0], fleet.event_items[0]
    heap_pop(fleet.event_keys, fleet.event_items, counts.num_events)
    counts.num_events -= 1
    return key // _KINDS, key % _KINDS, item % _PAYLOADS


@entry
def run(fleet, rng):
    """Simulates until every request has ended, or until Python has to act. Returns why it returned, and the time."""
    counts, requests, instances = fleet.counts[0], fleet.batches.requests, fleet.batches.instances
    end = requests[-1].arrived if requests.size else 0
    while True:
        arrives = requests[counts.arrivals].arrived if counts.arrivals < requests.size else FOREVER
        if not _has_room(fleet):
            return NO_ROOM, 0
        if counts.num_events and fleet.event_keys[0] // _KINDS <= min(arrives, FOREVER - 1):
            time, kind, payload = _next_event(fleet)
            if kind == DELIVERY:
                _deliver(fleet, payload, time, rng)
            elif time > end:  # only deliveries still matter
                continue
            elif kind == BEAT:
                _beat(fleet, payload, time, rng)
            else:
                return kind, time
        elif arrives < FOREVER:
            _arrive(fleet, counts.arrivals, rng)
        else:
            break
    for number in range(instances.size):
        batching.advance(fleet.batches, number, FOREVER - 1)
        _collect(fleet, number)
    return ENDED, 0


@entry
def schedule(fleet, time, kind, payload):
    """Adds an event."""
    _push(fleet, time, kind, payload)


@entry
def publish_all(fleet):
    """Makes every router see every instance as it is, adapters included."""
    gossip_ns, fleet.setting[0].gossip_ns = fleet.setting[0].gossip_ns, 0
    for number in range(fleet.batches.instances.size):
        views.publish(fleet, number, 0)
        views.arrive(fleet, 0)
    fleet.setting[0].gossip_ns = gossip_ns


# --- placement ---


@entry
def add_adapters(caches, adapters, numbers):
    """Places adapters on instances, pair by pair, to stay there."""
    for at in range(adapters.size):
        adapter_cache.add(caches, numbers[at], adapters[at], 0, True)


@entry
def remove_adapters(caches, adapters, numbers):
    """Removes adapters from instances, pair by pair, or lets them be evicted once no request uses them."""
    for at in range(adapters.size):
        adapter_cache.remove(caches, numbers[at], adapters[at])


@entry
def complete_orders(fleet, rng):
    """Completes the orders of all requests under way: a plan that follows changes them no more."""
    for slot in range(fleet.routes.size):
        routing.expand(fleet, slot, rng)


# --- dLoRA's rebalancing ---


@entry
def advance_all(batches, now):
    """Advances every instance. Returns the number of requests that wait for memory or a slot."""
    stuck = 0
    for number in range(batches.instances.size):
        batching.advance(batches, number, now)
        stuck += batching.num_stuck(batches.instances[number])
    return stuck


@entry
def move_request(fleet, index, target, now):
    """Moves a request that waits for memory or a slot to another instance, which it reaches after a hop. Returns False,
    without having done so, where there is no room."""
    if not _has_room(fleet):
        return False
    request = fleet.batches.requests[index]
    source = request.place
    batching.take_back(fleet.batches, source, index)
    if request.adapter >= 0:
        adapter_cache.release(fleet.caches, source, request.adapter)
    fleet.counts[0].migrations += 1
    slot = _make_route(fleet, index, source)
    route = fleet.routes[slot]
    route.target, route.force, route.partial = target, True, False
    fleet.orders[slot, 0], fleet.known[slot] = target, 1
    _push(fleet, now + fleet.setting[0].hop_ns, DELIVERY, slot)
    return True
