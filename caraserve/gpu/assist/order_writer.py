"""Writes the work orders of an assisted chunk: which worker gets which rows, and where x, deltas and weights are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import GROUPS, HostAdapter
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
from caraserve.gpu.memory.adapter_tables import GROUP_SITES
from caraserve.gpu.memory.adapters import RegisteredMemory
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS, HostRegion, inputs_of, x_stride
from caraserve.gpu.memory.link_queue import LoraSource
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec


@dataclass(frozen=True, slots=True)
class ChunkOrders:
    """The work orders of a chunk. `words`: int64 [module groups, layers, words], zeros where the adapter has nothing;
    `slices`: of all workers; `answer_bytes`: deltas that the device will read."""

    words: Int64s
    slices: int
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [first, first + rows) of a chunk, for one worker."""

    worker: int
    first: int
    rows: int


class WorkOrderWriter:
    """Writes work orders and counts each worker's hand-offs. Used by the launching thread only."""

    def __init__(self, spec: ModelSpec, region: HostRegion, memory: RegisteredMemory, dtype: Dtype) -> None:
        """`dtype`: of x and deltas."""
        self._spec, self._region, self._memory, self._dtype = spec, region, memory, dtype
        self._buffers = {buffers.sync_slot: buffers for buffers in region.hand_off_buffers}
        self._outputs = [[spec.site_shape(site)[1] for site in group] for group in GROUPS]
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
        has_group = np.array([[group in groups for group in range(len(GROUPS))] for groups in chunk.groups])
        by_workers = has_group & is_helped[:, None]  # [layers, groups]
        numbers, entries = self._take_numbers(parts, by_workers), self._entries(adapter)
        made = np.zeros((len(GROUPS), self._spec.layers, self.order_words), np.int64)
        outputs = 0
        for group in np.flatnonzero(has_group.any(0)).tolist():
            waiting, helped = (np.flatnonzero(has_group[:, group] & (is_helped == is_so)) for is_so in (False, True))
            if len(waiting):
                addresses = self._addresses(chunk, group, waiting, with_flags=False)
                made[group, waiting] = orders_without_workers(addresses, self.order_words)
            if len(helped):
                sites = slice(GROUP_SITES[group].start, GROUP_SITES[group].stop)
                modules = HostModules(entries[helped, sites], self._outputs[group])
                addresses = self._addresses(chunk, group, helped, with_flags=True)
                tasks, region = self._tasks(chunk, group, parts), self._input(chunk, group)
                made[group, helped] = work_orders(
                    tasks, numbers[helped, group], modules, region, addresses, self.order_words
                )
                outputs += int(((modules.entries["rank"] > 0) @ np.array(modules.outputs)).sum())
        answered = self._dtype.itemsize * sum(part.rows for part in parts) * outputs
        return ChunkOrders(made, len(parts) * int(by_workers.sum()), answered)

    def _take_numbers(self, parts: Sequence[_Part], by_workers: NDArray[np.bool_]) -> Int64s:
        """Returns the workers' next numbers, int64 [layers, groups, parts], which rise in the device's order."""
        ordinal = np.cumsum(by_workers.ravel()).reshape(by_workers.shape)
        last = np.array([self._numbers.get(part.worker, 0) for part in parts], np.int64)
        for part, number in zip(parts, last.tolist(), strict=True):
            self._numbers[part.worker] = number + int(by_workers.sum())
        return last + ordinal[:, :, None]

    def _entries(self, adapter: HostAdapter) -> NDArray[np.void]:
        """Returns the adapter's modules in host memory, LORA_ENTRY [layers, sites]."""
        entries = np.zeros((self._spec.layers, len(SITES)), LORA_ENTRY)
        fill_entries(entries, adapter.spec, self._region.region.offset(int(adapter.data.ctypes.data)))
        return entries

    def _addresses(
        self, chunk: AssistedChunk, group: int, layers: NDArray[np.intp], *, with_flags: bool
    ) -> SyncAddresses:
        base, slot = self._memory.device_base, chunk.sync_slot
        flags = [slot.flags[layer * len(GROUPS) + group] for layer in layers.tolist()]
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

    def _tasks(self, chunk: AssistedChunk, group: int, parts: Sequence[_Part]) -> list[WorkerTask]:
        area, (_, stride) = self._buffers[chunk.sync_slot.offset].deltas, delta_columns(self._outputs[group])
        row_bytes = self._dtype.itemsize * stride
        tasks = []
        for part in parts:
            block = self._blocks + part.worker * self._region.block_bytes
            tasks.append(WorkerTask(part.worker, block, part.first, part.rows, area + row_bytes * part.first))
        return tasks

    def _input(self, chunk: AssistedChunk, group: int) -> SharedInput:
        buffers, spec = self._buffers[chunk.sync_slot.offset], self._spec
        base, stride, inputs = self._memory.device_base, x_stride(spec, group), inputs_of(spec, group)
        return SharedInput(base, buffers.x, stride, inputs, self._dtype, buffers.wide_x)
