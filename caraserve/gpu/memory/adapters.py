"""Adapters on the device and on their way to it: memory in the pool, entries in the tables, copies in the queue.

The adapter manager keeps total bytes within the pool; this module decides where they are. An adapter that is being
copied, or that an assisted prefill reads, cannot move, so contiguous memory may be missing for a moment though there is
enough in total. Then the load waits until a pinned adapter is unpinned, and a batch that names the adapter waits too.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from caraserve.core.batch import DeviceLost
from caraserve.core.lora_layout import MAX_RANK, RANK_STEP, AdapterSpec, HostAdapter
from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.driver.streams import NOTHING, Lane, Marks, Timelines, at, latest
from caraserve.gpu.kernels.bgmv_work import AdapterItems, adapter_items
from caraserve.gpu.kernels.vocabulary import VocabularyTables
from caraserve.gpu.memory import padding
from caraserve.gpu.memory.adapter_tables import AdapterTables, Column, VocabularyColumn, column, vocabulary_column
from caraserve.gpu.memory.copier import CopyRequest, DeviceContext
from caraserve.gpu.memory.link_queue import LayerGroup, layer_groups
from caraserve.gpu.memory.pool import DevicePool, Grant, Move
from caraserve.gpu.memory.registered_memory import RegisteredMemory
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up

log = logging.getLogger(__name__)

Loaded = Callable[[Exception | None], None]
# What waits for memory: a function that tries it and returns whether it is done, and one that gives it up.
_Attempt = tuple[Callable[[], bool], Callable[[Exception], None]]


@dataclass(slots=True)
class BoundAdapter:
    """The adapter of a slot. `stored`: its layout in the pool; `generation`: the value that ready words get when a
    layer has arrived, 0 until the load is queued."""

    adapter: HostAdapter
    stored: AdapterSpec
    groups: tuple[frozenset[int], ...]  # by layer: groups of the layer in which the adapter has a module
    shapes: frozenset[int]  # of all these groups
    generation: int = 0
    is_placed: bool = False
    is_loading: bool = True
    arrivals: list[tuple[int, float]] = field(default_factory=list)  # (first layer of group, when it arrived)


class DeviceImages:
    """The adapter images on the device. Used by the launching thread only."""

    def __init__(
        self,
        context: DeviceContext,
        pool: DevicePool,
        memory: Tensor,
        tables: AdapterTables,
        plan: DecoderPlan,
        host: RegisteredMemory,
        *,
        padded_rank: int | None = None,
        with_ready_words: bool = False,
        when_copied: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory`: the pool's bytes. `padded_rank`: rank at which the padded baseline stores every module.
        `when_copied`: makes `poll` be called once everything issued on the copy lane so far has run."""
        self._driver, self._timelines = context.driver, context.timelines
        self._copier, self._ring = context.copier, context.ring
        self.pool, self.memory, self.tables = pool, memory, tables
        self._plan, self._host, self._padded_rank = plan, host, padded_rank
        self._when_copied = when_copied
        words = (tables.slots, len(plan.layers)) if with_ready_words else (0, 0)
        self._ready = torch.zeros(words, dtype=torch.int32, device=memory.device)
        self.bound: dict[int, BoundAdapter] = {}
        self._items: dict[tuple[int, int], tuple[AdapterItems, ...]] = {}  # by slot and most rank, by group shape
        self.bindings = 0  # changes with every binding of a slot
        self._waiting: deque[_Attempt] = deque()  # found no contiguous memory, in order
        self._loading: dict[int, Loaded] = {}  # callbacks, by slot
        self._unsettled: set[int] = set()  # slots whose adapter has neither memory nor failed
        self._failures: dict[int, Exception] = {}  # why an adapter cannot be used, by slot; its load has ended with it
        # By slot and lane, the mark after the last iteration or prefill that reads the adapter.
        self._used = np.zeros((tables.slots, len(Lane)), np.int64)
        self._lost: DeviceLost | None = None

    # --- called by the adapter manager ---

    def load(self, adapter: HostAdapter, slot: int, group_ends: Sequence[int], first_layer: int, done: Loaded) -> None:
        """Binds an adapter to a slot and queues its copy. Calls `done` with the failure or None."""
        stored = self.stored(adapter.spec)
        self.bound[slot] = BoundAdapter(adapter, stored, *groups_of(stored, self._plan))
        self._items = {key: made for key, made in self._items.items() if key[0] != slot}
        self.bindings += 1
        self._loading[slot] = done
        self._unsettled.add(slot)
        self._failures.pop(slot, None)
        self._used[slot] = NOTHING

        def place() -> bool:
            try:
                return self._place(slot, layer_groups(adapter.spec.layer_ends, group_ends, first_layer))
            except Exception as error:
                self._fail_load(slot, error)
                if (bound := self.bound[slot]).is_placed:  # or loads queued before `unload` would wait for its bytes
                    bound.is_placed = False
                    self.pool.release(slot, self._used_until(slot))
                return True

        self._retry_until_placed((place, lambda failure: self._fail_load(slot, failure)))

    def stored(self, spec: AdapterSpec) -> AdapterSpec:
        """Returns an adapter's layout in the pool. Raises AdapterRejected for a rank above the padded one.
        Thread-safe."""
        return spec if self._padded_rank is None else padding.padded(spec, self._plan, self._padded_rank)

    def unload(self, slot: int) -> None:
        """Frees a slot's memory; its load must have ended."""
        bound = self.bound.pop(slot)
        if bound.is_loading:
            raise AssertionError(f"adapter slot {slot} is unloaded while it is being loaded")
        self._failures.pop(slot, None)
        if bound.is_placed:
            self.pool.release(slot, self._used_until(slot))

    def resize_kv(self, blocks: int, done: Callable[[Exception | None], None]) -> None:
        """Resizes the KV cache, as core/backend.py defines. Removed blocks are reused only after all iterations
        issued."""

        def resize() -> bool:
            until = at(Lane.COMPUTE, self._timelines.issued()[Lane.COMPUTE])
            try:
                grant = self.pool.resize_kv(blocks, until=until, moved=self._timelines.next(Lane.COMPUTE))
                if grant is None:
                    return False
                self._move(grant)
                self._timelines.wait(Lane.COMPUTE, grant.after)
            except Exception as error:  # requests that wait for these blocks must end
                log.exception("the KV cache cannot be resized to %d blocks", blocks)
                done(error)
            else:
                done(None)
            return True

        if blocks < self.pool.kv_blocks:
            resize()
        else:
            self._retry_until_placed((resize, done))

    # --- called at launches ---

    def poll(self) -> None:
        """Records what has arrived, issues what comes next, and retries loads that found no memory."""
        self._copier.poll()
        self.pool.drop_passed(self._timelines.known)
        while self._waiting and self._waiting[0][0]():
            self._waiting.popleft()

    def fail(self, failure: DeviceLost) -> None:
        """Fails all loads, and resizes that wait for memory; called when the device has failed."""
        self._lost = failure
        waiting, self._waiting = self._waiting, deque()
        for _, give_up in waiting:
            give_up(failure)
        for slot in list(self._loading):
            self._fail_load(slot, failure)

    @property
    def is_busy(self) -> bool:
        """True if `poll` must be called again soon."""
        return bool(self._waiting or self._loading)

    def are_settled(self, slots: Collection[int]) -> bool:
        """True if each of these adapters has device memory or cannot be copied. If not, `poll` until they are."""
        return self._unsettled.isdisjoint(slots)

    def failures(self, slots: Collection[int]) -> dict[int, Exception]:
        """Returns, by slot, why an adapter cannot be used: its layers, or some of them, will never arrive. Raises
        DeviceLost when no batch can be launched any more."""
        if self._lost is not None:
            raise self._lost
        return {slot: failure for slot, failure in self._failures.items() if slot in slots}

    def arriving(self, slots: Collection[int]) -> list[int]:
        """Returns the slots with layers that may be missing."""
        return [slot for slot in self._loading if slot in slots]

    def arriving_by_layers(self, slots: Collection[int]) -> list[int]:
        """Returns the slots some of whose layers can be used while others are missing."""
        return [slot for slot in self.arriving(slots) if not self._copier.arrives_at_once(slot)]

    def items_of(self, slots: Sequence[int]) -> tuple[list[tuple[AdapterItems, ...]], int]:
        """Returns the BGMV kernels' items of each of these adapters by group shape, and the most rank rows that are
        computed. An adapter's are one object as long as it is bound to its slot and computed at the same rank.

        In the padded baseline every module has the rank of the largest of these adapters, otherwise its own."""
        most_rank = MAX_RANK
        if self._padded_rank is not None:
            most_rank = max(align_up(self.bound[slot].adapter.spec.rank, RANK_STEP) for slot in slots)
        return [self._items_of(slot, most_rank) for slot in slots], most_rank

    def group_shapes_of(self, slots: Collection[int]) -> frozenset[int]:
        """Returns the shapes of the groups in which any of these adapters has a module."""
        return frozenset().union(*(self.bound[slot].shapes for slot in slots))

    def changing_vocabulary(self, slots: Collection[int]) -> list[int]:
        """Returns the slots whose adapters change the embedding or the head."""
        return [slot for slot in slots if self.bound[slot].stored.vocabulary]

    def used(self, slots: Collection[int], lane: Lane, number: int) -> None:
        """Records that a pass which reads these adapters ends with mark `number` of `lane`."""
        self._used[list(slots), lane] = number  # a lane's marks only grow

    def bytes_of(self, slot: int) -> Tensor:
        """Returns an adapter's bytes on the device, at their present address."""
        start = self.pool.place_of(slot)
        return self.memory[start : start + self.bound[slot].stored.num_bytes]

    def ready_words(self, slot: int) -> list[int]:
        """Returns the device addresses of a slot's ready words, one per layer."""
        row = self._ready[slot]
        return [row.data_ptr() + row.element_size() * layer for layer in range(row.numel())]

    # --- inside ---

    def _retry_until_placed(self, attempt: _Attempt) -> None:
        if self._waiting or not attempt[0]():
            self._waiting.append(attempt)

    def _fail_load(self, slot: int, failure: Exception) -> None:
        """Ends a load with an error: its layers will not arrive, so no iteration may read the adapter."""
        self._failures[slot] = failure
        self._unsettled.discard(slot)
        self._used[slot] = latest(self._used_until(slot), self._copier.cancel(slot))
        self._end_load(slot, failure)

    def _used_until(self, slot: int) -> Marks:
        """Returns the marks after which nothing reads or writes a slot's bytes any more."""
        return tuple(self._used[slot].tolist())

    def _end_load(self, slot: int, failure: Exception | None) -> None:
        self.bound[slot].is_loading = False
        self._loading.pop(slot)(failure)

    def _place(self, slot: int, groups: tuple[LayerGroup, ...]) -> bool:
        bound = self.bound[slot]
        stored, data = bound.stored, bound.adapter.data
        source = int(data.ctypes.data) if data.size else 0  # an empty array has no address
        if source:
            self._host.await_range(source, data.size)
        grant = self.pool.place(slot, stored.num_bytes, self._timelines.next(Lane.COMPUTE))
        if grant is None:
            return False
        bound.is_placed = True
        self._unsettled.discard(slot)
        base = self.memory.data_ptr()
        self._move(grant)
        self._write_column(slot, base + grant.start)

        def arrived() -> None:
            self.pool.unpin(slot)
            self._end_load(slot, None)

        image = CopyRequest(
            slot=slot,
            source=self._host.on_device(source) if source else 0,
            target=base + grant.start,
            num_bytes=stored.num_bytes,
            groups=groups,
            after=grant.after,
            ready=self.ready_words(slot) if self._ready.numel() else (),
            rows=None if self._padded_rank is None else lambda group: self._rows(bound, group),
            arrived=lambda group, at_s: bound.arrivals.append((group.first_layer, at_s)),
            issued=self._when_copied,
        )
        bound.generation = self._copier.load(image, arrived)
        return True

    def _move(self, grant: Grant) -> None:
        """Moves other adapters out of the way. If that fails, no batch can be launched any more: they are at other
        places than the tables say."""
        try:
            issue_moves(self._driver, self._timelines, self.memory.data_ptr(), grant, self._relocate)
        except Exception as error:
            self._lost = DeviceLost(f"adapters could not be moved: {error}")
            raise

    def _rows(self, bound: BoundAdapter, group: LayerGroup) -> list[padding.RowCopy]:
        layers = range(group.first_layer, group.end_layer)
        return padding.copies(bound.adapter.spec, bound.stored, self._plan, layers)

    def _relocate(self, move: Move, stream: Stream) -> None:
        """Writes an adapter's new address to the tables, on the compute lane before the next iteration."""
        self._write_column(move.slot, self.memory.data_ptr() + move.target)

    def _write_column(self, slot: int, base: int) -> None:
        stored = self.bound[slot].stored
        made = column(stored, self._plan, base)
        self._send_column(slot, self.tables, made, ("a", "b", "vectors", "rank", "scale", "dtype"))
        if stored.vocabulary:  # kernels read the columns of no other adapters
            tables, of_sides = self.tables.vocabulary, vocabulary_column(stored, base)
            self._send_column(slot, tables, of_sides, ("a", "b", "rank", "rows", "scale"))
            for side in np.flatnonzero(of_sides.rows):
                self._ring.send(tables.tokens[side, slot].data_ptr(), of_sides.tokens[side])
        self._ring.flush()

    def _send_column(
        self,
        slot: int,
        tables: AdapterTables | VocabularyTables,
        made: Column | VocabularyColumn,
        names: Sequence[str],
    ) -> None:
        for name in names:
            table, values = getattr(tables, name), getattr(made, name)
            size = table.element_size()
            self._ring.send_column(table.data_ptr() + size * slot, size * self.tables.slots, values.ravel())

    def _items_of(self, slot: int, most_rank: int) -> tuple[AdapterItems, ...]:
        """Returns an adapter's items by group shape, for its first `most_rank` rank rows; made once."""
        key = slot, most_rank
        if key not in self._items:
            self._items[key] = items_by_shape(self._plan, slot, self.bound[slot].stored, most_rank)
        return self._items[key]


def items_by_shape(plan: DecoderPlan, slot: int, stored: AdapterSpec, most_rank: int) -> tuple[AdapterItems, ...]:
    """Returns an adapter's items by group shape, for its first `most_rank` rank rows. A list serves all groups of its
    shape, so it is made for the largest rank that the adapter has in any of them."""
    largest = [[0] * len(shape.widths) for shape in plan.group_shapes]
    places = [  # of each site, by layer: the shape of its group, and where it is in the group
        [(shape, place) for shape, group in zip(shapes, layer.groups, strict=True) for place in range(len(group.sites))]
        for shapes, layer in zip(plan.shapes_of_groups, plan.layers, strict=True)
    ]
    for span in stored.spans:
        shape, place = places[span.layer][span.site]
        largest[shape][place] = max(largest[shape][place], span.rank)
    ranks = [[min(align_up(rank, RANK_STEP), most_rank) for rank in of_shape] for of_shape in largest]
    pairs = zip(plan.group_shapes, ranks, strict=True)
    return tuple(adapter_items(slot, of_shape, stored.dtype, one.widths) for one, of_shape in pairs)


def groups_of(stored: AdapterSpec, plan: DecoderPlan) -> tuple[tuple[frozenset[int], ...], frozenset[int]]:
    """Returns the groups in which an adapter has a module, by layer, and their shapes."""
    groups: list[set[int]] = [set() for _ in plan.layers]
    for span in stored.spans:
        groups[span.layer].add(plan.layers[span.layer].sites[span.site].group)
    shapes = {shape[group] for shape, found in zip(plan.shapes_of_groups, groups, strict=True) for group in found}
    return tuple(map(frozenset, groups)), frozenset(shapes)


def issue_moves(
    driver: Driver, timelines: Timelines, base: int, grant: Grant, relocate: Callable[[Move, Stream], None]
) -> None:
    """Issues a grant's moves between two iterations. Must be called directly after the pool has granted with
    `timelines.next(Lane.COMPUTE)` as `moved`. `relocate` writes the new address to the tables, in stream order."""
    if not grant.moves:
        return
    stream = timelines.streams[Lane.COMPUTE]
    timelines.wait(Lane.COMPUTE, grant.moves_after)
    for move in grant.moves:
        for target, source, num_bytes in move.copies():
            driver.copy_on_device(base + target, base + source, num_bytes, stream)
        relocate(move, stream)
    timelines.mark(Lane.COMPUTE)
