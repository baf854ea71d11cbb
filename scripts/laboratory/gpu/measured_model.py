"""Times iterations of a model with random weights: decode, prefill, and what they cost the host."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from caraserve.bench.synthetic import Shape, shape_plan
from caraserve.core.batch import Batch, ScheduledRow
from caraserve.core.lora_layout import ALIGN_BYTES, AdapterSpec, HostAdapter
from caraserve.core.machine_profile import Targets
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.builder import GpuSizes
from caraserve.gpu.driver.device import GpuDevice
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import adapter_spec, random_adapter, target_sets
from caraserve.util.units import align_up
from scripts.laboratory.gpu.backends import DTYPE, cuda_backend
from scripts.laboratory.gpu.session import Prompt, Session, tokens
from scripts.laboratory.gpu.setup import CheckSetup

_THREADS = "caraserve-"  # the first part of the names of a backend's threads
_SETTLING = 2  # first iterations that are not counted: they start before later ones are queued
_SWITCH_S = 0.0005  # Python's thread switch interval, as the server sets it
_KV_SHARE = 0.8  # of the memory pool; the rest is for adapters


class MeasuredModel:
    """A backend, its session and its host memory, for timing iterations of requests with filled contexts."""

    def __init__(self, setup: CheckSetup, backend: CudaBackend, plan: DecoderPlan, context: int) -> None:
        self.setup, self.backend, self.plan = setup, backend, plan
        self.session = Session(backend, context)
        self._host_at = 0

    def adapter(self, rank: int, targets: Targets) -> HostAdapter | None:
        """Puts a new random adapter into host memory; returns None when there is no room left."""
        names = target_sets(self.plan)[targets]
        return self.put(adapter_spec(self.plan, DTYPE, rank, len(self.plan.layers), names))

    def put(self, spec: AdapterSpec) -> HostAdapter | None:
        """Puts a new random adapter with this spec into host memory; returns None when there is no room left."""
        memory = self.backend.host_memory[self._host_at :]
        if memory.nbytes < spec.num_bytes:
            return None
        self._host_at += align_up(spec.num_bytes, ALIGN_BYTES)
        return random_adapter(self.plan, spec, memory)

    def forget_adapters(self) -> None:
        """Lets later adapters overwrite the host memory of these. None of these may still be on the device."""
        self._host_at = 0

    def grow_contexts(self, slots: int) -> int:
        """Grows the KV cache for up to `slots` requests of the session's longest context, and leaves room for
        adapters; returns for how many it has room."""
        limits = self.backend.limits
        assert limits.shared is not None
        each = (self.session.context // limits.block_tokens + 1) * limits.shared.block_bytes
        most = max(1, min(slots, int(_KV_SHARE * limits.shared.num_bytes) // each))
        self.session.grow_kv(most)
        return most

    def fill(self, slots: Sequence[int], context: int) -> list[float]:
        """Prefills a request of `context` tokens in each slot, in the largest chunks; returns the ms of each chunk."""
        most, times_ms = self.backend.limits.max_step_tokens, list[float]()
        for slot in slots:
            prompt = Prompt(slot, tokens(context, self.plan.vocab_size, slot))
            starts = range(0, context, most)
            rows = [ScheduledRow(slot, at, min(most, context - at), 0, samples=False) for at in starts]
            first, *rest = rows
            ended = self.session.run(self.session.started([prompt], [first]), *(Batch((), (), (row,)) for row in rest))
            times_ms += [1000 * (each.result.done_s - each.result.started_s) for each in ended]
        return times_ms

    def decode_ms(self, context: int, adapters: Sequence[int]) -> float:
        """Returns the median time of a decode iteration with one request per given adapter slot, all at `context`."""
        rows = tuple(
            ScheduledRow(slot, context, 1, adapter, samples=True) for slot, adapter in enumerate(sorted(adapters))
        )
        plan = Batch((), (), rows)
        ended = self.session.run(*[plan] * (self.setup.effort.decodes + _SETTLING))[_SETTLING:]
        return median(1000 * (each.result.done_s - each.result.started_s) for each in ended)

    def host_us(self, context: int, adapters: Sequence[int]) -> dict[str, float]:
        """Returns the CPU time in µs that each of the backend's threads spends on a decode iteration as in
        `decode_ms`, by the thread's name."""
        before_s, count = _cpu_s(), self.setup.effort.decodes + _SETTLING
        self.decode_ms(context, adapters)
        return {name: 1e6 * (cpu_s - before_s.get(name, 0.0)) / count for name, cpu_s in _cpu_s().items()}

    def prefill_ms(self, count: int, adapter: int, slot: int = 0) -> float:
        """Returns the median time of an iteration that prefills a prompt of `count` tokens."""
        plan = self.prompt_batch(count, adapter, slot)
        repeats = self.setup.effort.cold_repeats
        return median(
            1000 * (each.result.done_s - each.result.started_s)
            for _ in range(repeats)
            for each in self.session.run(plan)
        )

    def prompt_batch(self, count: int, adapter: int, slot: int, *, is_side_batch: bool = False) -> Batch:
        """Returns a batch that starts a new request in `slot` and prefills its whole prompt of `count` tokens."""
        prompt = Prompt(slot, tokens(count, self.plan.vocab_size, 1), adapter)
        return self.session.started(
            [prompt],
            [ScheduledRow(slot, 0, count, adapter, samples=True, assist=is_side_batch)],
            is_side_batch=is_side_batch,
        )


@contextmanager
def measured_model(
    setup: CheckSetup,
    slots: int,
    context: int,
    adapter_slots: int,
    *,
    shape: Shape | None = None,
    workers: int = 0,
    device: GpuDevice | None = None,
) -> Iterator[MeasuredModel]:
    """Yields a backend with random weights, set up for up to `workers` LoRA workers.

    `shape` and `device` replace the setup's.
    """
    plan = shape_plan(shape or setup.effort.shape, max(4096, context + 64))
    sizes = measured_sizes(setup, slots, context, adapter_slots, workers)
    with cuda_backend(setup, plan, DTYPE, sizes, device=device) as backend:
        yield MeasuredModel(setup, backend, plan, context)


def measured_sizes(setup: CheckSetup, slots: int, context: int, adapter_slots: int, workers: int = 0) -> GpuSizes:
    """Returns the sizes of the backend of `measured_model`."""
    return GpuSizes(
        num_slots=slots,
        adapter_slots=adapter_slots,
        max_step_tokens=max(*setup.effort.prompts, max(setup.effort.cold_prompts) + slots),
        max_context=context + 16,
        memory_utilization=0.85,
        host_bytes=setup.effort.host_bytes,
        pool_bytes=setup.effort.model_pool_bytes,
        graph_bytes=setup.effort.graph_bytes,
        lora_cpus=setup.cores(workers) if workers else (),
    )


@contextmanager
def busy_python_thread() -> Iterator[None]:
    """Runs Python in another thread, which never waits, as an event loop under full load: the launching thread has to
    win the interpreter's lock after each call of the driver."""
    before_s, stop = sys.getswitchinterval(), threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    sys.setswitchinterval(_SWITCH_S)
    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before_s)


def _cpu_s() -> dict[str, float]:
    """Returns the CPU time of the backend's threads so far in s, by name."""
    return {
        thread.name.removeprefix(_THREADS): time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith(_THREADS) and thread.ident is not None
    }
