"""The state that routers of a simulated fleet see: delayed heartbeats, plus the requests that each has sent since.

A heartbeat reaches all routers at once, so published states are stored once. When a router routes a request, the
requests that it has sent and its own exact state are added to them, by the rules of `router.SentRequests`.

All functions are compiled.
"""

# mypy: disable-error-code="no-untyped-def"

from caraserve.bench.simulator import adapter_cache
from caraserve.bench.simulator.batching import advance, write_backlog
from caraserve.bench.simulator.compiled import following, free_slot, kernel, take_slot, unlink
from caraserve.cluster.routing.router import SENT_MAX_AGE_S, TRANSIT_S

_S = 1e-9


@kernel
def publish(fleet, number, now):
    """Sends an instance's heartbeat with the changes of its adapters."""
    counts, changed = fleet.counts[0], fleet.caches.changed
    beat = fleet.beats[counts.beats_tail % fleet.beats.size]
    counts.beats_tail += 1
    beat.at, beat.number, beat.changes = now + fleet.setting[0].gossip_ns, number, 0
    write_backlog(fleet.batches.machines[number], fleet.batches.instances[number], beat.backlog)
    adapter = following(changed, number, -1)
    while adapter >= 0:
        change = fleet.changes[counts.changes_tail % fleet.changes.size]
        change.adapter, change.tier = adapter, adapter_cache.tier(fleet.caches, number, adapter)
        counts.changes_tail += 1
        beat.changes += 1
        unlink(changed, number, adapter)
        adapter = following(changed, number, -1)


@kernel
def arrive(fleet, now):
    """Applies the heartbeats that have arrived by `now`."""
    counts = fleet.counts[0]
    while counts.beats_head < counts.beats_tail and fleet.beats[counts.beats_head % fleet.beats.size].at <= now:
        beat = fleet.beats[counts.beats_head % fleet.beats.size]
        counts.beats_head += 1
        number = beat.number
        fleet.published[number] = beat.backlog
        for _ in range(beat.changes):
            change = fleet.changes[counts.changes_head % fleet.changes.size]
            counts.changes_head += 1
            fleet.tiers[change.adapter, number] = change.tier
        for router in range(fleet.sent_first.shape[1]):
            _forget_sent(fleet, number, router, beat.at * _S)


@kernel
def _forget_sent(fleet, number, router, now_s):
    """Removes the requests that an instance's new heartbeat includes."""
    at = fleet.sent_first[number, router]
    fleet.sent_first[number, router] = 0
    while at:
        after = fleet.sent[at].after
        if fleet.sent[at].at_s > now_s - TRANSIT_S:
            _append_sent(fleet, number, router, at)
        else:
            free_slot(fleet.sent_slots, at)
        at = after


@kernel
def add_sent(fleet, number, route, now):
    """Records a request that a router has forwarded."""
    at = take_slot(fleet.sent_slots)
    sent = fleet.sent[at]
    sent.at_s, sent.rank = now * _S, route.rank
    sent.prompt_tokens, sent.output_tokens = route.prompt_tokens, route.output_tokens
    _append_sent(fleet, number, route.router, at)


@kernel
def _append_sent(fleet, number, router, at):
    fleet.sent[at].after = 0
    if fleet.sent_first[number, router]:
        fleet.sent[fleet.sent_last[number, router]].after = at
    else:
        fleet.sent_first[number, router] = at
    fleet.sent_last[number, router] = at


@kernel
def look(fleet, router, now):
    """Writes the backlogs of all instances as one router sees them to `fleet.seen`."""
    now_s, central = now * _S, fleet.setting[0].central
    for number in range(fleet.seen.size):
        seen = fleet.seen[number]
        if central:
            advance(fleet.batches, number, now)
        if central or number == router:
            write_backlog(fleet.batches.machines[number], fleet.batches.instances[number], seen)
            continue
        fleet.seen[number] = fleet.published[number]
        at = fleet.sent_first[number, router]
        while at:
            sent = fleet.sent[at]
            if sent.at_s > now_s - SENT_MAX_AGE_S:
                _add(seen, sent.rank, sent.prompt_tokens, sent.output_tokens)
            at = sent.after


@kernel
def _add(seen, rank, prompt_tokens, output_tokens):
    """Adds a queued request to a backlog, as `Backlog.plus` does."""
    seen.requests += 1
    seen.rank_sum += rank
    seen.rank_max = max(seen.rank_max, rank)
    seen.queued_tokens += prompt_tokens
    seen.queued_token_ranks += prompt_tokens * rank
    seen.kv_free_tokens = seen.kv_free_tokens - prompt_tokens - output_tokens
    seen.queue_room -= 1
