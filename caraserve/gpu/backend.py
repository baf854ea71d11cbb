"""The CUDA backend: a thread that launches, lanes of device work, and threads that wait for its results.

All calls go to the launching thread in order. That thread never waits for the device, except when it must place an
adapter. `builder.py` makes the parts.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, RowResult, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.core.machine_profile import Profile
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.lora_workers.timing import RoundTrip
from caraserve.errors import CopyFailed
from caraserve.gpu.assist.predictions import measured_predictions
from caraserve.gpu.builder import BackendParts, GpuSizes
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.forward.warm_up import LateKernels
from caraserve.gpu.weights import Weights
from caraserve.model.plan import DecoderPlan
from caraserve.telemetry.trace import Trace

log = logging.getLogger(__name__)

_POLL_S = 0.001  # between two polls while anything is being copied
_IDLE_S = 0.5  # without a job, before a graph is captured that could wait
_NICE = -5  # of the launching thread, where the system allows it: the device may wait for this thread

Done = Callable[[StepResult | Exception], None]
T = TypeVar("T")


class CudaBackend:
    """Implements the contract of core/backend.py on a GPU."""

    shares_cores = False  # CPU LoRA workers have cores that iterations do not need

    def __init__(
        self, plan: DecoderPlan, weights: Weights, sizes: GpuSizes, device: GpuDevice, trace: Trace | None = None
    ) -> None:
        self.device_name = self.accelerator = device.name
        self.pads_to_largest_rank = sizes.padded_rank is not None
        self._plan = plan
        self._late_kernels = LateKernels()
        self.delta_itemsize = weights.dtype.itemsize
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        built: SimpleQueue[BackendParts | Exception] = SimpleQueue()

        def build() -> BackendParts:
            return BackendParts(plan, weights, sizes, device, lambda: self._jobs.put(_nothing), trace)

        self._thread = threading.Thread(
            target=self._run, args=(device, build, built), name="caraserve-launch", daemon=True
        )
        self._thread.start()
        self._parts: BackendParts = _raised(built.get())
        self.limits = self._parts.limits
        self.host_memory = self._parts.region.arena
        self.workers: WorkerPool = self._parts.workers

    # --- before serving ---

    @property
    def warm_up_steps(self) -> int:
        """Returns how often `warm_up` calls `advance`."""
        return self._parts.warm_up_steps

    def warm_up(self, advance: Callable[[], None] = lambda: None) -> None:
        """Loads every kernel and captures graphs, but for those of large prompts, which are captured while there is no
        job; to be called once, before any batch. Raises the errors of both. Kernels that are loaded later are counted
        and logged."""

        def warm_up() -> None:
            self._parts.warm_up(advance)
            self._late_kernels.watch()

        self._on_thread(warm_up)

    def capture_late_graphs(self) -> None:
        """Captures the graphs now that would be captured while there is no job; nothing may run. Raises DriverError."""

        def capture() -> None:
            for lane in Lane:
                self._parts.context.timelines.settle(lane)
            while self._parts.capture_late():
                pass

        self._on_thread(capture)

    def start_workers(self, tokens_per_worker: Callable[[int], int]) -> None:
        """Starts the CPU LoRA workers; to be called once. Returns at once: until they run, prefills wait for their
        layers. `tokens_per_worker(rank)`: the most tokens in a slice."""
        assisted = self._parts.assisted
        assisted.set_predictions(replace(assisted.predictions, tokens_per_worker=tokens_per_worker))
        self.workers.start()

    def use(self, profile: Profile, *, slice_tokens: int | None = None) -> None:
        """Uses the measured times of this machine to predict hand-offs and prefills. Slices of hand-offs follow them,
        or have up to `slice_tokens`."""
        predictions = measured_predictions(profile, self._plan, self.delta_itemsize, slice_tokens)
        self._parts.assisted.set_predictions(predictions)
        self._parts.context.queue.bytes_per_s = profile.link_bytes_per_s

    def emulate_link(self, bytes_per_s: float) -> None:
        """Limits the bandwidth of loads. Those before are not affected."""
        self._on_thread(lambda: self._parts.emulate_link(bytes_per_s))

    def time_hand_off(self, slot: int, tokens: int) -> RoundTrip | None:
        """Times hand-offs of q, k, v to one worker, for a loaded slot, and returns their mean: from the kernel that
        copies x to the one that adds the deltas. Returns None if no worker is idle, one fails, or a prompt is computed
        with their help. Raises DriverError."""
        return self._on_thread(lambda: self._parts.assisted.time_hand_offs(slot, tokens))

    # --- counts ---

    @property
    def slices_handed_off(self) -> int:
        """Returns the slices in all work orders so far, including those for layers that arrived before they were
        needed."""
        return self._parts.assisted.slices

    @property
    def modules_redone(self) -> int:
        """Returns the number of assisted chunks that were aborted because a worker died or stopped."""
        return self._parts.assisted.void_chunks

    @property
    def adapters_merged(self) -> int:
        """Returns how often an adapter was merged into the base weights."""
        return 0 if self._parts.merged is None else self._parts.merged.merges

    @property
    def late_kernels(self) -> int:
        """Returns how many kernels were compiled or loaded after `warm_up`."""
        return self._late_kernels.count

    # --- serving ---

    def launch(self, batch: Batch, done: Done) -> None:
        """Queues one iteration; `done` is called on a thread of the backend."""
        self._jobs.put(lambda: self._launch(batch, done))

    def load_adapter(
        self,
        adapter: HostAdapter,
        slot: int,
        done: Callable[[Exception | None], None],
        group_ends: Sequence[int] = (),
        layers: int | None = None,
        first_layer: int = 0,
    ) -> None:
        """Binds the adapter after all that was launched before; `done` is called on the launching thread."""
        if layers is not None:
            raise _whole_images_only()
        self._jobs.put(lambda: self._parts.images.load(adapter, slot, group_ends, first_layer, done))

    def extend_load(self, slot: int, layers: int) -> None:
        """Raises AssertionError, as `break_load` and `recall` do: an iteration that waits for a copy cannot be
        recalled, so only whole images are loaded."""
        raise _whole_images_only()

    def break_load(self, slot: int, cause: Exception) -> None:
        raise _whole_images_only()

    def recall(self, slot: int) -> None:
        raise _whole_images_only()

    def device_bytes(self, spec: AdapterSpec) -> int:
        """Returns the bytes that an adapter takes on the device, including the rows that padding adds."""
        return self._parts.images.stored(spec).num_bytes

    def unload_adapter(self, slot: int) -> None:
        """Frees the adapter's memory, which is reused only after all batches launched so far."""
        self._jobs.put(lambda: self._parts.images.unload(slot))

    def release_vectors(self, slot: int) -> None:
        """Frees the vectors, which are copied to the device as a batch is launched."""
        self._jobs.put(lambda: self._parts.slots.free_vectors(slot))

    def resize_kv(self, blocks: int, done: Callable[[Exception | None], None]) -> None:
        """Resizes the KV cache; `done` is called on the launching thread."""
        self._jobs.put(lambda: self._parts.images.resize_kv(blocks, done))

    def close(self) -> None:
        """Waits for everything launched, then ends threads and workers."""
        self._jobs.put(None)
        self._thread.join()
        self._late_kernels.stop()
        self._parts.close()

    # --- the launching thread ---

    def _on_thread(self, job: Callable[[], T]) -> T:
        """Runs a job on the launching thread. Returns its result, or raises its error."""
        result: SimpleQueue[T | Exception] = SimpleQueue()
        self._jobs.put(lambda: result.put(_tried(job)))
        return _raised(result.get())

    def _run(
        self, device: GpuDevice, build: Callable[[], BackendParts], built: "SimpleQueue[BackendParts | Exception]"
    ) -> None:
        """Runs the launching thread. The thread builds the parts itself, because libraries keep memory for each thread
        that launches."""
        _raise_priority()

        def enter_and_build() -> BackendParts:
            device.enter_thread()
            self._parts = build()
            return self._parts

        outcome = _tried(enter_and_build)
        built.put(outcome)
        if isinstance(outcome, Exception):
            return
        while True:
            try:
                job = self._jobs.get(timeout=self._wait_s())
            except Empty:
                job = self._poll_or_capture
            if job is None:
                break
            try:
                job()
                if self._parts.is_busy or job is _nothing:
                    self._parts.poll()
            except Exception:
                log.exception("the device refuses an operation")
            del job  # otherwise the last batch, with its matchers, would be kept until the next job
        while self._parts.assisted.is_open:
            self._parts.assisted.await_return(_POLL_S)
            self._parts.poll()

    def _poll_or_capture(self) -> None:
        if self._parts.is_busy:
            self._parts.poll()
        else:
            self._parts.capture_late()

    def _wait_s(self) -> float | None:
        """Returns how many seconds to wait for a job before the next poll; None: without a limit."""
        if self._parts.assisted.is_issuing:
            return 0.0
        if self._parts.is_busy:
            return _POLL_S
        return _IDLE_S if self._parts.has_late_graphs else None

    def _launch(self, batch: Batch, done: Done) -> None:
        try:
            self._parts.slots.apply(batch)  # even if this fails: slots and blocks of other requests come only once
            failures = self._await_places({row.adapter_slot for row in batch.rows} - {BASE_ADAPTER_SLOT})
            if failures:
                batch, done = _without(failures, batch, done)
            if not batch.rows:
                self._parts.context.ring.flush()
                self._parts.context.timelines.mark(Lane.COMPUTE)  # raises DriverError if the device has failed
                now_s = time.monotonic()
                self._parts.lanes[0].waiter.after_those(lambda: done(StepResult((), now_s, now_s, now_s)))
            elif batch.is_side_batch:
                self._parts.assisted.launch(batch, done)
            else:
                self._parts.iterations.launch(batch, done)
        except Exception as error:
            failure = error  # Python deletes an exception's name after its clause
            self._parts.lanes[0].waiter.after_those(lambda: done(failure))

    def _await_places(self, slots: set[int]) -> dict[int, Exception]:
        """Waits until the adapters have device memory, which at this point is almost always true. Returns the failures
        of those that cannot be copied, by slot."""
        while not self._parts.images.are_settled(slots):
            self._parts.context.timelines.settle(Lane.COPY)
            self._parts.assisted.await_return(_POLL_S)
            self._parts.poll()
        return self._parts.images.failures(slots)


def _without(failures: Mapping[int, Exception], batch: Batch, done: Done) -> tuple[Batch, Done]:
    """Returns a batch without the rows of the adapters in `failures`, and a callback that adds these rows' failures to
    its result."""
    kept = tuple(row for row in batch.rows if row.adapter_slot not in failures)

    def with_failures(outcome: StepResult | Exception) -> None:
        if isinstance(outcome, StepResult):
            computed = iter(outcome.rows)
            rows = [
                RowResult(is_finite=False, failure=CopyFailed(failure))
                if (failure := failures.get(row.adapter_slot)) is not None
                else next(computed)
                for row in batch.rows
            ]
            outcome = replace(outcome, rows=tuple(rows))
        done(outcome)

    return replace(batch, rows=kept, is_side_batch=batch.is_side_batch and bool(kept)), with_failures


def _whole_images_only() -> AssertionError:
    return AssertionError("Limits.streamed_batches is 0: adapters are loaded from complete images in host memory")


def _tried(job: Callable[[], T]) -> T | Exception:
    try:
        return job()
    except Exception as error:
        return error


def _raised(outcome: T | Exception) -> T:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _nothing() -> None:
    """A job that makes the launching thread poll."""


def _raise_priority() -> None:
    """Raises the thread's priority, where the system allows it."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except OSError:
        log.debug("the launching thread keeps its priority")
