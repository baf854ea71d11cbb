"""Launches iterations and returns their results.

The launching thread fills the batch's arrays, copies them to the device, and launches a graph, or kernel by kernel. It
does not wait: the next iteration may be launched before this one has begun. The waiter's thread returns results.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, StepResult
from caraserve.core.outputs import (
    SAMPLE_MASKED,
    ColdStartCost,
    Output,
    OutputValues,
    append_tokens,
    collect,
    outputs_of,
)
from caraserve.errors import GrammarFailed
from caraserve.gpu.driver.api import DriverError, Stream
from caraserve.gpu.driver.streams import NOTHING, Lane
from caraserve.gpu.forward.batch import BatchWriter, DeviceBatch, FilledBatch
from caraserve.gpu.forward.batch_lists import BatchLists
from caraserve.gpu.forward.decoder import Decoder
from caraserve.gpu.forward.graphs import CapturedGraphs
from caraserve.gpu.forward.lanes import CapturedPass, IterationLane
from caraserve.gpu.memory.adapters import DeviceImages
from caraserve.gpu.memory.copier import DeviceContext
from caraserve.gpu.memory.masks import LaneMasks
from caraserve.gpu.memory.pass_shape import Capacity
from caraserve.gpu.memory.request_state import RequestSlots
from caraserve.gpu.memory.results import ResultBlocks, Results, Waiter, result_bytes
from caraserve.gpu.merged_weights import MergedDeviceWeights
from caraserve.gpu.weights import Weights
from caraserve.model.plan import DecoderPlan
from caraserve.telemetry.trace import Trace


@dataclass(frozen=True, slots=True)
class LaneResources:
    """The capacity, batch, decoder, result blocks, waiter and masks of one lane."""

    capacity: Capacity
    batch: DeviceBatch
    host: BatchWriter
    decoder: Decoder
    results: ResultBlocks
    waiter: Waiter
    masks: LaneMasks


Done = Callable[[StepResult | Exception], None]
T = TypeVar("T")


def copy_results(decoder: Decoder, outputs: Output, results: Results, address: int, stream: Stream) -> None:
    """Copies results of the last pass to the host; of alternative tokens as many as a request wants."""
    batch, driver = decoder.batch, decoder.driver
    num_bytes = result_bytes(results.outputs, outputs.most_logprobs)
    driver.copy_to_host(address, batch.results.data_ptr(), num_bytes, stream)
    if count := len(outputs.embedded):
        embeddings = decoder.embed_prompts(count, stream)
        driver.copy_to_host(address + result_bytes(results.outputs), embeddings.data_ptr(), embeddings.nbytes, stream)


def return_results(
    lane: LaneResources,
    stream: Stream,
    outputs: Output,
    read: Callable[[Results], T],
    ended: Callable[[T | Exception], None],
    copy_more: Callable[[int], None] = lambda end: None,
) -> None:
    """Copies the results of a lane's last pass to the host. Calls `ended`, on the waiter's thread, with what `read`
    makes of them, or with the error. `copy_more(end)` issues more copies, to the bytes before this device address."""
    results, address = lane.results.acquire()

    def release(failure: DriverError | None) -> None:
        outcome: T | Exception
        try:
            outcome = read(results) if failure is None else failure
        except Exception as error:  # the engine waits for an outcome, so it gets this one
            outcome = error
        lane.results.release(results, address)
        ended(outcome)

    try:
        copy_results(lane.decoder, outputs, results, address, stream)
        copy_more(address + results.block.nbytes)
        lane.waiter.when_done(stream, release)
    except Exception:
        lane.results.release(results, address)
        raise


def values_of(decoder: Decoder, outputs: Output, results: Results) -> OutputValues:
    """Returns the values in a block of results; valid until the block is released."""
    dtype, shape = decoder.weights.dtype, (len(outputs.embedded), decoder.plan.hidden)
    first = result_bytes(results.outputs)
    stored = results.block[first : first + dtype.itemsize * shape[0] * shape[1]]
    embeddings = np.empty(shape, np.float32)
    if shape[0]:
        embeddings = torch.from_numpy(stored).view(dtype).view(shape).float().numpy()
    return OutputValues(
        results.chosen, results.logprob, results.rank, results.top_ids, results.top_logprobs, embeddings
    )


_Unchanging = tuple[object, ...]


def _unchanging(batch: Batch) -> _Unchanging | None:
    """Returns what an iteration depends on besides the first positions of its rows and its adapters' bindings; None if
    it depends on positions in other ways. Names no matchers, which would be kept. 64 rows take 7 µs."""
    rows = batch.rows
    if any(row.prompt_logprobs is not None for row in rows):
        return None
    named = [
        (row.slot, row.count, row.adapter_slot, row.samples, row.logprobs, row.embeds, row.averages, row.drafts)
        for row in rows
    ]
    return batch.merged, named, [row.matcher is None for row in rows]


@dataclass(frozen=True, slots=True)
class _PreparedBatch:
    """A batch that is in the host's arrays, or differs from it only in the positions of its rows."""

    stays: _Unchanging | None
    bindings: int  # of the adapter slots when it was prepared
    adapters: tuple[int, ...]  # slots
    outputs: Output
    filled: FilledBatch
    captured: CapturedPass | None  # the graph if all layers of its adapters have arrived
    has_masks: bool


class IterationRunner:
    """Launches iterations. Used by the launching thread; `done` is called on the waiter's thread."""

    def __init__(
        self,
        context: DeviceContext,
        parts: LaneResources,
        images: DeviceImages,
        slots: RequestSlots,
        captured_graphs: CapturedGraphs,
        merged: MergedDeviceWeights | None,
        plan: DecoderPlan,
        trace: Trace | None = None,
    ) -> None:
        """`merged`: the weights that adapters are merged into, as large as the base's; None where mode `merged` is
        off."""
        self._driver = context.driver
        self._timelines, self._ring, self._decoder = context.timelines, context.ring, parts.decoder
        self._lane = IterationLane(context.driver, self._timelines, context.copier, len(plan.layers))
        self._resources, self._batch, self._host, self._masks = parts, parts.batch, parts.host, parts.masks
        self._images, self._slots, self._captured_graphs, self._merged = images, slots, captured_graphs, merged
        self._layers, self._trace = len(plan.layers), trace
        self._lists = BatchLists(self._ring, images, self._batch.lists)
        self._words, self._words_at = self._host.empty(), self._batch.words.data_ptr()
        self._last: _PreparedBatch | None = None  # what the arrays hold on the device
        self._ended_s = 0.0  # end of the previous iteration

    def launch(self, batch: Batch, done: Done) -> None:
        """Launches a batch whose adapters all have device memory. Raises errors that occur before anything is
        launched."""
        last, self._last = self._last, None  # if this batch fails, nothing is known of the device's arrays
        stays = _unchanging(batch)
        if last is not None and stays is not None and (stays, self._images.bindings) == (last.stays, last.bindings):
            now, shape = last, self._host.move(self._words, batch.rows, last.filled)
            place = self._host.positions(shape.tokens)
        else:
            now = self._prepare(batch, stays, is_known=last is not None)
            shape, place = now.filled.shape, slice(0, len(self._words))
        arriving = self._images.arriving(now.adapters)
        weights = self._merge(batch.merged)
        by_layers = self._images.arriving_by_layers(now.adapters)
        captured = self._captured_graphs.find(batch, shape, by_layers) if by_layers else now.captured
        masked = self._masks.prepare(batch.rows, now.outputs) if now.has_masks else None
        steps = captured or self._decoder.make_pass(shape, weights=weights, masked=masked)

        def metadata(stream: Stream) -> None:
            self._ring.send(self._words_at + self._words.itemsize * place.start, self._words[place])
            self._slots.send_vectors(batch.rows, self._decoder.hidden, self._ring)
            self._ring.flush()

        self._timelines.passed()  # frees events, which would accumulate while nothing is loading
        number, issued_s = self._lane.launch(metadata, steps, arriving, NOTHING)
        self._images.used(now.adapters, Lane.COMPUTE, number)
        if captured is not None and masked is not None:
            self._decoder.sample_masked(masked, 0, shape.outputs, self._timelines.streams[Lane.COMPUTE])
        begun_s = time.monotonic() if captured is not None else issued_s  # a graph begins when all of it is there
        arrivals = {slot: self._images.bound[slot].arrivals for slot in arriving}
        failures = {} if masked is None else masked.failures
        self._return_results(batch, now, arrivals, failures, begun_s, done)
        self._last = now

    def _prepare(self, batch: Batch, stays: "_Unchanging | None", *, is_known: bool) -> "_PreparedBatch":
        """Writes a batch into the host's arrays, and sends the BGMV kernels' lists if they differ from those on the
        device. `is_known`: whether these are known."""
        adapters = {row.adapter_slot for row in batch.rows} - {BASE_ADAPTER_SLOT}
        outputs = outputs_of(batch.rows, self._slots.prompt_tokens)
        groups, changing = self._images.group_shapes_of(adapters), self._images.changing_vocabulary(adapters)
        with_lora = batch.merged is None
        filled = self._host.fill(self._words, batch.rows, outputs, groups, changing, with_lora=with_lora)
        if not is_known:
            self._lists.forget()
        self._lists.send(filled.bgmv_slots)
        return _PreparedBatch(
            stays,
            self._images.bindings,
            tuple(adapters),
            outputs,
            filled,
            self._captured_graphs.find(batch, filled.shape, ()),
            has_masks=bool((outputs.kind == SAMPLE_MASKED).any()),
        )

    def _merge(self, slot: int | None) -> Weights | None:
        """Merges the adapter of a slot, in the compute lane's order, and returns the weights with it; None for None."""
        if slot is None:
            return None
        if self._merged is None:
            raise AssertionError("a batch wants an adapter merged, but no memory was taken for merged weights")
        bound = self._images.bound[slot]
        if bound.is_loading:
            raise AssertionError(f"adapter slot {slot} cannot be merged: its weights have not arrived")
        stream = self._timelines.streams[Lane.COMPUTE]
        self._merged.merge(bound.stored, self._images.bytes_of(slot), self._driver, stream)
        return self._merged.weights

    def _return_results(
        self,
        batch: Batch,
        now: _PreparedBatch,
        arrivals: Mapping[int, list[tuple[int, float]]],
        failures: Mapping[int, GrammarFailed],
        begun_s: float,
        done: Done,
    ) -> None:
        """`arrivals`: of adapters that may not have arrived, by slot."""
        launched_s = time.monotonic()
        prompt_tokens = self._slots.prompt_tokens.copy()

        def read(results: Results) -> StepResult:
            done_s = time.monotonic()
            started_s, self._ended_s = max(begun_s, self._ended_s), done_s
            if self._trace is not None:
                name = f"{batch.num_tokens} tokens of {len(batch.rows)} requests"
                self._trace.span("device", name, int(started_s * 1e9), int(done_s * 1e9))
            found = values_of(self._decoder, now.outputs, results)
            loads = {
                slot: ColdStartCost(waited_ms=1000 * stall_s(started_s, done_s, self._layers, of_slot))
                for slot, of_slot in arrivals.items()
            }
            rows = collect(batch, now.outputs, found, prompt_tokens, loads, failures)
            if now.has_masks:
                append_tokens(batch.rows, rows)
            return StepResult(rows, started_s, done_s, launched_s)

        return_results(self._resources, self._timelines.streams[Lane.COMPUTE], now.outputs, read, done)


def stall_s(started_s: float, done_s: float, layers: int, arrivals: list[tuple[int, float]]) -> float:
    """Returns how long an iteration waited for layers. `started_s`: when its kernels could begin; `arrivals`: (first
    layer of a layer group, when it arrived).

    Layers take equal times: a group at layer l that came a seconds after the start stalled the iteration by a minus l
    layer times, where a layer time is the time without stalls divided by the layers."""
    spent_s, worst_s = done_s - started_s, 0.0
    for first_layer, at_s in list(arrivals):
        share = first_layer / layers
        waited_s = min(at_s - started_s, spent_s)
        worst_s = max(worst_s, (waited_s - share * spent_s) / (1 - share))
    return min(worst_s, spent_s)
