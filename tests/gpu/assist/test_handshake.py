"""Every wait ends, also when workers die or are late; aborted chunks; reuse of sync slots."""

from collections.abc import Iterator

import pytest

from caraserve.cpu.lora_workers.pool import WorkerState
from caraserve.cpu.shared_memory import SharedRegion
from caraserve.gpu.assist.handshake import CHECK_S, SyncSlotPool, Watchdog
from caraserve.gpu.assist.lane import chunk_ends
from caraserve.gpu.driver.api import has_reached, successor
from caraserve.gpu.memory.sync_slots import RegionWords, SyncSlot, sync_slot_bytes

HAND_OFFS, TOP = 3, 1 << 32
EXPECTED_S, LIMIT_S = 0.001, 0.007  # of a hand-off


def worker(incarnation: int = 1, *, is_busy: bool = False) -> WorkerState:
    return WorkerState(1, 0, 0, 0, is_busy, is_asleep=False, incarnation=incarnation)


ALIVE, SECOND_DEAD = [worker(), worker()], [worker(), worker(0)]


class Chunk:
    """A watched chunk whose words the test writes as the device and the workers do, and a clock."""

    def __init__(self, *, generation: int = 0) -> None:
        self.region = SharedRegion(sync_slot_bytes(HAND_OFFS))
        self.words, self.now_s = RegionWords(self.region), 100.0
        self.slots = SyncSlotPool(self.words, [SyncSlot.at(0, HAND_OFFS, generation)])
        self.watchdog = Watchdog(self.words)
        self.slot = self.acquire()
        self.watchdog.watch(self.slot, dict.fromkeys(range(HAND_OFFS), EXPECTED_S))

    def acquire(self) -> SyncSlot:
        slot = self.slots.acquire()
        assert slot is not None
        return slot

    def reach(self, hand_off: int) -> None:
        """Asks the workers for a hand-off, as the device does."""
        self.words.store(self.slot.flags[hand_off].x_flag, self.slot.generation)

    def answer(self, hand_off: int) -> None:
        self.words.store(self.slot.flags[hand_off].y_flag, self.slot.generation)

    def check(self, workers: list[WorkerState], later_s: float = 0.0) -> bool:
        """Lets the watchdog check at a later time. Returns whether the chunk has been aborted."""
        self.now_s += later_s
        self.watchdog.check(self.now_s, workers)
        return self.words.load(self.slot.status) == self.slot.generation


@pytest.fixture
def chunk() -> Iterator[Chunk]:
    made = Chunk()
    yield made
    made.region.close()


def test_the_device_is_released_within_5_ms_of_a_workers_death(chunk: Chunk) -> None:
    chunk.reach(0)
    chunk.check(ALIVE)
    died_s = chunk.now_s
    while not chunk.check(SECOND_DEAD, CHECK_S):
        assert chunk.now_s - died_s <= 0.005
    assert chunk.watchdog.unwatch(chunk.slot)


def test_the_device_is_released_at_once_when_no_worker_is_left(chunk: Chunk) -> None:
    chunk.reach(0)
    assert not chunk.check(ALIVE)
    assert chunk.check([worker(0), worker(0)])


def test_another_worker_may_compute_a_dead_workers_slice(chunk: Chunk) -> None:
    chunk.reach(0)
    chunk.check(ALIVE)
    assert not chunk.check(SECOND_DEAD, CHECK_S)
    for hand_off in range(HAND_OFFS):
        chunk.reach(hand_off)
        chunk.answer(hand_off)
        assert not chunk.check(SECOND_DEAD, CHECK_S)
    assert not chunk.check(SECOND_DEAD, 1.0)
    assert not chunk.watchdog.unwatch(chunk.slot)


def test_a_replacement_worker_does_not_hide_a_death(chunk: Chunk) -> None:
    chunk.reach(0)
    chunk.check(ALIVE)
    replaced = [worker(), worker(3)]
    assert not chunk.check(replaced, CHECK_S)
    assert chunk.check(replaced, 0.0035)


def test_a_hand_off_is_aborted_at_its_deadline_and_not_before(chunk: Chunk) -> None:
    chunk.reach(0)
    chunk.check(ALIVE)
    assert not chunk.check(ALIVE, LIMIT_S - 0.0001)
    assert chunk.check(ALIVE, 0.0002)


def test_each_hand_offs_deadline_starts_when_the_device_waits(chunk: Chunk) -> None:
    assert not chunk.check(ALIVE, 1.0)  # the device has not reached the first hand-off yet
    for hand_off in range(HAND_OFFS):
        chunk.reach(hand_off)
        chunk.check(ALIVE)
        assert not chunk.check(ALIVE, LIMIT_S - CHECK_S)
        chunk.answer(hand_off)
    assert not chunk.check(ALIVE, 1.0)


def test_a_hand_off_that_the_device_has_left_is_not_waited_for(chunk: Chunk) -> None:
    chunk.reach(0)
    chunk.check(ALIVE)
    chunk.words.store(chunk.slot.flags[0].left, chunk.slot.generation)
    assert not chunk.check(ALIVE, 1.0)


def test_a_sync_slot_is_not_reused_until_no_worker_can_write_to_it(chunk: Chunk) -> None:
    chunk.watchdog.abort(chunk.slot)
    assert chunk.watchdog.unwatch(chunk.slot)
    busy = [worker(is_busy=True), worker()]
    chunk.slots.release(chunk.slot, busy)
    assert chunk.slots.acquire() is None
    chunk.slots.reclaim(busy)
    assert chunk.slots.acquire() is None
    chunk.slots.reclaim([worker(), worker(is_busy=True)])  # the other one computes another hand-off
    assert chunk.slots.acquire() is chunk.slot


def test_a_sync_slot_does_not_wait_for_a_dead_worker(chunk: Chunk) -> None:
    chunk.slots.release(chunk.slot, [worker(is_busy=True)])
    chunk.slots.reclaim([worker(5, is_busy=True)])  # another incarnation
    assert chunk.slots.acquire() is chunk.slot


def test_words_not_written_for_2_to_the_31_generations_do_not_compare_as_ahead(chunk: Chunk) -> None:
    for word in range(0, sync_slot_bytes(HAND_OFFS), 4):
        chunk.words.store(word, TOP // 2 + 100)
    chunk.slot.generation = TOP // 2 + 50  # as after many chunks
    chunk.slots.release(chunk.slot)
    slot = chunk.acquire()
    for flags in slot.flags:
        assert not has_reached(chunk.words.load(flags.x_flag), slot.generation)
        assert not has_reached(chunk.words.load(flags.y_flag), slot.generation)
    assert chunk.words.load(slot.status) != slot.generation


def test_generations_wrap() -> None:
    assert successor(TOP - 1) == 0
    assert has_reached(0, TOP - 1)
    assert has_reached(7, 7)
    assert not has_reached(TOP - 1, 0)
    assert has_reached(TOP // 2 - 1, 0)
    assert not has_reached(TOP // 2, 0)


def test_each_word_of_a_sync_slot_has_its_own_cache_line() -> None:
    slots = [SyncSlot.at(index * sync_slot_bytes(HAND_OFFS), HAND_OFFS) for index in range(2)]
    words = [slot.status for slot in slots]
    words += [word for slot in slots for flags in slot.flags for word in (flags.x_flag, flags.y_flag)]
    assert len({word // 64 for word in words}) == len(words)
    assert max(words) < 2 * sync_slot_bytes(HAND_OFFS)


def test_a_prompts_chunks_are_of_equal_size_but_the_last() -> None:
    assert list(chunk_ends(100, 400)) == [228, 356, 400]
    assert list(chunk_ends(0, 128)) == [128]
    assert list(chunk_ends(5, 5)) == []
