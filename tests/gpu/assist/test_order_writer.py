"""Work orders of a chunk: each worker's rows of x and deltas have a place of their own, in every dtype."""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caraserve.core.lora_layout import PANEL
from caraserve.cpu import handoff
from caraserve.gpu.assist.lane import AssistedChunk
from caraserve.gpu.assist.order_writer import ChunkOrders, WorkOrderWriter
from caraserve.gpu.kernels.work_orders import work_order_bytes
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS, HostRegion, delta_bytes, x_bytes, x_stride
from caraserve.gpu.memory.link_queue import LoraSource
from caraserve.gpu.memory.registered_memory import RegisteredMemory
from caraserve.gpu.memory.sync_slots import SyncSlot
from caraserve.model.dtype import Dtype
from caraserve.profiling.microbench import adapter_spec
from scripts.laboratory.gpu.null_device import NullDriver
from tests.gpu.small_model import mixed_plan

WORKERS, ON_DEVICE = 3, 1 << 40
READY, GENERATION = (8, 16), 77
PLAN = mixed_plan()
LAYERS, GROUPS = len(PLAN.layers), range(PLAN.most_groups)
ADAPTER = adapter_spec(PLAN, Dtype.F16, 8, LAYERS)
HEAD_BYTES, TASK_HEAD_BYTES = work_order_bytes(0), work_order_bytes(1) - work_order_bytes(0) - handoff.SLICE_BYTES


def overlaps(spans: list[tuple[int, int]]) -> bool:
    ordered = sorted(spans)
    return any(end > start for (_, end), (start, _) in pairwise(ordered))


@pytest.fixture
def region(dtype: Dtype) -> Iterator[HostRegion]:
    made = HostRegion(PLAN, dtype, WORKERS, (4096, 4096), 4096, 1, (64, 64), 1 << 20)
    yield made
    made.region.close()


class FarDriver(NullDriver):
    """Maps host memory to another address."""

    def register_host(self, host_address: int, num_bytes: int) -> int:
        return ON_DEVICE


def write(
    region: HostRegion, dtype: Dtype, sources: Sequence[LoraSource], groups: Sequence[Collection[int]], idle: int
) -> ChunkOrders:
    """Writes the work orders of a chunk in the second sync slot, `idle` of whose workers are idle, twice."""
    memory = RegisteredMemory(FarDriver(), region.region, region.region.num_bytes)
    buffers = region.hand_off_buffers[1]
    adapter: Any = SimpleNamespace(spec=ADAPTER, data=region.arena)
    slot = SyncSlot.at(buffers.sync_slot, len(GROUPS) * LAYERS, GENERATION)
    chunk = AssistedChunk(1, slot, sources, groups, READY, 5)
    writer = WorkOrderWriter(PLAN, region, memory, dtype)
    writer.write(chunk, adapter, ASSISTED_CHUNK_TOKENS, range(idle), lambda rank: 1)
    return writer.write(chunk, adapter, ASSISTED_CHUNK_TOKENS, range(idle), lambda rank: 1)


@pytest.mark.parametrize("dtype", Dtype)
def test_each_worker_has_its_own_rows(region: HostRegion, dtype: Dtype) -> None:
    buffers = region.hand_off_buffers[1]
    written = write(region, dtype, [LoraSource.WORKERS] * LAYERS, [GROUPS] * LAYERS, WORKERS)
    outputs = sum(site.outputs for layer in PLAN.layers for site in layer.sites)
    assert written.answer_bytes == dtype.itemsize * ASSISTED_CHUNK_TOKENS * outputs
    assert written.slices == len(GROUPS) * LAYERS * WORKERS
    for group, layer in product(GROUPS, range(LAYERS)):
        stride = x_stride(PLAN.layers[layer].groups[group].shape)
        tasks = written.words[group, layer, HEAD_BYTES // 8 :].reshape(WORKERS, -1)
        slices = tasks[:, TASK_HEAD_BYTES // 8 :]
        rows = slices[:, handoff.SLICE_ROWS]
        assert rows.sum() == ASSISTED_CHUNK_TOKENS
        assert (slices[:, handoff.SLICE_DTYPE] == dtype.value).all()
        assert (slices[:, handoff.SLICE_X_STRIDE] == dtype.itemsize * stride).all()
        assert (tasks[:, 5] == slices[:, handoff.SLICE_Y] + ON_DEVICE).all()  # where the device reads the deltas
        for word, pitch, area, num_bytes in (
            (handoff.SLICE_X, handoff.SLICE_X_STRIDE, buffers.x, x_bytes(PLAN, dtype)),
            (handoff.SLICE_Y, handoff.SLICE_Y_STRIDE, buffers.deltas, delta_bytes(PLAN, dtype)),
        ):
            check_places(slices[:, word], rows * slices[:, pitch], area, num_bytes)
        if dtype is not Dtype.F32:
            wide = rows * 4 * stride
            check_places(slices[:, handoff.SLICE_WIDE_X], wide, buffers.wide_x, x_bytes(PLAN, Dtype.F32))


@pytest.mark.parametrize("dtype", [Dtype.F16])
def test_slices_name_the_sites_of_their_layers_group(region: HostRegion, dtype: Dtype) -> None:
    """Sites have other indices, and groups other sites, in other layers. Parts of a fused module share A."""
    written = write(region, dtype, [LoraSource.WORKERS] * LAYERS, [GROUPS] * LAYERS, 1)
    arena = region.region.offset(int(region.arena.ctypes.data))
    for layer, one in enumerate(PLAN.layers):
        for group in one.groups:
            words = written.words[group.index, layer, (HEAD_BYTES + TASK_HEAD_BYTES) // 8 :]
            assert words[handoff.SLICE_SITES] == len(group.sites)
            sites = words[handoff.SLICE_HEAD_BYTES // 8 : handoff.SLICE_BYTES // 8]
            listed = sites.reshape(-1, handoff.SITE_BYTES // 8)[: len(group.sites)]
            of_layer = [span for span in ADAPTER.spans if span.layer == layer]
            spans = [span for span in of_layer if one.sites[span.site].group == group.index]
            assert [entry[:2].tolist() for entry in listed] == [
                [arena + span.a_offset, arena + span.b_offset] for span in spans
            ]
            columns = [dtype.itemsize * column for column in group.columns(PANEL)]
            assert listed[:, handoff.SITE_COLUMN_BYTES].tolist() == columns


def check_places(starts: np.ndarray, sizes: np.ndarray, area: int, num_bytes: int) -> None:
    spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
    assert not overlaps(spans)
    assert min(spans)[0] == area
    assert max(spans)[1] <= area + num_bytes


@pytest.mark.parametrize("dtype", [Dtype.F32])
def test_workers_are_asked_for_the_layers_whose_source_they_are(region: HostRegion, dtype: Dtype) -> None:
    """The device waits for the weights of the other layers, and for nothing where the adapter has no module."""
    sources = [LoraSource.WAIT, LoraSource.WORKERS]
    written = write(region, dtype, sources, [{0, 2}, {0, 3}], idle=2)
    assert written.slices == 2 * 2
    for group, layer in product(GROUPS, range(LAYERS)):
        order = written.words[group, layer]
        if group not in ({0, 2}, {0, 3})[layer]:
            assert not order.any()
            continue
        tasks, _, rows, _, ready, wanted, status, generation, x_flag, y_flag, x = order[:11].tolist()
        assert (ready, wanted, generation) == (READY[layer], 5, GENERATION)
        assert status == ON_DEVICE + region.hand_off_buffers[1].sync_slot
        if layer == 0:
            assert (tasks, rows, x_flag, y_flag, x) == (0, 0, 0, 0, 0)
        else:
            assert (tasks, rows) == (2, ASSISTED_CHUNK_TOKENS)
            assert x == ON_DEVICE + region.hand_off_buffers[1].x
            assert len({status, x_flag, y_flag}) == 3


@pytest.mark.parametrize("dtype", [Dtype.F32])
def test_without_idle_workers_the_device_waits_for_every_layer(region: HostRegion, dtype: Dtype) -> None:
    written = write(region, dtype, [LoraSource.WORKERS] * LAYERS, [GROUPS] * LAYERS, idle=0)
    assert (written.slices, written.answer_bytes) == (0, 0)
    assert (written.words[:, :, 4] == READY).all()
    assert not written.words[:, :, 0].any()


@pytest.mark.parametrize("dtype", [Dtype.F32])
def test_a_workers_numbers_rise_in_the_devices_order(region: HostRegion, dtype: Dtype) -> None:
    """By one for each hand-off, also from one chunk to the next."""
    written = write(region, dtype, [LoraSource.WORKERS] * LAYERS, [GROUPS] * LAYERS, WORKERS)
    numbers = written.words[:, :, HEAD_BYTES // 8 + 1]  # of the first worker, [groups, layers]
    hand_offs = len(GROUPS) * LAYERS
    assert numbers.T.ravel().tolist() == list(range(hand_offs + 1, 2 * hand_offs + 1))
