"""Passes whose kernels check their inputs, and a device with arriving adapters, CPU workers and a clock."""

from collections.abc import Callable, Sequence

import numpy as np

from caraserve.core.lora_layout import DOWN, GATE_UP, GROUPS, OUT, QKV
from caraserve.gpu.assist.handshake import SyncSlot, SyncSlotPool, Watchdog, WorkerStatus, sync_slot_bytes
from caraserve.gpu.driver.api import Stream, has_reached
from caraserve.gpu.driver.streams import NOTHING, Lane, Marks, Timelines, at, latest
from caraserve.gpu.forward.decoder import DecoderPass, HandOff
from caraserve.gpu.forward.lanes import AssistedChunk, AssistLane, IterationLane
from caraserve.gpu.memory.copier import AdapterCopier, CopyRequest
from caraserve.gpu.memory.link_queue import LinkQueue, LoraSource, layer_groups
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
    """A pass whose kernels check their inputs and record what they did. `slots`: adapters of its rows; hand-offs are
    those of the first."""

    def __init__(self, world: "World", slots: Sequence[int]) -> None:
        self.world, self.slots = world, slots
        self.done: list[tuple[str, int, int]] = []
        self.resident: dict[int, bool] = {}  # by index: decision of `publish`
        self.published: dict[int, int] = {}  # by index: generation

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

        reads = [self.world.layer_of(slot, layer) for slot in self.slots]
        self._issue(stream, "add_lora", layer, group, reads, end)

    def publish(self, layer: int, group: int, hand_off: HandOff, stream: Stream) -> None:
        driver = self.world.driver

        def is_resident() -> bool:
            return driver.word(hand_off.ready) == hand_off.ready_generation

        def joins() -> list[Clock]:
            self.resident[hand_off.index] = is_resident()
            return [driver.released[hand_off.ready]] if is_resident() else []

        def end() -> None:
            flag = hand_off.y_flag if self.resident[hand_off.index] else hand_off.x_flag
            driver.memory[flag : flag + 4].view(np.uint32)[0] = hand_off.generation
            self.published[hand_off.index] = hand_off.generation

        def leave(clock: Clock) -> None:
            for flag in (hand_off.x_flag, hand_off.y_flag):
                driver.released[flag] = clock

        driver.issue(stream, Operation(f"publish {layer}.{group}", joins=joins, end=end, leaves=leave))

    def await_workers(self, hand_off: HandOff, stream: Stream) -> None:
        self.world.driver.wait_value(stream, hand_off.y_flag, hand_off.generation)

    def add_handed_off(self, layer: int, group: int, hand_off: HandOff, stream: Stream) -> None:
        driver, slot = self.world.driver, self.slots[0]

        def end() -> None:
            if driver.word(hand_off.status) == hand_off.generation:
                self.done.append(("skip", layer, group))
            elif self.resident[hand_off.index]:
                self.world.assert_there(slot, layer)
                self.done.append(("expand", layer, group))
            else:
                assert (hand_off.index, hand_off.generation) in self.world.worked, "no worker has computed this"
                self.done.append(("add", layer, group))

        driver.issue(stream, Operation(f"add {layer}.{group}", end=end))

    def sample(self, stream: Stream) -> None:
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


class World:
    """A device with arriving adapters, CPU workers, a watchdog and a clock."""

    def __init__(self, piece_bytes: int = 1 << 20, sync_slots: int = 2, generation: int = TOP - 2) -> None:
        self.driver = FakeDriver(WORDS + 4096)
        self.driver.memory[HOST : HOST + SLOTS * IMAGE] = np.arange(SLOTS * IMAGE) + 1
        self.lanes = Timelines(self.driver)
        self.copier = AdapterCopier(self.driver, self.lanes, LinkQueue(1e6, piece_bytes), ARRIVALS)
        self.iterations = IterationLane(self.driver, self.lanes, self.copier, LAYERS)
        self.assist = AssistLane(self.driver, self.lanes, self.copier, WORDS)
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

    def assisted(self, chunk: AssistedChunk) -> FakePass:
        work = FakePass(self, [chunk.slot])
        self.watchdog.watch(chunk.sync_slot, {index: 0.001 for _, _, index, _ in chunk.hand_offs()})
        self.chunks[chunk.slot] = at(Lane.ASSIST, self.launch_chunk(work, chunk, NOTHING))
        return work

    def hold_copies(self) -> None:
        """Makes copies issued from now on arrive only once `copies_run` is set."""
        self.copies_run = False
        self.driver.issue(self.lanes.streams[Lane.COPY], Operation("slow", ready=lambda: self.copies_run))

    def launch_chunk(self, work: FakePass, chunk: AssistedChunk, after: Marks) -> int:
        issue = self.assist.issue(self.metadata, work, chunk, after)
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
