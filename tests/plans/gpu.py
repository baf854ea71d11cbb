"""Computes made-up decoders with the CUDA backend on an emulated device."""

import numpy as np
import torch
from torch import Tensor

from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.builder import GpuSizes
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.linear.base import SCALE, TORCH_CODES, Fill, ReadMatrix
from caraserve.gpu.weights import TORCH_DTYPES, load
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.formats import Matrix, TensorReader, WeightFormat
from caraserve.model.plan import DecoderPlan
from tests.gpu.host_device import host_device
from tests.plans.driving import BLOCK_TOKENS, BLOCKS

_CODES = {stored: code for code, stored in TORCH_CODES.items()}


def backend_of(
    plan: DecoderPlan,
    read: TensorReader,
    *,
    dtype: Dtype = Dtype.F32,
    merging: bool = False,
    with_graphs: bool = False,
    last: Lane | None = None,
) -> CudaBackend:
    """Returns a backend for requests of up to 128 tokens. Triton's kernels must have been replaced. `last`: lane that
    runs only when no other can."""
    device, _ = host_device(dtype, last=last)
    weights = load(plan, TORCH_DTYPES[dtype], 128, torch.device("cpu"), fill_from(read), read=matrices_of(read))
    sizes = GpuSizes(
        num_slots=2,
        adapter_slots=3,
        max_step_tokens=128,
        max_context=128,
        memory_utilization=0.5,
        host_bytes=4 << 20,
        graph_bytes=(1 << 30) * with_graphs,
        pool_bytes=(16 << 20) + 8 * BLOCKS * BLOCK_TOKENS * plan.kv_bytes_per_token(dtype.itemsize),
        merging=merging,
    )
    backend = CudaBackend(plan, weights, sizes, device)
    if with_graphs:
        backend.warm_up()
        assert not backend._parts.captured_graphs.failures
    return backend


def matrices_of(read: TensorReader) -> ReadMatrix:
    """Returns what reads weights in grouped codes from a reader's tensors."""

    def matrix(stored: WeightFormat, module: str, shape: tuple[int, ...]) -> Matrix:
        if len(shape) == 3:
            return stored.read_stacked(read, module, (shape[0], shape[1], shape[2]))
        return stored.read(read, module, (shape[0], shape[1]))

    return matrix


def fill_from(read: TensorReader) -> Fill:
    """Returns a Fill with the tensors of a reader."""

    def fill(name: str, target: Tensor) -> None:
        shape = tuple(target.shape)
        if target.dtype in _CODES:
            codes = torch.from_numpy(read.codes(name, shape, _CODES[target.dtype]))
            target.view(torch.uint8).copy_(codes)
        elif name.endswith(SCALE):
            target.copy_(torch.from_numpy(read.scales(name.removesuffix(f".weight{SCALE}"), len(target)).copy()))
        else:
            target.copy_(torch.from_numpy(np.ascontiguousarray(to_float32(*read(name, shape)))))

    return fill
