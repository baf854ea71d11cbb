"""Backends for the stages: the CUDA backend under test, the CPU backend as reference, and the models that they run."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.gpu.session import Prompt, Session, tokens
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.bench.synthetic import Shape, llama_config, write_adapters, write_model
from caraserve.core.backend import Backend
from caraserve.core.batch import Batch, ScheduledRow
from caraserve.core.lora_layout import ALIGN_BYTES, HostAdapter
from caraserve.cpu.weights import folder_reader, load_model
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.forward.builder import GpuDevice, GpuSizes
from caraserve.gpu.weights import TORCH_DTYPES, Fill, dummy, from_reader, load
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec, load_spec, parse_spec
from caraserve.profiling.microbench import adapter_spec, random_adapter
from caraserve.util.units import align_up

DTYPE = Dtype.BF16
_THREADS = "caraserve-"  # the first part of the names of a backend's threads
_SETTLING = 2  # first iterations that are not counted: they start before later ones are queued
TINY = Shape(hidden=64, layers=2, intermediate=96, vocab=512, heads=4, kv_heads=2)
_TINY_RANKS = (4, 8, 16, 24)
TINY_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model with random weights in fp32 and adapters of several ranks for it, on disk."""

    folder: Path
    adapters: tuple[Path, ...]

    @classmethod
    def write(cls, folder: Path) -> "TinyModel":
        spec = write_model(folder / "tiny", TINY, "float32", TINY_CONTEXT)
        paths = write_adapters(
            folder / "tiny-adapters",
            spec,
            count=len(_TINY_RANKS),
            ranks=_TINY_RANKS,
            targets=SITES,
            dtype="float32",
        )
        return cls(folder / "tiny", tuple(paths.values()))

    @property
    def spec(self) -> ModelSpec:
        return load_spec(self.folder)

    def read(self, memory: NDArray[np.uint8]) -> list[HostAdapter]:
        """Reads all adapters into `memory`, one after another."""
        found, at = [], 0
        for path in self.adapters:
            size = inspect_adapter(path, self.spec).num_bytes
            found.append(read_adapter(path, self.spec, memory[at : at + size]))
            at = align_up(at + size, ALIGN_BYTES)
        return found


@contextmanager
def cpu_backend(model: TinyModel, slots: int, adapter_slots: int, step_tokens: int) -> Iterator[Backend]:
    """Yields a CPU backend as reference: tests compare its results with those of transformers and peft."""
    from caraserve.cpu.backend import CpuBackend, CpuSizes  # here, because this import compiles kernels

    spec = model.spec
    loaded = load_model(spec, Dtype.F32, TINY_CONTEXT, folder_reader(model.folder), lambda: None)
    sizes = CpuSizes(
        threads=1,
        num_slots=slots,
        adapter_slots=adapter_slots,
        max_step_tokens=step_tokens,
        max_context=TINY_CONTEXT,
        kv_cache_bytes=2 * slots * (TINY_CONTEXT + 32) * spec.kv_bytes_per_token(4),
        host_bytes=8 << 20,
    )
    backend = CpuBackend(spec, loaded, sizes)
    try:
        backend.warm_up()
        yield backend
    finally:
        backend.close()


@contextmanager
def cuda_backend(
    setup: CheckSetup,
    spec: ModelSpec,
    dtype: Dtype,
    sizes: GpuSizes,
    *,
    folder: Path | None = None,
    device: GpuDevice | None = None,
    warm: bool = True,
) -> Iterator[CudaBackend]:
    """Yields a CUDA backend with the weights in `folder`, or random ones if it is None.

    `device` replaces the setup's device. With `warm`, CUDA graphs are captured first.
    """
    used = setup.open(dtype)[0] if device is None else device
    used.enter_thread()
    fill: Fill = dummy(0, used.device) if folder is None else from_reader(folder_reader(folder), used.device)
    weights = load(spec, TORCH_DTYPES[dtype], sizes.max_context, used.device, fill)
    backend = CudaBackend(spec, weights, sizes, used)
    try:
        if warm:
            backend.warm_up()
        yield backend
    finally:
        backend.close()


def shape_spec(shape: Shape, max_position: int) -> ModelSpec:
    """Returns the specification of a Llama-shaped model that is not on disk."""
    return parse_spec(llama_config(shape, max_position))


class MeasuredModel:
    """A backend, its session and its host memory, for timing iterations of requests with filled contexts."""

    def __init__(self, setup: CheckSetup, backend: CudaBackend, spec: ModelSpec, context: int) -> None:
        self.setup, self.backend, self.spec = setup, backend, spec
        self.session = Session(backend, context)
        self._host_at = 0

    def adapter(self, rank: int, sites: Sequence[str]) -> HostAdapter | None:
        """Puts a new random adapter into host memory; returns None when there is no room left."""
        memory = self.backend.host_memory[self._host_at :]
        if memory.nbytes < 4 * rank * self.spec.num_parameters // self.spec.hidden:
            return None
        made = random_adapter(self.spec, adapter_spec(self.spec, DTYPE, rank, self.spec.layers, sites), memory)
        self._host_at += made.spec.num_bytes + 64 - made.spec.num_bytes % 64
        return made

    def forget_adapters(self) -> None:
        """Lets later adapters overwrite the host memory of these. None of these may still be on the device."""
        self._host_at = 0

    def fill(self, slots: int, context: int) -> None:
        """Prefills a request of `context` tokens in each of the first `slots` slots, in chunks."""
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
        """Returns the median time of a decode iteration with one request per given adapter slot, all at `context`."""
        rows = tuple(
            ScheduledRow(slot, context, 1, adapter, samples=True) for slot, adapter in enumerate(sorted(adapters))
        )
        plan = Batch((), (), rows)
        ended = self.session.run(*[plan] * (self.setup.effort.decodes + _SETTLING))[_SETTLING:]
        return median(1000 * (each.result.done_s - each.result.started_s) for each in ended)

    def host_us(self, context: int, adapters: Sequence[int]) -> float:
        """Returns the CPU time in µs that the backend's threads spend on a decode iteration as in `decode_ms`."""
        before_s, count = _cpu_s(), self.setup.effort.decodes + _SETTLING
        self.decode_ms(context, adapters)
        return 1e6 * (_cpu_s() - before_s) / count

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
        prompt = Prompt(slot, tokens(count, self.spec.vocab_size, 1), adapter)
        return self.session.started(
            [prompt],
            [ScheduledRow(slot, 0, count, adapter, samples=True, assist=is_side_batch)],
            is_side_batch=is_side_batch,
        )


@contextmanager
def measured_model(
    setup: CheckSetup, slots: int, context: int, adapter_slots: int, *, workers: int = 0
) -> Iterator[MeasuredModel]:
    """Yields a backend with random weights of the setup's shape, set up for up to `workers` LoRA workers."""
    spec = shape_spec(setup.effort.shape, max(4096, context + 64))
    sizes = GpuSizes(
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
    with cuda_backend(setup, spec, DTYPE, sizes) as backend:
        yield MeasuredModel(setup, backend, spec, context)


def _cpu_s() -> float:
    """Returns the CPU time of the backend's threads so far, in s."""
    mine = [thread for thread in threading.enumerate() if thread.name.startswith(_THREADS) and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in mine)
