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
from numpy.typing import NDArray

from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, StepResult
from caraserve.core.outputs import ColdStartCost, Output, OutputValues, append_tokens, collect, outputs_of
from caraserve.errors import GrammarFailed
from caraserve.gpu.driver.api import DriverError, Stream
from caraserve.gpu.driver.streams import NOTHING, Lane
from caraserve.gpu.forward.batch import BatchWriter, DeviceBatch, decode_slots
from caraserve.gpu.forward.decoder import Decoder
from caraserve.gpu.forward.graphs import CapturedGraphs
from caraserve.gpu.forward.lanes import IterationLane
from caraserve.gpu.memory.adapters import BoundAdapter, DeviceImages
from caraserve.gpu.memory.copier import DeviceContext
from caraserve.gpu.memory.masks import LaneMasks
from caraserve.gpu.memory.pass_shape import Capacity
from caraserve.gpu.memory.request_state import RequestSlots
from caraserve.gpu.memory.results import ResultBlocks, Results, Waiter, result_bytes
from caraserve.gpu.memory.staging_ring import StagingRing
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


class BatchLists:
    """The BGMV kernels' lists of one lane. They are sent again only when the decoding rows or their adapters change."""

    def __init__(self, ring: StagingRing, images: DeviceImages, batch: DeviceBatch) -> None:
        self._ring, self._images, self._lists = ring, images, batch.lists
        self._sent: tuple[int, bytes] | None = None

    def send(self, slots: NDArray[np.int32]) -> None:
        """Sends the lists of a batch, if they changed. `slots`: int32 [tokens], adapter slots as `decode_slots` returns
        them."""
        slots = slots if slots.any() else slots[:0]
        state = self._images.bindings, slots.tobytes()
        if state == self._sent:
            return
        self._sent = state
        counts = np.zeros(tuple(self._lists.counts.shape), np.int32)
        for shape, made in enumerate(self._images.work_items(slots) if slots.size else ()):
            pair = self._lists.lists[shape]
            for launch, (target, items) in enumerate(zip(pair, (made.shrink, made.expand), strict=True)):
                self._ring.send(target.data_ptr(), items)
                counts[shape, launch] = len(items)
            if shape == 0:  # groups of rows are the same for all
                self._ring.send(self._lists.groups.data_ptr(), made.groups)
        self._ring.send(self._lists.counts.data_ptr(), counts)


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
        self._lists = BatchLists(self._ring, images, self._batch)
        self._words = self._host.empty()
        self._ended_s = 0.0  # end of the previous iteration

    def launch(self, batch: Batch, done: Done) -> None:
        """Launches a batch whose adapters all have device memory. Raises errors that occur before anything is
        launched."""
        launched_s = time.monotonic()
        with_lora = batch.merged is None
        outputs = outputs_of(batch.rows, self._slots.prompt_tokens)
        adapters = {row.adapter_slot for row in batch.rows} - {BASE_ADAPTER_SLOT}
        groups = self._images.group_shapes_of(adapters)
        changing = self._images.changing_vocabulary(adapters)
        shape = self._host.fill(self._words, batch.rows, outputs, groups, changing, with_lora=with_lora)
        arriving = self._images.arriving(adapters)
        weights = self._merge(batch.merged)
        captured = self._captured_graphs.find(batch, shape, arriving)
        masked = self._masks.prepare(batch.rows, outputs)
        steps = captured or self._decoder.make_pass(shape, weights=weights, masked=masked)
        self._lists.send(decode_slots(batch.rows) if with_lora else np.zeros(0, np.int32))

        def metadata(stream: Stream) -> None:
            self._ring.send(self._batch.words.data_ptr(), self._words)
            self._slots.send_vectors(batch.rows, self._decoder.hidden, self._ring)
            self._ring.flush()

        self._timelines.passed()  # frees events, which would accumulate while nothing is loading
        number = self._lane.launch(metadata, steps, arriving, NOTHING)
        self._images.used(adapters, Lane.COMPUTE, number)
        if captured is not None and masked is not None:
            self._decoder.sample_masked(masked, 0, shape.outputs, self._timelines.streams[Lane.COMPUTE])
        bound = {slot: self._images.bound[slot] for slot in arriving}
        self._return_results(batch, outputs, bound, {} if masked is None else masked.failures, launched_s, done)

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
        outputs: Output,
        arriving: Mapping[int, BoundAdapter],
        failures: Mapping[int, GrammarFailed],
        launched_s: float,
        done: Done,
    ) -> None:
        prompt_tokens = self._slots.prompt_tokens.copy()

        def read(results: Results) -> StepResult:
            done_s = time.monotonic()
            started_s, self._ended_s = max(launched_s, self._ended_s), done_s
            if self._trace is not None:
                name = f"{batch.num_tokens} tokens of {len(batch.rows)} requests"
                self._trace.span("device", name, int(started_s * 1e9), int(done_s * 1e9))
            found = values_of(self._decoder, outputs, results)
            loads = {
                slot: ColdStartCost(waited_ms=1000 * stall_s(started_s, done_s, self._layers, bound.arrivals))
                for slot, bound in arriving.items()
            }
            rows = collect(batch, outputs, found, prompt_tokens, loads, failures)
            append_tokens(batch.rows, rows)
            return StepResult(rows, started_s, done_s)

        return_results(self._resources, self._timelines.streams[Lane.COMPUTE], outputs, read, done)


def stall_s(started_s: float, done_s: float, layers: int, arrivals: list[tuple[int, float]]) -> float:
    """Returns how long an iteration waited for layers. `arrivals`: (first layer of a layer group, when it was seen).

    Layers take equal times: a group at layer l that came a seconds after the start stalled the iteration by a minus l
    layer times, where a layer time is the time without stalls divided by the layers."""
    spent_s, worst_s = done_s - started_s, 0.0
    for first_layer, at_s in list(arrivals):
        share = first_layer / layers
        waited_s = min(at_s - started_s, spent_s)
        worst_s = max(worst_s, (waited_s - share * spent_s) / (1 - share))
    return min(worst_s, spent_s)
