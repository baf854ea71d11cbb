"""What becomes of refused requests in a simulated fleet: `router.check_acceptance` and `router.next_target`, compiled.

All functions are compiled. `slot` is the number of a route.
"""

# mypy: disable-error-code="no-untyped-def"

import math

from caraserve.bench.simulator import adapter_cache, routing
from caraserve.bench.simulator.batching import write_backlog
from caraserve.bench.simulator.compiled import MS, kernel
from caraserve.cluster.routing.router import ATTEMPTS, REFUSAL_TIME_SHARE


@kernel
def refuses(fleet, slot):
    """Returns whether the target refuses a request, by its exact state, and records the reason."""
    setting, route, batches = fleet.setting[0], fleet.routes[slot], fleet.batches
    number, shown = route.target, fleet.seen[route.target]
    machine = batches.machines[number]
    write_backlog(machine, batches.instances[number], shown)
    here = adapter_cache.tier(fleet.caches, number, batches.requests[route.request].adapter)
    cost, latency_ms = routing.estimate(machine, shown, here, route, setting.slo_ms, 0.0)
    full = shown.queue_room <= 0 or latency_ms == math.inf
    if not full and (cost < math.inf or route.force):
        return False
    at = route.attempts
    route.tried[at], route.tried_force[at] = number, route.force
    route.tried_latency_ms[at], route.missed_slo[at] = latency_ms, not full
    route.attempts += 1
    return True


@kernel
def _was_tried(route, number, force_only):
    found = False
    for at in range(route.attempts):
        found = found or (route.tried[at] == number and (not force_only or route.tried_force[at] != 0))
    return found


@kernel
def choose_next(fleet, slot, now, rng):
    """Writes the target after the attempts so far. Returns False when no instance is left."""
    setting, route = fleet.setting[0], fleet.routes[slot]
    if route.attempts == 0:
        route.target, route.force = fleet.orders[slot, 0], not setting.enforces_slo
        return True
    routing.expand(fleet, slot, rng)
    untried = -1
    for at in range(route.known):
        if untried < 0 and not _was_tried(route, fleet.orders[slot, at], False):
            untried = fleet.orders[slot, at]
    elapsed_ms = (now - fleet.batches.requests[route.request].arrived) / MS
    if untried >= 0 and route.attempts < ATTEMPTS and elapsed_ms < REFUSAL_TIME_SHARE * setting.ttft_ms:
        route.target, route.force = untried, not setting.enforces_slo
        return True
    best = -1
    for at in range(route.attempts):
        if route.missed_slo[at] and not _was_tried(route, route.tried[at], True):
            latency_ms = route.tried_latency_ms[at]
            if (
                best < 0
                or latency_ms < route.tried_latency_ms[best]
                or (latency_ms == route.tried_latency_ms[best] and route.tried[at] < route.tried[best])
            ):
                best = at
    if best >= 0:
        route.target, route.force = route.tried[best], True
        return True
    route.target, route.force = untried, True
    return untried >= 0 and route.attempts < 2 * ATTEMPTS
