"""Passes whose kernels check their inputs, and a device with arriving adapters, CPU workers and a clock."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from caraserve.core.lora_layout import DOWN, GATE_UP, GROUPS, OUT, QKV
from caraserve.gpu.assist.handshake import SyncSlotPool, Watchdog, WorkerStatus
from caraserve.gpu.assist.lane import AssistedChunk, AssistLane
from caraserve.gpu.driver.api import Stream, has_reached
from caraserve.gpu.driver.streams import NOTHING, Lane, Marks, Timelines, at, latest
from caraserve.gpu.forward.decoder import DecoderPass
from caraserve.gpu.forward.lanes import CapturedPass, IterationLane, capture_pass
from caraserve.gpu.memory.copier import AdapterCopier, CopyRequest
from caraserve.gpu.memory.link_queue import LinkQueue, LoraSource, layer_groups
from caraserve.gpu.memory.sync_slots import SyncSlot, sync_slot_bytes
from tests.gpu.fake_driver import Clock, FakeDriver, Operation

LAYERS, LAYER_BYTES, SLOTS = 3, 8, 4
HAND_OFFS = LAYERS * len(GROUPS)
IMAGE = LAYERS * LAYER_BYTES
DEVICE, HOST = 0, SLOTS * IMAGE
READY = 2 * SLOTS * IMAGE
GATE = READY + 4 * SLOTS * LAYERS
ARRIVALS = GATE + 4
BATCH = GATE + 8  # what kernels read of the batch; one for each lane
WORDS = 1024
TOP = 2**32


class FakePass(DecoderPass):
    """A pass whose kernels check their inputs and record what they did. `slots`: adapters of its rows; `handed_off`:
    its module groups, if it is that of an assisted chunk: the one whose work orders were sent last."""

    def __init__(
        self, world: "World", slots: Sequence[int], handed_off: Collection[int] = (), *, samples: bool = True
    ) -> None:
        self.world, self.slots, self.handed_off, self._samples = world, slots, handed_off, samples
        self.done: list[tuple[str, int, int]] = []
        self.outcomes: dict[tuple[int, int], str] = {}  # by layer and module group: "by workers", "awaited", …

    def embed(self, stream: Stream) -> None:
        batch = BATCH + 8 * stream
        self._issue(stream, "embed", 0, 0, reads=[(batch, batch + 4)])

    def attention_norm(self, layer: int, stream: Stream) -> None:
        self._issue(stream, "attention_norm", layer, QKV)

    def rotate_and_append(self, layer: int, stream: Stream) -> None:
        self._issue(stream, "rotate_and_append", layer, OUT)

    def attend(self, layer: int, stream: Stream) -> None:
        self._issue(stream, "attend", layer, OUT)

    def mlp_norm(self, layer: int, stream: Stream) -> None:
        self._issue(stream, "mlp_norm", layer, GATE_UP)

    def silu_mul(self, layer: int, stream: Stream) -> None:
        self._issue(stream, "silu_mul", layer, DOWN)

    def project(self, layer: int, group: int, stream: Stream) -> None:
        self._issue(stream, "project", layer, group)

    def add_lora(self, layer: int, group: int, stream: Stream) -> None:
        def end() -> None:
            for slot in self.slots:
                self.world.assert_there(slot, layer)

        if self.handed_off:
            return  # the adapter has nothing in other module groups
        reads = [self.world.layer_of(slot, layer) for slot in self.slots]
        self._issue(stream, "add_lora", layer, group, reads, end)

    def publish(self, layer: int, group: int, stream: Stream) -> None:
        driver, place = self.world.driver, (layer, group)

        def joins() -> list[Clock]:
            order = self.world.order(layer, group)
            if order is None:
                self.outcomes[place] = "nothing"
            elif order.has_arrived:
                self.outcomes[place] = "by device"
                return [driver.released[order.ready]]
            elif order.is_aborted:
                self.outcomes[place] = "lost"
            else:
                self.outcomes[place] = "by workers" if order.asks else "awaited"
            return []

        def end() -> None:
            order = self.world.order(layer, group)
            if order is not None and order.asks:
                flag = order.x_flag if self.outcomes[place] == "by workers" else order.y_flag
                driver.memory[flag : flag + 4].view(np.uint32)[0] = order.generation

        def leave(clock: Clock) -> None:
            order = self.world.order(layer, group)
            if order is not None and order.asks:
                for flag in (order.x_flag, order.y_flag):
                    driver.released[flag] = clock

        driver.issue(stream, Operation(f"publish {layer}.{group}", joins=joins, end=end, leaves=leave))

    def add_handed_off(self, layer: int, group: int, stream: Stream) -> None:
        driver, place = self.world.driver, (layer, group)

        def is_over() -> bool:
            order = self.world.order(layer, group)
            if order is None or self.outcomes[place] not in ("by workers", "awaited"):
                return True
            if not order.has_arrived:
                driver.check_issued(order.ready, order.ready_generation)
            return self._is_done(place, order) or order.has_arrived or order.is_aborted

        def joins() -> list[Clock]:
            order = self.world.order(layer, group)
            if order is None or self._is_done(place, order):
                return [] if order is None else [driver.released.get(order.y_flag, {})]
            if self.outcomes[place] == "by workers" and order.has_arrived:
                driver.memory[order.x_flag + 8 : order.x_flag + 12].view(np.uint32)[0] = order.generation
                driver.released[order.x_flag + 8] = {}
            if self.outcomes[place] != "lost":
                self.outcomes[place] = "by device" if order.has_arrived else "lost"
            return [driver.released[order.ready]] if self.outcomes[place] == "by device" else []

        def end() -> None:
            order, outcome = self.world.order(layer, group), self.outcomes[place]
            if order is None:
                return
            if outcome == "by device":
                self.world.assert_there(order.slot, layer)
            elif outcome == "by workers":
                assert (order.index, order.generation) in self.world.worked, "no worker has computed this"
            self.done.append(({"lost": "skip", "by device": "expand", "by workers": "add"}[outcome], layer, group))

        driver.issue(stream, Operation(f"wait {layer}.{group}", ready=is_over, joins=joins))
        driver.issue(stream, Operation(f"add {layer}.{group}", end=end))

    def _is_done(self, place: tuple[int, int], order: "Order") -> bool:
        """True if the workers that were asked have answered."""
        y_flag = self.world.driver.word(order.y_flag)
        return self.outcomes[place] == "by workers" and has_reached(y_flag, order.generation)

    def sample(self, stream: Stream) -> None:
        if self._samples:
            self._issue(stream, "sample", 0, 0)

    def _issue(
        self,
        stream: Stream,
        name: str,
        layer: int,
        group: int,
        reads: Sequence[tuple[int, int]] = (),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        def end() -> None:
            then()
            self.done.append((name, layer, group))

        self.world.driver.issue(stream, Operation(f"{name} {layer}.{group}", reads=reads, end=end))


@dataclass(frozen=True)
class Order:
    """A work order in device memory, with the words that it names."""

    driver: FakeDriver
    slot: int
    index: int
    asks: bool  # whether it names workers
    x_flag: int
    y_flag: int
    status: int
    generation: int
    ready: int
    ready_generation: int

    @property
    def has_arrived(self) -> bool:
        return self.driver.word(self.ready) == self.ready_generation

    @property
    def is_aborted(self) -> bool:
        return self.driver.word(self.status) == self.generation


class World:
    """A device with arriving adapters, CPU workers, a watchdog and a clock."""

    def __init__(self, piece_bytes: int = 1 << 20, sync_slots: int = 2, generation: int = TOP - 2) -> None:
        self.driver = FakeDriver(WORDS + 4096)
        self.driver.memory[HOST : HOST + SLOTS * IMAGE] = np.arange(SLOTS * IMAGE) + 1
        self.lanes = Timelines(self.driver)
        self.copier = AdapterCopier(self.driver, self.lanes, LinkQueue(1e6, piece_bytes), ARRIVALS)
        self.iterations = IterationLane(self.driver, self.lanes, self.copier, LAYERS)
        self.assist = AssistLane(self.driver, self.lanes, self.copier, LAYERS)
        self._orders: AssistedChunk | None = None  # the chunk whose work orders are in device memory
        self.sync_slots = SyncSlotPool(
            self,
            [SyncSlot.at(index * sync_slot_bytes(HAND_OFFS), HAND_OFFS, generation) for index in range(sync_slots)],
        )
        self.driver.register_host(WORDS, sync_slots * sync_slot_bytes(HAND_OFFS))
        self.watchdog = Watchdog(self)
        self.chunks: dict[int, Marks] = {}  # by slot: the last chunk that used it
        self.worked: set[tuple[int, int]] = set()
        self.now_s = 0.0
        self.copies_run = True
        self.statuses = [WorkerStatus(0, 1, is_idle=True), WorkerStatus(1, 2, is_idle=True)]

    # The words, as the host sees them.
    def load(self, offset: int) -> int:
        self.driver.acquire(WORDS + offset)
        return self.driver.word(WORDS + offset)

    def store(self, offset: int, value: int) -> None:
        self.driver.store(WORDS + offset, value)

    def layer_of(self, slot: int, layer: int) -> tuple[int, int]:
        start = DEVICE + slot * IMAGE + layer * LAYER_BYTES
        return start, start + LAYER_BYTES

    def assert_there(self, slot: int, layer: int) -> None:
        low, high = self.layer_of(slot, layer)
        there = self.driver.memory[low:high]
        assert np.array_equal(there, self.driver.memory[HOST + low : HOST + high]), "a layer was read too early"

    def ready(self, slot: int) -> list[int]:
        return [READY + 4 * (slot * LAYERS + layer) for layer in range(LAYERS)]

    def bring(self, slot: int, group_ends: Sequence[int] = (1, 2), first_layer: int = 0) -> int:
        layer_ends = [LAYER_BYTES * (layer + 1) for layer in range(LAYERS)]
        groups = layer_groups(layer_ends, group_ends, first_layer)
        computed = at(Lane.COMPUTE, self.lanes.issued()[Lane.COMPUTE])  # any of these may have used the bytes
        after = latest(computed, self.chunks.get(slot, NOTHING))
        image = CopyRequest(slot, HOST + slot * IMAGE, slot * IMAGE, IMAGE, groups, after, self.ready(slot))
        return self.copier.load(image, lambda: None)

    def metadata(self, stream: Stream) -> None:
        self.driver.copy_to_device(BATCH + 8 * stream, BATCH + 8 * stream + 4, 4, stream)

    def chunk(
        self, slot: int, generation: int, sources: Sequence[LoraSource], groups: Sequence[int] = (0, 3)
    ) -> AssistedChunk:
        sync_slot = self.sync_slots.acquire()
        assert sync_slot is not None, "no sync slot is free"
        return AssistedChunk(slot, sync_slot, sources, [groups] * LAYERS, self.ready(slot), generation)

    def order(self, layer: int, group: int) -> Order | None:
        """Returns the work order in device memory, or None if the adapter has nothing there."""
        chunk = self._orders
        assert chunk is not None, "no work orders have come"
        if group not in chunk.groups[layer]:
            return None
        index, sync_slot = layer * len(GROUPS) + group, chunk.sync_slot
        flags = WORDS + sync_slot.flags[index].x_flag, WORDS + sync_slot.flags[index].y_flag
        asks = chunk.sources[layer] is LoraSource.WORKERS
        status = WORDS + sync_slot.status
        ready = chunk.ready[layer], chunk.ready_generation
        return Order(self.driver, chunk.slot, index, asks, *flags, status, sync_slot.generation, *ready)

    def capture_chunk(self) -> tuple[FakePass, CapturedPass]:
        """Returns the pass of any chunk and its graph, without sampling."""
        work = FakePass(self, [], range(len(GROUPS)), samples=False)
        stream = self.lanes.streams[Lane.ASSIST]
        return work, capture_pass(self.driver, work, stream, LAYERS, gate=None)

    def assisted(self, chunk: AssistedChunk, captured: CapturedPass | None = None) -> FakePass:
        """Launches a chunk and returns its pass, which only samples if the others are `captured`."""
        work = FakePass(self, [chunk.slot], frozenset().union(*map(frozenset, chunk.groups)))
        self.watchdog.watch(chunk.sync_slot, {index: 0.001 for _, _, index, _ in chunk.hand_offs()})
        self.chunks[chunk.slot] = at(Lane.ASSIST, self.launch_chunk(work, chunk, NOTHING, captured))
        return work

    def hold_copies(self) -> None:
        """Makes copies issued from now on arrive only once `copies_run` is set."""
        self.copies_run = False
        self.driver.issue(self.lanes.streams[Lane.COPY], Operation("slow", ready=lambda: self.copies_run))

    def launch_chunk(
        self, work: FakePass, chunk: AssistedChunk, after: Marks, captured: CapturedPass | None = None
    ) -> int:
        def metadata(stream: Stream) -> None:
            def send() -> None:
                self._orders = chunk

            self.metadata(stream)
            self.driver.issue(stream, Operation("orders", end=send))

        issue = self.assist.issue(metadata, work, captured, chunk.slot, after)
        while True:
            try:
                next(issue)
            except StopIteration as end:
                return int(end.value)

    def work(self, chunk: AssistedChunk) -> bool:
        """Does the workers' part of the first hand-off that has x but not y. Returns False if there is none."""
        for _, _, index, flags in chunk.hand_offs():
            if has_reached(self.load(flags.y_flag), chunk.sync_slot.generation):
                continue
            if not has_reached(self.load(flags.x_flag), chunk.sync_slot.generation):
                return False
            self.worked.add((index, chunk.sync_slot.generation))
            self.store(flags.y_flag, chunk.sync_slot.generation)
            return True
        return False

    def settle(self, choose: Callable[[int], int] = lambda count: 0) -> None:
        while self.driver.step(choose):
            pass
