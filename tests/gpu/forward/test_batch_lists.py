"""The BGMV kernels' lists on the device: whatever was sent before, the kernels compute each batch, and nothing else."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from caraserve.gpu.forward.batch import ItemLists
from caraserve.gpu.forward.batch_lists import BatchLists
from caraserve.gpu.kernels.bgmv_work import (
    COUNT,
    FIRST,
    GROUP_COUNT,
    GROUP_RANK,
    GROUP_ROW,
    MOST_ROWS,
    PLACE,
    SLOT,
    AdapterItems,
    Ints,
    adapter_items,
)
from caraserve.gpu.memory.adapters import DeviceImages
from caraserve.gpu.memory.staging_ring import StagingRing
from caraserve.model.dtype import Dtype

SLOTS, ROWS, MAX_RANK = 12, 24, 64
SHAPES = ((96, 32), (200,))  # outputs of the projections, by group shape
Item = tuple[int, ...]


class Device:
    """A lane's lists, what is bound to the adapter slots, and a ring that copies at once."""

    def __init__(self) -> None:
        counts = [sum(width // 8 + 1 for width in widths) * MAX_RANK * ROWS for widths in SHAPES]
        pairs = [tuple(torch.zeros((count, 4), dtype=torch.int32) for _ in range(2)) for count in counts]
        self.memory = ItemLists(
            torch.zeros((len(SHAPES), 2), dtype=torch.int32),
            cast("tuple[tuple[torch.Tensor, torch.Tensor], ...]", tuple(pairs)),
            torch.zeros((ROWS, 8), dtype=torch.int32),
        )
        self.bindings, self.most_rank, self.sent_bytes = 0, 512, 0
        self.ranks: dict[int, int] = {}
        self._items: dict[tuple[int, int], tuple[AdapterItems, ...]] = {}
        self.lists = BatchLists(cast("StagingRing", self), cast("DeviceImages", self), self.memory)

    def bind(self, slot: int, rank: int) -> None:
        """Binds another adapter to a slot, without modules in the first group shape if its rank is odd."""
        self.bindings += 1
        self.ranks[slot] = rank
        self._items = {key: items for key, items in self._items.items() if key[0] != slot}

    def items_of(self, slots: Sequence[int]) -> tuple[list[tuple[AdapterItems, ...]], int]:
        return [self.of(slot) for slot in slots], self.most_rank

    def of(self, slot: int) -> tuple[AdapterItems, ...]:
        key, rank = (slot, self.most_rank), self.ranks[slot]
        if key not in self._items:
            computed = min(rank // 2 * 2, self.most_rank)
            ranks = [0 if rank % 2 and shape == 0 else computed for shape in range(len(SHAPES))]
            self._items[key] = tuple(
                adapter_items(slot, [of_shape] * len(widths), Dtype.BF16, widths)
                for of_shape, widths in zip(ranks, SHAPES, strict=True)
            )
        return self._items[key]

    def send(self, target: int, data: NDArray[np.generic]) -> None:
        self.sent_bytes += data.nbytes
        for tensor in (self.memory.counts, self.memory.groups, *(one for pair in self.memory.lists for one in pair)):
            start = target - tensor.data_ptr()
            if 0 <= start < tensor.nbytes:
                assert start + data.nbytes <= tensor.nbytes, "more than the list holds"
                tensor.view(-1).view(torch.uint8)[start : start + data.nbytes] = torch.from_numpy(
                    np.ascontiguousarray(data).reshape(-1).view(np.uint8)
                )

    def computed(self) -> Counter[Item]:
        """Returns what the kernels compute: group shape, launch, row, and an item of the row's adapter."""
        found = Counter[Item]()
        groups = self.memory.groups.numpy()
        for shape, pair in enumerate(self.memory.lists):
            for launch, items in enumerate(pair):
                for item in items[: int(self.memory.counts[shape, launch])].tolist():
                    group = groups[item[PLACE] >> 8]
                    # Kernels read the weights of items whose group has a rank.
                    assert group[GROUP_RANK] == (self.most_rank if group[GROUP_COUNT] else 0)
                    for row in group[GROUP_ROW : GROUP_ROW + group[GROUP_COUNT]].tolist():
                        found[shape, launch, row, item[SLOT], item[PLACE] & 0xFF, item[FIRST], item[COUNT]] += 1
        return found

    def expected(self, slots: Ints) -> Counter[Item]:
        found = Counter[Item]()
        for row, slot in enumerate(slots.tolist()):
            for shape, adapter in enumerate(self.of(slot) if slot else ()):
                for launch, items in enumerate((adapter.shrink, adapter.expand)):
                    for item in items.tolist():
                        found[shape, launch, row, item[SLOT], item[PLACE], item[FIRST], item[COUNT]] += 1
        return found

    def run(self, *slots: int) -> int:
        """Sends a batch, checks what the kernels compute, and returns the bytes that were sent for it."""
        self.sent_bytes, wanted = 0, np.array(slots, np.int32)
        self.lists.send(wanted)
        assert self.computed() == self.expected(wanted)
        return self.sent_bytes


def device(rank: int = 16) -> Device:
    made = Device()
    for slot in range(1, SLOTS):
        made.bind(slot, rank)
    return made


batches = st.lists(st.integers(0, SLOTS - 1), max_size=ROWS).filter(
    lambda slots: all(slots.count(slot) <= MOST_ROWS for slot in range(1, SLOTS))
)
bindings = st.tuples(st.integers(1, SLOTS - 1), st.integers(1, MAX_RANK))
steps = st.one_of(batches, batches, bindings, st.sampled_from([8, 512]))


@given(st.lists(steps, max_size=12))
def test_after_any_batches_and_bindings_the_lists_are_those_of_the_last_batch(
    steps: list[list[int] | tuple[int, int] | int],
) -> None:
    here = device()
    for step in steps:
        if isinstance(step, list):
            here.run(*step)
        elif isinstance(step, tuple):
            here.bind(*step)
        else:
            here.most_rank = step  # of a padded batch: another adapter in it is the largest
            here.bindings += 1


def test_an_unchanged_batch_sends_nothing_and_rows_that_move_or_end_send_no_items() -> None:
    here = device()
    first = here.run(*range(1, 11))
    assert here.run(*range(1, 11)) == 0
    moved = here.run(1, 2, 3, 0, 0, 0, *range(4, 11))  # three tokens of a prompt come between them
    ended = here.run(1, 2, 3, *range(5, 11))
    assert max(moved, ended) < first / 10
    assert here.run(*range(1, 11)) < first / 10  # the fourth comes back


def test_an_adapter_that_replaces_another_sends_its_own_items() -> None:
    here = device()
    first = here.run(*range(1, 11))
    assert here.run(*range(2, 11), 11) < first / 4
    assert int(here.memory.counts[0, 0]) == 10 * len(here.of(1)[0].shrink), "it did not take the other's places"


def test_the_items_of_an_adapter_bound_to_the_slot_of_another_are_sent() -> None:
    here = device()
    here.run(1, 2, 3)
    here.bind(2, 32)
    here.run(1, 2, 3)


def test_a_batch_without_rows_for_the_lists_has_no_items_and_leaves_those_of_others() -> None:
    here = device()
    first = here.run(*range(1, 11))
    assert here.run(0, 0, 0) < first / 100
    assert here.run(0) == 0
    assert here.run(*range(1, 11)) < first / 10


def test_few_items_are_skipped() -> None:
    here = device()
    here.run(*range(1, 11))
    for gone in range(1, 10):
        rows = range(gone + 1, 11)
        here.run(*rows)
        items = int(here.memory.counts[0, 0])
        assert items <= 1.2 * len(rows) * len(here.of(1)[0].shrink)


def test_all_is_sent_again_after_a_batch_that_may_not_have_reached_the_device() -> None:
    here = device()
    first = here.run(1, 2, 3)
    here.memory.counts.zero_()
    here.memory.groups.zero_()
    here.lists.forget()
    assert here.run(1, 2, 3) == first
