"""A part of stage `startup`: starts a backend in a new process, and measures time and device memory."""

import time
from dataclasses import dataclass, replace

from caraserve.bench.synthetic import shape_spec
from caraserve.gpu.builder import GpuSizes
from caraserve.gpu.memory.weight_transfer import TransferFigures
from caraserve.model.spec import ModelSpec
from scripts.laboratory.gpu.backends import DTYPE, cuda_backend, load_folder
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

CHECKPOINT = "checkpoint"
_LAYERS = 2
_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class StartFigures:
    """One start with compiled kernels on disk. The model has few layers, so all but the weights is the part of a start
    that does not depend on a model's size."""

    open_s: float  # device and raw kernels
    weights: TransferFigures  # of the weights' way from the page cache to the device
    warm_up_s: float  # backend, Triton's kernels, graphs
    device_bytes: int  # in use on the device at the end, by this and all other processes


def start_once(setup: CheckSetup) -> StageResult[StartFigures]:
    """Starts and warms up a backend once, with the weights in folder CHECKPOINT beside the setup's."""
    started_s = time.monotonic()
    device = setup.open(DTYPE)[0]
    opened_s = time.monotonic()
    spec = model_spec(setup)
    sizes = GpuSizes(
        num_slots=max(setup.effort.batches),
        adapter_slots=4,
        max_step_tokens=max(setup.effort.prompts),
        max_context=_CONTEXT,
        memory_utilization=0.85,
        host_bytes=1 << 20,
        pool_bytes=64 << 20,
        graph_bytes=setup.effort.graph_bytes,
    )
    device.enter_thread()
    weights, transfer = load_folder(setup.folder.with_name(CHECKPOINT), spec, DTYPE, sizes, device)
    loaded_s = time.monotonic()
    with cuda_backend(setup, spec, DTYPE, sizes, weights=weights, device=device):
        ready_s = time.monotonic()
        used = device.driver.total_bytes() - device.driver.free_bytes()
    return StageResult(StartFigures(opened_s - started_s, transfer, ready_s - loaded_s, used), Lines().all)


def model_spec(setup: CheckSetup) -> ModelSpec:
    """Returns the model that is started."""
    return shape_spec(replace(setup.effort.shape, layers=_LAYERS), 2 * _CONTEXT)
