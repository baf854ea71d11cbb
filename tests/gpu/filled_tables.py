"""Writes adapters to a lane's tables and lists at once, as DeviceImages and BatchLists do through a staging ring."""

from collections.abc import Mapping, Sequence

import torch

from caraserve.core.lora_layout import AdapterSpec
from caraserve.gpu.forward.batch import ItemLists
from caraserve.gpu.kernels.bgmv_work import AdapterItems, Ints, plan_items
from caraserve.gpu.memory.adapter_tables import AdapterTables, column, vocabulary_column
from caraserve.model.plan import DecoderPlan


def write_column(tables: AdapterTables, plan: DecoderPlan, slot: int, spec: AdapterSpec, base: int) -> None:
    """Writes a slot's column. `base`: address of the adapter's bytes."""
    made = column(spec, plan, base)
    for name in ("a", "b", "vectors", "rank", "scale"):
        table = getattr(tables, name)
        table[:, :, slot] = torch.from_numpy(getattr(made, name)).to(table.device)
    tables.dtype[slot] = int(made.dtype[0])
    of_sides = vocabulary_column(spec, base)
    for name in ("a", "b", "rank", "rows", "scale", "tokens"):
        table = getattr(tables.vocabulary, name)
        table[:, slot] = torch.from_numpy(getattr(of_sides, name)).to(table.device)


def write_items(lists: ItemLists, row_slots: Ints, items: Mapping[int, Sequence[AdapterItems]]) -> None:
    """Writes the lists of a batch. `items`: by slot and by group shape."""

    def write(target: torch.Tensor, values: Ints) -> None:
        target[: len(values)] = torch.from_numpy(values).to(target.device)

    for shape, pair in enumerate(lists.lists):
        by_slot = [items[slot][shape] if slot in items else None for slot in range(max(items, default=0) + 1)]
        made = plan_items(row_slots, by_slot)
        for launch, (target, listed) in enumerate(zip(pair, (made.shrink, made.expand), strict=True)):
            write(target, listed)
            lists.counts[shape, launch] = len(listed)
        write(lists.groups, made.groups)
