"""The BGMV kernels' lists of one lane on the device, and what of them is sent when a batch's rows or adapters change.

An item names its group of rows by a number, and the rows are in the table of groups. So items are sent only for an
adapter that the lists do not have: when rows end, or move because a prompt's tokens come between them, the table alone
changes. An adapter that leaves keeps its items, which kernels skip because its group has rank 0, until an adapter with
as many items takes their places. If too many would be skipped, the lists are rebuilt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caraserve.gpu.forward.batch import ItemLists
from caraserve.gpu.kernels.bgmv_work import GROUP_RANK, GROUP_WORDS, AdapterItems, Ints, in_groups, row_groups
from caraserve.gpu.memory.adapters import DeviceImages
from caraserve.gpu.memory.staging_ring import StagingRing

_MOST_SKIPPED = 1 / 8  # of the items that are not: the kernels read an item and its group to skip it
_MOST_NEW = 1 / 2  # of the groups: beyond it, one copy for each list costs less than one for each group

OfAdapter = Sequence[AdapterItems]  # by group shape


class BatchLists:
    """The lists of one lane. Used by the launching thread only."""

    def __init__(self, ring: StagingRing, images: DeviceImages, lists: ItemLists) -> None:
        self._ring, self._images, self._lists = ring, images, lists
        self._targets = [items.data_ptr() for pair in lists.lists for items in pair]
        self.forget()

    def forget(self) -> None:
        """Sends all with the next batch: what was sent before may not have reached the device."""
        most = [len(items) for pair in self._lists.lists for items in pair]
        self._places = ItemPlaces(most, len(self._lists.groups))
        self._sent: tuple[int, bytes] | None = None
        self._counts: list[int] = []  # on the device

    def send(self, slots: Ints) -> None:
        """Makes the ring send what differs from the lists on the device. `slots`: int32 [tokens], the adapter slots of
        tokens that the lists are for, 0 for others."""
        slots = slots if slots.any() else slots[:0]
        state = self._images.bindings, slots.tobytes()
        if state == self._sent:
            return
        of_groups, groups = row_groups(slots)
        counts = [0] * len(self._targets)
        if of_groups:
            wanted, groups[:, GROUP_RANK] = self._images.items_of(of_groups)
            numbers, writes = self._places.place(wanted)
            for write in writes:
                self._ring.send(self._targets[write.list] + write.items.strides[0] * write.first, write.items)
            table = np.zeros((self._places.groups, GROUP_WORDS), np.int32)
            table[numbers] = groups
            self._ring.send(self._lists.groups.data_ptr(), table)
            counts = self._places.counts
        if counts != self._counts:
            self._ring.send(self._lists.counts.data_ptr(), np.array(counts, np.int32))
        self._sent, self._counts = state, counts


@dataclass(frozen=True, slots=True)
class ItemWrite:
    """Items that are to be written to one list, from place `first` on."""

    list: int
    first: int
    items: Ints  # int32 [items, ITEM_WORDS]


@dataclass(frozen=True, slots=True)
class _Block:
    """The items of one group in all lists. `key`: which group of which adapter. `adapter` is kept, so that no other has
    its identity."""

    key: tuple[int, int]
    adapter: OfAdapter
    sizes: tuple[int, ...]
    first: tuple[int, ...]


class ItemPlaces:
    """Where the items of groups are in the lists: two of each group shape, for shrink and for expand."""

    def __init__(self, capacities: Sequence[int], most_groups: int) -> None:
        """`capacities`: most items, by list."""
        self._capacities, self._most_groups = tuple(capacities), most_groups
        self._blocks: list[_Block] = []  # by number of the group
        self._numbers: dict[tuple[int, int], int] = {}  # by key
        self.counts = [0] * len(capacities)  # items, by list

    @property
    def groups(self) -> int:
        """Returns how many numbers of groups there are."""
        return len(self._blocks)

    def place(self, wanted: Sequence[OfAdapter]) -> tuple[list[int], list[ItemWrite]]:
        """Returns the number of the group of each of these adapters, and what must be written before the lists have all
        their items. An adapter that has several groups is there several times, one after another; it is another object
        when its items are others. All other groups are to be skipped."""
        keys, before = list[tuple[int, int]](), None
        for adapter in wanted:
            keys.append((id(adapter), keys[-1][1] + 1 if adapter is before else 0))
            before = adapter
        found = list(map(self._numbers.get, keys))
        new = [(index, key) for index, (key, number) in enumerate(zip(keys, found, strict=True)) if number is None]
        if len(new) > _MOST_NEW * len(wanted):
            return self._rebuilt(wanted, keys)
        unused = set(range(self.groups)).difference(found)
        for index, key in new:
            found[index] = self._put(wanted[index], key, unused)
        while self.groups - 1 in unused:
            unused.remove(self.groups - 1)
            self._drop_last()
        skipped = sum(sum(self._blocks[number].sizes) for number in unused)
        fit = all(count <= most for count, most in zip(self.counts, self._capacities, strict=True))
        if not fit or self.groups > self._most_groups or skipped > _MOST_SKIPPED * (sum(self.counts) - skipped):
            return self._rebuilt(wanted, keys)
        numbers = [number for number in found if number is not None]
        return numbers, [write for index, _ in new for write in self._writes(numbers[index])]

    def _put(self, adapter: OfAdapter, key: tuple[int, int], unused: set[int]) -> int:
        """Gives a group the places of an unused one with as many items, or places at the end; returns its number."""
        sizes = tuple(map(len, _lists(adapter)))
        number = next((number for number in unused if self._blocks[number].sizes == sizes), None)
        if number is None:
            number = self.groups
            self._blocks.append(_Block(key, adapter, sizes, tuple(self.counts)))
            self.counts = [count + size for count, size in zip(self.counts, sizes, strict=True)]
        else:
            unused.remove(number)
            before = self._blocks[number]
            del self._numbers[before.key]
            self._blocks[number] = _Block(key, adapter, sizes, before.first)
        self._numbers[key] = number
        return number

    def _drop_last(self) -> None:
        block = self._blocks.pop()
        del self._numbers[block.key]
        self.counts = list(block.first)

    def _writes(self, number: int) -> list[ItemWrite]:
        block = self._blocks[number]
        parts = zip(block.first, _lists(block.adapter), strict=True)
        return [ItemWrite(place, first, in_groups([items], [number])) for place, (first, items) in enumerate(parts)]

    def _rebuilt(
        self, wanted: Sequence[OfAdapter], keys: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[ItemWrite]]:
        """Places these groups one after another, and nothing else."""
        self._blocks, self._numbers, self.counts = [], {}, [0] * len(self._capacities)
        numbers = [self._put(adapter, key, set()) for adapter, key in zip(wanted, keys, strict=True)]
        lists = zip(*map(_lists, wanted), strict=True)
        return numbers, [ItemWrite(place, 0, in_groups(parts, numbers)) for place, parts in enumerate(lists)]


def _lists(adapter: OfAdapter) -> list[Ints]:
    return [items for of_shape in adapter for items in (of_shape.shrink, of_shape.expand)]
