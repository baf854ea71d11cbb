"""The model whose speed is measured, with random weights, and adapters for it; shared by stages."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from caraserve.bench.gpu.backends import cuda_backend, shape_spec, synthetic_adapter
from caraserve.bench.gpu.rig import Rig
from caraserve.bench.gpu.session import Prompt, Session, tokens
from caraserve.core.batch import Batch, ScheduledRow
from caraserve.core.lora_layout import HostAdapter
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.forward.builder import GpuSizes
from caraserve.model.dtype import Dtype
from caraserve.model.spec import ModelSpec

DTYPE = Dtype.BF16
_THREADS = "caraserve-"  # begin the names of a backend's threads
_SETTLING = 2  # iterations that begin before those that count are queued


class Big:
    """A backend whose requests have contexts already."""

    def __init__(self, rig: Rig, backend: CudaBackend, spec: ModelSpec, context: int) -> None:
        self.rig, self.backend, self.spec = rig, backend, spec
        self.session = Session(backend, context)
        self._host_at = 0

    def adapter(self, rank: int, sites: Sequence[str]) -> HostAdapter | None:
        """In the host tier; None when there is no room left."""
        memory = self.backend.host_memory[self._host_at :]
        if memory.nbytes < 4 * rank * self.spec.num_parameters // self.spec.hidden:
            return None
        made = synthetic_adapter(self.spec, DTYPE, rank, sites, memory)
        self._host_at += made.spec.num_bytes + 64 - made.spec.num_bytes % 64
        return made

    def forget_adapters(self) -> None:
        """Their host memory is used again; none is on the device any more."""
        self._host_at = 0

    def fill(self, slots: int, context: int) -> None:
        """Computes the contexts of requests in the first slots, chunk by chunk."""
        most = self.backend.limits.max_step_tokens
        prompts = [Prompt(slot, tokens(context, self.spec.vocab_size, slot)) for slot in range(slots)]
        for prompt in prompts:
            ends = [*range(most, context, most), context]
            rows = [
                ScheduledRow(prompt.slot, end - (end - 1) % most - 1, (end - 1) % most + 1, 0, samples=False)
                for end in ends
            ]
            first, *rest = rows
            self.session.run(self.session.started([prompt], [first]), *(Batch((), (), (row,)) for row in rest))

    def decode_ms(self, context: int, adapters: Sequence[int]) -> float:
        """Median time of an iteration of one token for as many requests as adapter slots are given."""
        rows = tuple(
            ScheduledRow(slot, context, 1, adapter, samples=True) for slot, adapter in enumerate(sorted(adapters))
        )
        plan = Batch((), (), rows)
        ended = self.session.run(*[plan] * (self.rig.effort.decodes + _SETTLING))[_SETTLING:]
        return median(1000 * (each.result.done_s - each.result.started_s) for each in ended)

    def host_us(self, context: int, adapters: Sequence[int]) -> float:
        """CPU time that the backend's threads spend on such an iteration."""
        before_s, count = _cpu_s(), self.rig.effort.decodes + _SETTLING
        self.decode_ms(context, adapters)
        return 1e6 * (_cpu_s() - before_s) / count

    def prefill_ms(self, count: int, adapter: int, slot: int = 0) -> float:
        """Median time of a whole prompt in one iteration."""
        plan = self.prompt_plan(count, adapter, slot)
        repeats = self.rig.effort.cold_repeats
        return median(
            1000 * (each.result.done_s - each.result.started_s)
            for _ in range(repeats)
            for each in self.session.run(plan)
        )

    def prompt_plan(self, count: int, adapter: int, slot: int, *, is_side_batch: bool = False) -> Batch:
        """A new request in a slot, its prompt whole."""
        prompt = Prompt(slot, tokens(count, self.spec.vocab_size, 1), adapter)
        return self.session.started(
            [prompt],
            [ScheduledRow(slot, 0, count, adapter, samples=True, assist=is_side_batch)],
            is_side_batch=is_side_batch,
        )


@contextmanager
def big(rig: Rig, slots: int, context: int, adapter_slots: int, *, workers: int = 0) -> Iterator[Big]:
    """KV blocks for `slots` requests, as far as the device has room; the rest is for adapters."""
    spec = shape_spec(rig.effort.shape, max(4096, context + 64))
    sizes = GpuSizes(
        num_slots=slots,
        adapter_slots=adapter_slots,
        max_step_tokens=max(*rig.effort.prompts, max(rig.effort.cold_prompts) + slots),
        max_context=context + 16,
        memory_utilization=0.85,
        host_bytes=rig.effort.host_bytes,
        pool_bytes=rig.effort.model_pool_bytes,
        graph_bytes=rig.effort.graph_bytes,
        lora_cpus=rig.cores(workers) if workers else (),
    )
    with cuda_backend(rig, spec, DTYPE, sizes) as backend:
        yield Big(rig, backend, spec, context)


def _cpu_s() -> float:
    """CPU time so far of the backend's threads."""
    mine = [thread for thread in threading.enumerate() if thread.name.startswith(_THREADS) and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in mine)
