"""Writes the work orders of an assisted chunk: which worker gets which rows, and where x, deltas and weights are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import GROUPS, HostAdapter, SiteSpan
from caraserve.gpu.assist.handshake import HandOffFlags, WorkerStatus
from caraserve.gpu.assist.work_orders import (
    HostModule,
    SharedInput,
    SyncAddresses,
    WorkerTask,
    delta_columns,
    split_rows,
    work_order_bytes,
    write_work_order,
)
from caraserve.gpu.forward.lanes import AssistedChunk
from caraserve.gpu.memory.adapters import RegisteredMemory
from caraserve.gpu.memory.host_memory import HostRegion, inputs_of, x_stride
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec

_WAIT_NS = 10_000_000_000  # for weights that are being copied, once no worker is waited for


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """The work order of one hand-off. `tasks`: number of workers asked; `answer_bytes`: deltas that the device will
    read."""

    index: int
    words: NDArray[np.int64]
    tasks: int
    answer_bytes: int


class WorkOrderWriter:
    """Writes work orders and counts each worker's hand-offs. Used by the launching thread only."""

    def __init__(self, spec: ModelSpec, region: HostRegion, memory: RegisteredMemory, dtype: Dtype) -> None:
        """`dtype`: of x and deltas."""
        self._dtype = dtype
        self._spec, self._region, self._memory = spec, region, memory
        self._buffers = {buffers.sync_slot: buffers for buffers in region.hand_off_buffers}
        self._numbers: dict[int, int] = {}  # by worker
        self._blocks = memory.on_device(int(region.blocks.ctypes.data))

    def write(
        self,
        chunk: AssistedChunk,
        adapter: HostAdapter,
        tokens: int,
        statuses: Sequence[WorkerStatus],
        tokens_per_worker: Callable[[int], int],
    ) -> list[WorkOrder]:
        """Returns one work order for each hand-off of a chunk of `tokens` tokens."""
        idle = [status.worker for status in statuses if status.incarnation is not None and status.is_idle]
        slices = split_rows(tokens, tokens_per_worker(adapter.spec.rank), max(1, len(idle)))
        deltas, size = self._buffers[chunk.sync_slot.offset].deltas, self._dtype.itemsize
        spans = {(span.layer, span.site): span for span in adapter.spec.spans}
        written = []
        for layer, group, index, flags in chunk.hand_offs():
            modules = self._modules(adapter, spans, layer, group)
            _, stride = delta_columns(modules)
            tasks = [
                self._task(worker, first, rows, deltas + size * stride * first)
                for worker, (first, rows) in zip(idle, slices, strict=False)
            ]
            words = self._words(chunk, layer, group, flags, modules, tasks)
            outputs = sum(module.outputs for module in modules if module.rank)
            answered = sum(task.rows for task in tasks)
            written.append(WorkOrder(index, words, len(tasks), size * answered * outputs))
        return written

    def write_without_workers(self, chunk: AssistedChunk) -> Iterator[WorkOrder]:
        """Yields work orders that ask no worker; for warm-up."""
        for layer, group, index, flags in chunk.hand_offs():
            modules = [HostModule(self._spec.site_shape(site)[1]) for site in GROUPS[group]]
            yield WorkOrder(index, self._words(chunk, layer, group, flags, modules, []), 0, 0)

    def _words(
        self,
        chunk: AssistedChunk,
        layer: int,
        group: int,
        flags: HandOffFlags,
        modules: Sequence[HostModule],
        tasks: Sequence[WorkerTask],
    ) -> NDArray[np.int64]:
        base, buffers = self._memory.device_base, self._buffers[chunk.sync_slot.offset]
        addresses = SyncAddresses(
            deadline_ns=_WAIT_NS,
            ready=chunk.ready[layer],
            ready_generation=chunk.ready_generation,
            status=base + chunk.sync_slot.status,
            generation=chunk.sync_slot.generation,
            x_flag=base + flags.x_flag,
            y_flag=base + flags.y_flag,
        )
        words = np.zeros(work_order_bytes(len(tasks)) // 8, np.int64)
        where = SharedInput(
            base, buffers.x, x_stride(self._spec, group), inputs_of(self._spec, group), self._dtype, buffers.wide_x
        )
        write_work_order(words, tasks, modules, where, addresses)
        return words

    def _task(self, worker: int, first: int, rows: int, deltas: int) -> WorkerTask:
        number = self._numbers[worker] = self._numbers.get(worker, 0) + 1
        block = self._blocks + worker * self._region.block_bytes
        return WorkerTask(worker, block, number, first, rows, deltas)

    def _modules(
        self, adapter: HostAdapter, spans: Mapping[tuple[int, int], SiteSpan], layer: int, group: int
    ) -> list[HostModule]:
        """The modules of a group in host memory, where workers read them."""
        base = self._region.region.offset(int(adapter.data.ctypes.data))
        modules = []
        for site in GROUPS[group]:
            outputs = self._spec.site_shape(site)[1]
            if (span := spans.get((layer, SITES.index(site)))) is None:
                modules.append(HostModule(outputs))
            else:
                a, b = base + span.a_offset, base + span.b_offset
                modules.append(HostModule(outputs, span.padded_rank, adapter.spec.dtype, span.scale, a, b))
        return modules
