"""The engine: owns requests, and turns them into iterations. the only writer of `Request`.

One turn: admit → plan → launch iteration n+1 → retire iteration n → wait for whatever comes first. Two iterations are
in flight at most, so the device never waits for the event loop. Everything here runs on the event loop; the backend's
callbacks are brought back to it.

A request that ends while its next iteration is already launched gives its slot and blocks back at once: the backend
applies plans in launch order, so whoever gets them next writes after that iteration has read. Its result is dropped.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Generator, Sequence

from caraserve.config import EngineConfig
from caraserve.core.backend import Backend
from caraserve.core.batch import DeviceLost, RowResult, ScheduledRow, StepResult
from caraserve.core.request import Finish, FinishReason, GenerateRequest, Phase, Request, TokenDelta, TokenLogprob
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.executor import Executor, LaunchedBatch, undo
from caraserve.engine.merge_policy import MergePolicy
from caraserve.engine.queues import RequestQueues
from caraserve.engine.stats import EngineLoad, EngineSnapshot, MetricsSink, Watch
from caraserve.engine.stream import Stream
from caraserve.errors import (
    BackendFailed,
    CaraServeError,
    ContextLengthExceeded,
    Displaced,
    Draining,
    NonFiniteLogits,
    Overloaded,
)
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.catalog import Catalog
from caraserve.lora.registry import AdapterInfo
from caraserve.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_DRAIN_RETRY_S = 5.0
_DROPPED_AT_ONCE = 64  # cancelled requests, at 20 µs each


class Engine:
    """Continuous batching over one backend."""

    def __init__(
        self,
        *,
        base_names: Sequence[str],
        backend: Backend,
        catalog: Catalog,
        tokenizer: Tokenizer,
        config: EngineConfig,
        metrics: MetricsSink,
        exclusive_loads: bool = False,
        merging: MergePolicy | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`base_names`: of the base model, the one that it is listed by first. `exclusive_loads`: nothing runs while an
        adapter is loading (the `ondemand` baseline). `merging`: says which adapter is merged into the weights when (the
        `merged` baseline)."""
        self.base_name, self.base_names = base_names[0], base_names
        self.tokenizer = tokenizer
        self.catalog = catalog
        self.default_sampling = tokenizer.default_sampling
        self.max_model_len = backend.limits.max_context
        self.draining = False
        self.failure: str | None = None  # why nothing will ever be answered again
        self.watch: Watch | None = None
        self._backend, self._limits = backend, backend.limits
        self._config, self._metrics, self._now = config, metrics, now
        self._exclusive_loads = exclusive_loads
        self._seeds = random.Random(config.seed)
        self._queues = RequestQueues(
            backend.limits,
            catalog.manager,
            tokenizer.eos_ids,
            prefix_caching=config.enable_prefix_caching,
            prefetching=not exclusive_loads,
            observe_preemption=metrics.observe_preemption,
            now=now,
        )
        self._cancelled: list[ActiveRequest] = []
        self._open = 0
        self._tokens_per_s = 0.0
        self._decode_s = 0.0  # an iteration without prefill, of late
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._executor = Executor(backend, self._queues, merging, self._wake.set)
        self._idle = asyncio.Event()
        self._idle.set()
        catalog.manager.on_change(self._wake.set)

    # --- what HTTP asks ---

    def submit(self, asked: GenerateRequest) -> Stream:
        """Queues a request; in a full queue, in place of one of the client that has most there. Raises NotFound,
        ContextLengthExceeded, Overloaded or Draining, without any effect."""
        return self._submit(asked, None).stream

    def submit_each(self, asked: Sequence[GenerateRequest]) -> Generator[Stream]:
        """Queues a request with each step, as `submit` does, all with the adapter version that the first one gets,
        whatever is loaded in place between two steps. Thousands take 100 ms."""
        adapter: Adapter | None = None
        try:
            for one in asked:
                active = self._submit(one, adapter)
                if adapter is None and active.adapter is not None:
                    adapter = self.catalog.manager.hold(active.adapter)
                yield active.stream
        finally:
            if adapter is not None:
                self.catalog.manager.unpin(adapter)

    def _submit(self, asked: GenerateRequest, adapter: Adapter | None) -> ActiveRequest:
        """`adapter`: held already, of an earlier request of the same response."""
        if self.failure is not None:
            raise BackendFailed(f"the device has failed: {self.failure}")
        if self.draining:
            raise Draining("the server is stopping", retry_after_s=_DRAIN_RETRY_S)
        if len(asked.prompt_ids) + min(asked.params.max_tokens, 1) > self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt has "
                f"{len(asked.prompt_ids)}, and the answer at least one.",
                param="prompt",
            )
        displaced = None
        if (count := len(self._queues.waiting)) >= self._config.max_queue:
            message, retry_after_s = f"{count} requests are waiting", self._retry_after_s()
            if (displaced := self._queues.waiting.newest_of_largest(asked.tenant.client)) is None:
                raise Overloaded(message, retry_after_s=retry_after_s)
        if adapter is not None:
            self.catalog.manager.hold(adapter)
        elif asked.adapter is not None:
            adapter = self.catalog.pin(asked.adapter)
        if displaced is not None:
            self._finish(displaced, "error", error=Displaced(message, retry_after_s=retry_after_s))
        active = self._open_request(asked, adapter)
        self._queues.waiting.push(asked.tenant, active)
        self._queues.admit()  # a load need not wait for the iteration under way
        self._wake.set()
        return active

    def adapters(self) -> list[AdapterInfo]:
        """All adapters that can be asked for."""
        return self.catalog.all()

    def adapter(self, name: str) -> AdapterInfo:
        """One adapter. Raises NotFound."""
        return self.catalog.get(name)

    async def load_adapter(self, name: str, path: str, *, inplace: bool = False) -> AdapterInfo:
        """Registers an adapter at run time. Raises AdapterRejected or NotFound."""
        return await self.catalog.load(name, path, inplace=inplace)

    async def unload_adapter(self, name: str) -> None:
        """Takes an adapter away; returns when its last request has ended. Raises NotFound."""
        await self.catalog.unload(name)

    def snapshot(self) -> EngineSnapshot:
        """The state that metrics and the page show."""
        return EngineSnapshot.of(self._queues, self.catalog.manager, draining=self.draining)

    def waiting(self) -> set[str]:
        """Ids of the requests that have not begun."""
        return {active.request.asked.request_id for active in self._queues.waiting}

    def workload(self, response_tokens: float) -> EngineLoad:
        """What there is to do, for those who predict it."""
        return EngineLoad.of(self._queues, self.catalog, self._limits, self._config.max_queue, response_tokens)

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests, lets the open ones end, and cancels those that have not after `timeout_s`."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._cancelled += [*self._queues.waiting, *self._queues.loading, *self._queues.running]
            self._wake.set()
            await self._idle.wait()

    def check(self) -> None:
        """Raises AssertionError when a count does not add up."""
        self._queues.check()
        assert self._open == len(self._queues), "a request is lost"
        self.catalog.manager.check()

    # --- the loop ---

    async def run(self) -> None:
        """Turns until cancelled."""
        pending: LaunchedBatch | None = None
        while True:
            self._wake.clear()
            self._retire_aside()
            await self._drop_cancelled()
            self._fail_unloadable()
            self._queues.admit()
            begins_s = self._next_begins_s(pending)
            self._queues.start(begins_s)
            exclusive_load = self._exclusive_loads and self.catalog.manager.loading
            launched = None if exclusive_load else self._executor.launch(begins_s)
            if pending is not None:
                await self._retire_iteration(pending)  # frees what the next turn may admit
            elif launched is None:
                await self._sleep(list(self._queues.running) if exclusive_load else [])
            pending = launched

    def _next_begins_s(self, pending: LaunchedBatch | None) -> float:
        """When an iteration launched now will begin: not before the one under way could be done."""
        now_s = self._now()
        return now_s if pending is None else max(now_s, pending.begins_s + self._decode_s)

    async def _sleep(self, interrupted: list[ActiveRequest]) -> None:
        """Until something has changed, or a request may start whose adapter is on its way. `interrupted`: requests that
        could go on but for a load."""
        alarm, since_s = None, self._now()
        if self._queues.next_start_s is not None:
            alarm = self._loop.call_later(max(0.0, self._queues.next_start_s - self._now()), self._wake.set)
        await self._wake.wait()
        if alarm is not None:
            alarm.cancel()
        for active in interrupted:
            active.request.interrupted_ms += 1000 * (self._now() - since_s)

    def _fail_unloadable(self) -> None:
        """A load may also fail under requests that run already; their tokens so far are right. What is launched of
        them may read an image that has given way by then: nobody is to find its blocks."""
        for active in [*self._queues.loading, *self._queues.running]:
            if active.adapter is not None and active.adapter.tier is AdapterTier.FAILED:
                if active.published:
                    self._queues.pool.forget_all()
                self._finish(active, "error", error=active.adapter.error)

    # --- retiring ---

    async def _retire_iteration(self, launched: LaunchedBatch) -> None:
        """Once it has ended; plans aside that end before it are retired at once."""
        while (outcome := await self._executor.outcome_of(launched)) is None:
            self._retire_aside()
        self._retire(launched, outcome)

    def _retire_aside(self) -> None:
        """Hands results of plans aside to their requests, and gives back what those that have ended still hold."""
        for launched in self._executor.take_ended_aside():
            ((active, row),), outcome = launched.rows, launched.result.result()
            self._queues.end_aside(active)
            if isinstance(outcome, Exception):
                log.error("a plan aside failed", exc_info=outcome)
                self._fail([active], outcome)
            elif outcome.rows[0].needs_retry:
                undo(active, row)
                stays = self._limits.assisted_batches and active.can_go_on  # whom workers failed goes on without
                if active.request.phase is not Phase.FINISHED and not stays:
                    self._queues.set_back(active)
            elif active.request.phase is not Phase.FINISHED:
                self._queues.publish(active)
                took_ms = 1000 * (outcome.done_s - outcome.started_s) - outcome.rows[0].waited_ms
                self._deliver(launched, outcome, took_ms)
        self._settle()

    def _settle(self) -> None:
        if self._open == 0 and self._queues.is_settled:
            self._idle.set()

    def _retire(self, launched: LaunchedBatch, outcome: StepResult | Exception) -> None:
        """What came of an iteration, failure included."""
        if isinstance(outcome, Exception):
            self._fail_iteration(launched, outcome)
            return
        duration_s = outcome.done_s - outcome.started_s
        if launched.num_tokens == len(launched.rows):
            self._decode_s += 0.2 * (duration_s - self._decode_s)
        if self.watch is not None:
            self.watch(launched.rows, 1000 * duration_s)
        self._tokens_per_s += 0.1 * (launched.num_tokens / max(duration_s, 1e-6) - self._tokens_per_s)
        self._deliver(launched, outcome, 1000 * duration_s)

    def _deliver(self, launched: LaunchedBatch, outcome: StepResult, took_ms: float) -> None:
        """Hands the results to their requests; those of requests that have ended meanwhile are dropped."""
        self._metrics.observe_iteration(launched.num_tokens, took_ms)
        interruptions_ms = outcome.interruptions_ms([row for _, row in launched.rows])
        for (active, row), result, others_ms in zip(launched.rows, outcome.rows, interruptions_ms, strict=True):
            if active.request.phase is not Phase.FINISHED:
                active.request.cpu_layers += result.cpu_layers
                active.request.stalled_ms += result.waited_ms
                active.request.interrupted_ms += others_ms
                self._observe_choice(active, outcome.done_s)
                if result.is_finite:
                    self._retire_row(active, row, result, outcome.done_s)
                else:
                    self._fail_not_finite(active)

    def _fail_iteration(self, launched: LaunchedBatch, cause: Exception) -> None:
        """Ends the requests of a failed iteration, and those that may have reused blocks which it was to fill."""
        log.error("an iteration failed", exc_info=cause)
        self._queues.pool.forget_all()
        lost = [active for active, _ in launched.rows]
        lost += [active for active in self._queues.running if active.request.phase is Phase.PREFILL and active.reused]
        self._fail(lost, cause)

    def _fail(self, lost: list[ActiveRequest], cause: Exception) -> None:
        if isinstance(cause, DeviceLost):
            self.failure = str(cause)
        for active in lost:
            if active.request.phase is not Phase.FINISHED:
                self._finish(active, "error", error=BackendFailed(f"the iteration failed: {cause}"))

    def _fail_not_finite(self, active: ActiveRequest) -> None:
        """Ends a request whose logits are not finite, and takes what it computed out of the prefix cache."""
        self._queues.pool.forget(active.request.blocks)
        name = active.request.asked.adapter or self.base_name
        self._finish(active, "error", error=NonFiniteLogits(name))

    def _retire_row(self, active: ActiveRequest, row: ScheduledRow, result: RowResult, done_s: float) -> None:
        request = active.request
        if result.prompt_scored:
            active.put_prompt_scores(row, result)
        if result.token_id is None:
            if request.asked.params.max_tokens == 0 and row.start + row.count == request.prompt_tokens:
                self._finish(active, "length")
            return
        self._observe_token(active, done_s)
        token = result.token_id
        request.output_ids.append(token)
        self._queues.waiting.charge(request.asked.tenant, 0, 1)
        if request.phase is Phase.PREFILL:
            request.to(Phase.DECODE, self._now())
        logprobs = (result.scored,) if result.scored else ()
        params = request.asked.params
        may_stop = len(request.output_ids) >= params.min_tokens
        reason, stop_reason = request.ended_by(token, self.tokenizer.eos_ids) if may_stop else (None, None)
        text = ""
        if reason is None or params.include_stop_str_in_output:
            text, stop = active.detokenizer.push(token, may_stop=may_stop)
            if reason is None and stop is not None:
                reason, stop_reason = "stop", stop
        if reason is None and not request.wants_more(self.max_model_len):
            reason = "length"
        if reason is None:
            active.stream.put(TokenDelta(text, (token,), logprobs))
        else:
            self._finish(active, reason, stop_reason=stop_reason, text=text, token_ids=(token,), logprobs=logprobs)

    def _observe_choice(self, active: ActiveRequest, done_s: float) -> None:
        """Once for each request: how its first chunk began, and whether it took as long as was expected."""
        choice = active.choice
        if choice is None or choice.is_observed:
            return
        choice.is_observed = True
        expected_s = choice.ends_s - choice.chosen_s
        self._metrics.observe_choice(choice.name, 1000 * expected_s, 1000 * (done_s - choice.chosen_s))

    def _observe_token(self, active: ActiveRequest, done_s: float) -> None:
        if active.last_token_s is None:
            self._metrics.observe_first_token(done_s - active.request.asked.arrival_s)
        else:
            self._metrics.observe_token_gap(done_s - active.last_token_s)
        active.last_token_s = done_s

    # --- opening and ending ---

    def _open_request(self, asked: GenerateRequest, adapter: Adapter | None) -> ActiveRequest:
        params = asked.params
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        request = Request(asked, seed, since_s=self._now())
        detokenizer = self.tokenizer.detokenizer(
            asked.prompt_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        stream = Stream(lambda: self._cancel(active))
        active = ActiveRequest(request, stream, detokenizer, adapter, b"")
        self._open += 1
        self._idle.clear()
        return active

    def _cancel(self, active: ActiveRequest) -> None:
        if active.request.phase is not Phase.FINISHED:
            self._cancelled.append(active)
            self._wake.set()

    async def _drop_cancelled(self) -> None:
        """Some in each turn of the event loop: one response may have had thousands."""
        dropped, self._cancelled = self._cancelled[:_DROPPED_AT_ONCE], self._cancelled[_DROPPED_AT_ONCE:]
        for active in dropped:
            if active.request.phase is not Phase.FINISHED:
                self._finish(active, "cancelled")
        if self._cancelled:
            self._wake.set()
            await asyncio.sleep(0)  # with nothing to compute, the engine would not wait for anything else

    def _finish(
        self,
        active: ActiveRequest,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: CaraServeError | None = None,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Ends a request wherever it is, gives back all it holds, and sends the last delta."""
        request = active.request
        self._queues.take_out(active)
        request.to(Phase.FINISHED, self._now())
        self._open -= 1
        self._settle()
        finish = Finish(
            reason=reason,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=len(request.output_ids),
            cached_tokens=request.cached_tokens,
            phases=request.phases(),
            stop_reason=stop_reason,
            error=error,
        )
        self._metrics.observe_finish(finish)
        text += active.detokenizer.flush()
        active.stream.put(TokenDelta(text, token_ids, logprobs, finish=finish))

    def _retry_after_s(self) -> float:
        """About how long the queue's prompts and answers take at the recent rate."""
        return min(60.0, max(1.0, self._queues.waiting_tokens() / self._tokens_per_s if self._tokens_per_s else 1.0))
