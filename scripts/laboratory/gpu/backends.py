"""Backends for the stages: the CUDA backend under test, the CPU backend as reference, and the models that they run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.synthetic import write_adapters, write_model
from caraserve.core.backend import Backend
from caraserve.core.lora_layout import ALIGN_BYTES, HostAdapter
from caraserve.cpu.weights import load_model
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.builder import GpuSizes
from caraserve.gpu.checkpoint import load_checkpoint
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.memory.weight_transfer import TransferFigures
from caraserve.gpu.weights import TORCH_DTYPES, Weights, dummy, load
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.families import load_plan
from caraserve.model.folder_reader import FolderReader
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up
from scripts.laboratory.gpu.setup import TINY, CheckSetup

DTYPE = Dtype.BF16
_TINY_RANKS = (4, 8, 16, 24)
TINY_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model with random weights in fp32 and adapters of several ranks for it, on disk."""

    folder: Path
    adapters: tuple[Path, ...]

    @classmethod
    def write(cls, folder: Path) -> "TinyModel":
        plan = write_model(folder / "tiny", TINY, "float32", TINY_CONTEXT)
        paths = write_adapters(
            folder / "tiny-adapters",
            plan,
            count=len(_TINY_RANKS),
            ranks=_TINY_RANKS,
            targets=plan.targets,
            dtype="float32",
        )
        return cls(folder / "tiny", tuple(paths.values()))

    @property
    def plan(self) -> DecoderPlan:
        return load_plan(self.folder)

    def read(self, memory: NDArray[np.uint8]) -> list[HostAdapter]:
        """Reads all adapters into `memory`, one after another."""
        found, at = [], 0
        for path in self.adapters:
            size = inspect_adapter(path, self.plan).num_bytes
            found.append(read_adapter(path, self.plan, memory[at : at + size]))
            at = align_up(at + size, ALIGN_BYTES)
        return found


@contextmanager
def cpu_backend(model: TinyModel, slots: int, adapter_slots: int, step_tokens: int) -> Iterator[Backend]:
    """Yields a CPU backend as reference: tests compare its results with those of transformers and peft."""
    from caraserve.cpu.backend import CpuBackend, CpuSizes  # here, because this import compiles kernels

    plan = model.plan
    with FolderReader(model.folder) as read:
        loaded = load_model(plan, Dtype.F32, TINY_CONTEXT, read, lambda: None)
    sizes = CpuSizes(
        threads=1,
        num_slots=slots,
        adapter_slots=adapter_slots,
        max_step_tokens=step_tokens,
        max_context=TINY_CONTEXT,
        kv_cache_bytes=2 * slots * (TINY_CONTEXT + 32) * plan.kv_bytes_per_token(4),
        host_bytes=8 << 20,
    )
    backend = CpuBackend(plan, loaded, sizes)
    try:
        backend.warm_up()
        yield backend
    finally:
        backend.close()


@contextmanager
def cuda_backend(
    setup: CheckSetup,
    plan: DecoderPlan,
    dtype: Dtype,
    sizes: GpuSizes,
    *,
    folder: Path | None = None,
    weights: Weights | None = None,
    device: GpuDevice | None = None,
    warm: bool = True,
) -> Iterator[CudaBackend]:
    """Yields a CUDA backend with `weights`, with those in `folder`, or with random ones if both are None.

    `device` replaces the setup's device. With `warm`, all CUDA graphs are captured first.
    """
    used = setup.open(dtype)[0] if device is None else device
    used.enter_thread()
    if weights is None and folder is not None:
        weights, _ = load_folder(folder, plan, dtype, sizes, used)
    elif weights is None:
        weights = load(plan, TORCH_DTYPES[dtype], sizes.max_context, used.device, dummy(0, used.device))
    backend = CudaBackend(plan, weights, sizes, used)
    try:
        if warm:
            backend.warm_up()
            backend.capture_late_graphs()
        yield backend
    finally:
        backend.close()


def load_folder(
    folder: Path, plan: DecoderPlan, dtype: Dtype, sizes: GpuSizes, device: GpuDevice
) -> tuple[Weights, TransferFigures]:
    """Loads a checkpoint to the device, which has been entered, and measures that."""
    return load_checkpoint(folder, device, partial(load, plan, TORCH_DTYPES[dtype], sizes.max_context))
