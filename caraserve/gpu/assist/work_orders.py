"""The bytes of a work order: what each CPU worker computes in a hand-off, and the words to signal with.

A work order is written before the chunk is launched and read by the kernels of handoff.cu, which decide whether the
workers are asked. The words of a worker's slice are those of cpu/handoff.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL
from caraserve.cpu import handoff
from caraserve.cpu.structs import LORA_ENTRY
from caraserve.model.dtype import Dtype
from caraserve.util.units import align_up, ceil_div

# Words of a work order and of a task, as `struct WorkOrder` and `struct WorkerTask` in handoff.cu.
_HEAD_WORDS, _TASK_HEAD_WORDS = 12, 7
_SLICE_WORDS = handoff.SLICE_BYTES // 8
_TASK_WORDS = _TASK_HEAD_WORDS + _SLICE_WORDS
MAX_TASKS = 256  # threads of the block that publishes them


@dataclass(frozen=True, slots=True)
class HostModule:
    """One module of a layer in host memory. Rank 0: the adapter does not have it. `a`, `b`: offsets into the region."""

    outputs: int
    rank: int = 0  # padded
    dtype: Dtype = Dtype.F32
    scale: float = 1.0
    a: int = 0
    b: int = 0


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A worker's part of a hand-off: rows [first, first + rows) of the chunk."""

    worker: int
    block: int  # device address of its words
    number: int  # counts this worker's hand-offs
    first: int
    rows: int
    deltas: int  # offset of its result area in the region


@dataclass(frozen=True, slots=True)
class SharedInput:
    """Location of x in the shared region. `device_base`: the region's device address; `x_stride`: numbers between
    rows. `dtype`: of x and deltas, as the device computes."""

    device_base: int
    x: int  # offset
    x_stride: int
    inputs: int
    dtype: Dtype
    wide_x: int  # offset of x in fp32, which workers write; used unless the dtype is fp32


@dataclass(frozen=True, slots=True)
class SyncAddresses:
    """Device addresses of a hand-off's words, and the values that are written there."""

    deadline_ns: int  # of the wait kernel, from its start
    ready: int  # word that is set to `ready_generation` once the layer's weights are on the device
    ready_generation: int
    status: int  # word that is set to `generation` when the chunk is aborted
    generation: int
    x_flag: int = 0  # set to `generation` after x; 0: not used
    y_flag: int = 0  # completion counter, set to `generation` after the last slice; 0: not used


def work_order_bytes(tasks: int) -> int:
    """Returns the bytes of a work order for `tasks` workers."""
    return 8 * (_HEAD_WORDS + tasks * _TASK_WORDS)


def delta_columns(modules: Sequence[HostModule]) -> tuple[tuple[int, ...], int]:
    """Returns the first column of each module in a row of deltas, and the row's length, in numbers."""
    ends = np.cumsum([align_up(module.outputs, PANEL) for module in modules]).tolist()
    return (0, *ends[:-1]), ends[-1]


def split_rows(tokens: int, most: int, workers: int) -> list[tuple[int, int]]:
    """Returns (first, rows) of slices of `tokens` rows: as few slices as keep each within `most`, one per worker."""
    parts = min(ceil_div(tokens, most), workers)
    edges = [tokens * part // parts for part in range(parts + 1)]
    return [(first, end - first) for first, end in pairwise(edges)]


def write_work_order(
    into: NDArray[np.int64],
    tasks: Sequence[WorkerTask],
    modules: Sequence[HostModule],
    region: SharedInput,
    addresses: SyncAddresses,
) -> None:
    """Fills `into`, int64 of at least `work_order_bytes`. The tasks' rows must be contiguous and in order."""
    if len(tasks) > MAX_TASKS or not 0 < len(modules) <= handoff.MOST_SITES:
        raise AssertionError("a hand-off has up to three modules and one slice for each worker")
    rows = sum(task.rows for task in tasks)
    head = (
        len(tasks),
        tasks[0].first if tasks else 0,
        rows,
        addresses.deadline_ns,
        addresses.ready,
        addresses.ready_generation,
    )
    into[:_HEAD_WORDS] = 0
    into[: len(head) + 4] = (*head, addresses.status, addresses.generation, addresses.x_flag, addresses.y_flag)
    counter = addresses.y_flag - region.device_base if addresses.y_flag else 0
    adapted = sum(1 << index for index, module in enumerate(modules) if module.rank)
    shared = _slice(modules, region, counter)
    row_bytes = region.dtype.itemsize * region.x_stride
    for index, task in enumerate(tasks):
        words = into[_HEAD_WORDS + index * _TASK_WORDS :][:_TASK_WORDS]
        deltas = region.device_base + task.deltas
        words[:_TASK_HEAD_WORDS] = (task.block, task.number, task.worker, task.first, task.rows, deltas, adapted)
        words[_TASK_HEAD_WORDS:] = shared
        own = words[_TASK_HEAD_WORDS:]
        own[handoff.SLICE_X] = region.x + row_bytes * task.first
        own[handoff.SLICE_ROWS], own[handoff.SLICE_Y] = task.rows, task.deltas
        own[handoff.SLICE_WIDE_X] = region.wide_x + 4 * region.x_stride * task.first


def _slice(modules: Sequence[HostModule], region: SharedInput, counter: int) -> NDArray[np.int64]:
    """Returns the words of a slice that are the same for all workers of a hand-off; 0: the others."""
    columns, stride = delta_columns(modules)
    size = region.dtype.itemsize
    words = np.zeros(_SLICE_WORDS, np.int64)
    words[handoff.SLICE_X_STRIDE], words[handoff.SLICE_Y_STRIDE] = size * region.x_stride, size * stride
    words[handoff.SLICE_K], words[handoff.SLICE_COUNTER] = region.inputs, counter
    words[handoff.SLICE_DTYPE] = region.dtype.value
    adapted = [(module, column) for module, column in zip(modules, columns, strict=True) if module.rank]
    words[handoff.SLICE_SITES] = len(adapted)
    for index, (module, column) in enumerate(adapted):
        at = (handoff.SLICE_HEAD_BYTES + index * handoff.SITE_BYTES) // 8
        site = words[at : at + handoff.SITE_BYTES // 8]
        entry = np.zeros(1, LORA_ENTRY)
        entry["a"], entry["b"], entry["rank"] = module.a, module.b, module.rank
        entry["dtype"], entry["scale"] = module.dtype.value, module.scale
        site[: LORA_ENTRY.itemsize // 8] = entry.view(np.int64)
        site[handoff.SITE_PANELS] = align_up(module.outputs, PANEL) // PANEL
        site[handoff.SITE_COLUMN_BYTES] = size * column
    return words
