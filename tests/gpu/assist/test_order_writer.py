"""Work orders of a chunk: each worker's rows of x and deltas have a place of their own, in every dtype."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caraserve.bench.gpu.backends import shape_spec
from caraserve.bench.synthetic import Shape
from caraserve.core.lora_layout import GROUPS
from caraserve.cpu import handoff
from caraserve.gpu.assist.handshake import SyncSlot, WorkerStatus
from caraserve.gpu.assist.order_writer import WorkOrderWriter
from caraserve.gpu.assist.work_orders import work_order_bytes
from caraserve.gpu.forward.lanes import ASSISTED_CHUNK_TOKENS, AssistedChunk
from caraserve.gpu.memory.adapters import RegisteredMemory
from caraserve.gpu.memory.host_memory import HostRegion, delta_bytes, x_bytes, x_stride
from caraserve.gpu.memory.link_queue import LoraSource
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES
from caraserve.profiling.microbench import adapter_spec

LAYERS, WORKERS, ON_DEVICE = 2, 3, 1 << 40
SPEC = shape_spec(Shape(hidden=96, layers=LAYERS, intermediate=160, vocab=64, heads=6, kv_heads=2), 64)
GROUPS_OF_ALL = range(len(GROUPS))
HEAD_BYTES, TASK_HEAD_BYTES = work_order_bytes(0), work_order_bytes(1) - work_order_bytes(0) - handoff.SLICE_BYTES


def overlaps(spans: list[tuple[int, int]]) -> bool:
    ordered = sorted(spans)
    return any(end > start for (_, end), (start, _) in pairwise(ordered))


@pytest.mark.parametrize("dtype", Dtype)
def test_each_worker_has_its_own_rows(dtype: Dtype) -> None:
    region = HostRegion(SPEC, dtype, WORKERS, (4096, 4096), 4096, 1, (64, 64), 1 << 20)
    try:
        check_rows(region, dtype)
    finally:
        region.region.close()


def check_rows(region: HostRegion, dtype: Dtype) -> None:
    memory, buffers = RegisteredMemory(region.region.base, ON_DEVICE), region.hand_off_buffers[1]
    adapter: Any = SimpleNamespace(spec=adapter_spec(SPEC, Dtype.F16, 8, LAYERS, SITES), data=region.arena)
    slot = SyncSlot.at(buffers.sync_slot, LAYERS * len(GROUPS))
    chunk = AssistedChunk(1, slot, [LoraSource.WORKERS] * LAYERS, [GROUPS_OF_ALL] * LAYERS, (8, 16), 5)
    statuses = [WorkerStatus(worker, 1, is_idle=True) for worker in range(WORKERS)]
    writer = WorkOrderWriter(SPEC, region, memory, dtype)
    written = writer.write(chunk, adapter, ASSISTED_CHUNK_TOKENS, statuses, lambda rank: 1)
    assert [order.index for order in written] == list(range(LAYERS * len(GROUPS)))
    for order in written:
        group = order.index % len(GROUPS)
        outputs = sum(SPEC.site_shape(site)[1] for site in GROUPS[group])
        assert order.answer_bytes == dtype.itemsize * ASSISTED_CHUNK_TOKENS * outputs
        tasks = order.words[HEAD_BYTES // 8 :].reshape(WORKERS, -1)
        slices = tasks[:, TASK_HEAD_BYTES // 8 :]
        rows = slices[:, handoff.SLICE_ROWS]
        assert rows.sum() == ASSISTED_CHUNK_TOKENS
        assert (slices[:, handoff.SLICE_DTYPE] == dtype.value).all()
        assert (slices[:, handoff.SLICE_X_STRIDE] == dtype.itemsize * x_stride(SPEC, group)).all()
        assert (tasks[:, 5] == slices[:, handoff.SLICE_Y] + ON_DEVICE).all()  # where the device reads the deltas
        for word, stride, area, num_bytes in (
            (handoff.SLICE_X, handoff.SLICE_X_STRIDE, buffers.x, x_bytes(SPEC, dtype)),
            (handoff.SLICE_Y, handoff.SLICE_Y_STRIDE, buffers.deltas, delta_bytes(SPEC, dtype)),
        ):
            check_places(slices[:, word], rows * slices[:, stride], area, num_bytes)
        if dtype is not Dtype.F32:
            wide = rows * 4 * x_stride(SPEC, group)
            check_places(slices[:, handoff.SLICE_WIDE_X], wide, buffers.wide_x, x_bytes(SPEC, Dtype.F32))


def check_places(starts: np.ndarray, sizes: np.ndarray, area: int, num_bytes: int) -> None:
    spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
    assert not overlaps(spans)
    assert min(spans)[0] == area
    assert max(spans)[1] <= area + num_bytes
