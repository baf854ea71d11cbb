"""The rules of all routing policies over numbers: the server runs them as they are, `bench/simulator` compiles them.

Instances are numbered in the order of their names. `view` has what one decision works on, in lists here and in NumPy
arrays in the simulator:

    count                     the number of instances
    requests, holds           of each: its requests, and whether it has the adapter
    planned                   the adapter's instances by the plan, ascending
    shares, fractions         the same, the largest fraction first, and the fraction of each
    classes, class_rank       the rank that each instance is for by the plan, and the one for requests of this rank
    costs, latencies_ms       of each instance as far as it is `estimated`, by `write_estimate`
    order, known              the instances, best first: `known[0]` of them so far, which are `marked`
    members, ranking, kept, pool, chosen, draws    room to work

`rng` is a `random.Random` here, and a generator of the same numbers in the simulator. No I/O, no clock.
"""

import math
from collections.abc import Iterable
from typing import Any

AUTO, RANK_AWARE, BY_PLAN, RANDOM, ROUND_ROBIN, FIRST_FIT, MOST_IDLE, DLORA = range(8)
POLICIES = {
    "auto": AUTO,
    "rank-aware": RANK_AWARE,
    "loraserve": BY_PLAN,
    "random": RANDOM,
    "round-robin": ROUND_ROBIN,
    "first-fit": FIRST_FIT,
    "most-idle": MOST_IDLE,
    "dlora": DLORA,
    "s-lora-random": BY_PLAN,
    "s-lora-contiguous": BY_PLAN,
}
BY_COST = (AUTO, RANK_AWARE)  # their requests are refused where they would miss the SLO; others are forced
SHORTLIST = 8  # candidates kept after the first stage
QUOTES = 4  # of them asked, at random: always asking the same best ones would send all requests there
FIRST_FIT_REQUESTS = 32  # to which first-fit fills an instance

ATTEMPTS = 3  # instances that may refuse one request
REFUSAL_TIME_SHARE = 0.2  # of the promised time to the first token; refusals may take that long


# --- replaced in the simulator ---


def write_estimate(view: Any, number: int) -> None:
    """Writes cost and latency of the request on an instance, by the load that it last published."""
    view.costs[number], view.latencies_ms[number] = view.estimate(number)


def below(rng: Any, count: int) -> int:
    """Draws an integer from 0 to `count` - 1."""
    return int(rng.randrange(count))


def sort_by_keys(numbers: Any, count: int, first: Any, second: Any, third: Any) -> None:
    """Sorts the first `count` numbers by three keys, which are sequences by instance; equal ones stay in order."""
    numbers[:count] = sorted(numbers[:count], key=lambda number: (first[number], second[number], third[number]))


# --- parts of orders ---


def shuffle(rng: Any, numbers: Any, count: int, drawn: int) -> None:
    """Draws `drawn` of the first `count` numbers to their end, as `Random.sample` does; the first one drawn is last."""
    for at in range(drawn):
        chosen, last = below(rng, count - at), count - at - 1
        numbers[chosen], numbers[last] = numbers[last], numbers[chosen]


def mark_known(view: Any) -> None:
    """Marks the instances that are in the order, and no others."""
    for number in range(view.count):
        view.marked[number] = False
    for at in range(view.known[0]):
        view.marked[view.order[at]] = True


def append(view: Any, number: int) -> None:
    """Adds an instance to the order, unless it is there."""
    if not view.marked[number]:
        view.marked[number] = True
        view.order[view.known[0]] = number
        view.known[0] += 1


def all_members(view: Any) -> int:
    """Makes all instances members. Returns their number."""
    for number in range(view.count):
        view.members[number] = number
    return int(view.count)


def holding_members(view: Any, holding: bool) -> int:
    """Makes those instances members that hold the adapter, or those that do not. Returns their number."""
    count = 0
    for number in range(view.count):
        if view.holds[number] == holding:
            view.members[count] = number
            count += 1
    return count


def append_by_requests(view: Any, count: int) -> None:
    """Adds the first `count` members in order of their requests; ties stay in order."""
    sort_by_keys(view.members, count, view.requests, view.requests, view.requests)
    for at in range(count):
        append(view, view.members[at])


def append_shuffled(view: Any, count: int, by_requests: bool, rng: Any) -> None:
    """Adds the first `count` members in random order, or in order of their requests with ties at random."""
    members = view.members
    shuffle(rng, members, count, count)
    for at in range(count // 2):
        members[at], members[count - 1 - at] = members[count - 1 - at], members[at]
    if by_requests:
        append_by_requests(view, count)
    else:
        for at in range(count):
            append(view, members[at])


def idlest(view: Any, count: int, rng: Any) -> int:
    """Returns one of the first `count` members with the fewest requests, at random."""
    least, ties = view.requests[view.members[0]], 0
    for at in range(count):
        least = min(least, view.requests[view.members[at]])
    for at in range(count):
        ties += view.requests[view.members[at]] == least
    chosen = below(rng, ties)
    for at in range(count):
        if view.requests[view.members[at]] == least:
            if chosen == 0:
                return int(view.members[at])
            chosen -= 1
    return -1


# --- by cost, in two stages ---


def class_for(ranks: Iterable[int], rank: float) -> int:
    """Returns the class for requests of a rank: the least rank that is not below it, else the highest; -1 if there is
    none."""
    least, highest = -1, -1
    for one in ranks:
        highest = max(highest, one)
        if one >= rank and (least < 0 or one < least):
            least = one
    return least if least >= 0 else highest


def group_members(view: Any, which: int) -> int:
    """Makes the instances of one of `auto`'s groups members: 0 the adapter's instances by the plan, 1 its rank's class,
    2 all. Returns their number."""
    if which == 2:
        return all_members(view)
    count = 0
    if which == 0:
        for at in range(len(view.planned)):
            view.members[at] = view.planned[at]
        return len(view.planned)
    for number in range(len(view.classes)):
        if view.classes[number] == view.class_rank:
            view.members[count] = number
            count += 1
    return count


def rank_members(view: Any, count: int, rng: Any) -> None:
    """Ranks the first `count` members by cost, then latency, then at random."""
    for at in range(count):
        number = view.members[at]
        if not view.estimated[number]:
            view.estimated[number] = True
            write_estimate(view, number)
        view.draws[number] = rng.random()
        view.ranking[at] = number
    sort_by_keys(view.ranking, count, view.costs, view.latencies_ms, view.draws)


def rank_candidates(view: Any, policy: int, slo_ms: float, rng: Any) -> int:
    """Ranks the candidates of a policy in `BY_COST`. Returns their number.

    Rank-aware (Toppings): all instances. Auto: LoRAServe's plan names the candidates, Toppings' cost chooses among them
    and counts the request's own time too. They are the instances that have the adapter by the plan; where none of them
    is within the SLO, all instances of the rank's class; then all. So adapters spread only when their own instances are
    full, and ranks mix only when their class is full. Cost is computed only as far as that goes: most requests compare
    a few candidates.
    """
    if policy == RANK_AWARE:
        count = all_members(view)
        rank_members(view, count, rng)
        return count
    num_kept = 0  # of the first group whose iterations meet the SLO
    count = 0
    for which in range(3):
        count = group_members(view, which)
        if count == 0:
            continue
        rank_members(view, count, rng)
        best = view.ranking[0]
        if view.costs[best] < math.inf:
            if view.latencies_ms[best] <= slo_ms:
                return count
            if num_kept == 0:
                num_kept = count
                for at in range(count):
                    view.kept[at] = view.ranking[at]
    for at in range(num_kept):  # no group meets the SLO with waiting included
        view.ranking[at] = view.kept[at]
    return num_kept if num_kept > 0 else count


def shortlist(view: Any, count: int, me: int, rng: Any) -> int:
    """Starts an empty order with those of the `count` best whose exact quotes are worth a round trip, in order of the
    ranking. Returns how many. `me`: the router's own instance; its state is at hand: a fifth quote at no cost, and no
    forwarding if it is the best."""
    pool, chosen = view.pool, view.chosen
    best, size = min(SHORTLIST, count), 0
    for at in range(best):
        if view.costs[view.ranking[at]] < math.inf:
            pool[size] = view.ranking[at]
            size += 1
    within_slo = size > 0
    if size < QUOTES:
        size = min(QUOTES, best) if within_slo else best
        for at in range(size):
            pool[at] = view.ranking[at]
    asked = min(QUOTES, size) if within_slo else size  # past the SLO views err most, so there are more quotes
    for at in range(size):
        chosen[at] = pool[at]
    if within_slo:
        shuffle(rng, chosen, size, asked)
    for at in range(size):
        wanted = pool[at] == me
        for drawn in range(size - asked, size):
            wanted = wanted or chosen[drawn] == pool[at]
        if wanted:
            view.order[view.known[0]] = pool[at]
            view.known[0] += 1
    return int(view.known[0])


def append_ranking(view: Any, count: int) -> None:
    """Adds the `count` instances of the ranking."""
    for at in range(count):
        append(view, view.ranking[at])


# --- without cost ---


def draw_by_plan(view: Any, rng: Any) -> None:
    """Adds the adapter's instances in an order drawn by their fractions (LoRAServe)."""
    left, numbers, fractions = len(view.shares), view.members, view.draws
    for at in range(left):
        numbers[at], fractions[at] = view.shares[at], view.fractions[at]
    while left > 0:
        total = 0.0
        for at in range(left):
            total += fractions[at]
        chosen = 0
        if total > 0:  # as `Random.choices`
            drawn, bound = rng.random() * total, fractions[0]
            while chosen < left - 1 and bound <= drawn:
                chosen += 1
                bound += fractions[chosen]
        else:
            chosen = below(rng, left)
        append(view, numbers[chosen])
        left -= 1
        for at in range(chosen, left):
            numbers[at], fractions[at] = numbers[at + 1], fractions[at + 1]


def choose_first(view: Any, policy: int, turn: int, rng: Any) -> None:
    """Starts an empty order by a policy that is not in `BY_COST`. `turn`: the number of requests that this router has
    routed before. There is at least one instance.

    Random; round robin; first-fit (Punica): those with room by name, which fills instances one by one up to a batch
    size; most idle (Toppings' baseline): the fewest requests; dLoRA: the fewest among the adapter's holders; by plan
    (LoRAServe): drawn by fraction φ, of which S-LoRA's static plans have one of 1.
    """
    count = view.count
    if policy == ROUND_ROBIN:
        append(view, turn % count)
    elif policy == FIRST_FIT:
        for number in range(count):
            if view.requests[number] < FIRST_FIT_REQUESTS:
                append(view, number)
        if view.known[0] == 0:
            complete(view, policy, rng)
    elif policy == DLORA:
        holders = holding_members(view, True)
        append(view, idlest(view, holders if holders > 0 else all_members(view), rng))
    elif policy == MOST_IDLE:
        append(view, idlest(view, all_members(view), rng))
    elif policy == BY_PLAN and len(view.shares) > 0:
        draw_by_plan(view, rng)
    else:
        append(view, below(rng, count))


def complete(view: Any, policy: int, rng: Any) -> None:
    """Adds all instances that are not in the order, which only refused requests need."""
    mark_known(view)
    count = view.count
    if policy == AUTO:  # smaller groups first, in each the least busy first
        for which in range(3):
            append_by_requests(view, group_members(view, which))
    elif policy == ROUND_ROBIN:
        first = view.order[0]
        for step in range(1, count):
            append(view, (first + step) % count)
    elif policy == FIRST_FIT:
        append_by_requests(view, all_members(view))
    elif policy == DLORA:
        holders = holding_members(view, True)
        if holders > 0:
            append_shuffled(view, holders, True, rng)
            others = holding_members(view, False)
            if others > 0:
                append(view, idlest(view, others, rng))
        else:
            others = all_members(view)
        append_shuffled(view, others, True, rng)
    elif policy == BY_PLAN and len(view.shares) > 0:
        for number in range(count):
            append(view, number)
    elif policy != RANK_AWARE:  # whose ranking has all
        append_shuffled(view, all_members(view), policy == MOST_IDLE, rng)


# --- refusals ---

ACCEPTS, FULL, MISSES_SLO = range(3)
OFFER, OVERRULE, FORCE, END = range(4)


def acceptance(queue_room: float, cost: float, latency_ms: float, force: bool) -> int:
    """Decides whether an instance accepts a request, by its exact state: ACCEPTS, or the reason why it does not."""
    if queue_room <= 0 or latency_ms == math.inf:
        return FULL
    return MISSES_SLO if cost == math.inf and not force else ACCEPTS


def best_refusal(tried: Any, forced: Any, missed_slo: Any, latencies_ms: Any, count: int) -> int:
    """Returns which of `count` attempts was refused because of the SLO alone with the least latency, on an instance
    that was not forced; -1: none. Each argument is a sequence by attempt; `tried`: the instances."""
    best = -1
    for at in range(count):
        could = missed_slo[at] != 0
        for other in range(count):
            could = could and not (forced[other] != 0 and tried[other] == tried[at])
        if could and (
            best < 0
            or latencies_ms[at] < latencies_ms[best]
            or (latencies_ms[at] == latencies_ms[best] and tried[at] < tried[best])
        ):
            best = at
    return best


def next_step(attempts: int, is_untried: bool, is_refused: bool, elapsed_ms: float, ttft_ms: float) -> int:
    """Decides what follows on so many attempts: OFFER the request to the next untried instance, OVERRULE the refusal of
    `best_refusal`, FORCE it on the next untried one, or END. `is_untried`, `is_refused`: whether there is such a one.

    At most ATTEMPTS instances may refuse, within a fifth of the promised time to the first token. The walk ends
    whatever the answers: each instance is tried once, and forced once.
    """
    if is_untried and attempts < ATTEMPTS and elapsed_ms < REFUSAL_TIME_SHARE * ttft_ms:
        return OFFER
    if is_refused:
        return OVERRULE
    return FORCE if is_untried and attempts < 2 * ATTEMPTS else END
