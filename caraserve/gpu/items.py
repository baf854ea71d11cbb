"""Cuts a decode batch's LoRA into items of work of about equal bytes, for the kernels of bgmv.cu. Pure; level 1.

One list serves all layers: it is made for the largest rank that an adapter has in any layer, and the kernels skip what
a layer lacks. Rows of one adapter share a read of its weights, up to `ROWS` of them. An item reads 16 KiB or less:

    shrink    a plane of K of eight rank rows (four in fp32)
    expand    as many columns of B, at all ranks, as 128 threads hold with eight 16-byte loads each

so a small rank pays nothing for a large one beside it. Lists change only with the members of a batch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.model.layout import RANK_STEP, Dtype
from caraserve.plan import BASE_ADAPTER_SLOT
from caraserve.units import ceil_div

ROWS = 4
PLANES = 4
THREADS = 128
VECTOR_BYTES = 16

# Words of an item, as `struct Item` in bgmv.cu.
SLOT, SHAPE, FIRST, COUNT, ROW = range(5)
ITEM_WORDS = ROW + ROWS

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WorkItems:
    """int32 [items, ITEM_WORDS] for each of the two launches."""

    shrink: Ints
    expand: Ints


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rows that share a read: int32 [groups] slots and numbers of rows, [groups, ROWS] the rows."""

    slot: Ints
    count: Ints
    rows: Ints


def plan_items(row_slots: Ints, ranks: Ints, dtypes: Ints, outputs: tuple[int, ...]) -> WorkItems:
    """Items of rows with adapter slots `row_slots` [rows].

    `ranks` [projections, slots]: the largest of any layer, 0 where a module is not adapted; `dtypes` [slots]: values of
    `Dtype`; `outputs`: columns of each projection.
    """
    groups = _group_rows(row_slots)
    per_load = VECTOR_BYTES // np.where(dtypes == Dtype.F32.value, 4, 2)
    shrink, expand = [], []
    for projection, columns in enumerate(outputs):
        rank_groups = -(-ranks[projection] // RANK_STEP)
        shape = projection | groups.count << 8
        step = per_load  # 4 warps of 2 rank rows, or of 1 in fp32
        tiles = rank_groups * RANK_STEP // step
        index, number = _spread((tiles * PLANES)[groups.slot])
        slot = groups.slot[index]
        # Planes side by side: blocks that run at the same time read neighbouring bytes.
        shrink.append(_items(groups, index, shape, number // PLANES * step[slot], number % PLANES))
        vectors = -(-columns // per_load)
        width = THREADS // np.maximum(rank_groups, 1)
        index, number = _spread(np.where(rank_groups > 0, -(-vectors // width), 0)[groups.slot])
        slot = groups.slot[index]
        first = number * width[slot]
        expand.append(_items(groups, index, shape, first, np.minimum(width[slot], vectors[slot] - first)))
    return WorkItems(np.concatenate(shrink), np.concatenate(expand))


def most_items(rows: int, max_rank: int, outputs: tuple[int, ...], dtype: Dtype) -> tuple[int, int]:
    """Shrink and expand items that a batch of so many rows can have: a graph's lists are made for that."""
    per_load = VECTOR_BYTES // dtype.itemsize
    rank_groups = ceil_div(max_rank, RANK_STEP)
    shrink = rank_groups * RANK_STEP // per_load * PLANES * len(outputs)
    expand = sum(ceil_div(ceil_div(columns, per_load), THREADS // rank_groups) for columns in outputs)
    return rows * shrink, rows * expand


def _group_rows(row_slots: Ints) -> _Groups:
    order = np.argsort(row_slots, kind="stable").astype(np.int32)
    order = order[row_slots[order] > BASE_ADAPTER_SLOT]
    slots, starts, counts = np.unique(row_slots[order], return_index=True, return_counts=True)
    index, number = _spread(-(-counts // ROWS))
    first = starts[index] + ROWS * number
    count = np.minimum(counts[index] - ROWS * number, ROWS).astype(np.int32)
    places = first[:, None] + np.minimum(np.arange(ROWS), count[:, None] - 1)  # unused places repeat the last row
    return _Groups(slots[index].astype(np.int32), count, order[places])


def _spread(pieces: NDArray[np.integer]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """For every piece its owner and its number: [2, 3] → 0 0 1 1 1 and 0 1 0 1 2."""
    owner = np.repeat(np.arange(len(pieces)), pieces)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)


def _items(
    groups: _Groups, index: NDArray[np.intp], shape: Ints, first: NDArray[np.intp], count: NDArray[np.intp]
) -> Ints:
    items = np.empty((len(index), ITEM_WORDS), np.int32)
    items[:, SLOT], items[:, SHAPE] = groups.slot[index], shape[index]
    items[:, FIRST], items[:, COUNT], items[:, ROW:] = first, count, groups.rows[index]
    return items
