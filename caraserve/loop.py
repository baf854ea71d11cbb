"""The engine: continuous batching of requests over one backend.

One turn: expire → admit → schedule → execute iteration n+1 → process the output of iteration n. At most two iterations
are in flight, so the device does not wait for the event loop. Everything here runs on the event loop.

Before a turn the engine waits: iteration n+1 is planned only as long before the predicted end of iteration n as this
and its launch take, and requests that arrive until then are in it. Planned as soon as iteration n begins, it would be
without nearly all that arrive while n runs. They would wait for all of n+1: with iterations of 7 ms, for 5 of the 23 ms
to their first token.

A request that ends while its next iteration is already launched gives its slot and blocks back at once: the backend
applies batches in launch order, so their next owner writes after that iteration has read. Its result is dropped.

When a client disconnects, `_expire` ends its request. A full queue refuses requests in `_submit` (429).
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Generator, Sequence

from caraserve.config import EngineConfig
from caraserve.core.backend import Backend
from caraserve.core.batch import DeviceLost
from caraserve.core.request import GenerateRequest, Phase, Request
from caraserve.engine.active_request import ActiveRequest, Ending
from caraserve.engine.batch_launcher import BatchLauncher, LaunchedBatch
from caraserve.engine.batch_timeline import BatchTimeline
from caraserve.engine.executor import Executor, Iteration
from caraserve.engine.held_answers import HeldAnswers
from caraserve.engine.iteration_times import IterationTime, IterationTimes, IterationWork
from caraserve.engine.merge_policy import MergePolicy
from caraserve.engine.queues import RequestQueues
from caraserve.engine.results import ResultRecorder
from caraserve.engine.side_batches import SideBatches
from caraserve.engine.slot_allocator import SlotAllocator
from caraserve.engine.speculation import Speculation
from caraserve.engine.stats import EngineLoad, IterationObserver, RequestCounts, rank_of, snapshot_of
from caraserve.engine.token_stream import TokenStream
from caraserve.engine.unread import UnreadAnswer, UnreadBudget, default_budget_bytes
from caraserve.errors import (
    BackendFailed,
    CaraServeError,
    ContextLengthExceeded,
    Displaced,
    Draining,
    Overloaded,
)
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.catalog import Catalog
from caraserve.lora.registry import AdapterInfo
from caraserve.telemetry.metrics import EngineSnapshot, Metrics
from caraserve.tokenizer.tokenizer import Tokenizer
from caraserve.util.alarm import Alarm

log = logging.getLogger(__name__)

_DRAIN_RETRY_S = 5.0
_CANCELLED_AT_ONCE = 64  # requests ended in one turn of the event loop, at 20 µs each
_PREDICTION_S = 0.25  # for which a predicted wait in the queue is used
_RESULTS_S = 0.001  # of work on results in one turn of the event loop; 64 rows with logprobs take up to 17 ms


class Engine:
    """Runs on the event loop. `run` is its loop; everything else may be called meanwhile."""

    def __init__(
        self,
        *,
        base_names: Sequence[str],
        backend: Backend,
        catalog: Catalog,
        tokenizer: Tokenizer,
        config: EngineConfig,
        metrics: Metrics,
        exclusive_loads: bool = False,
        merging: MergePolicy | None = None,
        observers: Sequence[IterationObserver] = (),
        iteration_ms: IterationTime | None = None,
        alarm: Alarm | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`base_names`: names of the base model, which is listed by the first. `exclusive_loads`: no iteration runs
        while an adapter is loading (the `ondemand` baseline). `merging`: chooses the adapter that is merged into the
        weights (the `merged` baseline). `observers`: called after every iteration. `iteration_ms`: the performance
        model; None: nothing is known of this machine's speed but the recent rate of tokens. `alarm`: rings when the
        next iteration is to be planned; None: each is planned as soon as the one before begins."""
        self.base_name, self.base_names = base_names[0], base_names
        self.tokenizer = tokenizer
        self.catalog = catalog
        self.default_sampling = tokenizer.default_sampling
        self.max_model_len = backend.limits.max_context
        self.embedding_size = backend.limits.embedding_size
        self.draining = False
        self.failure: str | None = None  # the error after which no request can be answered
        self.timeline = BatchTimeline()
        self.request_counts = RequestCounts()
        self._observers, self._iteration_ms, self._alarm = observers, iteration_ms, alarm
        self._backend, self._limits = backend, backend.limits
        self._config, self._metrics, self._now = config, metrics, now
        self._exclusive_loads = exclusive_loads
        self._seeds = random.Random(config.seed)
        self._cancelled: list[ActiveRequest] = []
        self._held = HeldAnswers(self._send_end)
        self._unfinished = 0
        self._tokens_per_s = 0.0
        self._predicted_s = (0.0, 0.0)  # when to predict the wait in the queue again, and the last prediction
        self._times = IterationTimes(iteration_ms)
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self.unread = UnreadBudget(config.max_unread_bytes or default_budget_bytes(), self._wake.set)
        limits, manager = backend.limits, catalog.manager
        self._slots = SlotAllocator(backend, manager, tokenizer.eos_ids, prefix_caching=config.enable_prefix_caching)
        launcher = BatchLauncher(backend, self._slots)
        self._side_batches = SideBatches(backend, manager, self._slots, launcher, self._wake.set)
        self._queues = RequestQueues(
            limits,
            manager,
            self._slots,
            self._side_batches,
            prefetching=not exclusive_loads,
            observe_preemption=metrics.observe_preemption,
            now=now,
        )
        self._speculation = Speculation(limits, config.num_speculative_tokens, metrics.observe_drafts)
        parts = limits, self._queues, self._slots, self._side_batches, launcher
        self._executor = Executor(*parts, merging, self._speculation)
        self._results = ResultRecorder(
            self._queues,
            self._slots,
            self._speculation,
            self.timeline,
            metrics,
            self._finish,
            base_name=self.base_name,
            eos_ids=tokenizer.eos_ids,
            max_context=self.max_model_len,
            now=now,
        )
        self._idle = asyncio.Event()
        self._idle.set()
        catalog.manager.on_change(self._wake.set)
        catalog.manager.on_check(self._end_checked)

    # --- the API of HTTP and the cluster ---

    def submit(self, inputs: GenerateRequest) -> TokenStream:
        """Queues a request. In a full queue it replaces the newest request of the client with the most for its weight,
        if that client then still has as many as this one. Raises NotFound, ContextLengthExceeded, Overloaded, Draining
        or BackendFailed, without any effect."""
        return self._submit(inputs, None, UnreadAnswer(self.unread, inputs.tenant.client)).stream

    def submit_each(self, inputs: Sequence[GenerateRequest]) -> Generator[TokenStream]:
        """Yields the stream of each request after queueing it as `submit` does, all with the adapter that has the name
        at the first. A generator, because thousands take 100 ms."""
        adapter: Adapter | None = None
        unread = UnreadAnswer(self.unread, inputs[0].tenant.client)
        try:
            for one in inputs:
                active = self._submit(one, adapter, unread)
                if adapter is None and active.adapter is not None:
                    adapter = self.catalog.manager.pin_again(active.adapter)
                yield active.stream
        finally:
            if adapter is not None:
                self.catalog.manager.unpin(adapter)

    def _submit(self, inputs: GenerateRequest, adapter: Adapter | None, unread: UnreadAnswer) -> ActiveRequest:
        """Queues a request. `adapter`: of an earlier request of the same response, pinned by the caller; None: looked
        up by its name. `unread`: of the response."""
        if self.failure is not None:
            raise BackendFailed(f"the device has failed: {self.failure}")
        if self.draining:
            raise Draining("the server is stopping", retry_after_s=_DRAIN_RETRY_S)
        if len(inputs.prompt_ids) + min(inputs.params.max_tokens, 1) > self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt has "
                f"{len(inputs.prompt_ids)}, and the answer at least one.",
                param="prompt",
            )
        displaced = None
        if (count := self._queues.num_waiting) >= self._config.max_queue:
            message, retry_after_s = f"{count} requests are waiting", self.predicted_wait_s()
            if (displaced := self._queues.newest_of_largest(inputs.tenant)) is None:
                raise Overloaded(message, retry_after_s=retry_after_s)
        if adapter is not None:
            self.catalog.manager.pin_again(adapter)
        elif inputs.adapter is not None:
            adapter = self.catalog.pin(inputs.adapter)
        if displaced is not None:
            self._finish(displaced, Ending("error", error=Displaced(message, retry_after_s=retry_after_s)))
        active = self._make_active(inputs, adapter, unread)
        self._queues.waiting.push(inputs.tenant, active)
        self._start_loads()
        self._wake.set()
        return active

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished."""
        return self._idle.is_set()

    def adapters(self) -> list[AdapterInfo]:
        """Returns all adapters that requests may name."""
        return self.catalog.all()

    def adapter(self, name: str) -> AdapterInfo:
        """Returns the adapter of that name. Raises NotFound."""
        return self.catalog.get(name)

    async def load_adapter(
        self, name: str, path: str, *, inplace: bool = False, check: Callable[[], None] = lambda: None
    ) -> AdapterInfo:
        """Registers an adapter at run time. `check`: called when it is the name's turn; may refuse. Raises
        AdapterRejected, AdapterBusy or NotFound."""
        return await self.catalog.load(name, path, inplace=inplace, check=check)

    async def unload_adapter(self, name: str, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Unregisters an adapter and returns when its last request has ended. `is_wanted`: called when it is the name's
        turn; False: nothing is done. Raises NotFound or AdapterBusy."""
        await self.catalog.unload(name, is_wanted)

    def snapshot(self) -> EngineSnapshot:
        """Returns the state that metrics and the dashboard show."""
        return snapshot_of(self._queues, self.catalog.manager, draining=self.draining)

    def waiting(self) -> set[str]:
        """Returns the ids of the requests that were not admitted yet."""
        return {active.request.inputs.request_id for active in self._queues.waiting}

    def workload(self, response_tokens: float) -> EngineLoad:
        """Returns sums to predict the engine's next iterations from. `response_tokens`: expected of an answer."""
        return EngineLoad.of(self._queues, self.catalog, self._limits, self._config.max_queue, response_tokens)

    def predicted_wait_s(self) -> float:
        """Predicts the seconds that the waiting requests take, 1 to 60: by the performance model or, without one, by
        the recent rate of tokens. Computed four times a second at most: a thousand waiting requests take 0.3 ms."""
        if self._now() >= self._predicted_s[0]:
            if self._iteration_ms is not None:
                response_tokens = self._metrics.mean_answer_tokens()
                load = self.workload(response_tokens)
                queue_s = load.queue_s(self._iteration_ms, self._limits.num_slots, response_tokens)
            else:
                queue_s = self._queues.waiting_tokens() / self._tokens_per_s if self._tokens_per_s else 0.0
            self._predicted_s = self._now() + _PREDICTION_S, min(60.0, max(1.0, queue_s))
        return self._predicted_s[1]

    def predicted_answer_s(self) -> float:
        """Predicts the time of one more answer, from its first token to its last."""
        batch = len(self._queues.running) + 1
        decode_s = self._times.decode_s
        if self._iteration_ms is not None:
            ranks = [rank_of(active.adapter, self.catalog) for active in self._queues.running]
            decode_s = self._iteration_ms(batch, sum(ranks), max(ranks, default=0), 0, 0, 0) / 1000
        return self._metrics.mean_answer_tokens() * decode_s

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests from now on, waits for the unfinished ones, and cancels those left after `timeout_s`."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._cancelled += self._queues.all()
            self._wake.set()
            await self._idle.wait()

    def check(self) -> None:
        """Raises AssertionError if the engine's slots, blocks, requests or adapters do not add up."""
        self._queues.check()
        assert self._unfinished == len(self._queues) + len(self._held), "a request is lost"
        self.catalog.manager.check()

    # --- the loop ---

    async def run(self) -> None:
        """Runs turn after turn until cancelled."""
        pending: LaunchedBatch | None = None
        while True:
            if pending is not None and self._speculation.needs_results(pending.rows):
                await self._process_output(pending)
                pending = None
            if pending is not None:
                await self._await_arrivals(pending)
            self._wake.clear()
            planned_s = self._now()
            await self._expire()
            begins_s = self._times.next_begin_s(self._now())
            self._admit(begins_s)
            stops = self._exclusive_loads and self.catalog.manager.loading  # a load stops all iterations
            iteration = None if stops else self._executor.schedule(begins_s)
            launched = self._execute(iteration, planned_s)
            if pending is not None:
                await self._process_output(pending)  # may free slots for the next turn
            elif launched is None:
                await self._sleep(list(self._queues.running) if iteration is None else [])
            self._process_side_batches()
            pending = launched

    async def _await_arrivals(self, pending: LaunchedBatch) -> None:
        """Waits until the next iteration has to be planned, so that it is launched when `pending` ends. A request that
        arrives meanwhile only makes that earlier, if a launch with prompts takes longer."""
        if self._alarm is None:
            return
        pending.result.add_done_callback(lambda _: self._wake.set())
        due_s = math.inf
        while True:
            self._wake.clear()
            at_s, now_s = self._plan_at_s(pending), self._now()
            if at_s is None or at_s <= now_s:
                break
            self._start_loads()
            if at_s != due_s:
                due_s = at_s
                self._alarm.set(at_s, self._wake.set)
            await self._wake.wait()
            self._process_side_batches()
        if now_s >= due_s:
            self._times.woke(now_s - due_s)

    def _plan_at_s(self, pending: LaunchedBatch) -> float | None:
        """Returns when to plan the iteration after `pending`; None: at once, because the time is not known, `pending`
        has ended, or nothing could join it."""
        if pending.result.done() or self._queues.is_full:
            return None
        rows, has_prompts = self._queues.next_rows()
        return self._times.plan_at_s(rows, has_prompts=has_prompts)

    def _start_loads(self) -> None:
        """Starts the loads of requests that may be admitted, which do not wait for the iteration under way."""
        self._queues.admit(self._times.next_begin_s(self._now()), self._times.decode_s, preempts=False)

    async def _expire(self) -> None:
        """Ends requests that were cancelled, those whose adapter cannot be loaded, and all if the device has failed.
        Pauses those whose clients read too slowly."""
        cancelled, self._cancelled = self._cancelled[:_CANCELLED_AT_ONCE], self._cancelled[_CANCELLED_AT_ONCE:]
        for active in cancelled:
            if not active.is_finished:
                self._finish(active, Ending("cancelled"))
        if self._cancelled:  # one response may have had thousands of requests
            self._wake.set()
            await asyncio.sleep(0)  # without an iteration under way, this is where other tasks run
        if (cause := self.catalog.manager.device_loader.failure) is not None:
            self.failure = self.failure or str(cause)
        if self.failure is not None:
            for active in self._queues.all():
                self._finish(active, Ending("error", error=BackendFailed(f"the device has failed: {self.failure}")))
        for active in [*self._queues.loading, *self._queues.running]:
            if active.adapter is not None and active.adapter.tier is AdapterTier.FAILED:
                self._finish(active, Ending("error", error=active.adapter.error))
        if self.unread.has_changed:
            self.unread.has_changed = False
            self._queues.follow_readers()

    def _admit(self, begins_s: float) -> None:
        """Moves requests from waiting to loading, and from loading to running, as far as slots and memory allow."""
        self._queues.admit(begins_s, self._times.decode_s, preempts=True)
        self._queues.start(begins_s, self._times.decode_s)

    def _execute(self, iteration: Iteration | None, planned_s: float) -> LaunchedBatch | None:
        """Launches an iteration and side batches. `planned_s`: when its planning began. None: no iteration was
        launched."""
        launched = None if iteration is None else self._executor.execute(iteration)
        if launched is not None:
            work = IterationWork.of(launched.rows, lambda active: rank_of(active.adapter, self.catalog))
            self._times.launch(work, len(launched.rows), planned_s, self._now())
        return launched

    async def _process_output(self, launched: LaunchedBatch) -> None:
        """Waits for an iteration and passes its results on; meanwhile, processes side batches that end before it."""
        while (outcome := await self._executor.result_of(launched)) is None:
            self._process_side_batches()
        if isinstance(outcome, Exception):
            self._times.fail(self._now())
            self._fail_iteration(launched, outcome)
            return
        duration_s = outcome.done_s - outcome.started_s
        self._metrics.observe_begin(*self._times.end(outcome))
        self._speculation.observe(launched.rows, outcome)
        self._tokens_per_s += 0.1 * (launched.num_tokens / max(duration_s, 1e-6) - self._tokens_per_s)
        for observe in self._observers:
            observe(launched.rows, 1000 * duration_s)
        began_s = self._now()
        for _ in self._results.record(launched, outcome, 1000 * duration_s):
            if self._now() - began_s > _RESULTS_S:
                await asyncio.sleep(0)
                began_s = self._now()
        if any(active.last_token_s == active.first_token_s == outcome.done_s for active, _ in launched.rows):
            await asyncio.sleep(0)  # first tokens are sent before the iteration after the next is scheduled

    def _process_side_batches(self) -> None:
        """Passes the results of side batches that have ended to their requests."""
        for launched, outcome in self._side_batches.take_ended(self._queues.requeue):
            if isinstance(outcome, Exception):
                self._fail([active for active, _ in launched.rows], outcome)
            else:
                took_ms = 1000 * (outcome.done_s - outcome.started_s) - outcome.rows[0].waited_ms
                for _ in self._results.record(launched, outcome, took_ms):
                    pass
        self._update_idle()

    async def _sleep(self, interrupted: list[ActiveRequest]) -> None:
        """Waits until a request, an adapter or a side batch has changed, or a request may start whose adapter is being
        copied. `interrupted`: requests that could run but for a load, whose waiting time is counted."""
        alarm, since_s = None, self._now()
        if self._queues.next_start_s is not None:
            alarm = self._loop.call_later(max(0.0, self._queues.next_start_s - self._now()), self._wake.set)
        await self._wake.wait()
        if alarm is not None:
            alarm.cancel()
        for active in interrupted:
            active.record_interruption(1000 * (self._now() - since_s))

    # --- failures ---

    def _fail_iteration(self, launched: LaunchedBatch, cause: Exception) -> None:
        """Ends the requests of a failed iteration, and those that may have reused blocks which it was to fill."""
        log.error("an iteration failed", exc_info=cause)
        self._slots.pool.forget_all()
        lost = [active for active, _ in launched.rows]
        lost += [active for active in self._queues.running if active.request.phase is Phase.PREFILL and active.reused]
        self._fail(lost, cause)

    def _fail(self, lost: list[ActiveRequest], cause: Exception) -> None:
        if isinstance(cause, DeviceLost):
            self.failure = str(cause)
        for active in lost:
            if not active.is_finished:
                self._finish(active, Ending("error", error=BackendFailed(f"the iteration failed: {cause}")))

    # --- the beginning and the end of a request ---

    def _make_active(self, inputs: GenerateRequest, adapter: Adapter | None, unread: UnreadAnswer) -> ActiveRequest:
        params = inputs.params
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        request = Request(inputs, seed, since_s=self._now())
        detokenizer = self.tokenizer.detokenizer(
            inputs.prompt_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            kept_special_ids=params.kept_special_ids,
        )
        name = inputs.adapter or self.base_name

        def served_by() -> str:
            if adapter is None:
                return name
            return f"{name}@{digest}" if (digest := adapter.content_digest) is not None else ""

        stream = TokenStream(
            lambda: self._cancel(active),
            unread,
            served_by,
            lambda: request.phases(self._now()),
            lambda: request.computed,
        )
        active = ActiveRequest(request, stream, detokenizer, adapter)
        self._unfinished += 1
        self.request_counts.begin(inputs.adapter, self._now())
        self._idle.clear()
        return active

    def _cancel(self, active: ActiveRequest) -> None:
        if not active.is_finished:
            self._cancelled.append(active)
            self._wake.set()

    def _finish(self, active: ActiveRequest, ending: Ending) -> None:
        """Removes a request from its queue, releases its resources and sends its last delta, which may have to wait for
        the digest of its adapter's bytes."""
        is_held = self._held.hold(active, ending)
        if is_held:
            active.end(self._now())
        self._queues.remove(active)
        if not is_held:
            self._send_end(active, ending)

    def _end_checked(self, adapter: Adapter, error: CaraServeError | None) -> None:
        """Ends the answers that have waited for the digest of an adapter's bytes. With an error, which says that they
        are others, all requests of the adapter end."""
        if error is not None:
            for active in self._queues.all():
                if active.adapter is adapter:
                    self._finish(active, Ending("error", error=error))
        self._held.release(adapter, error)

    def _send_end(self, active: ActiveRequest, ending: Ending) -> None:
        self._unfinished -= 1
        self.request_counts.end(active.request.inputs.adapter)
        self._update_idle()
        finish = active.finish(ending, self._now())
        self._metrics.observe_finish(finish)
        inputs, first_s = active.request.inputs, active.first_token_s
        self._metrics.observe_request(inputs, finish, None if first_s is None else first_s - inputs.arrival_s)

    def _update_idle(self) -> None:
        if self._unfinished == 0 and not self._side_batches.finished:
            self._idle.set()
