"""Assisted prefills: prompts computed with the help of CPU workers, chunk by chunk on the assist lane (Toppings §4.2).

Before a chunk is launched, a work order is written for each layer and group that may have to be handed off. It says
what each worker computes; the device decides, when it reaches the layer, whether the workers are asked. If a chunk's
workers fail, the whole chunk and the rest of its prompt are void: the engine computes the prompt again without workers.
When the whole adapter has arrived, the rest of its prompt is left to iterations.
Chunks of one prompt run one after another; as many chunks of different prompts are in flight as there are sync slots.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from caraserve.core.batch import Batch, RowResult, ScheduledRow, StepResult
from caraserve.core.outputs import Output, append_tokens, collect, outputs_of
from caraserve.cpu.lora_workers.pool import WorkerPool, WorkerState
from caraserve.cpu.lora_workers.timing import RoundTrip
from caraserve.errors import GrammarFailed
from caraserve.gpu.assist.chunk_graphs import ChunkGraphs
from caraserve.gpu.assist.handshake import SyncSlotPool, Watchdog, idle_workers
from caraserve.gpu.assist.lane import AssistedChunk, AssistLane, chunk_ends
from caraserve.gpu.assist.order_writer import ChunkOrders, WorkOrderWriter
from caraserve.gpu.assist.predictions import AssistPredictions
from caraserve.gpu.driver.api import DriverError, Stream, successor
from caraserve.gpu.driver.streams import Lane, at, latest
from caraserve.gpu.forward.decoder import issue_pass
from caraserve.gpu.forward.iteration import Done, LaneResources, return_results, values_of
from caraserve.gpu.forward.lanes import capture
from caraserve.gpu.forward.lora_pass import HandOffMemory
from caraserve.gpu.memory.adapters import BoundAdapter, DeviceImages
from caraserve.gpu.memory.copier import DeviceContext
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS, HostRegion, x_stride
from caraserve.gpu.memory.link_queue import LoraSource, choose_source
from caraserve.gpu.memory.pass_shape import PassShape, all_groups
from caraserve.gpu.memory.registered_memory import RegisteredMemory
from caraserve.gpu.memory.request_state import RequestSlots
from caraserve.gpu.memory.results import Results
from caraserve.gpu.memory.sync_slots import RegionWords, SyncSlot
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan

log = logging.getLogger(__name__)
_PATIENCE_S = 0.1  # assumed time of one that is measured, which the watchdog aborts after five times as long …
_GIVE_UP_S = 0.6  # … and whose wait ends then, in each layer, if no worker was there to be asked


@dataclass(frozen=True, slots=True)
class AssistResources:
    """The CPU workers, the memory that they share with the device, the watchdog that aborts waits for them, and the
    dtype of x and deltas, in which the device computes."""

    region: HostRegion
    memory: RegisteredMemory
    workers: WorkerPool
    watchdog: Watchdog
    dtype: Dtype


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that is computed by assisted prefill."""

    batch: Batch
    done: Done
    issued: int  # mark of the compute lane, after which the device has its request slot and KV blocks
    ends: deque[int]
    at: int  # position at which its next chunk begins
    started_s: float
    cpu_layers: set[int] = field(default_factory=set)
    cpu_lora_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Issuing:
    """A chunk that is being issued; each step of `layers` issues one layer, or all of them if they were captured."""

    prompt: _Prompt
    sync_slot: SyncSlot
    layers: Iterator[None]


@dataclass(frozen=True, slots=True)
class _Chunk:
    prompt: _Prompt
    row: ScheduledRow
    outputs: Output
    sync_slot: SyncSlot
    failures: Mapping[int, GrammarFailed]


class AssistedPrefills:
    """All assisted prefills of a backend. Used by the launching thread only."""

    def __init__(
        self,
        context: DeviceContext,
        parts: LaneResources,
        images: DeviceImages,
        slots: RequestSlots,
        assist_resources: AssistResources,
        plan: DecoderPlan,
        wake: Callable[[], None],
        graph_bytes: int = 0,
    ) -> None:
        """`wake` makes the launching thread call `schedule_pending`. `graph_bytes`: of device memory, for graphs."""
        self._driver, self._timelines = context.driver, context.timelines
        self._compute_ring, self._ring = context.ring, context.assist_ring
        self._copier, self._queue = context.copier, context.queue
        self._images, self._slots, self._plan, self._wake = images, slots, plan, wake
        self._resources, self._batch, self._host = parts, parts.batch, parts.host
        self._decoder, self._masks = parts.decoder, parts.masks
        self._region, self._memory = assist_resources.region, assist_resources.memory
        self._workers, self._watchdog = assist_resources.workers, assist_resources.watchdog
        self._lane = AssistLane(self._driver, self._timelines, self._copier, len(plan.layers))
        region, hand_offs = self._region, len(plan.layers) * plan.most_groups
        self._words = RegionWords(region.region)
        offsets = [buffers.sync_slot for buffers in region.hand_off_buffers]
        self._sync_slots = SyncSlotPool(self._words, [SyncSlot.at(offset, hand_offs) for offset in offsets])
        self._batch_words = self._host.empty()
        self._writer = WorkOrderWriter(plan, region, self._memory, assist_resources.dtype)
        self._hand_offs = HandOffMemory.empty(
            (plan.most_groups, len(plan.layers), self._writer.order_words),
            len(self._workers),
            [x_stride(shape) for shape in plan.group_shapes],
            self._batch.words.device,
        )
        tile_tokens = parts.capacity.tile_tokens
        self.graphs = ChunkGraphs(self._driver, self._decoder, plan, self._hand_offs, tile_tokens, graph_bytes)
        self._waiting: deque[_Prompt] = deque()
        self._issuing: _Issuing | None = None
        self._in_flight: list[_Chunk] = []  # issued completely
        self._answers: dict[int, int] = {}  # bytes that workers were asked for, by sync slot
        self._returned: SimpleQueue[Callable[[], None]] = SimpleQueue()  # callbacks of chunks that finished
        self.predictions = AssistPredictions()
        self.slices = self.void_chunks = 0  # slices in all work orders, and chunks that were aborted, since the start

    def launch(self, batch: Batch, done: Done) -> None:
        """Queues a batch of one row, whose request slot and blocks have just been written on the compute lane."""
        (row,) = batch.rows
        ends = deque(chunk_ends(row.start, row.start + row.count))
        self._compute_ring.flush()
        issued = self._timelines.mark(Lane.COMPUTE)
        self._waiting.append(_Prompt(batch, done, issued, ends, row.start, time.monotonic()))
        self.schedule_pending()

    def set_predictions(self, predictions: AssistPredictions) -> None:
        """Uses these predictions from now on."""
        self.predictions = predictions

    @property
    def is_busy(self) -> bool:
        """True if `schedule_pending` must be called again soon."""
        return bool(self._waiting) or self.is_issuing

    @property
    def is_issuing(self) -> bool:
        """True if `schedule_pending` must be called again at once."""
        return self._issuing is not None

    @property
    def is_open(self) -> bool:
        """True if some prompt is not finished."""
        return bool(self._in_flight) or self.is_busy

    def await_return(self, timeout_s: float) -> None:
        """Waits for a chunk in flight, if there is one, for `timeout_s` at most."""
        if self._in_flight and not self.is_issuing:
            with contextlib.suppress(Empty):
                self._returned.get(timeout=timeout_s)()

    def schedule_pending(self) -> None:
        """Processes chunks that have finished, and issues a layer of the next one if a sync slot is free."""
        while not self._returned.empty():
            self._returned.get()()
            self._images.poll()  # loads that waited for the chunk's adapter to be unpinned come before the next chunk
        if self._issuing is None:
            self._begin_next()
        if self._issuing is not None:
            self._issue_layer(self._issuing)

    def fail(self, failure: Exception) -> None:
        """Fails all prompts that have not been launched; called when the device has failed."""
        if self._issuing is not None:
            self._abort(self._issuing, failure)
        while self._waiting:
            self._waiting.popleft().done(failure)

    def _begin_next(self) -> None:
        if not self._waiting:
            return
        states = self._workers.states()
        self._sync_slots.reclaim(states)
        if (sync_slot := self._sync_slots.acquire()) is None:
            return
        prompt = self._waiting.popleft()
        if not self._in_flight:
            self._watch_workers(True)
        self._images.pool.pin(prompt.batch.rows[0].adapter_slot)
        self._issuing = _Issuing(prompt, sync_slot, self._issue_chunk(prompt, sync_slot, idle_workers(states)))

    def _issue_layer(self, issuing: _Issuing) -> None:
        """Issues one layer. An error fails this chunk's prompt, and not the batch that is being launched now."""
        try:
            next(issuing.layers)
        except StopIteration:
            self._issuing = None
        except Exception as error:
            self._abort(issuing, error)

    def _abort(self, issuing: _Issuing, failure: Exception) -> None:
        """Ends a chunk that cannot be issued completely. What was launched of it, its whole graph perhaps, has ended
        before its KV blocks, adapter and sync slot are released."""
        self._issuing = None
        self._in_flight = [chunk for chunk in self._in_flight if chunk.sync_slot is not issuing.sync_slot]
        self._watchdog.abort(issuing.sync_slot)  # the device waits for no worker any more
        with contextlib.suppress(DriverError):  # of a device that has failed for good
            self._timelines.settle(Lane.ASSIST)
        self._watchdog.unwatch(issuing.sync_slot)
        self._release(issuing.prompt.batch.rows[0].adapter_slot, issuing.sync_slot, self._workers.states())
        issuing.prompt.done(failure)

    def _release(self, slot: int, sync_slot: SyncSlot, late: Sequence[WorkerState] = ()) -> None:
        """Releases what a chunk held. `late`: all workers, if one of them may still write to its sync slot."""
        self._images.pool.unpin(slot)
        self._queue.answered(self._answers.pop(sync_slot.offset, 0))
        self._sync_slots.release(sync_slot, late)
        if not self._in_flight and not self.is_issuing:
            self._watch_workers(False)

    # --- one chunk ---

    def _issue_chunk(self, prompt: _Prompt, sync_slot: SyncSlot, idle: Sequence[int]) -> Iterator[None]:
        (whole,) = prompt.batch.rows
        end = prompt.ends.popleft()
        is_last = not prompt.ends
        row = replace(whole, start=prompt.at, count=end - prompt.at)
        row = row if is_last else replace(row, samples=False, embeds=False)
        row = row if row.samples else replace(row, logprobs=None, matcher=None)
        outputs = outputs_of((row,), self._slots.prompt_tokens)
        slot, bound = row.adapter_slot, self._images.bound[row.adapter_slot]
        shape = self._host.fill(self._batch_words, (row,), outputs, bound.shapes, all_prompt=True).shape
        graph = self.graphs.find(shape)
        chunk = AssistedChunk(
            slot=slot,
            sync_slot=sync_slot,
            sources=self._sources(bound, slot, row.count, len(idle)),
            groups=bound.groups,
            ready=self._images.ready_words(slot),
            ready_generation=bound.generation,
        )
        orders = self._writer.write(chunk, bound.adapter, row.count, idle, self.predictions.tokens_per_worker)
        self.slices += orders.slices
        self._answers[sync_slot.offset] = orders.answer_bytes
        self._queue.await_answers(orders.answer_bytes)
        expected_s = self._hand_offs_s(row.count, bound, len(idle))
        self._watchdog.watch(sync_slot, {index: expected_s for _, _, index, _ in chunk.hand_offs()})

        def metadata(stream: Stream) -> None:
            self._ring.send(self._batch.words.data_ptr(), self._batch_words)
            self._slots.send_vectors((row,), self._decoder.hidden, self._ring)
            self._send_orders(orders.words, shape.groups if graph is None else graph.shape.groups)
            self._ring.flush()

        after = latest(at(Lane.COMPUTE, prompt.issued), self._images.pool.moved(slot))
        masked = self._masks.prepare((row,), outputs)
        steps = self._decoder.make_pass(shape, hand_offs=self._hand_offs, masked=masked)
        captured = None if graph is None else graph.captured
        number = yield from self._lane.issue(metadata, steps, captured, slot, after)
        self._images.used([slot], Lane.ASSIST, number)
        prompt.at = end
        launched = _Chunk(prompt, row, outputs, sync_slot, {} if masked is None else masked.failures)
        self._in_flight.append(launched)
        self._return_results(launched)

    def _return_results(self, chunk: _Chunk) -> None:
        prompt_tokens = self._slots.prompt_tokens.copy()

        def read(results: Results) -> RowResult:
            if results.block[-4:].view(np.int32)[0]:  # the chunk's error word
                return RowResult(needs_retry=True)
            found = values_of(self._decoder, chunk.outputs, results)
            batch = Batch((), (), (chunk.row,))
            (made,) = collect(batch, chunk.outputs, found, prompt_tokens, failures=chunk.failures)
            return made

        def ended(outcome: RowResult | Exception) -> None:
            self._returned.put(lambda: self._on_chunk_finished(chunk, outcome))
            self._wake()

        def copy_error(end: int) -> None:
            self._driver.copy_to_host(end - 4, self._hand_offs.errors, 4, stream)

        stream = self._timelines.streams[Lane.ASSIST]
        return_results(self._resources, stream, chunk.outputs, read, ended, copy_error)

    def _on_chunk_finished(self, chunk: _Chunk, outcome: RowResult | Exception) -> None:
        self._in_flight.remove(chunk)
        was_aborted = self._watchdog.unwatch(chunk.sync_slot)
        prompt, sync_slot = chunk.prompt, chunk.sync_slot
        has_failed = was_aborted or isinstance(outcome, Exception) or outcome.needs_retry
        asked = [
            (index, flags)
            for index, flags in enumerate(sync_slot.flags)
            if self._words.load(flags.x_flag) == sync_slot.generation
        ]
        done = [(index, flags) for index, flags in asked if self._words.load(flags.y_flag) == sync_slot.generation]
        prompt.cpu_layers |= {index // self._plan.most_groups for index, _ in done}
        prompt.cpu_lora_ms += sum(self._words.load(flags.spent_ns) for _, flags in done) / 1e6
        late = self._workers.states() if has_failed or len(done) < len(asked) else ()
        self._release(chunk.row.adapter_slot, sync_slot, late)
        if isinstance(outcome, Exception):
            prompt.done(outcome)
        elif has_failed:
            self.void_chunks += 1
            self._finish(prompt, RowResult(needs_retry=True))
        elif prompt.ends and self._images.arriving([chunk.row.adapter_slot]):
            self._waiting.append(prompt)
        elif prompt.ends:  # an iteration computes the rest at once; chunks would read all weights again, each of them
            self._finish(prompt, RowResult(left_tokens=prompt.ends[-1] - prompt.at))
        else:
            try:
                append_tokens((chunk.row,), (outcome,))
            except Exception as error:  # of a grammar; the engine waits for an outcome, so it gets this one
                prompt.done(error)
            else:
                self._finish(prompt, outcome)

    @staticmethod
    def _finish(prompt: _Prompt, result: RowResult) -> None:
        if not result.needs_retry:
            result = replace(result, cpu_layers=len(prompt.cpu_layers), cpu_lora_ms=prompt.cpu_lora_ms)
        prompt.done(StepResult((result,), prompt.started_s, time.monotonic()))

    def _watch_workers(self, in_flight: bool) -> None:
        """Keeps workers awake, and has stuck ones replaced, while chunks are in flight: a sync slot that a stuck worker
        may still write to is not free until then."""
        self._workers.keep_awake(in_flight)
        self._workers.watch(in_flight)

    def warm_up(self, advance: Callable[[], None]) -> None:
        """Runs every kernel of the lane once in each of its forms, in every layer, and captures the graphs. No work
        order asks a worker. Calls `advance` once, and after each graph."""
        stream = self._timelines.streams[Lane.ASSIST]
        self._ring.send(self._batch.words.data_ptr(), self._host.empty())
        self._ring.flush()
        for tokens in (2, 16, ASSISTED_CHUNK_TOKENS):
            shape = PassShape(tokens, 0, 1, 1, 1, has_items=False, context=0, groups=all_groups(self._plan))
            issue_pass(self._decoder.make_pass(shape, hand_offs=self._hand_offs), stream, len(self._plan.layers))
        self._timelines.settle(Lane.ASSIST)
        advance()
        self.graphs.capture_all(stream, lambda: self._timelines.settle(Lane.ASSIST), advance)

    def time_hand_offs(self, slot: int, tokens: int) -> RoundTrip | None:
        """Times hand-offs of q, k and v to one worker, in each layer that has such, one after another in a graph, with
        the kernels, words and memory of serving, and returns their mean. The adapter in `slot` must be loaded; the
        device treats its layers as missing. Returns None if a prompt is open, no worker is idle, or one fails, or if no
        layer has q, k and v. Raises DriverError."""
        states = self._workers.states()
        self._sync_slots.reclaim(states)
        idle = idle_workers(states)[:1]
        groups = [_groups_among(shapes, self._plan.attention_inputs) for shapes in self._plan.shapes_of_groups]
        if self.is_open or not idle or not any(groups) or (sync_slot := self._sync_slots.acquire()) is None:
            return None
        self._watch_workers(True)
        try:
            bound, workers = self._images.bound[slot], [LoraSource.WORKERS] * len(self._plan.layers)
            missing = successor(bound.generation)  # the ready words do not have this value
            ready = self._images.ready_words(slot)
            chunk = AssistedChunk(slot, sync_slot, workers, groups, ready, missing, wait_s=_GIVE_UP_S)
            orders = self._writer.write(chunk, bound.adapter, tokens, idle, lambda rank: tokens)
            self._watchdog.watch(sync_slot, {index: _PATIENCE_S for _, _, index, _ in chunk.hand_offs()})
            spent_s = self._run_hand_offs(chunk, orders, tokens)
            return None if spent_s is None else self._mean_round_trip(chunk, spent_s)
        finally:
            self._watchdog.unwatch(sync_slot)
            self._sync_slots.release(sync_slot, self._workers.states())
            self._watch_workers(False)

    def _run_hand_offs(self, chunk: AssistedChunk, orders: ChunkOrders, tokens: int) -> float | None:
        """Runs a chunk's hand-offs of q, k and v by these orders, as a graph: launched one by one, their kernels would
        take as long as the launches. Returns the time in s, or None if the driver makes no graph."""
        groups = self._plan.attention_inputs
        shape = PassShape(tokens, 0, 1, 0, 1, has_items=False, context=0, groups=groups)
        steps, stream = self._decoder.make_pass(shape, hand_offs=self._hand_offs), self._timelines.streams[Lane.ASSIST]

        def issue() -> None:
            for layer, group, _, _ in chunk.hand_offs():
                steps.publish(layer, group, stream)
                steps.add_handed_off(layer, group, stream)

        self._ring.send(self._batch.words.data_ptr(), self._host.empty())
        self._send_orders(np.zeros_like(orders.words), groups)
        self._ring.flush()
        issue()  # all kernels are loaded before the capture; without orders nothing is handed off
        self._timelines.settle(Lane.ASSIST)
        try:
            graph = capture(self._driver, stream, issue)
        except DriverError as error:  # there may be no device memory left for one
            log.warning("hand-offs to CPU workers were not timed: %s", error)
            return None
        self._send_orders(orders.words, groups)
        self._ring.flush()
        self._timelines.settle(Lane.ASSIST)
        started_s = time.perf_counter()
        self._driver.launch_graph(graph, stream)
        self._timelines.settle(Lane.ASSIST)
        spent_s = time.perf_counter() - started_s
        self._driver.destroy_graph(graph)  # unless the device has failed, with which the graph ends, too
        return spent_s

    def _mean_round_trip(self, chunk: AssistedChunk, spent_s: float) -> RoundTrip | None:
        """Returns the mean time of a chunk's hand-offs, or None if a worker was not asked for one, or did
        not finish one."""
        generation = chunk.sync_slot.generation
        flags = [entry for _, _, _, entry in chunk.hand_offs()]
        # Without its worker the device sets y_flag itself; x_flag is set only if the worker was asked.
        is_done = all(self._words.load(word) == generation for entry in flags for word in (entry.x_flag, entry.y_flag))
        if not is_done or self._words.load(chunk.sync_slot.status) == generation:
            return None
        compute_s = sum(self._words.load(entry.spent_ns) for entry in flags) / 1e9
        return RoundTrip(spent_s / len(flags), compute_s / len(flags))

    # --- what a chunk is made of ---

    def _hand_offs_s(self, tokens: int, bound: BoundAdapter, workers: int) -> float:
        """Predicts the time of a layer's hand-offs to so many workers."""
        has_all = not bound.shapes <= self._plan.attention_inputs
        work = self.predictions.work_of(tokens, bound.stored.rank, has_all, workers)
        return self.predictions.hand_offs_s(work)

    def _send_orders(self, words: NDArray[np.int64], groups: Collection[int]) -> None:
        """Clears the flags of hand-offs, and sends the work orders of a pass over these group shapes: `words` of
        ChunkOrders. Those of other groups stay as an earlier chunk left them."""
        self._ring.send(self._hand_offs.flags.data_ptr(), np.zeros(2, np.int32))
        if groups:
            last = max(self._plan.group_shapes[shape].index for shape in groups)
            self._ring.send(self._hand_offs.orders.data_ptr(), words[: last + 1])

    def _sources(self, bound: BoundAdapter, slot: int, tokens: int, workers: int) -> list[LoraSource]:
        """Predicts for each layer where its LoRA will come from when the device gets there."""
        now_s, layer_s = time.monotonic(), self.predictions.layer_s(tokens)
        expected = self._queue.arrivals(slot, now_s)
        issued_s = self._queue.arrival_of_issued(now_s)
        stall_s = self._hand_offs_s(tokens, bound, workers) if workers else None
        found = []
        for layer in range(len(self._plan.layers)):
            group = self._copier.group_of(slot, layer)
            found.append(
                choose_source(
                    arrived=group is None or self._copier.has_arrived(slot, layer),
                    arrives_s=issued_s if group is None else expected.get(group, issued_s),
                    use_s=now_s + layer * layer_s,
                    stall_s=stall_s,
                )
            )
        return found


def _groups_among(shapes: Sequence[int], wanted: Collection[int]) -> frozenset[int]:
    """Returns the groups of a layer that have one of the wanted shapes. `shapes`: of each of the layer's groups."""
    return frozenset(group for group, shape in enumerate(shapes) if shape in wanted)
