"""How often the team meets in a layer of attention and MLP, as caraserve/cpu/forward.py says."""

import ctypes
from dataclasses import replace

import pytest

from caraserve.cpu.backend import CpuBackend
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import MeasuredBackend
from tests.plans.cpu import backend_of
from tests.plans.driving import greedy, make_adapter
from tests.plans.made_up import PLANS, Tensors


def meetings(backend: CpuBackend) -> int:
    """Returns how often the team has met: the barrier's generation."""
    return ctypes.c_int64.from_address(int(backend._buffers.record["barrier"][0]) + 64).value


def of_an_iteration(plan: DecoderPlan, dtype: Dtype, has_adapter: bool) -> int:
    backend = backend_of(plan, Tensors(), dtype=dtype, threads=2)
    try:
        adapter, _ = make_adapter(plan, backend.host_memory)
        MeasuredBackend(backend).load(adapter, 1)
        before = meetings(backend)
        greedy(backend, [3, 1, 4], adapter=int(has_adapter), count=1)
        return meetings(backend) - before
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("dtype", "has_adapter", "expected"),
    [(Dtype.F32, False, 8), (Dtype.BF16, False, 10), (Dtype.F32, True, 12), (Dtype.BF16, True, 12)],
)
def test_barriers_of_a_layer(dtype: Dtype, has_adapter: bool, expected: int) -> None:
    plan = PLANS["sandwich"]()
    shorter = replace(plan, layers=plan.layers[:-1], layer_scalars=plan.layer_scalars[:-1])
    counts = [of_an_iteration(one, dtype, has_adapter) for one in (plan, shorter)]
    assert counts[0] - counts[1] == expected
