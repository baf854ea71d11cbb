"""Stage `build`: compiles and loads all kernels; later stages use the compiled ones."""

import time
from dataclasses import replace

from caraserve.bench.gpu.backends import DTYPE, cuda_backend, shape_spec
from caraserve.bench.gpu.results import StageResult
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.gpu.driver.modules import CudaKernels
from caraserve.gpu.forward.builder import GpuSizes
from caraserve.model.dtype import Dtype

_LAYERS = 1  # all layers use the same kernels
_CONTEXT = 512


def build(setup: CheckSetup) -> StageResult:
    """Compiles the raw CUDA kernels for each dtype, and Triton's by warming up a one-layer model of full width."""
    result = StageResult()
    for dtype in Dtype:
        started_s = time.monotonic()
        device, _ = setup.open(dtype)
        spent_s = time.monotonic() - started_s
        figures: dict[str, object] = {"s": spent_s}
        if isinstance(device.kernels, CudaKernels):
            figures["registers"] = device.kernels.registers
        result.figures[dtype.name.lower()] = figures
    raw_s = sum(each["s"] for each in result.figures.values())
    result.add_line("raw kernels, three types, no spills", f"{raw_s:.1f} s")
    started_s = time.monotonic()
    spec = shape_spec(replace(setup.effort.shape, layers=_LAYERS), 2 * _CONTEXT)
    sizes = GpuSizes(
        num_slots=2,
        adapter_slots=2,
        max_step_tokens=16,
        max_context=_CONTEXT,
        memory_utilization=0.85,
        host_bytes=1 << 20,
        pool_bytes=64 << 20,
        graph_bytes=setup.effort.graph_bytes,
    )
    with cuda_backend(setup, spec, DTYPE, sizes):
        result.figures["triton_s"] = time.monotonic() - started_s
    result.add_line("Triton's kernels for a large model", f"{result.figures['triton_s']:.1f} s")
    return result
