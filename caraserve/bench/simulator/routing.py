"""The server's routing policies on a simulated fleet: `cluster/routing/policy_rules.py`, compiled, with what it calls.

A simulated hour has a million decisions over 60 instances. All functions are compiled. `slot` is the number of a route.
`rng` is a NumPy generator over a Mersenne Twister, whose numbers are those of Python's `random.Random`.
"""

# mypy: disable-error-code="no-untyped-def"

from collections import namedtuple

import numpy as np

from caraserve.bench.simulator import adapter_cache
from caraserve.bench.simulator.batching import advance, write_backlog
from caraserve.bench.simulator.compiled import MS, compiled_for, kernel
from caraserve.bench.simulator.views import look
from caraserve.cluster.routing import policy_rules as rules
from caraserve.cluster.routing.cost import cold_ms, cost_and_latency
from caraserve.cluster.state.replicated_map import Tier

_ABSENT = int(Tier.ABSENT)


# What one decision works on; see `policy_rules.py`.
View = namedtuple(
    "View",
    "fleet slot count requests holds planned shares fractions classes class_rank costs latencies_ms draws estimated "
    "marked members ranking kept pool chosen order known",
)


@kernel
def view_of(fleet, slot):
    """Returns what the policies' rules work on for a route."""
    plan, route, adapter = fleet.plan, fleet.routes[slot], fleet.batches.requests[fleet.routes[slot].request].adapter
    start = end = 0
    class_rank = -1
    if adapter >= 0 and plan.classes.size > 0:
        start, end = plan.starts[adapter], plan.starts[adapter + 1]
        class_rank = rules.class_for(plan.classes, route.rank)
    return View(
        fleet,
        slot,
        fleet.members.size,
        fleet.requests_seen[slot],
        fleet.held[slot],
        plan.in_order[start:end],
        plan.instances[start:end],
        plan.fractions[start:end],
        plan.classes,
        class_rank,
        fleet.costs,
        fleet.latencies_ms,
        fleet.draws,
        fleet.estimated,
        fleet.marked,
        fleet.members,
        fleet.ranking,
        fleet.kept,
        fleet.shortlist[0],
        fleet.shortlist[1],
        fleet.orders[slot],
        fleet.known[slot : slot + 1],
    )


# --- what the rules call ---


@compiled_for(rules.below)
def _below(rng, count):
    """Draws as `Random._randbelow` does."""
    span = 1
    while span <= count:
        span *= 2
    while True:
        drawn = int(rng.random(dtype=np.float32) * np.float32(span))  # the highest bits of one 32-bit word
        if drawn < count:
            return drawn


@compiled_for(rules.sort_by_keys)
def _sort_by_keys(numbers, count, first, second, third):
    for at in range(1, count):
        number, place = numbers[at], at
        while place > 0:
            other = numbers[place - 1]
            if first[other] != first[number]:
                later = first[other] > first[number]
            elif second[other] != second[number]:
                later = second[other] > second[number]
            else:
                later = third[other] > third[number]
            if not later:
                break
            numbers[place] = other
            place -= 1
        numbers[place] = number


@kernel
def estimate(machine, shown, tier, route, slo_ms, own_weight):
    """Returns cost and latency in ms of a routed request on an instance with this backlog."""
    wait_ms = cold_ms(machine.links, tier, route.adapter_bytes)
    return cost_and_latency(
        machine.model,
        shown,
        route.rank,
        route.prompt_tokens,
        route.output_tokens,
        slo_ms,
        wait_ms,
        machine.links.blocks_batch != 0,
        own_weight,
    )


@kernel
def _seen_tier(fleet, adapter, number):
    if fleet.setting[0].central or adapter < 0:
        return adapter_cache.tier(fleet.caches, number, adapter)
    return fleet.tiers[adapter, number]


@compiled_for(rules.write_estimate)
def _write_estimate(view, number):
    fleet, setting, route = view.fleet, view.fleet.setting[0], view.fleet.routes[view.slot]
    tier = _seen_tier(fleet, fleet.batches.requests[route.request].adapter, number)
    machine = fleet.batches.machines[number]
    view.costs[number], view.latencies_ms[number] = estimate(
        machine, fleet.seen[number], tier, route, setting.slo_ms, setting.own_weight
    )


# --- decisions ---


@kernel
def propose(fleet, slot, now, rng):
    """Starts a route's order of instances by the policy. Returns when it may be sent, in ns: after quotes, if any."""
    setting, route = fleet.setting[0], fleet.routes[slot]
    policy, adapter = setting.policy, fleet.batches.requests[route.request].adapter
    look(fleet, route.router, now)
    for number in range(fleet.members.size):
        fleet.requests_seen[slot, number] = fleet.seen[number].requests
        if policy == rules.DLORA:
            fleet.held[slot, number] = _seen_tier(fleet, adapter, number) != _ABSENT
    view = view_of(fleet, slot)
    route.partial = policy != rules.RANK_AWARE
    view.known[0] = 0
    view.marked[:] = False
    if policy not in rules.BY_COST:
        rules.choose_first(view, policy, fleet.turns[route.router], rng)
        fleet.turns[route.router] += 1
        return now
    view.estimated[:] = False
    count = rules.rank_candidates(view, policy, setting.slo_ms, rng)
    if not setting.central:  # a scheduler that knows everything needs no quotes
        _ask(view, rules.shortlist(view, count, route.router, rng), now)
    rules.mark_known(view)
    rules.append_ranking(view, count)
    return now if setting.central else now + setting.quote_ns


@kernel
def _ask(view, count, now):
    """Sorts the first `count` instances of an order by their quotes; equal ones stay in order."""
    fleet, setting, route = view.fleet, view.fleet.setting[0], view.fleet.routes[view.slot]
    batches, adapter = fleet.batches, fleet.batches.requests[route.request].adapter
    for at in range(count):
        number = view.order[at]
        machine, shown = batches.machines[number], fleet.seen[number]
        advance(batches, number, now)
        write_backlog(machine, batches.instances[number], shown)
        tier = adapter_cache.tier(fleet.caches, number, adapter)
        view.costs[number], view.latencies_ms[number] = estimate(
            machine, shown, tier, route, setting.slo_ms, setting.own_weight
        )
        view.draws[number] = at
    rules.sort_by_keys(view.order, count, view.costs, view.latencies_ms, view.draws)
    fleet.counts[0].quotes += count


@kernel
def expand(fleet, slot, rng):
    """Completes a route's order, which only refused requests need."""
    if fleet.routes[slot].partial:
        fleet.routes[slot].partial = False
        rules.complete(view_of(fleet, slot), fleet.setting[0].policy, rng)


# --- refusals ---


@kernel
def refuses(fleet, slot):
    """Returns whether the target refuses a request, by its exact state, and records the reason."""
    setting, route, batches = fleet.setting[0], fleet.routes[slot], fleet.batches
    number, shown = route.target, fleet.seen[route.target]
    machine = batches.machines[number]
    write_backlog(machine, batches.instances[number], shown)
    tier = adapter_cache.tier(fleet.caches, number, batches.requests[route.request].adapter)
    cost, latency_ms = estimate(machine, shown, tier, route, setting.slo_ms, 0.0)
    decision = rules.acceptance(shown.queue_room, cost, latency_ms, route.force)
    if decision == rules.ACCEPTS:
        return False
    at = route.attempts
    route.tried[at], route.tried_force[at] = number, route.force
    route.tried_latency_ms[at], route.missed_slo[at] = latency_ms, decision == rules.MISSES_SLO
    route.attempts += 1
    return True


@kernel
def choose_next(fleet, slot, now, rng):
    """Writes the target after the attempts so far. Returns False when no instance is left."""
    setting, route, order = fleet.setting[0], fleet.routes[slot], fleet.orders[slot]
    force = not setting.enforces_slo
    if route.attempts == 0:
        route.target, route.force = order[0], force
        return True
    expand(fleet, slot, rng)
    untried = -1
    for at in range(fleet.known[slot]):
        is_tried = False
        for attempt in range(route.attempts):
            is_tried = is_tried or route.tried[attempt] == order[at]
        if untried < 0 and not is_tried:
            untried = order[at]
    elapsed_ms = (now - fleet.batches.requests[route.request].arrived) / MS
    best = rules.best_refusal(route.tried, route.tried_force, route.missed_slo, route.tried_latency_ms, route.attempts)
    step = rules.next_step(route.attempts, untried >= 0, best >= 0, elapsed_ms, setting.ttft_ms)
    if step == rules.OVERRULE:
        untried = route.tried[best]
    route.target, route.force = untried, force or step != rules.OFFER
    return step != rules.END
