"""How often the team meets in a layer of attention and MLP, as caraserve/cpu/forward.py says; and how members wait."""

import ctypes
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from caraserve.core.lora_layout import aligned_bytes
from caraserve.cpu.backend import CpuBackend
from caraserve.cpu.barrier import BARRIER_BYTES, meet
from caraserve.cpu.jit import entry
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


@entry
def meet_often(barrier, team, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        meet(barrier, team)


def test_members_that_wait_for_long_sleep_and_all_go_on_when_the_last_one_has_come() -> None:
    words = aligned_bytes(BARRIER_BYTES).view(np.int64)
    words[:] = 0
    address = int(words.ctypes.data)
    meet_often(address, 1, 1)  # compiles
    waiting = [Thread(target=meet_often, args=(address, 3, 500)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    ends_s = time.monotonic() + 10
    while words[0] < 2 or not all(map(is_asleep, waiting)):
        assert time.monotonic() < ends_s, "they use a core"
    meet_often(address, 3, 500)
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()
    assert words[:: 64 // words.itemsize].tolist() == [0, 500, 0]


def is_asleep(thread: Thread) -> bool:
    """Returns whether the system has put a thread to sleep."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"
