"""The routing policies of `cluster/routing/policies.py`, compiled.

A simulated hour has a million decisions over 60 instances. Costs are the server's own functions; the policies are
written again over arrays. They draw the same random numbers in the same order, so tests compare them with the server's
decision by decision.

All functions are compiled. `slot` is the number of a route. `rng` is a NumPy generator over a Mersenne Twister, whose
numbers are those of Python's `random.Random`.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from caraserve.bench.simulator import adapter_cache
from caraserve.bench.simulator.batching import advance, write_backlog
from caraserve.bench.simulator.compiled import kernel
from caraserve.bench.simulator.views import look
from caraserve.cluster.routing.cost import Tier, cold_ms, cost_and_latency
from caraserve.cluster.routing.policies import FIRST_FIT_REQUESTS, QUOTES, SHORTLIST

AUTO, RANK_AWARE, BY_PLAN, RANDOM, ROUND_ROBIN, FIRST_FIT, MOST_IDLE, DLORA = range(8)
POLICIES = {
    "auto": AUTO,
    "rank-aware": RANK_AWARE,
    "random": RANDOM,
    "round-robin": ROUND_ROBIN,
    "first-fit": FIRST_FIT,
    "most-idle": MOST_IDLE,
    "dlora": DLORA,
    **dict.fromkeys(("loraserve", "s-lora-random", "s-lora-contiguous"), BY_PLAN),
}
_ABSENT = int(Tier.ABSENT)

# --- chance, as Python's `random` has it ---


@kernel
def _below(rng, count):
    """Draws an integer from 0 to `count` - 1, as `Random._randbelow` does."""
    span = 1
    while span <= count:
        span *= 2
    while True:
        drawn = int(rng.random(dtype=np.float32) * np.float32(span))  # the highest bits of one 32-bit word
        if drawn < count:
            return drawn


@kernel
def _shuffle(rng, values, count, wanted):
    """Draws `wanted` of the first `count` values to their end, as `Random.sample` does; the first one drawn is last."""
    for at in range(wanted):
        chosen, last = _below(rng, count - at), count - at - 1
        values[chosen], values[last] = values[last], values[chosen]


# --- orders by several keys ---


@kernel
def _insert(order, count, number, first, second, third):
    """Inserts an instance into an order of `count` by three keys, which are arrays by instance; behind equal ones."""
    place = count
    while place > 0:
        other = order[place - 1]
        if first[other] != first[number]:
            later = first[other] > first[number]
        elif second[other] != second[number]:
            later = second[other] > second[number]
        else:
            later = third[other] > third[number]
        if not later:
            break
        order[place] = other
        place -= 1
    order[place] = number


# --- cost ---


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


@kernel
def _rank(fleet, route, count, rng):
    """Ranks the first `count` of `fleet.members` by cost, then latency, then at random, to `fleet.ranking`: by view."""
    setting, adapter = fleet.setting[0], fleet.batches.requests[route.request].adapter
    costs, latencies_ms, draws, ranking = fleet.costs, fleet.latencies_ms, fleet.draws, fleet.ranking
    for at in range(count):
        number = fleet.members[at]
        costs[number], latencies_ms[number] = estimate(
            fleet.batches.machines[number],
            fleet.seen[number],
            _seen_tier(fleet, adapter, number),
            route,
            setting.slo_ms,
            setting.own_weight,
        )
    for at in range(count):
        number = fleet.members[at]
        draws[number] = rng.random()
        _insert(ranking, at, number, costs, latencies_ms, draws)


# --- orders of instances ---


@kernel
def _mark_known(fleet, slot):
    fleet.marked[:] = False
    for at in range(fleet.routes[slot].known):
        fleet.marked[fleet.orders[slot, at]] = True


@kernel
def _append(fleet, slot, number):
    """Adds an instance to a route's order, unless it is there."""
    if not fleet.marked[number]:
        fleet.marked[number] = True
        route = fleet.routes[slot]
        fleet.orders[slot, route.known] = number
        route.known += 1


@kernel
def _all_members(fleet):
    for number in range(fleet.members.size):
        fleet.members[number] = number
    return fleet.members.size


@kernel
def _append_by_requests(fleet, slot, count):
    """Adds the first `count` members in order of their requests at the time of the decision; ties stay in order."""
    requests, members = fleet.requests_seen[slot], fleet.members
    for at in range(1, count):
        _insert(members, at, members[at], requests, requests, requests)
    for at in range(count):
        _append(fleet, slot, members[at])


@kernel
def _idlest(fleet, slot, count, rng):
    """Returns one of the members with the fewest requests, at random."""
    requests = fleet.requests_seen[slot]
    least = math.inf
    for at in range(count):
        least = min(least, requests[fleet.members[at]])
    ties = 0
    for at in range(count):
        ties += requests[fleet.members[at]] == least
    chosen = _below(rng, ties)
    for at in range(count):
        number = fleet.members[at]
        if requests[number] == least:
            if chosen == 0:
                return number
            chosen -= 1
    return -1


@kernel
def _group(fleet, route, which):
    """Writes the members of one of `auto`'s groups, and returns how many: 0 the adapter's instances by the plan, 1 its
    rank's class, 2 all."""
    adapter, members, plan = fleet.batches.requests[route.request].adapter, fleet.members, fleet.plan
    if which == 2:
        return _all_members(fleet)
    if adapter < 0 or not plan.classes.size:
        return 0
    count = 0
    if which == 0:
        for at in range(plan.starts[adapter], plan.starts[adapter + 1]):
            members[count] = plan.in_order[at]
            count += 1
        return count
    rank, most = math.inf, 0.0
    for number in range(members.size):
        most = max(most, float(plan.classes[number]))
        if plan.classes[number] >= route.rank:
            rank = min(rank, float(plan.classes[number]))
    rank = rank if rank < math.inf else most
    for number in range(members.size):
        if plan.classes[number] == rank:
            members[count] = number
            count += 1
    return count


@kernel
def _rank_group(fleet, route, rng):
    """Ranks the smallest of `auto`'s groups that meets the SLO. Returns the number of its members."""
    slo_ms = fleet.setting[0].slo_ms
    num_kept = 0  # of the first group whose iterations meet the SLO
    count = 0
    for which in range(3):
        count = _group(fleet, route, which)
        if count == 0:
            continue
        _rank(fleet, route, count, rng)
        best = fleet.ranking[0]
        if fleet.costs[best] < math.inf:
            if fleet.latencies_ms[best] <= slo_ms:
                return count
            if num_kept == 0:
                num_kept = count
                for at in range(count):
                    fleet.kept[at] = fleet.ranking[at]
    for at in range(num_kept):  # no group meets the SLO with waiting included
        fleet.ranking[at] = fleet.kept[at]
    return num_kept or count


@kernel
def _by_cost(fleet, slot, now, rng):
    """Orders by quotes of some of the best by view, then by view, as `policies._two_stage` does."""
    setting, route = fleet.setting[0], fleet.routes[slot]
    if setting.policy == AUTO:
        count = _rank_group(fleet, route, rng)
    else:
        count = _all_members(fleet)
        _rank(fleet, route, count, rng)
    if not setting.central:  # a scheduler that knows everything needs no quotes
        _ask(fleet, slot, count, now, rng)
    _mark_known(fleet, slot)
    for at in range(count):
        _append(fleet, slot, fleet.ranking[at])
    route.partial = setting.policy == AUTO


@kernel
def _ask(fleet, slot, count, now, rng):
    """Starts a route's order with some of the `count` best by view, in order of their quotes."""
    route, ranking, pool, chosen = fleet.routes[slot], fleet.ranking, fleet.shortlist[0], fleet.shortlist[1]
    best, size = min(SHORTLIST, count), 0
    for at in range(best):
        if fleet.costs[ranking[at]] < math.inf:
            pool[size] = ranking[at]
            size += 1
    within_slo = size > 0
    if size < QUOTES:
        size = min(QUOTES, best) if within_slo else best
        for at in range(size):
            pool[at] = ranking[at]
    asked = min(QUOTES, size) if within_slo else size
    for at in range(size):
        chosen[at] = pool[at]
    if within_slo:
        _shuffle(rng, chosen, size, asked)
    for at in range(size):
        wanted = pool[at] == route.router
        for drawn in range(size - asked, size):
            wanted = wanted or chosen[drawn] == pool[at]
        if wanted:
            _insert_quote(fleet, slot, pool[at], now)
    fleet.counts[0].quotes += route.known


@kernel
def _insert_quote(fleet, slot, number, now):
    """Asks an instance, and inserts it into the order by its answer."""
    setting, route, batches = fleet.setting[0], fleet.routes[slot], fleet.batches
    advance(batches, number, now)
    shown = fleet.seen[number]
    write_backlog(batches.machines[number], batches.instances[number], shown)
    here = adapter_cache.tier(fleet.caches, number, batches.requests[route.request].adapter)
    fleet.costs[number], fleet.latencies_ms[number] = estimate(
        batches.machines[number], shown, here, route, setting.slo_ms, setting.own_weight
    )
    fleet.draws[number] = route.known  # equal quotes stay in order
    _insert(fleet.orders[slot], route.known, number, fleet.costs, fleet.latencies_ms, fleet.draws)
    route.known += 1


@kernel
def _draw_by_plan(fleet, slot, rng):
    """Draws the order of an adapter's instances by their fractions."""
    plan, adapter = fleet.plan, fleet.batches.requests[fleet.routes[slot].request].adapter
    names, fractions = fleet.members, fleet.draws
    start, left = plan.starts[adapter], plan.starts[adapter + 1] - plan.starts[adapter]
    for at in range(left):
        names[at], fractions[at] = plan.instances[start + at], plan.fractions[start + at]
    while left:
        total = 0.0
        for at in range(left):
            total += fractions[at]
        chosen = 0
        if total > 0:  # as `Random.choices`
            drawn, below = rng.random() * total, fractions[0]
            while chosen < left - 1 and below <= drawn:
                chosen += 1
                below += fractions[chosen]
        else:
            chosen = _below(rng, left)
        _append(fleet, slot, names[chosen])
        left -= 1
        for at in range(chosen, left):
            names[at], fractions[at] = names[at + 1], fractions[at + 1]


@kernel
def _holders(fleet, slot, holding):
    """Writes the members that held the adapter at the time of the decision, or those that did not."""
    count = 0
    for number in range(fleet.members.size):
        if fleet.held[slot, number] == holding:
            fleet.members[count] = number
            count += 1
    return count


@kernel
def propose(fleet, slot, now, rng):
    """Starts a route's order of instances by the policy. Returns when it may be sent, in ns: after quotes, if any."""
    setting, route = fleet.setting[0], fleet.routes[slot]
    policy, router, instances = setting.policy, route.router, fleet.members.size
    adapter = fleet.batches.requests[route.request].adapter
    look(fleet, router, now)
    for number in range(instances):
        fleet.requests_seen[slot, number] = fleet.seen[number].requests
    route.known, route.partial = 0, True
    if policy in (AUTO, RANK_AWARE):
        _by_cost(fleet, slot, now, rng)
        return now if setting.central else now + setting.quote_ns
    fleet.marked[:] = False
    if policy == ROUND_ROBIN:
        _append(fleet, slot, fleet.turns[router] % instances)
        fleet.turns[router] += 1
    elif policy == FIRST_FIT:
        for number in range(instances):
            if fleet.seen[number].requests < FIRST_FIT_REQUESTS:
                _append(fleet, slot, number)
        if route.known == 0:
            expand(fleet, slot, rng)
    elif policy == DLORA:
        for number in range(instances):
            fleet.held[slot, number] = _seen_tier(fleet, adapter, number) != _ABSENT
        count = _holders(fleet, slot, True)
        _append(fleet, slot, _idlest(fleet, slot, count or _all_members(fleet), rng))
    elif policy == MOST_IDLE:
        _append(fleet, slot, _idlest(fleet, slot, _all_members(fleet), rng))
    elif policy == BY_PLAN and adapter >= 0:
        _draw_by_plan(fleet, slot, rng)
    else:
        _append(fleet, slot, _below(rng, instances))
    return now


@kernel
def expand(fleet, slot, rng):
    """Completes a route's order, which only refused requests need."""
    route, policy, instances = fleet.routes[slot], fleet.setting[0].policy, fleet.members.size
    if not route.partial:
        return
    route.partial = False
    _mark_known(fleet, slot)
    if policy == AUTO:
        for which in range(3):
            _append_by_requests(fleet, slot, _group(fleet, route, which))
    elif policy == ROUND_ROBIN:
        for step in range(1, instances):
            _append(fleet, slot, (fleet.orders[slot, 0] + step) % instances)
    elif policy == FIRST_FIT:
        _append_by_requests(fleet, slot, _all_members(fleet))
    elif policy == DLORA:
        _expand_holders(fleet, slot, rng)
    elif policy == BY_PLAN and fleet.batches.requests[route.request].adapter >= 0:
        for number in range(instances):
            _append(fleet, slot, number)
    else:
        _append_shuffled(fleet, slot, _all_members(fleet), policy == MOST_IDLE, rng)


@kernel
def _append_shuffled(fleet, slot, count, by_requests, rng):
    """Adds the members in random order, or in order of their requests with ties at random."""
    members = fleet.members
    _shuffle(rng, members, count, count)
    for at in range(count // 2):
        members[at], members[count - 1 - at] = members[count - 1 - at], members[at]
    if by_requests:
        _append_by_requests(fleet, slot, count)
    else:
        for at in range(count):
            _append(fleet, slot, members[at])


@kernel
def _expand_holders(fleet, slot, rng):
    """Adds the adapter's holders in order of their requests, then the others."""
    count = _holders(fleet, slot, True)
    if count:
        _append_shuffled(fleet, slot, count, True, rng)
        count = _holders(fleet, slot, False)
        if count:
            _append(fleet, slot, _idlest(fleet, slot, count, rng))
    else:
        count = _all_members(fleet)
    _append_shuffled(fleet, slot, count, True, rng)
