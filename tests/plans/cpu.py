"""Computes made-up decoders with the CPU backend."""

from caraserve.cpu.backend import CpuBackend, CpuSizes
from caraserve.cpu.structs import BLOCK_TOKENS
from caraserve.cpu.weights import load_model
from caraserve.model.dtype import Dtype
from caraserve.model.formats import TensorReader
from caraserve.model.plan import DecoderPlan
from tests.plans.driving import BLOCKS


def backend_of(
    plan: DecoderPlan,
    read: TensorReader,
    *,
    dtype: Dtype = Dtype.F32,
    kv_dtype: Dtype = Dtype.F32,
    threads: int = 1,
    adapter_slots: int = 3,
) -> CpuBackend:
    """Returns a backend for requests of up to 128 tokens."""
    sizes = CpuSizes(
        threads=threads,
        num_slots=2,
        adapter_slots=adapter_slots,
        max_step_tokens=128,
        max_context=128,
        kv_cache_bytes=plan.kv_bytes_per_token(kv_dtype.itemsize) * BLOCK_TOKENS * BLOCKS,
        kv_dtype=kv_dtype,
        host_bytes=4 << 20,
    )
    return CpuBackend(plan, load_model(plan, dtype, sizes.max_context, read, lambda: None), sizes)
