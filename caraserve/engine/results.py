"""Passes the results of batches to their requests: tokens, scores, embeddings and failures.

What an iteration does to its requests alike is counted once: the tokens that tenants have received, and the times
between tokens, of which most are the same.
"""

from collections.abc import Callable, Iterator

from caraserve.core.batch import RowResult, ScheduledRow, StepResult
from caraserve.core.request import TokenDelta
from caraserve.core.tenant import Tenant
from caraserve.engine.active_request import ActiveRequest, Ending
from caraserve.engine.batch_launcher import LaunchedBatch
from caraserve.engine.batch_timeline import BatchTimeline
from caraserve.engine.queues import RequestQueues
from caraserve.engine.slot_allocator import SlotAllocator
from caraserve.engine.speculation import Speculation
from caraserve.errors import NonFiniteLogits
from caraserve.telemetry.metrics import Metrics


class ResultRecorder:
    """Records the results of batches. Runs on the event loop."""

    def __init__(
        self,
        queues: RequestQueues,
        slots: SlotAllocator,
        speculation: Speculation,
        timeline: BatchTimeline,
        metrics: Metrics,
        finish: Callable[[ActiveRequest, Ending], None],
        *,
        base_name: str,
        eos_ids: frozenset[int],
        max_context: int,
        now: Callable[[], float],
    ) -> None:
        """`base_name`: what errors call the base model."""
        self._queues, self._slots, self._speculation = queues, slots, speculation
        self._timeline, self._metrics, self._finish = timeline, metrics, finish
        self._base_name, self._eos_ids, self._max_context, self._now = base_name, eos_ids, max_context, now

    def record(self, launched: LaunchedBatch, outcome: StepResult, took_ms: float) -> Iterator[None]:
        """Passes the results of a batch to its requests, and drops those of requests that have finished meanwhile.
        Yields after each request; any request may change or end before the next step."""
        self._metrics.observe_iteration(launched.num_tokens, took_ms)
        self._timeline.record(launched.rows, outcome.done_s)
        counts = _Counts(outcome.done_s)
        waits_ms = None if outcome.is_typical else outcome.interruptions_ms([row for _, row in launched.rows])
        for index, ((active, row), result) in enumerate(zip(launched.rows, outcome.rows, strict=True)):
            if active.is_finished:
                continue
            if waits_ms is not None:
                active.record_waits(result, waits_ms[index])
            if not result.left_tokens:
                self._observe_choice(active, outcome.done_s)
            if not result.is_finite:
                self._slots.pool.forget(active.request.blocks)  # no later request may reuse its blocks
                name = active.request.inputs.adapter or self._base_name
                self._finish(active, Ending("error", error=result.failure or NonFiniteLogits(name)))
            elif result.failure is not None:
                self._finish(active, Ending("error", error=result.failure))
            else:
                if result.prompt_scored:
                    active.send_prompt_scores(row, result)
                if result.token_ids:
                    self._record_tokens(active, row, result, counts)
                else:
                    self._record_without_tokens(active, row, result)
            yield
        for tenant, tokens in counts.tokens.items():
            self._queues.waiting.charge(tenant, 0, tokens)
        for before_s, tokens in counts.gaps.items():
            self._metrics.observe_token_gaps(outcome.done_s - before_s, tokens)

    def _record_tokens(self, active: ActiveRequest, row: ScheduledRow, result: RowResult, counts: "_Counts") -> None:
        tenant = active.request.inputs.tenant
        counts.tokens[tenant] = counts.tokens.get(tenant, 0) + 1 + len(row.drafts)
        if row.drafts:
            self._speculation.settle(active, row, result)
        text = ""
        for count, token in enumerate(result.token_ids, start=1):
            self._observe_token(active, counts)
            added, reason, stop_reason = active.record_token(token, self._eos_ids, self._max_context, self._now)
            text += added
            if reason is not None:
                ids, scored = result.token_ids[:count], result.scored[:count]
                self._finish(active, Ending(reason, stop_reason, None, text, ids, scored))
                return
        if result.scored:
            active.stream.put(TokenDelta(text, result.token_ids, result.scored))
        else:
            active.stream.put_text(text, result.token_ids)

    def _record_without_tokens(self, active: ActiveRequest, row: ScheduledRow, result: RowResult) -> None:
        request = active.request
        if result.embedding is not None:
            if (embedding := active.pool(row, result.embedding)) is not None:
                self._finish(active, Ending("stop", embedding=embedding))
        elif request.inputs.params.max_tokens == 0 and row.start + row.count == request.prompt_tokens:
            self._finish(active, Ending("length"))

    def _observe_choice(self, active: ActiveRequest, done_s: float) -> None:
        """Reports, once for each request, the start that mode `auto` chose, and its predicted and measured time."""
        choice = active.choice
        if choice is None or choice.is_observed:
            return
        choice.is_observed = True
        expected_s = choice.ends_s - choice.chosen_s
        self._metrics.observe_choice(choice.name, 1000 * expected_s, 1000 * (done_s - choice.chosen_s))

    def _observe_token(self, active: ActiveRequest, counts: "_Counts") -> None:
        before_s = active.last_token_s
        if before_s is None:
            active.first_token_s = counts.done_s
            self._metrics.observe_first_token(counts.done_s - active.request.inputs.arrival_s)
        else:
            counts.gaps[before_s] = counts.gaps.get(before_s, 0) + 1
        active.last_token_s = counts.done_s


class _Counts:
    """What an iteration that ended at `done_s` counts for many requests at once: tokens by tenant, and tokens by the
    time of the token before."""

    __slots__ = ("done_s", "gaps", "tokens")

    def __init__(self, done_s: float) -> None:
        self.done_s = done_s
        self.tokens: dict[Tenant, int] = {}
        self.gaps: dict[float, int] = {}
