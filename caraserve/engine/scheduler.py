"""What runs in the next iteration: decode tokens first, then prefill chunks, within budgets. Pure.

`plan_iteration` turns the running requests into a `SchedulerOutput`, once a turn. It reads requests and takes KV blocks
from the pool; it never changes a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from caraserve.core.backend import Limits
from caraserve.core.batch import BlockGrant, ScheduledRow
from caraserve.core.request import Request
from caraserve.kv.block_pool import BlockPool
from caraserve.util.units import ceil_div

PROMPT_LOGPROBS_CHUNK_TOKENS = 64  # rows whose every token is scored are kept short: logits are large


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A running request's part in the iteration."""

    request: Request
    row: ScheduledRow
    blocks: tuple[int, ...]  # newly granted, to follow the request's own


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One iteration: rows in the plan's order, and requests that must give up their slot and blocks.

    `lacking`: blocks beyond the pool's that requests left out of the iteration wait for. `is_short`: whether somebody
    found too few.
    """

    scheduled: tuple[Scheduled, ...]
    preempted: tuple[Request, ...]
    lacking: int = 0
    is_short: bool = False


def total_tokens(request: Request) -> int:
    """Tokens whose ids the device knows once all launched iterations have run."""
    return request.prompt_tokens + request.launched_outputs


def wants_output(request: Request, limits: Limits) -> bool:
    """Whether another token may be sampled; known before the tokens launched so far are."""
    return request.launched_outputs < request.asked.params.max_tokens and total_tokens(request) < limits.max_context


def has_work(request: Request, limits: Limits) -> bool:
    """Whether an iteration can advance the request: tokens to compute, and something to be had of them."""
    uncomputed = request.computed < total_tokens(request)
    return uncomputed and (request.computed < request.prompt_tokens or wants_output(request, limits))


def blocks_missing(request: Request, end: int, block_tokens: int) -> int:
    """Blocks that the request needs beyond its own to hold positions [0, end)."""
    return max(0, ceil_div(end, block_tokens) - len(request.blocks))


@dataclass(slots=True)
class _Pass:
    """Budgets of one planning pass; thrown away after it."""

    running: Sequence[Request]
    adapter_slots: Sequence[int]
    pool: BlockPool
    limits: Limits
    growable: int
    tokens_left: int
    scheduled: dict[Request, tuple[Scheduled, int]] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    left_out: dict[Request, int] = field(default_factory=dict)  # until the pool has grown; blocks kept for each
    is_short: bool = False

    @property
    def lacking(self) -> int:
        return max(0, sum(self.left_out.values()) - self.pool.available)

    def add(self, index: int) -> None:
        """Schedules as much of a request as the budgets allow; may preempt later ones, or the request itself."""
        request = self.running[index]
        if request in self.preempted or not has_work(request, self.limits) or self.tokens_left == 0:
            return
        count = _chunk(request, self.tokens_left)
        blocks = self._take(index, blocks_missing(request, request.computed + count, self.limits.block_tokens))
        if blocks is None:
            return
        row = _row(request, count, self.adapter_slots[index], self.limits)
        self.scheduled[request] = Scheduled(request, row, tuple(blocks)), index
        self.tokens_left -= count

    def _take(self, index: int, count: int) -> list[int] | None:
        """Blocks, from others if need be. None: the request has lost its own, or waits for the pool to grow."""
        if count == 0:
            return []
        request = self.running[index]
        while (kept := count + sum(self.left_out.values())) > self.pool.available:
            self.is_short = True
            if kept - self.pool.available <= self.growable:
                self.left_out[request] = count
                return None
            victim = self._victim()
            if victim is None:
                return None
            self.preempted.append(victim)
            self.pool.release(victim.blocks)
            if victim is request:
                return None
        return self.pool.take(count)

    def _victim(self) -> Request | None:
        """The last in line that holds blocks and neither is in this iteration nor waits for the pool to grow, or one
        of the same tenant that has a higher `priority`. The first of all is never one, so that one request always gets
        to the end."""
        spared = {*self.scheduled, *self.preempted, *self.left_out}
        able = [request for request in reversed(self.running[1:]) if request.blocks and request not in spared]
        same = [request for request in able if request.asked.tenant == able[0].asked.tenant]
        return max(same, key=lambda request: request.asked.priority, default=None)


def plan_iteration(
    running: Sequence[Request],
    adapter_slots: Sequence[int],
    pool: BlockPool,
    limits: Limits,
    served: int | None = None,
    growable: int = 0,
) -> SchedulerOutput:
    """Plans one iteration over `running`, first served first (by admission, if nobody asks for another order), with
    each request's adapter slot. Those behind the first `served` keep what they hold, unless blocks run out. As long as
    the pool can grow, by `growable` blocks, whoever finds none is left out and nobody loses any.

    Blocks of preempted requests are already back in the pool; blocks granted are taken from it.
    """
    budget = _Pass(running, adapter_slots, pool, limits, growable, limits.max_step_tokens)
    decoding = [total_tokens(request) - request.computed == 1 for request in running[:served]]
    for wanted in (True, False):
        for index, decodes in enumerate(decoding):
            if decodes is wanted:
                budget.add(index)
    ordered = sorted(budget.scheduled.values(), key=lambda entry: (entry[0].row.adapter_slot, entry[1]))
    return SchedulerOutput(
        tuple(entry for entry, _ in ordered), tuple(budget.preempted), budget.lacking, budget.is_short
    )


def plan_side_batch(request: Request, adapter_slot: int, pool: BlockPool, limits: Limits) -> Scheduled | int:
    """One row of all that is left of a prompt, as far as one plan takes it; or how many blocks it lacks. Blocks granted
    are taken from the pool; nobody loses any for it."""
    count = _chunk(request, limits.max_step_tokens)
    missing = blocks_missing(request, request.computed + count, limits.block_tokens)
    blocks = pool.take(missing)
    if blocks is None:
        return missing - pool.available
    return Scheduled(request, _row(request, count, adapter_slot, limits), tuple(blocks))


def _chunk(request: Request, most: int) -> int:
    count = min(total_tokens(request) - request.computed, most)
    return min(count, PROMPT_LOGPROBS_CHUNK_TOKENS) if _wants_scores(request) else count


def _wants_scores(request: Request) -> bool:
    return request.asked.params.prompt_logprobs is not None and request.computed < request.prompt_tokens


def _row(request: Request, count: int, adapter_slot: int, limits: Limits) -> ScheduledRow:
    samples = request.computed + count == total_tokens(request) and wants_output(request, limits)
    params = request.asked.params
    assert request.slot is not None
    return ScheduledRow(
        slot=request.slot,
        start=request.computed,
        count=count,
        adapter_slot=adapter_slot,
        samples=samples,
        logprobs=params.logprobs if samples else None,
        prompt_logprobs=params.prompt_logprobs if _wants_scores(request) else None,
    )


def grants(scheduled: Sequence[Scheduled]) -> tuple[BlockGrant, ...]:
    """The block tables' growth, before the requests' own lists are extended."""
    return tuple(
        BlockGrant(entry.row.slot, len(entry.request.blocks), entry.blocks) for entry in scheduled if entry.blocks
    )
