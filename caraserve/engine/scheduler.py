"""Plans the next iteration: decode tokens first, then prefill chunks, within budgets. No I/O.

`plan_iteration` turns the running requests into a `SchedulerOutput`, once per turn of the engine. It takes KV blocks
from the pool, and never changes a request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType

from msgspec import Struct

from caraserve.core.backend import Limits
from caraserve.core.batch import BlockGrant, ScheduledRow
from caraserve.core.request import Request
from caraserve.kv.block_pool import BlockPool
from caraserve.util.units import ceil_div

PROMPT_LOGPROBS_CHUNK_TOKENS = 64  # most tokens of a row that scores its prompt: their logits are large


class Scheduled(Struct, frozen=True):
    """A running request's row in the iteration, and the KV blocks granted for it."""

    request: Request
    row: ScheduledRow
    blocks: tuple[int, ...]  # newly granted, to follow the request's own


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One iteration: its rows, in the batch's order, and the requests that are preempted for it.

    `lacking`: blocks, beyond those in the pool, that requests left out of the iteration wait for. `is_short`: whether a
    request found too few blocks.
    """

    scheduled: tuple[Scheduled, ...]
    preempted: tuple[Request, ...]
    lacking: int = 0
    is_short: bool = False


def total_tokens(request: Request) -> int:
    """Returns how many tokens of a request are on the device once all launched iterations have run."""
    return request.prompt_tokens + request.launched_outputs


def wants_output(request: Request, limits: Limits) -> bool:
    """Returns whether another token may be sampled, even if the tokens launched so far are not known yet."""
    return request.launched_outputs < request.inputs.params.max_tokens and total_tokens(request) < limits.max_context


def has_work(request: Request, limits: Limits) -> bool:
    """Returns whether an iteration can advance a request: there is a prompt token to compute, or an output token."""
    if request.computed < request.prompt_tokens:
        return True
    return request.computed < total_tokens(request) and wants_output(request, limits)


def blocks_missing(request: Request, end: int, block_tokens: int) -> int:
    """Returns how many blocks a request needs beyond its own to hold positions [0, end)."""
    return max(0, ceil_div(end, block_tokens) - len(request.blocks))


@dataclass(slots=True)
class _Pass:
    """The state of planning one iteration."""

    running: Sequence[Request]
    adapter_slots: Sequence[int]
    pool: BlockPool
    limits: Limits
    growable: int
    drafts: Mapping[Request, tuple[int, ...]]
    tokens_left: int
    scheduled: list[tuple[int, int, Scheduled]] = field(default_factory=list)  # adapter slot, index, row
    preempted: list[Request] = field(default_factory=list)
    left_out: dict[Request, int] = field(default_factory=dict)  # wait for the pool to grow; blocks reserved for each
    is_short: bool = False

    @property
    def lacking(self) -> int:
        return max(0, sum(self.left_out.values()) - self.pool.available)

    def add(self, index: int) -> None:
        """Schedules as many tokens of a request as the budgets allow. May preempt later requests, or this one."""
        request, slot, limits = self.running[index], self.adapter_slots[index], self.limits
        if self.tokens_left == 0 or request in self.preempted or not has_work(request, limits):
            return
        if request.prompt_tokens <= request.computed == total_tokens(request) - 1 and request not in self.drafts:
            # Nearly always, and so without the general rules: they take 2 µs more.
            count = 1
            missing = int(request.computed == len(request.blocks) * limits.block_tokens)
            row = _decode_row(request, slot)
        else:
            drafts = self._drafts_of(request)
            count = _chunk(request, self.tokens_left) + len(drafts)
            missing = blocks_missing(request, request.computed + count, limits.block_tokens)
            row = _row(request, count, slot, limits, drafts)
        if (blocks := self._take(index, missing) if missing else []) is None:
            return
        self.scheduled.append((slot, index, Scheduled(request, row, tuple(blocks))))
        self.tokens_left -= count

    def _drafts_of(self, request: Request) -> tuple[int, ...]:
        """Returns a request's drafts as far as tokens are left in the iteration and in its answer, and blocks beside
        one for each running request: no request waits or is preempted for a draft."""
        if not (drafts := self.drafts.get(request, ())):
            return ()
        blocks = self.pool.available - sum(self.left_out.values()) - len(self.running)
        room = (len(request.blocks) + max(0, blocks)) * self.limits.block_tokens
        answer = min(request.inputs.params.max_tokens - request.launched_outputs, room - total_tokens(request) + 1)
        most = min(self.tokens_left, answer, self.limits.max_context - total_tokens(request)) - 1
        return drafts[: max(0, most)]

    def _take(self, index: int, count: int) -> list[int] | None:
        """Takes `count` blocks, and preempts other requests for them if necessary. None: the request was preempted
        itself, or waits until the pool has grown."""
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
        """Returns the request to preempt: the last one that holds blocks, is not in this iteration and does not wait
        for the pool to grow; of its tenant's such requests the one with the highest `priority` value. The first request
        of all is never preempted, so that at least one always finishes."""
        spared = {*(entry.request for _, _, entry in self.scheduled), *self.preempted, *self.left_out}
        able = [request for request in reversed(self.running[1:]) if request.blocks and request not in spared]
        same = [request for request in able if request.inputs.tenant == able[0].inputs.tenant]
        return max(same, key=lambda request: request.inputs.priority, default=None)


def plan_iteration(
    running: Sequence[Request],
    adapter_slots: Sequence[int],
    pool: BlockPool,
    limits: Limits,
    served: int | None = None,
    growable: int = 0,
    drafts: Mapping[Request, tuple[int, ...]] = MappingProxyType({}),
) -> SchedulerOutput:
    """Plans one iteration over `running`, first served first, with the adapter slot of each request. `drafts`: guesses
    of what follows the known tokens of some decoding requests, all of which are known.

    Only the first `served` requests get rows; the others keep their blocks unless blocks run out. While the pool can
    grow by enough blocks (`growable`), a request that finds too few is left out of the iteration, and none is
    preempted. Blocks of preempted requests are already back in the pool; granted blocks are taken from it.
    """
    budget = _Pass(running, adapter_slots, pool, limits, growable, drafts, limits.max_step_tokens)
    decoding = [total_tokens(request) - request.computed == 1 for request in running[:served]]
    for wanted in (True, False):
        for index, decodes in enumerate(decoding):
            if decodes is wanted:
                budget.add(index)
    scheduled = tuple([entry for _, _, entry in sorted(budget.scheduled, key=itemgetter(0, 1))])
    return SchedulerOutput(scheduled, tuple(budget.preempted), budget.lacking, budget.is_short)


def plan_side_batch(request: Request, adapter_slot: int, pool: BlockPool, limits: Limits) -> Scheduled | int:
    """Returns one row with the rest of a prompt, at most `max_step_tokens`, or how many blocks are lacking for it.
    Granted blocks are taken from the pool; no request is preempted for them."""
    count = _chunk(request, limits.max_step_tokens)
    missing = blocks_missing(request, request.computed + count, limits.block_tokens)
    blocks = pool.take(missing)
    if blocks is None:
        return missing - pool.available
    return Scheduled(request, _row(request, count, adapter_slot, limits), tuple(blocks))


def _chunk(request: Request, most: int) -> int:
    """Returns the tokens of a request's next row: all of one adapter, or all of the base model."""
    count = min(total_tokens(request) - request.computed, most)
    if request.computed < request.base_tokens:
        count = min(count, request.base_tokens - request.computed)
    return min(count, PROMPT_LOGPROBS_CHUNK_TOKENS) if _wants_scores(request) else count


def _wants_scores(request: Request) -> bool:
    return request.inputs.params.prompt_logprobs is not None and request.computed < request.prompt_tokens


def _decode_row(request: Request, adapter_slot: int) -> ScheduledRow:
    """Returns the row of the last known token of an answer that goes on. `_row` takes 3 µs more, of 20 in which a token
    is to be planned, recorded and sent."""
    assert request.slot is not None
    return ScheduledRow(request.slot, request.computed, 1, adapter_slot, True, request.inputs.params.logprobs)


def _row(request: Request, count: int, adapter_slot: int, limits: Limits, drafts: tuple[int, ...] = ()) -> ScheduledRow:
    known = total_tokens(request) + len(drafts)
    samples = request.computed + count == known and wants_output(request, limits)
    params = request.inputs.params
    ends_prompt = request.computed + count == request.prompt_tokens
    assert request.slot is not None
    return ScheduledRow(
        slot=request.slot,
        start=request.computed,
        count=count,
        adapter_slot=adapter_slot,
        samples=samples,
        logprobs=params.logprobs if samples else None,
        prompt_logprobs=params.prompt_logprobs if _wants_scores(request) else None,
        embeds=request.inputs.embeds and (ends_prompt or request.inputs.averages),
        averages=request.inputs.averages,
        drafts=drafts,
    )


def grants(scheduled: Sequence[Scheduled]) -> tuple[BlockGrant, ...]:
    """Returns the blocks granted to each request. To be called before they are added to `Request.blocks`."""
    return tuple(
        BlockGrant(entry.row.slot, len(entry.request.blocks), entry.blocks) for entry in scheduled if entry.blocks
    )
