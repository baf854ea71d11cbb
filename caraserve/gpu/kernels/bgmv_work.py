"""Cuts the LoRA of a decode batch into items of work of about equal bytes, for the kernels of bgmv.cu.

One list serves all layers: it is made for the largest rank that an adapter has in any layer, and the kernels skip what
a layer lacks. Up to `ROWS` rows of one adapter share one read of its weights. An item reads 16 KiB or less:

    shrink    a plane of K of eight rank rows (four in fp32)
    expand    as many columns of B, at all ranks, as 128 threads hold with eight 16-byte loads each

so an adapter of small rank costs no more in a batch with one of large rank, except in the padded baseline, which makes
items for the largest rank in the batch. An adapter's items are made once; a batch's list has those of its adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import BASE_ADAPTER_SLOT
from caraserve.core.lora_layout import MAX_RANK, RANK_STEP
from caraserve.model.dtype import Dtype
from caraserve.util.units import ceil_div

ROWS = 4
MOST_ROWS = 8  # of one adapter: for more, tensor cores (lora.py) read its weights once instead of every four rows
PLANES = 4
THREADS = 128
VECTOR_BYTES = 16

# Words of an item and of a group, as `struct Item` and `struct Group` in bgmv.cu.
SLOT, PLACE, FIRST, COUNT = range(4)
ITEM_WORDS = 4
GROUP_COUNT, GROUP_RANK, GROUP_ROW = 0, 1, 4
GROUP_WORDS = GROUP_ROW + ROWS
_GROUP = 8  # bits of PLACE below the group, for the projection

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AdapterItems:
    """One adapter's items for shrink and expand, int32 [items, ITEM_WORDS] each, without a group."""

    shrink: Ints
    expand: Ints


@dataclass(frozen=True, slots=True)
class WorkItems:
    """A batch's items for shrink and expand, int32 [items, ITEM_WORDS] each, and its groups of rows that share a read,
    [groups, GROUP_WORDS]."""

    shrink: Ints
    expand: Ints
    groups: Ints


def adapter_items(slot: int, ranks: Sequence[int], dtype: Dtype, outputs: Sequence[int]) -> AdapterItems:
    """Returns an adapter's items for projections that read the same x. By projection: `ranks`, the largest of any
    layer, 0 if the adapter lacks the module; `outputs`, the number of columns."""
    shrink, expand = [np.empty((0, ITEM_WORDS), np.int32)], [np.empty((0, ITEM_WORDS), np.int32)]
    step = per_load = VECTOR_BYTES // dtype.itemsize  # rank rows per item: each of four warps has two, or one in fp32
    for projection, (rank, columns) in enumerate(zip(ranks, outputs, strict=True)):
        rank_groups = ceil_div(rank, RANK_STEP)
        if rank_groups == 0:
            continue
        # Planes are neighbours in the list: blocks that run at the same time read neighbouring bytes.
        number = np.arange(rank_groups * RANK_STEP // step * PLANES)
        shrink.append(_items(slot, projection, number // PLANES * step, number % PLANES))
        vectors, width = ceil_div(columns, per_load), THREADS // rank_groups
        first = np.arange(0, vectors, width)
        expand.append(_items(slot, projection, first, np.minimum(width, vectors - first)))
    return AdapterItems(np.concatenate(shrink), np.concatenate(expand))


def plan_items(row_slots: Ints, adapters: Sequence[AdapterItems | None], most_rank: int = MAX_RANK) -> WorkItems:
    """Returns the items of rows with adapter slots `row_slots` [rows]. `adapters`: items by slot, None for no adapter.
    `most_rank`: rank rows beyond it are left out; the adapters' items have none of them."""
    slots, groups = row_groups(row_slots)
    groups[:, GROUP_RANK] = most_rank
    chosen = [adapter for slot in slots if (adapter := adapters[slot]) is not None]
    if len(chosen) != len(slots):
        raise AssertionError("a row names a slot that has no adapter")
    numbers = range(len(chosen))
    shrink, expand = [adapter.shrink for adapter in chosen], [adapter.expand for adapter in chosen]
    return WorkItems(in_groups(shrink, numbers), in_groups(expand, numbers), groups)


def in_groups(parts: Sequence[Ints], numbers: Sequence[int]) -> Ints:
    """Returns the items of several adapters, int32 [items, ITEM_WORDS], for the groups of rows with these numbers."""
    if len(parts) == 1:  # as when one adapter joins
        items = parts[0].copy()
        items[:, PLACE] += numbers[0] << _GROUP
        return items
    items = np.concatenate([np.empty((0, ITEM_WORDS), np.int32), *parts])
    items[:, PLACE] += np.repeat(np.array(numbers, np.int32) << _GROUP, [len(part) for part in parts])
    return items


def most_items(rows: int, max_rank: int, outputs: Sequence[int], dtype: Dtype) -> tuple[int, int]:
    """Returns the most shrink and expand items that a batch of `rows` rows can have; graphs' lists have this size."""
    per_load = VECTOR_BYTES // dtype.itemsize
    rank_groups = ceil_div(max_rank, RANK_STEP)
    shrink = rank_groups * RANK_STEP // per_load * PLANES * len(outputs)
    expand = sum(ceil_div(ceil_div(columns, per_load), THREADS // rank_groups) for columns in outputs)
    return rows * shrink, rows * expand


def by_adapter(slots: Ints) -> tuple[NDArray[np.intp], Ints, NDArray[np.intp], NDArray[np.intp]]:
    """Returns the tokens that have an adapter, ordered by its slot; these slots; and of each of them, where its tokens
    begin in that order, and their number. `slots`: int32 [tokens]."""
    order = np.flatnonzero(slots > BASE_ADAPTER_SLOT)
    found = slots[order]
    if (found[1:] < found[:-1]).any():  # rows of iterations are in this order already
        sorting = found.argsort(kind="stable")
        order, found = order[sorting], found[sorting]
    begins = np.ones(len(found), bool)
    np.not_equal(found[1:], found[:-1], out=begins[1:])
    borders = np.flatnonzero(np.append(begins, True))
    return order, found[borders[:-1]], borders[:-1], borders[1:] - borders[:-1]


def row_groups(row_slots: Ints) -> tuple[list[int], Ints]:
    """Returns the groups' slots and the groups, of up to ROWS rows of one adapter each, int32 [groups, GROUP_WORDS],
    without their rank; base model rows are in none."""
    order, slots, starts, counts = by_adapter(row_slots)
    blocks = -(-counts // ROWS)
    owner = np.repeat(np.arange(len(slots)), blocks)
    first = ROWS * (np.arange(len(owner)) - np.repeat(np.cumsum(blocks) - blocks, blocks))  # 0, 4, … | 0, 4, …
    groups = np.zeros((len(owner), GROUP_WORDS), np.int32)
    groups[:, GROUP_COUNT] = count = np.minimum(counts[owner] - first, ROWS)
    places = (starts[owner] + first)[:, None] + np.minimum(np.arange(ROWS), count[:, None] - 1)
    groups[:, GROUP_ROW:] = order[places]  # unused places repeat the last row
    return slots[owner].tolist(), groups


def _items(slot: int, projection: int, first: NDArray[np.integer], count: NDArray[np.integer]) -> Ints:
    items = np.empty((len(first), ITEM_WORDS), np.int32)
    items[:, SLOT], items[:, PLACE], items[:, FIRST], items[:, COUNT] = slot, projection, first, count
    return items
