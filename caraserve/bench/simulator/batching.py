"""Continuous batching of simulated instances, with runs of equal iterations advanced in one step.

The rules are those of the engine and its scheduler: decode tokens first, then chunks of prompts in the order of
admission, within an iteration's token budget; a request joins at the first iteration that was not launched yet when it
arrived, and leaves with its last token. Between two changes of the batch all iterations take equally long, so a run of
them is computed in one step. Where the engine would preempt a request, here a request waits until its prompt and output
fit. Times are whole nanoseconds, so that the length of a run is exactly its count times the time of an iteration.

All functions are compiled. `one` is the record of an instance, `machine` that of its machine.
"""

# mypy: disable-error-code="no-untyped-def"

from caraserve.bench.simulator.compiled import FOREVER, MAX_QUEUE, MS, heap_pop, heap_push, kernel
from caraserve.cluster.routing.perf_model import iteration_ms

# --- state ---


@kernel
def queued(one):
    """Returns the number of requests that wait, for their adapter or in the queue."""
    return one.num_waiting + one.num_loading


@kernel
def write_backlog(machine, one, shown):
    """Writes the backlog at the time advanced to into a record with the fields of `Backlog`."""
    waiting = queued(one)
    shown.requests = one.num_decoding + one.num_prefilling + waiting
    shown.rank_sum = one.rank_sum
    shown.rank_max = one.rank_max
    shown.queued_tokens = one.queued_tokens
    shown.queued_token_ranks = one.queued_token_ranks
    shown.kv_tokens = machine.kv_tokens
    shown.kv_free_tokens = one.kv_free - one.kv_promised
    shown.queue_room = machine.max_queue - waiting


@kernel
def largest_rank(counts, ranks):
    """Returns the largest rank with a count above 0, or 0."""
    at = ranks.size - 1
    while at > 0 and counts[at] == 0:
        at -= 1
    return ranks[at]


@kernel
def num_stuck(one):
    """Returns the number of requests that wait only for memory or a slot."""
    stuck = 0
    for at in range(one.num_waiting):
        stuck += one.waiting_joins[(one.waiting_head + at) % MAX_QUEUE] <= one.first
    return stuck


# --- requests ---


@kernel
def deliver(batches, number, index, now, ready):
    """Adds a request whose adapter is on the device at the time `ready`."""
    one, request = batches.instances[number], batches.requests[index]
    request.delivered, request.ready, request.place = now, ready, number
    one.ranks[request.rank_class] += 1
    one.rank_sum += request.rank
    one.rank_max = max(one.rank_max, request.rank)
    one.queued_tokens += request.prompt
    one.queued_token_ranks += request.prompt * request.rank
    one.kv_promised += request.prompt + request.output
    if ready > now:
        heap_push(one.loading_ready, one.loading, one.num_loading, ready, index)
        one.num_loading += 1
    else:
        _enter(batches, number, index, now)


@kernel
def take_back(batches, number, index):
    """Removes a request that waits for memory or a slot, which moves to another instance."""
    one, request = batches.instances[number], batches.requests[index]
    kept = 0
    for at in range(one.num_waiting):
        source, target = (one.waiting_head + at) % MAX_QUEUE, (one.waiting_head + kept) % MAX_QUEUE
        one.waiting[target], one.waiting_joins[target] = one.waiting[source], one.waiting_joins[source]
        kept += one.waiting[source] != index
    one.num_waiting = kept
    _forget(batches.ranks, one, request)
    one.kv_promised -= request.prompt + request.output
    one.queued_tokens -= request.left
    one.queued_token_ranks -= request.left * request.rank


@kernel
def _forget(ranks, one, request):
    one.rank_sum -= request.rank
    one.ranks[request.rank_class] -= 1
    one.rank_max = largest_rank(one.ranks, ranks)


# --- time ---


@kernel
def advance(batches, number, now):
    """Simulates an instance up to `now`, including iterations that end at `now`."""
    one = batches.instances[number]
    while one.num_loading and one.loading_ready[0] <= now:
        ready, index = one.loading_ready[0], one.loading[0]
        heap_pop(one.loading_ready, one.loading, one.num_loading)
        one.num_loading -= 1
        while one.stop <= ready:
            _boundary(batches, number)
        _enter(batches, number, index, ready)
    while one.stop <= now:
        _boundary(batches, number)


@kernel
def _enter(batches, number, index, now):
    """Queues a request whose adapter is loaded; everything before `now` has been simulated."""
    one = batches.instances[number]
    joins = 0
    if one.count:
        joins = one.first + (now - one.start) // one.each + 1 + batches.machines[number].launches_ahead
    tail = (one.waiting_head + one.num_waiting) % MAX_QUEUE
    one.waiting[tail], one.waiting_joins[tail] = index, joins
    one.num_waiting += 1
    if not one.count:
        _next(batches, number, now)
    elif joins < one.first + one.count:  # this run ends where the request joins
        one.count = joins - one.first
        one.stop = one.start + one.count * one.each


@kernel
def _boundary(batches, number):
    """Ends the current run of iterations."""
    one = batches.instances[number]
    now, last = one.stop, one.first + one.count - 1
    one.steps += 1
    one.iterations += one.count
    one.tokens += one.count * one.num_decoding
    one.busy_ns += now - one.start
    one.first = last + 1
    if one.num_decoding and one.decoding_last[0] == last:
        while one.num_decoding and one.decoding_last[0] == last:
            index = one.decoding[0]
            heap_pop(one.decoding_last, one.decoding, one.num_decoding)
            one.num_decoding -= 1
            _end(batches, number, index, now)
        one.decoding_rank_max = largest_rank(one.decoding_ranks, batches.ranks)
    if one.num_chunks:
        _end_chunks(batches, number, now, last)
    _next(batches, number, now)


@kernel
def _end_chunks(batches, number, now, last):
    one, requests = batches.instances[number], batches.requests
    for at in range(one.num_chunks):
        index, count = one.chunks[at], one.chunk_tokens[at]
        request = requests[index]
        request.left -= count
        one.queued_tokens -= count
        one.queued_token_ranks -= count * request.rank
        if request.left:
            continue
        request.first = now
        one.tokens += 1
        one.decoding_rank_sum += request.rank
        one.decoding_ranks[request.rank_class] += 1
        if request.output == 1:
            _end(batches, number, index, now)
        else:
            heap_push(one.decoding_last, one.decoding, one.num_decoding, last + request.output - 1, index)
            one.num_decoding += 1
    one.decoding_rank_max = largest_rank(one.decoding_ranks, batches.ranks)
    left = 0
    for at in range(one.num_prefilling):
        one.prefilling[left] = one.prefilling[at]
        left += requests[one.prefilling[at]].left > 0
    one.num_prefilling = left


@kernel
def _end(batches, number, index, now):
    one, request = batches.instances[number], batches.requests[index]
    one.decoding_rank_sum -= request.rank
    one.decoding_ranks[request.rank_class] -= 1
    _forget(batches.ranks, one, request)
    one.kv_free += request.prompt + request.output
    request.done = now
    request.next_ended = -1
    if one.ended_head < 0:
        one.ended_head = index
    else:
        batches.requests[one.ended_tail].next_ended = index
    one.ended_tail = index


@kernel
def _next(batches, number, now):
    """Admits waiting requests and plans the next run of iterations."""
    machine, one = batches.machines[number], batches.instances[number]
    # An idle engine has launched no iteration ahead, so requests join at once.
    idle = one.num_decoding + one.num_prefilling == 0
    while one.num_waiting and (one.waiting_joins[one.waiting_head] <= one.first or idle):
        request = batches.requests[one.waiting[one.waiting_head]]
        needed = request.prompt + request.output
        if needed > one.kv_free or one.num_decoding + one.num_prefilling >= machine.max_running:
            break
        request.admitted = now
        one.kv_free -= needed
        one.kv_promised -= needed
        one.prefilling[one.num_prefilling] = one.waiting[one.waiting_head]
        one.num_prefilling += 1
        one.waiting_head = (one.waiting_head + 1) % MAX_QUEUE
        one.num_waiting -= 1
    one.start = now
    one.num_chunks = one.count = 0
    one.stop = FOREVER
    tokens = token_ranks = rank_max = 0
    if one.num_prefilling:
        one.count = 1
        tokens, token_ranks, rank_max = _cut_chunks(machine, one, batches.requests)
    elif one.num_decoding:
        one.count = one.decoding_last[0] + 1 - one.first
        joins = one.waiting_joins[one.waiting_head]
        if one.num_waiting and one.first < joins < one.first + one.count:
            one.count = joins - one.first
    if one.count:
        each_ms = iteration_ms(
            machine.model, one.num_decoding, one.decoding_rank_sum, one.decoding_rank_max, tokens, token_ranks, rank_max
        )
        if tokens:
            each_ms += machine.beside_prompt_ms * one.num_decoding
        one.each = max(1, round(each_ms * MS))
        one.stop = now + one.count * one.each


@kernel
def _cut_chunks(machine, one, requests):
    """Divides an iteration's token budget among prompts. Returns Σ tokens, Σ tokens · rank, and the
    largest rank."""
    budget = machine.max_step_tokens - one.num_decoding
    tokens = token_ranks = rank_max = 0
    # The scheduler treats the last token of a prompt like a decode token: it comes before all chunks.
    for chunked in range(2):
        for at in range(one.num_prefilling):
            request = requests[one.prefilling[at]]
            if (request.left != 1) != chunked or tokens >= budget:
                continue
            count = min(request.left, budget - tokens)
            one.chunks[one.num_chunks], one.chunk_tokens[one.num_chunks] = one.prefilling[at], count
            one.num_chunks += 1
            tokens += count
            token_ranks += count * request.rank
            rank_max = max(rank_max, request.rank)
    return tokens, token_ranks, rank_max
