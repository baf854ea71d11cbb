"""Backends that the stages ask: CUDA's over a rig's device, and the CPU's as the judge."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.gpu.rig import Rig
from caraserve.bench.synthetic import Shape, llama_config, write_adapters, write_model
from caraserve.core.backend import Backend
from caraserve.core.lora_layout import ALIGN_BYTES, AdapterSpec, HostAdapter, lay_out
from caraserve.cpu.weights import folder_reader, load_model
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.forward.builder import GpuDevice, GpuSizes
from caraserve.gpu.weights import TORCH_DTYPES, Fill, dummy, from_reader, load
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec, load_spec, parse_spec
from caraserve.profiling.microbench import random_adapter
from caraserve.util.units import align_up

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
        """All adapters, in a host tier."""
        found, at = [], 0
        for path in self.adapters:
            size = inspect_adapter(path, self.spec).num_bytes
            found.append(read_adapter(path, self.spec, memory[at : at + size]))
            at = align_up(at + size, ALIGN_BYTES)
        return found


@contextmanager
def cpu_backend(model: TinyModel, slots: int, adapter_slots: int, step_tokens: int) -> Iterator[Backend]:
    """The judge: Numba's kernels, held against transformers and peft in tests."""
    from caraserve.cpu.backend import CpuBackend, CpuSizes  # compiles kernels: not when this file is imported

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
    rig: Rig,
    spec: ModelSpec,
    dtype: Dtype,
    sizes: GpuSizes,
    *,
    folder: Path | None = None,
    device: GpuDevice | None = None,
    warm: bool = True,
) -> Iterator[CudaBackend]:
    """Weights are those of `folder`, or random. `device`: in the place of the rig's. `warm`: graphs are captured."""
    used = rig.open(dtype)[0] if device is None else device
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
    """Of a Llama-shaped model that is on no disk."""
    return parse_spec(llama_config(shape, max_position))


def synthetic_adapter(
    spec: ModelSpec, dtype: Dtype, rank: int, sites: Sequence[str], memory: NDArray[np.uint8]
) -> HostAdapter:
    """One with random weights at the front of `memory`."""
    spans, ends = lay_out(spec, dtype, {(layer, site): (rank, 1.0) for layer in range(spec.layers) for site in sites})
    digest = hashlib.sha256(f"synthetic {dtype.name} {rank} {sites}".encode()).hexdigest()
    return random_adapter(spec, AdapterSpec(digest, dtype, rank, tuple(sites), ends, spans), memory)
