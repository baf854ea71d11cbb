"""The CPU backend: a lane thread that runs plans in order, a copy thread beside it for adapters, CPU LoRA workers in
processes of their own.

`serve.py` builds it, `loop.py` launches plans on it, `adapters/residency.py` loads adapters into it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from caraserve.core.backend import Limits
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.core.machine_profile import Profile
from caraserve.cpu.adapters import CpuImage, DeviceAdapters
from caraserve.cpu.attention import BLOCK_TOKENS
from caraserve.cpu.batch import BatchShape, CpuBatch, build_batch, collect
from caraserve.cpu.buffers import Buffers
from caraserve.cpu.forward import Sampler, step
from caraserve.cpu.loader import AdapterLoader, EmulatedLink
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.lora_workers.timing import RoundTrip, one_segment, round_trip
from caraserve.cpu.merged_weights import CpuMergedWeights
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.cpu.streamed_prefill import StreamedPrefills
from caraserve.cpu.structs import CACHE, filled
from caraserve.cpu.thread_team import ThreadTeam, yield_to_event_loop
from caraserve.cpu.tracing import trace_batch
from caraserve.cpu.weights import LoadedModel
from caraserve.model.spec import ModelSpec
from caraserve.telemetry.trace import Trace
from caraserve.util.units import align_up, ceil_div

_STREAMED_PLANS = 2  # each has room for the residual stream of a whole iteration

_LaneJob = Callable[[], None]
PlanDone = Callable[[StepResult | Exception], None]


@dataclass(frozen=True, slots=True)
class CpuSizes:
    """What `serve.py` decides for this backend."""

    threads: int
    num_slots: int
    adapter_slots: int
    max_step_tokens: int
    max_context: int
    kv_cache_bytes: int
    host_bytes: int  # for the host tier
    lora_cpus: tuple[int, ...] = ()  # cores that CPU LoRA workers are pinned to


class CpuBackend:
    """Runs plans in launch order on one lane thread and its team; see model/backend.py for the contract."""

    device_name, accelerator = "the CPU", ""
    shares_cores = True  # CPU LoRA workers compute where iterations do

    def __init__(self, spec: ModelSpec, loaded: LoadedModel, sizes: CpuSizes, trace: Trace | None = None) -> None:
        block_bytes = spec.kv_bytes_per_token(4) * BLOCK_TOKENS
        self.limits = Limits(
            num_blocks=sizes.kv_cache_bytes // block_bytes,
            block_tokens=BLOCK_TOKENS,
            num_slots=sizes.num_slots,
            adapter_slots=sizes.adapter_slots,
            max_step_tokens=sizes.max_step_tokens,
            max_context=sizes.max_context,
            streamed_batches=_STREAMED_PLANS,
        )
        self._spec, self._loaded, self._trace = spec, loaded, trace
        self._merged: CpuMergedWeights | None = None  # until it is asked for: it takes as much memory as the base
        self._adapters = DeviceAdapters(spec, sizes.adapter_slots)
        self._sampling = np.zeros(sizes.num_slots, SLOT_SAMPLING)
        self._blocks = np.zeros((sizes.num_slots, ceil_div(sizes.max_context, BLOCK_TOKENS)), np.int64)
        self._history = np.zeros((sizes.num_slots, sizes.max_context + 1), np.int64)
        self._kv = np.zeros(self.limits.num_blocks * block_bytes + 64, np.uint8)  # no room until it is written
        self._cache = self._make_cache()
        tokens = max(sizes.max_step_tokens, sizes.num_slots)
        outputs = tokens + sizes.num_slots  # every token scored, every row sampled
        self._buffers = Buffers(loaded.model, tokens, outputs, sizes.threads, sizes.host_bytes, sizes.lora_cpus)
        self.host_memory = self._buffers.host_memory
        self._lora = self._buffers.lora_record(self._adapters.addresses())
        self.workers = WorkerPool(
            self._buffers.region, self._buffers.blocks, sizes.lora_cpus, self._buffers.block_bytes
        )
        self._shape = BatchShape(spec.layers, len(self.workers), traced=trace is not None)
        vocab = int(loaded.model["vocab"][0])
        self._logits = np.zeros((outputs, int(loaded.model["vocab_pad"][0])), np.float32)
        self._copies = np.zeros((sizes.threads, vocab), np.float32)
        self._seen = np.zeros((sizes.threads, vocab), np.uint8)
        self._team = ThreadTeam(sizes.threads)
        self._jobs: SimpleQueue[_LaneJob | None] = SimpleQueue()
        self._link = EmulatedLink()
        self._copier = AdapterLoader(self._link, self._jobs.put, trace)
        beside = [self._buffers.beside() for _ in range(_STREAMED_PLANS)]
        self._asides = StreamedPrefills(spec.layers, beside, self._compute, self._result)
        self._copier.moved = self._asides.go_on
        self._lane = threading.Thread(target=self._run_lane, name="caraserve-lane", daemon=True)
        self._lane.start()

    def warm_up(self, *, merging: bool = False) -> None:
        """Compiles or loads the kernels by computing one token; to be called once, before any plan. `merging`: also
        what plans with a merged adapter need."""
        sampling = SlotSampling.greedy(1)
        rows = (ScheduledRow(0, 0, 1, BASE_ADAPTER_SLOT, samples=True),)
        outcome = self._run(Batch((SlotStart(0, (0,), sampling),), (), rows))
        if isinstance(outcome, Exception):
            raise outcome
        if merging:
            self._weights_with(BASE_ADAPTER_SLOT)

    def start_workers(self, tokens_per_worker: Callable[[int], int]) -> None:
        """Starts the CPU LoRA workers; to be called once, after `warm_up`. Returns at once: until they are there,
        layers that they would compute are waited for. `tokens_per_worker(rank)`: most tokens of a slice."""
        self.set_slices(tokens_per_worker)
        self.workers.start()

    def set_slices(self, tokens_per_worker: Callable[[int], int]) -> None:
        """Sets the most tokens of a slice by rank; the lane reads it at each hand-off."""
        self._buffers.set_tokens_per_worker(tokens_per_worker)

    def use(self, profile: Profile) -> None:
        """Slices go by what was measured of this machine."""
        self.set_slices(profile.tokens_per_worker)

    def emulate_link(self, bytes_per_s: float) -> None:
        """Slows loading down to a stated bandwidth from now on."""
        self._link.bytes_per_s = bytes_per_s

    @property
    def slices_handed_off(self) -> int:
        """Slices of layers that CPU workers were asked for so far."""
        return self._buffers.slices_handed_off

    @property
    def modules_redone(self) -> int:
        """Modules of such slices that the device had to compute itself, a worker having died or stopped."""
        return self._buffers.modules_redone

    @property
    def adapters_merged(self) -> int:
        """How often an adapter was merged into the base weights."""
        return 0 if self._merged is None else self._merged.merges

    def time_hand_off(self, slot: int, tokens: int) -> RoundTrip | None:
        """Hands q, k, v of the first layer over to the workers, for a bound slot, after all that was launched. None if
        no worker was free."""
        result: SimpleQueue[RoundTrip | None] = SimpleQueue()
        batch, arrays = one_segment(slot, tokens, self._shape.layers)
        records = self._loaded.model, self._buffers.record, self._lora, batch
        self.workers.watch(True)
        self._jobs.put(lambda: result.put(round_trip(*records, self.workers)))
        outcome = result.get()
        self.workers.watch(False)
        del arrays  # alive until now: the record has their addresses
        return outcome

    def launch(self, plan: Batch, done: PlanDone) -> None:
        """Queues one iteration; `done` is called on the lane's thread."""
        if plan.is_side_batch:
            self._jobs.put(lambda: self._begin_aside(plan, done))
        else:
            self._jobs.put(lambda: done(self._run(plan)))

    def load_adapter(
        self,
        adapter: HostAdapter,
        slot: int,
        done: Callable[[Exception | None], None],
        group_ends: Sequence[int] = (),
        layers: int | None = None,
    ) -> None:
        """Binds on the lane, after all that was launched before; copies on the copy thread."""
        image = CpuImage.empty(adapter, layers)
        self._jobs.put(lambda: self._adapters.bind(slot, image))
        self._copier.load(slot, image, group_ends, done)

    def extend_load(self, slot: int, layers: int) -> None:
        """More layers are in the host tier: they are copied, and prompts that waited for them go on."""
        self._copier.extend(slot, layers)

    def break_load(self, slot: int, cause: Exception) -> None:
        """No more layers will be in the host tier."""
        self._copier.cut(slot, cause)

    def recall(self, slot: int) -> None:
        """Voids what waits for such layers in a request slot."""
        self._jobs.put(lambda: self._asides.recall(slot))

    def device_bytes(self, spec: AdapterSpec) -> int:
        """As many as in the host tier."""
        return spec.num_bytes

    def unload_adapter(self, slot: int) -> None:
        """Unbinds on the lane, after every plan launched so far."""
        self._jobs.put(lambda: self._adapters.unbind(slot))

    def resize_kv(self, blocks: int, done: Callable[[], None]) -> None:
        """Never called: KV blocks and adapters have memory of their own here."""
        raise AssertionError(f"{blocks} KV blocks: there are {self.limits.num_blocks}, once and for all")

    def close(self) -> None:
        """Runs what was launched, then ends the threads."""
        self._link.close()
        self._copier.close()
        self._jobs.put(None)
        self._lane.join()
        self._team.close()
        self.workers.close()
        self._buffers.region.close()

    def _run_lane(self) -> None:
        yield_to_event_loop()
        while (job := self._jobs.get()) is not None:
            job()
        self._asides.close()

    def _run(self, plan: Batch) -> StepResult | Exception:
        started_s = time.monotonic()
        try:
            batch = self._batch_of(plan)
            self._compute(plan, batch, self._buffers.record)
            return self._result(plan, batch, started_s)
        except Exception as error:  # the loop fails the plan's requests and goes on
            return error

    def _begin_aside(self, plan: Batch, done: PlanDone) -> None:
        try:
            batch, image = self._batch_of(plan), self._adapters.image(plan.rows[0].adapter_slot)
        except Exception as error:
            done(error)
        else:
            self._asides.begin(plan, batch, image, done)

    def _batch_of(self, plan: Batch) -> CpuBatch:
        self._apply(plan)
        return build_batch(plan, self._adapters, self._sampling["prompt_tokens"], self._shape)

    def _compute(self, plan: Batch, batch: CpuBatch, buffers: NDArray[np.void]) -> None:
        model = self._loaded.model if plan.merged is None else self._weights_with(plan.merged)
        started_ns = time.monotonic_ns()
        self.workers.watch(batch.is_arriving)
        try:
            self._team.run(step, model, buffers, self._lora, self._cache, batch.record, self._sampler(batch))
        finally:
            self.workers.watch(False)
        if self._trace is not None:
            trace_batch(self._trace, plan, batch, started_ns, time.monotonic_ns())

    def _result(self, plan: Batch, batch: CpuBatch, started_s: float) -> StepResult:
        rows = collect(plan, batch, self._sampling["prompt_tokens"])
        return StepResult(rows, started_s, time.monotonic())

    def _weights_with(self, slot: int) -> NDArray[np.void]:
        """A MODEL record of the base with the adapter in `slot` merged. Raises ValueError when it cannot be."""
        if slot != BASE_ADAPTER_SLOT and self._adapters.is_arriving(slot):
            raise ValueError(f"adapter slot {slot} cannot be merged: its weights have not arrived")
        if self._merged is None:
            self._merged = CpuMergedWeights(self._spec, self._loaded, self._team.size)
        started_ns, before = time.monotonic_ns(), self._merged.merges
        model = self._merged.holding(slot, self._adapters, self._buffers.record, self._lora, self._team.run)
        if self._trace is not None and self._merged.merges > before:
            self._trace.span("device", f"merging adapter slot {slot}", started_ns, time.monotonic_ns())
        return model

    def _sampler(self, batch: CpuBatch) -> Sampler:
        return Sampler(
            table=self._sampling,
            logits=self._logits,
            copies=self._copies,
            seen=self._seen,
            history=self._history,
            chosen=batch.chosen,
            logprob=batch.logprob,
            top_ids=batch.top_ids,
            top_logprobs=batch.top_logprobs,
        )

    def _apply(self, plan: Batch) -> None:
        for start in plan.starts:
            self._start_slot(start)
        for grant in plan.grants:
            self._blocks[grant.slot, grant.first : grant.first + len(grant.blocks)] = grant.blocks

    def _start_slot(self, start: SlotStart) -> None:
        self._history[start.slot, : len(start.token_ids)] = start.token_ids
        write_sampling(self._sampling, start.slot, start.sampling)

    def _make_cache(self) -> NDArray[np.void]:
        return filled(
            CACHE,
            base=align_up(int(self._kv.ctypes.data), 64),
            blocks=int(self._blocks.ctypes.data),
            max_blocks=self._blocks.shape[1],
            history=int(self._history.ctypes.data),
            max_history=self._history.shape[1],
        )
