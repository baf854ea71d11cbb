"""Writes down a hand-off for the device to carry out: what each CPU worker is asked for, and what is waited for.

A letter is made before the iteration is launched and read by the kernels of handoff.cu when they get there; whether it
is sent is theirs to decide. The words of a worker's slice are those of cpu/handoff.py. Pure.
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

# Words of a letter and of an errand, as `struct WorkOrder` and `struct WorkerTask` in handoff.cu.
_HEAD_WORDS, _TASK_HEAD_WORDS = 12, 7
_SLICE_WORDS = handoff.SLICE_BYTES // 8
_TASK_WORDS = _TASK_HEAD_WORDS + _SLICE_WORDS
MAX_TASKS = 256  # threads of the block that sends them


@dataclass(frozen=True, slots=True)
class HostModule:
    """One projection of the layer, in the host tier. Rank 0: the adapter does not have it. Offsets into the region."""

    outputs: int
    rank: int = 0  # padded
    dtype: Dtype = Dtype.F32
    scale: float = 1.0
    a: int = 0
    b: int = 0


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A worker's part: rows [first, first + rows) of the prompt. `number`: of its hand-offs, one more each time."""

    worker: int
    block: int  # device address of its words
    number: int
    first: int
    rows: int
    deltas: int  # offset of its area for results in the region


@dataclass(frozen=True, slots=True)
class SharedInput:
    """The shared region as the device sees it, and where x lies in it. `x_stride`: numbers between rows."""

    device_base: int
    x: int  # offset
    x_stride: int
    inputs: int


@dataclass(frozen=True, slots=True)
class SyncAddresses:
    """Device addresses of the words that decide. `arrived` gets the value `wanted` with the layer's weights; `status`
    gets `generation` when all is given up; x_flag and y_flag are set to it (0: nobody looks). The y_flag is a
    completion counter."""

    deadline_ns: int
    arrived: int
    wanted: int
    status: int
    generation: int
    x_flag: int = 0
    y_flag: int = 0


def work_order_bytes(tasks: int) -> int:
    """Bytes of a letter."""
    return 8 * (_HEAD_WORDS + tasks * _TASK_WORDS)


def delta_columns(modules: Sequence[HostModule]) -> tuple[tuple[int, ...], int]:
    """Where the modules begin in a row of deltas, and how long that is, in fp32 numbers."""
    ends = np.cumsum([align_up(module.outputs, PANEL) for module in modules]).tolist()
    return (0, *ends[:-1]), ends[-1]


def split_rows(tokens: int, most: int, workers: int) -> list[tuple[int, int]]:
    """(first, rows) of slices of a prompt: as many workers as it takes for none to have more than `most` tokens."""
    parts = min(ceil_div(tokens, most), workers)
    edges = [tokens * part // parts for part in range(parts + 1)]
    return [(first, end - first) for first, end in pairwise(edges)]


def write_work_order(
    into: NDArray[np.int64],
    tasks: Sequence[WorkerTask],
    modules: Sequence[HostModule],
    region: SharedInput,
    terms: SyncAddresses,
) -> None:
    """Fills `into`, at least `work_order_bytes` of them. The errands' rows follow one another."""
    if len(tasks) > MAX_TASKS or not 0 < len(modules) <= handoff.MOST_SITES:
        raise AssertionError("a hand-off has up to three modules and one slice for each worker")
    rows = sum(task.rows for task in tasks)
    head = (len(tasks), tasks[0].first if tasks else 0, rows, terms.deadline_ns, terms.arrived, terms.wanted)
    into[:_HEAD_WORDS] = 0
    into[: len(head) + 4] = (*head, terms.status, terms.generation, terms.x_flag, terms.y_flag)
    counter = terms.y_flag - region.device_base if terms.y_flag else 0
    adapted = sum(1 << index for index, module in enumerate(modules) if module.rank)
    for index, task in enumerate(tasks):
        words = into[_HEAD_WORDS + index * _TASK_WORDS :][:_TASK_WORDS]
        deltas = region.device_base + task.deltas
        words[:_TASK_HEAD_WORDS] = (
            task.block,
            task.number,
            task.worker,
            task.first,
            task.rows,
            deltas,
            adapted,
        )
        _write_slice(words[_TASK_HEAD_WORDS:], task, modules, region, counter)


def _write_slice(
    words: NDArray[np.int64], task: WorkerTask, modules: Sequence[HostModule], region: SharedInput, counter: int
) -> None:
    columns, stride = delta_columns(modules)
    words[:] = 0
    words[handoff.SLICE_X] = region.x + 4 * region.x_stride * task.first
    words[handoff.SLICE_X_STRIDE] = 4 * region.x_stride
    words[handoff.SLICE_K] = region.inputs
    words[handoff.SLICE_ROWS] = task.rows
    words[handoff.SLICE_Y], words[handoff.SLICE_Y_STRIDE] = task.deltas, 4 * stride
    words[handoff.SLICE_COUNTER] = counter
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
        site[handoff.SITE_COLUMN_BYTES] = 4 * column
