"""The bytes of work orders: what each CPU worker computes in a hand-off, and the words to signal with.

Work orders are written before the chunk is launched and read by the kernels of handoff.cu, which decide whether the
workers are asked. The words of a worker's slice are those of cpu/handoff.py. The hand-offs of all groups of one shape
are written at once: they differ in their words and weights only, and a chunk has more than a hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL
from caraserve.cpu import handoff
from caraserve.cpu.structs import LORA_ENTRY
from caraserve.gpu.kernels.cuda_launch import BYTES_THREADS
from caraserve.model.dtype import Dtype
from caraserve.util.units import align_up, ceil_div

Int64s = NDArray[np.int64]

# Words of a work order and of a task, as `struct WorkOrder` and `struct WorkerTask` in handoff.cu.
_VECTORS = 11  # of the order: one word for each module
_HEAD_WORDS, _TASK_HEAD_WORDS = _VECTORS + handoff.MOST_SITES, 7
_SLICE_WORDS = handoff.SLICE_BYTES // 8
_TASK_WORDS = _TASK_HEAD_WORDS + _SLICE_WORDS
_ENTRY_WORDS, _SITE_WORDS = LORA_ENTRY.itemsize // 8, handoff.SITE_BYTES // 8
MAX_TASKS = BYTES_THREADS  # of the block that publishes them, one for each


@dataclass(frozen=True, slots=True)
class HostModules:
    """The modules of one group in host memory, where workers read A and B, and the device vectors. `entries`:
    LORA_ENTRY [hand-offs, modules], whose addresses are offsets into the region; rank 0: the adapter does not have the
    module. `outputs`: of each module."""

    entries: NDArray[np.void]
    outputs: Sequence[int]


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A worker's part of a hand-off: rows [first, first + rows) of the chunk."""

    worker: int
    block: int  # device address of its words
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
    """Device addresses of hand-offs' words, and the values that are written there. Arrays: int64 [hand-offs]."""

    deadline_ns: int  # of the wait kernel, from its start
    ready: Int64s  # words that are set to `ready_generation` once the layer's weights are on the device
    ready_generation: int
    status: int  # word that is set to `generation` when the chunk is aborted
    generation: int
    x_flags: Int64s  # set to `generation` after x; 0: not used
    y_flags: Int64s  # completion counters, set to `generation` after the last slice; 0: not used


def work_order_bytes(tasks: int) -> int:
    """Returns the bytes of a work order for `tasks` workers."""
    return 8 * (_HEAD_WORDS + tasks * _TASK_WORDS)


def delta_columns(outputs: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Returns the first column of each module in a row of deltas, and the row's length, in numbers. `outputs`: of each
    module."""
    ends = np.cumsum([align_up(width, PANEL) for width in outputs]).tolist()
    return (0, *ends[:-1]), ends[-1]


def split_rows(tokens: int, most: int, workers: int) -> list[tuple[int, int]]:
    """Returns (first, rows) of slices of `tokens` rows: as few slices as keep each within `most`, one per worker."""
    parts = min(ceil_div(tokens, most), workers)
    edges = [tokens * part // parts for part in range(parts + 1)]
    return [(first, end - first) for first, end in pairwise(edges)]


def orders_without_workers(addresses: SyncAddresses, words: int) -> Int64s:
    """Returns int64 [hand-offs, words]: work orders without workers, so that the device waits for the layer's
    weights."""
    orders = np.zeros((len(addresses.ready), words), np.int64)
    _write_heads(orders, (), addresses)
    return orders


def work_orders(
    tasks: Sequence[WorkerTask],
    numbers: Int64s,
    modules: HostModules,
    region: SharedInput,
    addresses: SyncAddresses,
    words: int,
) -> Int64s:
    """Returns int64 [hand-offs, words]: work orders for the same workers and rows. `numbers`: int64 [hand-offs, tasks],
    which count each worker's hand-offs; `words`: at least `work_order_bytes` / 8. The tasks' rows must be contiguous
    and in order."""
    if not 0 < len(tasks) <= MAX_TASKS or not 0 < len(modules.outputs) <= handoff.MOST_SITES:
        raise AssertionError(f"a hand-off has up to {handoff.MOST_SITES} modules and one slice for each worker")
    orders = np.zeros((len(addresses.ready), words), np.int64)
    _write_heads(orders, tasks, addresses)
    orders[:, 10] = region.device_base + region.x
    vectors = modules.entries["vectors"]
    orders[:, _VECTORS : _VECTORS + len(modules.outputs)] = np.where(vectors, region.device_base + vectors, 0)
    adapted = (modules.entries["rank"] > 0) @ (1 << np.arange(len(modules.outputs)))  # a bit of each module
    shared = _slices(modules, region, addresses)
    row_bytes = region.dtype.itemsize * region.x_stride
    for index, task in enumerate(tasks):
        first = _HEAD_WORDS + index * _TASK_WORDS
        own, head = orders[:, first + _TASK_HEAD_WORDS : first + _TASK_WORDS], orders[:, first:]
        head[:, 0], head[:, 1], head[:, 2] = task.block, numbers[:, index], task.worker
        head[:, 3], head[:, 4], head[:, 5] = task.first, task.rows, region.device_base + task.deltas
        head[:, 6] = adapted
        own[:] = shared
        own[:, handoff.SLICE_X] = region.x + row_bytes * task.first
        own[:, handoff.SLICE_ROWS], own[:, handoff.SLICE_Y] = task.rows, task.deltas
        own[:, handoff.SLICE_WIDE_X] = region.wide_x + 4 * region.x_stride * task.first
    return orders


def _write_heads(orders: Int64s, tasks: Sequence[WorkerTask], addresses: SyncAddresses) -> None:
    first, rows = tasks[0].first if tasks else 0, sum(task.rows for task in tasks)
    orders[:, :4] = len(tasks), first, rows, addresses.deadline_ns
    orders[:, 4], orders[:, 5] = addresses.ready, addresses.ready_generation
    orders[:, 6], orders[:, 7] = addresses.status, addresses.generation
    orders[:, 8], orders[:, 9] = addresses.x_flags, addresses.y_flags


def _slices(modules: HostModules, region: SharedInput, addresses: SyncAddresses) -> Int64s:
    """Returns the words of a slice that are the same for all workers of a hand-off, int64 [hand-offs, words]; 0: the
    others."""
    columns, stride = delta_columns(modules.outputs)
    size, y_flags = region.dtype.itemsize, addresses.y_flags
    words = np.zeros((len(y_flags), _SLICE_WORDS), np.int64)
    words[:, handoff.SLICE_X_STRIDE], words[:, handoff.SLICE_Y_STRIDE] = size * region.x_stride, size * stride
    words[:, handoff.SLICE_K], words[:, handoff.SLICE_DTYPE] = region.inputs, region.dtype.value
    words[:, handoff.SLICE_COUNTER] = np.where(y_flags == 0, 0, y_flags - region.device_base)
    has_module = modules.entries["rank"] > 0  # [hand-offs, modules]
    words[:, handoff.SLICE_SITES] = has_module.sum(1)
    hand_off, module = np.nonzero(has_module)
    place = (np.cumsum(has_module, 1) - 1)[hand_off, module]  # only modules that the adapter has are listed
    sites = words[:, handoff.SLICE_HEAD_BYTES // 8 :].reshape(len(words), handoff.MOST_SITES, _SITE_WORDS)
    entries = np.ascontiguousarray(modules.entries).view(np.int64).reshape(*has_module.shape, _ENTRY_WORDS)
    panels = np.array([align_up(width, PANEL) // PANEL for width in modules.outputs])
    sites[hand_off, place, :_ENTRY_WORDS] = entries[hand_off, module]
    sites[hand_off, place, handoff.SITE_PANELS] = panels[module]
    sites[hand_off, place, handoff.SITE_COLUMN_BYTES] = size * np.array(columns)[module]
    words[:, handoff.SLICE_HEAD_BYTES // 8 :] = sites.reshape(len(words), -1)
    return words
