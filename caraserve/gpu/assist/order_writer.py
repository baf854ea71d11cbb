"""Writes the work orders of an assisted chunk: which worker gets which rows, and where x, deltas and weights are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import HostAdapter
from caraserve.cpu.adapters import fill_entries
from caraserve.cpu.structs import LORA_ENTRY
from caraserve.gpu.assist.lane import AssistedChunk
from caraserve.gpu.kernels.work_orders import (
    HostModules,
    Int64s,
    SharedInput,
    SyncAddresses,
    WorkerTask,
    delta_columns,
    orders_without_workers,
    split_rows,
    work_order_bytes,
    work_orders,
)
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS, HostRegion, x_stride
from caraserve.gpu.memory.link_queue import LoraSource
from caraserve.gpu.memory.registered_memory import RegisteredMemory
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan, GroupShape


@dataclass(frozen=True, slots=True)
class ChunkOrders:
    """The work orders of a chunk. `words`: int64 [most groups, layers, words], zeros where the adapter has nothing;
    `slices`: of all workers; `answer_bytes`: deltas that the device will read."""

    words: Int64s
    slices: int
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of one shape. A layer has one of them or none; in all layers it has the same index."""

    shape: GroupShape
    layers: NDArray[np.bool_]  # [layers], which have one
    first_site: NDArray[np.intp]  # [layers], index of its first site

    @classmethod
    def of(cls, plan: DecoderPlan) -> "list[_Groups]":
        """Returns the groups of each shape."""
        groups = [cls(shape, *np.zeros((2, len(plan.layers)), np.intp)) for shape in plan.group_shapes]
        for layer, shapes in enumerate(plan.shapes_of_groups):
            for group, shape in zip(plan.layers[layer].groups, shapes, strict=True):
                groups[shape].layers[layer], groups[shape].first_site[layer] = True, group.sites[0].index
        return groups


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [first, first + rows) of a chunk, for one worker."""

    worker: int
    first: int
    rows: int


class WorkOrderWriter:
    """Writes work orders and counts each worker's hand-offs. Used by the launching thread only."""

    def __init__(self, plan: DecoderPlan, region: HostRegion, memory: RegisteredMemory, dtype: Dtype) -> None:
        """`dtype`: of x and deltas."""
        self._plan, self._region, self._memory, self._dtype = plan, region, memory, dtype
        self._buffers = {buffers.sync_slot: buffers for buffers in region.hand_off_buffers}
        self._groups = _Groups.of(plan)
        self._numbers: dict[int, int] = {}  # by worker, of its last hand-off
        self._blocks = memory.on_device(int(region.blocks.ctypes.data))
        workers = len(region.blocks) // region.block_bytes
        most = max(1, min(workers, ASSISTED_CHUNK_TOKENS))  # a worker has at least one token
        self.order_words = work_order_bytes(most) // 8

    def write(
        self,
        chunk: AssistedChunk,
        adapter: HostAdapter,
        tokens: int,
        idle: Sequence[int],
        tokens_per_worker: Callable[[int], int],
    ) -> ChunkOrders:
        """Returns the work orders of a chunk of `tokens` tokens. The workers `idle` are asked for the layers whose
        source they are; the device waits for the weights of the others."""
        slices = split_rows(tokens, tokens_per_worker(adapter.spec.rank), max(1, len(idle)))
        parts = [_Part(worker, *rows) for worker, rows in zip(idle, slices, strict=False)]
        is_helped = np.array([source is LoraSource.WORKERS and bool(parts) for source in chunk.sources])
        most = self._plan.most_groups
        has_group = np.array([[group in groups for group in range(most)] for groups in chunk.groups])
        by_workers = has_group & is_helped[:, None]  # [layers, most groups]
        numbers, entries = self._take_numbers(parts, by_workers), self._entries(adapter)
        made = np.zeros((most, len(self._plan.layers), self.order_words), np.int64)
        outputs = 0
        for groups in self._groups:
            shape, group = groups.shape, groups.shape.index
            has_one = has_group[:, group] & groups.layers
            waiting, helped = (np.flatnonzero(has_one & (is_helped == is_so)) for is_so in (False, True))
            if len(waiting):
                addresses = self._addresses(chunk, group, waiting, with_flags=False)
                made[group, waiting] = orders_without_workers(addresses, self.order_words)
            if len(helped):
                sites = groups.first_site[helped, None] + np.arange(len(shape.widths))
                modules = HostModules(entries[helped[:, None], sites], shape.widths)
                addresses = self._addresses(chunk, group, helped, with_flags=True)
                tasks, region = self._tasks(chunk, shape, parts), self._input(chunk, shape)
                made[group, helped] = work_orders(
                    tasks, numbers[helped, group], modules, region, addresses, self.order_words
                )
                outputs += int(((modules.entries["rank"] > 0) @ np.array(modules.outputs)).sum())
        answered = self._dtype.itemsize * sum(part.rows for part in parts) * outputs
        return ChunkOrders(made, len(parts) * int(by_workers.sum()), answered)

    def _take_numbers(self, parts: Sequence[_Part], by_workers: NDArray[np.bool_]) -> Int64s:
        """Returns the workers' next numbers, int64 [layers, most groups, parts], which rise in the device's order."""
        ordinal = np.cumsum(by_workers.ravel()).reshape(by_workers.shape)
        last = np.array([self._numbers.get(part.worker, 0) for part in parts], np.int64)
        for part, number in zip(parts, last.tolist(), strict=True):
            self._numbers[part.worker] = number + int(by_workers.sum())
        return last + ordinal[:, :, None]

    def _entries(self, adapter: HostAdapter) -> NDArray[np.void]:
        """Returns the adapter's modules in host memory, LORA_ENTRY [layers, most sites]."""
        entries = np.zeros((len(self._plan.layers), self._plan.most_sites), LORA_ENTRY)
        fill_entries(entries, adapter.spec, self._region.region.offset(int(adapter.data.ctypes.data)))
        return entries

    def _addresses(
        self, chunk: AssistedChunk, group: int, layers: NDArray[np.intp], *, with_flags: bool
    ) -> SyncAddresses:
        base, slot = self._memory.device_base, chunk.sync_slot
        flags = [slot.flags[chunk.index(layer, group)] for layer in layers.tolist()]
        x_flags, y_flags = (
            np.array([base + at if with_flags else 0 for at in offsets], np.int64)
            for offsets in ([each.x_flag for each in flags], [each.y_flag for each in flags])
        )
        return SyncAddresses(
            deadline_ns=int(1e9 * chunk.wait_s),
            ready=np.array(chunk.ready, np.int64)[layers],
            ready_generation=chunk.ready_generation,
            status=base + slot.status,
            generation=slot.generation,
            x_flags=x_flags,
            y_flags=y_flags,
        )

    def _tasks(self, chunk: AssistedChunk, shape: GroupShape, parts: Sequence[_Part]) -> list[WorkerTask]:
        area, (_, stride) = self._buffers[chunk.sync_slot.offset].deltas, delta_columns(shape.widths)
        row_bytes = self._dtype.itemsize * stride
        tasks = []
        for part in parts:
            block = self._blocks + part.worker * self._region.block_bytes
            tasks.append(WorkerTask(part.worker, block, part.first, part.rows, area + row_bytes * part.first))
        return tasks

    def _input(self, chunk: AssistedChunk, shape: GroupShape) -> SharedInput:
        buffers, base = self._buffers[chunk.sync_slot.offset], self._memory.device_base
        return SharedInput(base, buffers.x, x_stride(shape), shape.inputs, self._dtype, buffers.wide_x)
