"""Every wait ends, also when workers die or are late; aborted chunks; reuse of sync slots."""

from caraserve.gpu.assist.handshake import CHECK_S, WorkerStatus
from caraserve.gpu.assist.lane import AssistedChunk
from caraserve.gpu.driver.api import has_reached, successor
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.memory.link_queue import LoraSource
from caraserve.gpu.memory.sync_slots import SyncSlot, sync_slot_bytes
from tests.gpu.fake_pass import HAND_OFFS, LAYERS, TOP, FakePass, World

WORKERS = LoraSource.WORKERS


def waiting_chunk(world: World) -> tuple[AssistedChunk, FakePass]:
    """Returns a chunk that the device has reached, waiting for its first result."""
    world.hold_copies()
    chunk = world.chunk(1, world.bring(1), [WORKERS] * LAYERS)
    work = world.assisted(chunk)
    world.settle()
    world.watchdog.check(world.now_s, world.statuses)
    return chunk, work


def is_released(world: World) -> bool:
    world.settle()
    return world.driver.is_idle(world.lanes.streams[Lane.ASSIST])


def test_the_device_is_released_within_5_ms_of_a_workers_death() -> None:
    world = World()
    chunk, work = waiting_chunk(world)
    died_s = world.now_s
    while not is_released(world):
        world.now_s += CHECK_S
        world.watchdog.check(world.now_s, world.statuses[:1])  # the other worker is alive, but does not redo the slice
        assert world.now_s - died_s <= 0.005
    assert world.watchdog.unwatch(chunk.sync_slot)
    assert {kind for kind, *_ in work.done} == {
        *("embed", "attention_norm", "project", "rotate_and_append", "attend", "mlp_norm", "silu_mul", "skip", "sample")
    }


def test_the_device_is_released_at_once_when_no_worker_is_left() -> None:
    world = World()
    waiting_chunk(world)
    world.watchdog.check(world.now_s, [WorkerStatus(0, None, is_idle=True)])
    assert is_released(world)


def test_another_worker_may_compute_a_dead_workers_slice() -> None:
    world = World()
    chunk, work = waiting_chunk(world)
    world.watchdog.check(world.now_s + CHECK_S, world.statuses[:1])
    while world.work(chunk):
        world.settle()
        world.watchdog.check(world.now_s + 2 * CHECK_S, world.statuses[:1])
    world.watchdog.check(world.now_s + 1.0, world.statuses[:1])
    assert not world.watchdog.unwatch(chunk.sync_slot)
    assert work.done[-1] == ("sample", 0, 0)


def test_a_replacement_worker_does_not_hide_a_death() -> None:
    world = World()
    waiting_chunk(world)
    statuses = [world.statuses[0], WorkerStatus(1, 3, is_idle=True)]
    world.watchdog.check(world.now_s + 0.001, statuses)
    world.watchdog.check(world.now_s + 0.0045, statuses)
    assert is_released(world)


def test_a_hand_off_is_aborted_at_its_deadline_and_not_before() -> None:
    world = World()
    waiting_chunk(world)  # predicted: 1 ms
    world.watchdog.check(world.now_s + 0.0069, world.statuses)
    assert not is_released(world)
    world.watchdog.check(world.now_s + 0.0071, world.statuses)
    assert is_released(world)


def test_each_hand_offs_deadline_starts_when_the_device_waits() -> None:
    world = World()
    world.hold_copies()
    chunk = world.chunk(1, world.bring(1), [WORKERS] * LAYERS)
    world.assisted(chunk)
    for _ in range(100):  # the device has not reached the hand-off yet
        world.now_s += 0.01
        world.watchdog.check(world.now_s, world.statuses)
    world.settle()
    while True:
        for _ in range(5):
            world.watchdog.check(world.now_s, world.statuses)
            world.now_s += CHECK_S
        if not world.work(chunk):
            break
        world.settle()
    assert not world.watchdog.unwatch(chunk.sync_slot)


def test_a_sync_slot_is_not_reused_until_no_worker_can_write_to_it() -> None:
    world = World(sync_slots=1)
    chunk, _ = waiting_chunk(world)
    busy = [WorkerStatus(0, 1, is_idle=False), WorkerStatus(1, 2, is_idle=True)]
    world.watchdog.abort(chunk.sync_slot)
    assert is_released(world)
    assert world.watchdog.unwatch(chunk.sync_slot)
    world.sync_slots.release(chunk.sync_slot, busy)
    assert world.sync_slots.acquire() is None
    world.sync_slots.reclaim(busy)
    assert world.sync_slots.acquire() is None
    busy_with_another_hand_off = WorkerStatus(1, 2, is_idle=False)
    world.sync_slots.reclaim([WorkerStatus(0, 1, is_idle=True), busy_with_another_hand_off])
    assert world.sync_slots.acquire() is chunk.sync_slot


def test_a_sync_slot_does_not_wait_for_a_dead_worker() -> None:
    world = World(sync_slots=1)
    sync_slot = world.sync_slots.acquire()
    assert sync_slot is not None
    world.sync_slots.release(sync_slot, [WorkerStatus(0, 1, is_idle=False)])
    world.sync_slots.reclaim([WorkerStatus(0, 5, is_idle=False)])  # another incarnation
    assert world.sync_slots.acquire() is sync_slot


def test_words_not_written_for_2_to_the_31_generations_do_not_compare_as_ahead() -> None:
    world = World(sync_slots=1, generation=5)
    for word in range(0, sync_slot_bytes(HAND_OFFS), 4):
        world.store(word, TOP // 2 + 100)
    sync_slot = world.sync_slots.acquire()
    assert sync_slot is not None
    sync_slot.generation = TOP // 2 + 50  # as after many chunks
    world.sync_slots.release(sync_slot)
    sync_slot = world.sync_slots.acquire()
    assert sync_slot is not None
    for flags in sync_slot.flags:
        assert not has_reached(world.load(flags.x_flag), sync_slot.generation)
        assert not has_reached(world.load(flags.y_flag), sync_slot.generation)
    assert world.load(sync_slot.status) != sync_slot.generation


def test_generations_wrap() -> None:
    assert successor(TOP - 1) == 0
    assert has_reached(0, TOP - 1)
    assert has_reached(7, 7)
    assert not has_reached(TOP - 1, 0)
    assert has_reached(TOP // 2 - 1, 0)
    assert not has_reached(TOP // 2, 0)


def test_sync_slots_do_not_overlap_and_each_word_has_its_own_cache_line() -> None:
    sync_slots = [SyncSlot.at(index * sync_slot_bytes(HAND_OFFS), HAND_OFFS) for index in range(2)]
    words = [
        w
        for sync_slot in sync_slots
        for w in (sync_slot.status, *(f for e in sync_slot.flags for f in (e.x_flag, e.y_flag)))
    ]
    assert len({word // 64 for word in words}) == len(words)
    assert max(words) < 2 * sync_slot_bytes(HAND_OFFS)
