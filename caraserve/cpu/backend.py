"""The CPU backend: a lane thread that runs batches in order, a copy thread for adapters, processes of LoRA workers."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from caraserve.core.backend import Limits
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.grammar import mask_words
from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.core.machine_profile import Profile
from caraserve.core.outputs import append_tokens
from caraserve.cpu.adapter_loader import AdapterLoader, EmulatedLink
from caraserve.cpu.adapters import CpuImage, DeviceAdapters
from caraserve.cpu.batch import BatchShape, CpuBatch, build_batch, collect
from caraserve.cpu.buffers import Buffers
from caraserve.cpu.forward import Sampler, step
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.lora_workers.timing import RoundTrip, one_segment, round_trip
from caraserve.cpu.masks import MaskThread, masked_rows
from caraserve.cpu.merged_weights import CpuMergedWeights
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.cpu.streamed_prefill import StreamedPrefills
from caraserve.cpu.structs import BLOCK_TOKENS, CACHE, filled
from caraserve.cpu.thread_team import ThreadTeam
from caraserve.cpu.tracing import trace_batch
from caraserve.cpu.weights import LoadedModel
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.telemetry.trace import Trace
from caraserve.util.thread_priority import yield_to_event_loop
from caraserve.util.units import align_up, ceil_div

_STREAMED_PREFILLS = 2  # at a time; each has a residual stream of its own
_DRAFT_TOKENS = 16  # in an iteration; 17 rows take three to four times as long as one

_LaneCall = Callable[[], None]
BatchDone = Callable[[StepResult | Exception], None]


@dataclass(frozen=True, slots=True)
class CpuSizes:
    """Sizes and cores of a CPU backend."""

    threads: int
    num_slots: int
    adapter_slots: int
    max_step_tokens: int
    max_context: int
    kv_cache_bytes: int
    host_bytes: int  # for the host cache
    lora_cpus: tuple[int, ...] = ()  # cores that CPU LoRA workers are pinned to
    kv_dtype: Dtype = Dtype.F32  # or bfloat16
    padded: bool = False  # whether adapters are computed at the largest rank among prompts, or among decoding rows


class CpuBackend:
    """Runs batches in launch order on a lane thread and its team; implements `core.backend.Backend`."""

    device_name, accelerator = "the CPU", ""
    delta_itemsize = 0  # there is no link

    def __init__(self, plan: DecoderPlan, loaded: LoadedModel, sizes: CpuSizes, trace: Trace | None = None) -> None:
        block_bytes = plan.kv_bytes_per_token(sizes.kv_dtype.itemsize) * BLOCK_TOKENS
        self.limits = Limits(
            num_blocks=sizes.kv_cache_bytes // block_bytes,
            block_tokens=BLOCK_TOKENS,
            num_slots=sizes.num_slots,
            adapter_slots=sizes.adapter_slots,
            max_step_tokens=sizes.max_step_tokens,
            max_context=sizes.max_context,
            streamed_batches=_STREAMED_PREFILLS,
            embedding_size=plan.hidden,
            state_bytes=int(loaded.model["state_bytes"][0]),
            draft_tokens=_DRAFT_TOKENS,
        )
        self._plan, self._loaded, self._trace = plan, loaded, trace
        self.shares_cores = sizes.threads + len(sizes.lora_cpus) > len(os.sched_getaffinity(0))
        self._merged: CpuMergedWeights | None = None  # made at its first use: it takes as much memory as the base model
        self._adapters = DeviceAdapters(plan, sizes.adapter_slots, padded=sizes.padded)
        self.pads_to_largest_rank = sizes.padded
        self._sampling = np.zeros(sizes.num_slots, SLOT_SAMPLING)
        self._blocks = np.zeros((sizes.num_slots, ceil_div(sizes.max_context, BLOCK_TOKENS)), np.int64)
        self._history = np.zeros((sizes.num_slots, sizes.max_context + 1), np.int64)
        self._prompt_embeds: dict[int, NDArray[np.float32]] = {}  # by request slot
        self._embed_addresses = np.zeros(sizes.num_slots, np.int64)
        self._kv = np.zeros(self.limits.num_blocks * block_bytes + 64, np.uint8)  # takes no memory until it is written
        self._states = np.zeros(sizes.num_slots * self.limits.state_bytes + 64, np.uint8)  # neither does this
        self._cache = self._make_cache(block_bytes, sizes.kv_dtype)
        tokens = max(sizes.max_step_tokens, sizes.num_slots)
        outputs = tokens + sizes.num_slots  # every token scored, every row sampled
        threads, host_bytes, lora_cpus = sizes.threads, sizes.host_bytes, sizes.lora_cpus
        parts = plan, tokens, outputs, threads, host_bytes, lora_cpus
        self._buffers = Buffers(*parts, loaded.prepared_bytes, sizes.kv_dtype)
        self.host_memory = self._buffers.host_memory
        self._lora = self._buffers.lora_record(self._adapters.addresses())
        self.workers = WorkerPool(
            self._buffers.region, self._buffers.blocks, sizes.lora_cpus, self._buffers.block_bytes
        )
        groups, is_traced = plan.most_groups, trace is not None
        self._shape = BatchShape(len(plan.layers), groups, len(self.workers), traced=is_traced)
        vocab = int(loaded.model["vocab"][0])
        self._logits = np.zeros((outputs, int(loaded.model["vocab_pad"][0])), np.float32)
        self._masks = np.zeros((sizes.num_slots, mask_words(vocab)), np.uint32)
        self._copies = np.zeros((sizes.threads, vocab), np.float32)
        self._seen = np.zeros((sizes.threads, vocab), np.uint8)
        self._mask_thread = MaskThread()
        self._team = ThreadTeam(sizes.threads)
        self._lane_calls: SimpleQueue[_LaneCall | None] = SimpleQueue()
        self._link = EmulatedLink()
        records = [self._buffers.record_for_streaming() for _ in range(_STREAMED_PREFILLS)]
        self._streamed = StreamedPrefills(len(plan.layers), records, self._compute, self._result)
        self._loader = AdapterLoader(self._link, self._lane_calls.put, self._streamed.advance, trace)
        self._lane = threading.Thread(target=self._run_lane, name="caraserve-lane", daemon=True)
        self._lane.start()

    def warm_up(self, *, merging: bool = False) -> None:
        """Compiles the kernels, or loads them from the cache, by computing one token. To be called once, before any
        batch. `merging`: also the kernels of mode `merged`."""
        sampling = SlotSampling.greedy(1)
        rows = (ScheduledRow(0, 0, 1, BASE_ADAPTER_SLOT, samples=True),)
        outcome = self._run(Batch((SlotStart(0, (0,), sampling),), (), rows), time.monotonic())
        if isinstance(outcome, Exception):
            raise outcome
        if merging:
            self._weights_with(BASE_ADAPTER_SLOT)

    def start_workers(self, tokens_per_worker: Callable[[int], int]) -> None:
        """Starts the CPU LoRA workers; to be called once, after `warm_up`. Returns at once: until they run, iterations
        wait for weights instead. `tokens_per_worker(rank)`: maximum tokens of a slice."""
        self.set_slices(tokens_per_worker)
        self.workers.start()

    def set_slices(self, tokens_per_worker: Callable[[int], int]) -> None:
        """Sets the maximum tokens of a slice by rank; the lane reads it at each hand-off."""
        self._buffers.set_tokens_per_worker(tokens_per_worker)

    def use(self, profile: Profile, *, slice_tokens: int | None = None) -> None:
        """Sets the slices of hand-offs by the measured speed of this machine's cores, or to `slice_tokens`."""
        self.set_slices(profile.tokens_per_worker if slice_tokens is None else lambda rank: slice_tokens)

    def emulate_link(self, bytes_per_s: float) -> None:
        """Limits loading to a bandwidth from now on."""
        self._link.bytes_per_s = bytes_per_s

    @property
    def slices_handed_off(self) -> int:
        """Returns how many slices of layers were handed off to CPU workers."""
        return self._buffers.slices_handed_off

    @property
    def modules_redone(self) -> int:
        """Returns how many modules of such slices the device computed because a worker died or stopped."""
        return self._buffers.modules_redone

    @property
    def adapters_merged(self) -> int:
        """Returns how often an adapter was merged into the base weights."""
        return 0 if self._merged is None else self._merged.merges

    @property
    def late_kernels(self) -> int:
        """Returns 0: all kernels are compiled before the first batch."""
        return 0

    def time_hand_off(self, slot: int, tokens: int) -> RoundTrip | None:
        """Times a hand-off of q, k, v of the first layer, for a bound slot, after all launched batches. Returns None if
        no worker was free."""
        result: SimpleQueue[RoundTrip | None] = SimpleQueue()
        cpu_batch, arrays = one_segment(slot, tokens, self._shape.layers)
        records = self._loaded.model, self._buffers.record, self._lora, cpu_batch
        self.workers.watch(True)
        self._lane_calls.put(lambda: result.put(round_trip(*records, self.workers)))
        outcome = result.get()
        self.workers.watch(False)
        del arrays  # kept until here: the record holds their addresses
        return outcome

    def launch(self, batch: Batch, done: BatchDone) -> None:
        """Queues one iteration; `done` is called on the lane thread."""
        if batch.is_side_batch:
            self._lane_calls.put(lambda: self._start_streamed(batch, done))
        else:
            launched_s = time.monotonic()
            self._lane_calls.put(lambda: done(self._run(batch, launched_s)))

    def load_adapter(
        self,
        adapter: HostAdapter,
        slot: int,
        done: Callable[[Exception | None], None],
        group_ends: Sequence[int] = (),
        layers: int | None = None,
        first_layer: int = 0,
    ) -> None:
        """Binds on the lane, after all launched batches; copies on the copy thread."""
        image = CpuImage.empty(adapter, layers, first_layer)
        self._lane_calls.put(lambda: self._adapters.bind(slot, image))
        self._loader.load(slot, image, group_ends, done)

    def extend_load(self, slot: int, layers: int) -> None:
        """Copies further layers that are in the host cache now; streamed prefills that waited for them continue."""
        self._loader.extend(slot, layers)

    def break_load(self, slot: int, cause: Exception) -> None:
        """Ends a load whose other layers will never be in the host cache."""
        self._loader.abort(slot, cause)

    def recall(self, slot: int) -> None:
        """Ends the streamed prefill of a request slot for a retry, if it waits for the host cache."""
        self._lane_calls.put(lambda: self._streamed.recall(slot))

    def device_bytes(self, spec: AdapterSpec) -> int:
        """Returns the bytes of the image: the same as in the host cache."""
        return spec.num_bytes

    def unload_adapter(self, slot: int) -> None:
        """Unbinds on the lane, after all launched batches."""
        self._lane_calls.put(lambda: self._adapters.unbind(slot))

    def release_vectors(self, slot: int) -> None:
        """Frees the vectors on the lane, after all launched batches."""
        self._lane_calls.put(lambda: self._free_vectors(slot))

    def resize_kv(self, blocks: int, done: Callable[[Exception | None], None]) -> None:
        """Raises AssertionError: KV blocks and adapters have separate memory here."""
        raise AssertionError(f"{blocks} KV blocks: this backend always has {self.limits.num_blocks}")

    def close(self) -> None:
        """Runs the launched batches, then ends threads and workers."""
        self._link.close()
        self._loader.close()
        self._lane_calls.put(None)
        self._lane.join()
        self._team.close()
        self._mask_thread.close()
        self.workers.close()
        self._buffers.region.close()

    def _run_lane(self) -> None:
        yield_to_event_loop()
        while (call := self._lane_calls.get()) is not None:
            call()
            del call  # otherwise the last batch, with its matchers, would be kept until the next call
        self._streamed.close()

    def _run(self, batch: Batch, launched_s: float) -> StepResult | Exception:
        started_s = time.monotonic()
        try:
            cpu_batch = self._batch_of(batch)
            self._compute(batch, cpu_batch, self._buffers.record)
            return self._result(batch, cpu_batch, started_s, launched_s)
        except Exception as error:  # the engine fails the requests of this batch and continues
            return error

    def _start_streamed(self, batch: Batch, done: BatchDone) -> None:
        try:
            cpu_batch, image = self._batch_of(batch), self._adapters.image(batch.rows[0].adapter_slot)
        except Exception as error:
            done(error)
        else:
            self._streamed.start(batch, cpu_batch, image, done)

    def _batch_of(self, batch: Batch) -> CpuBatch:
        self._apply(batch)
        return build_batch(batch, self._adapters, self._sampling["prompt_tokens"], self._shape)

    def _compute(self, batch: Batch, cpu_batch: CpuBatch, buffers: NDArray[np.void]) -> None:
        model = self._loaded.model if batch.merged is None else self._weights_with(batch.merged)
        started_ns = time.monotonic_ns()
        self._write_masks(batch, cpu_batch)
        self.workers.watch(cpu_batch.is_arriving)
        worker_ns = self._buffers.worker_ns[: len(cpu_batch.segments)]
        worker_ns[:] = 0
        try:
            self._team.run(step, model, buffers, self._lora, self._cache, cpu_batch.record, self._sampler(cpu_batch))
        finally:
            self.workers.watch(False)
        cpu_batch.lora_ns[:] += worker_ns
        if self._trace is not None:
            trace_batch(self._trace, self._plan, batch, cpu_batch, started_ns, time.monotonic_ns())

    def _write_masks(self, batch: Batch, cpu_batch: CpuBatch) -> None:
        """Begins to write the tokens that grammars allow next; `step` waits for them before it samples. The iterations
        before have run, so all tokens are known."""
        if cpu_batch.computed_layers.stop == len(self._plan.layers) and (rows := masked_rows(batch.rows)):
            masks = [self._masks[row.slot] for row in rows]
            self._mask_thread.write(rows, masks, cpu_batch.grammar_failures, int(cpu_batch.masks_written.ctypes.data))

    def _result(
        self, batch: Batch, cpu_batch: CpuBatch, started_s: float, launched_s: float | None = None
    ) -> StepResult:
        rows = collect(batch, cpu_batch, self._sampling["prompt_tokens"], self._buffers.normed)
        append_tokens(batch.rows, rows)
        for row, result in zip(batch.rows, rows, strict=True):
            if row.drafts:
                self._write_history(row, result.token_ids)
        return StepResult(rows, started_s, time.monotonic(), launched_s)

    def _weights_with(self, slot: int) -> NDArray[np.void]:
        """Returns a MODEL record with the adapter in `slot` merged. Raises ValueError before it has arrived."""
        if slot != BASE_ADAPTER_SLOT and self._adapters.is_arriving(slot):
            raise ValueError(f"adapter slot {slot} cannot be merged: its weights have not arrived")
        if self._merged is None:
            self._merged = CpuMergedWeights(self._loaded, self._team.size)
        started_ns, before = time.monotonic_ns(), self._merged.merges
        model = self._merged.with_adapter(slot, self._adapters, self._buffers.record, self._lora, self._team.run)
        if self._trace is not None and self._merged.merges > before:
            self._trace.span("device", f"merging adapter slot {slot}", started_ns, time.monotonic_ns())
        return model

    def _sampler(self, cpu_batch: CpuBatch) -> Sampler:
        return Sampler(
            table=self._sampling,
            masks=self._masks,
            masks_written=cpu_batch.masks_written,
            logits=self._logits,
            copies=self._copies,
            seen=self._seen,
            history=self._history,
            chosen=cpu_batch.chosen,
            logprob=cpu_batch.logprob,
            rank=cpu_batch.rank,
            top_ids=cpu_batch.top_ids,
            top_logprobs=cpu_batch.top_logprobs,
        )

    def _apply(self, batch: Batch) -> None:
        for start in batch.starts:
            self._start_slot(start)
        for grant in batch.grants:
            self._blocks[grant.slot, grant.first : grant.first + len(grant.blocks)] = grant.blocks
        for row in batch.rows:
            if row.drafts:
                self._write_history(row, row.drafts)

    def _write_history(self, row: ScheduledRow, token_ids: Sequence[int]) -> None:
        """Writes the tokens that follow the first one of a row with drafts."""
        self._history[row.slot, row.start + 1 : row.start + 1 + len(token_ids)] = token_ids

    def _start_slot(self, start: SlotStart) -> None:
        self._history[start.slot, : len(start.token_ids)] = start.token_ids
        self._free_vectors(start.slot)
        if start.prompt_embeds is not None:
            self._prompt_embeds[start.slot] = start.prompt_embeds
            self._embed_addresses[start.slot] = start.prompt_embeds.ctypes.data
        write_sampling(self._sampling, start.slot, start.sampling)

    def _free_vectors(self, slot: int) -> None:
        self._prompt_embeds.pop(slot, None)

    def _make_cache(self, block_bytes: int, kv_dtype: Dtype) -> NDArray[np.void]:
        return filled(
            CACHE,
            base=align_up(int(self._kv.ctypes.data), 64),
            block_bytes=block_bytes,
            itemsize=kv_dtype.itemsize,
            blocks=int(self._blocks.ctypes.data),
            max_blocks=self._blocks.shape[1],
            history=int(self._history.ctypes.data),
            max_history=self._history.shape[1],
            prompt_embeds=int(self._embed_addresses.ctypes.data),
            states=align_up(int(self._states.ctypes.data), 64),
            state_bytes=self.limits.state_bytes,
        )
