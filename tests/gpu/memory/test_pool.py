"""The device pool: what fits, what moves, and that no byte gets a new owner while launched work may access it."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.streams import NOTHING, Lane, Marks, Timelines, at, latest
from caraserve.gpu.memory.adapters import issue_moves
from caraserve.gpu.memory.pool import DevicePool, Grant, Move
from tests.gpu.host_backend import check_pool
from tests.gpu.host_driver import HostDriver, Operation
from tests.gpu.lora_case import address

GRANULE = 16
BLOCK = 24  # neither divides the granule nor is divided by it
PAST = at(Lane.COMPUTE, 1)


def pool(granules: int = 20, **options: int) -> DevicePool:
    return DevicePool(granules * GRANULE, BLOCK, granule=GRANULE, **options)


def placed(made: DevicePool, slot: int, granules: int, *, held: bool = False) -> Grant:
    grant = made.place(slot, granules * GRANULE, PAST)
    assert grant is not None, "it should fit"
    if not held:
        made.unpin(slot)
    return grant


# --- placement ---


def test_adapters_are_placed_from_the_high_end_and_in_the_smallest_hole_first() -> None:
    made = pool(20)
    assert [placed(made, slot, size).start // GRANULE for slot, size in ((1, 4), (2, 2), (3, 3), (4, 1))] == [
        16,
        14,
        11,
        10,
    ]
    made.release(1, NOTHING)
    made.release(3, NOTHING)
    assert placed(made, 5, 2).start // GRANULE == 12  # at the top of adapter 3's hole
    assert made.place_of(5) == 12 * GRANULE
    check_pool(made)


def test_sizes_are_whole_granules_and_an_empty_adapter_takes_one() -> None:
    made = pool()
    assert [made.takes(size) for size in (0, 1, GRANULE, GRANULE + 1)] == [GRANULE, GRANULE, GRANULE, 2 * GRANULE]


def test_holes_are_joined_by_the_smallest_move() -> None:
    made = pool(10)
    for slot, size in ((1, 2), (2, 1), (3, 2), (4, 3), (5, 2)):
        placed(made, slot, size)
    made.release(1, NOTHING)
    made.release(3, NOTHING)
    assert made.place(6, 5 * GRANULE, PAST) is None
    grant = placed(made, 6, 4)
    assert grant.moves == (Move(2, 7 * GRANULE, 9 * GRANULE, GRANULE),)
    assert grant.start == 5 * GRANULE
    check_pool(made)


def test_of_two_ways_to_join_holes_the_cheaper_is_chosen() -> None:
    made = pool(14)
    for slot, size in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 4), (6, 6)):
        placed(made, slot, size)
    made.pin(6)
    for slot in (1, 3, 4):
        made.release(slot, NOTHING)
    made.pin(5)
    assert [move.slot for move in placed(made, 7, 3).moves] == [2]
    made = pool(13)
    for slot, size in ((1, 1), (2, 1), (3, 1), (4, 6), (5, 1), (6, 3)):
        placed(made, slot, size)
    for slot in (1, 3, 5):
        made.release(slot, NOTHING)
    assert [move.slot for move in placed(made, 7, 2).moves] == [2]


def test_bytes_returned_unused_keep_their_marks() -> None:
    made = pool(4)
    placed(made, 1, 4)
    made.release(1, at(Lane.COMPUTE, 5))
    assert placed(made, 2, 4).after == at(Lane.COMPUTE, 5)
    made.release(2, NOTHING)
    assert placed(made, 3, 2).after == at(Lane.COMPUTE, 5)
    made.drop_passed(at(Lane.COMPUTE, 4))
    assert placed(made, 4, 1).after == at(Lane.COMPUTE, 5)
    made.drop_passed(at(Lane.COMPUTE, 5))
    assert placed(made, 5, 1).after == NOTHING


def test_the_limit_of_adapter_bytes_holds_although_memory_is_free() -> None:
    made = pool(20, lora_bytes=4 * GRANULE)
    placed(made, 1, 3)
    assert made.place(2, 2 * GRANULE, PAST) is None
    placed(made, 2, 1)


def test_the_least_kv_blocks_are_reserved_before_they_are_requested() -> None:
    made = pool(20, least_kv_blocks=8)  # 192 bytes: 12 granules
    placed(made, 1, 8)
    assert made.place(2, GRANULE, PAST) is None
    assert made.resize_kv(8, until=NOTHING, moved=PAST) == Grant(0, 8 * BLOCK, NOTHING)
    check_pool(made)


def test_what_can_never_fit_is_an_error_and_changes_nothing() -> None:
    """None would mean that it fits once adapters have moved or left."""
    made = pool(20, lora_bytes=10 * GRANULE, least_kv_blocks=8)
    with pytest.raises(ValueError, match="14 KV blocks do not fit in 320 bytes"):
        made.resize_kv(14, until=NOTHING, moved=PAST)
    with pytest.raises(ValueError, match="takes 144 bytes of the pool, and all adapters may take 128"):
        made.place(1, 9 * GRANULE, PAST)
    assert made.resize_kv(13, until=NOTHING, moved=PAST) == Grant(0, 13 * BLOCK, NOTHING)
    with pytest.raises(ValueError, match="may take 32"):
        pool(20, lora_bytes=2 * GRANULE).place(1, 3 * GRANULE, PAST)
    check_pool(made)


def test_growing_kv_moves_adapters_together_and_fails_if_they_are_in_the_way() -> None:
    made = pool(10)
    for slot in range(1, 6):
        placed(made, slot, 2)
    for slot in (2, 4):
        made.release(slot, NOTHING)
    grant = made.resize_kv(2, until=NOTHING, moved=PAST)  # 48 bytes: 3 granules
    assert grant is not None
    assert [move.slot for move in grant.moves] == [3, 5]
    assert made.resize_kv(3, until=NOTHING, moved=PAST) is None  # 5 granules, 4 free
    assert made.kv_blocks == 2
    check_pool(made)


def test_pinned_adapters_do_not_move() -> None:
    made = pool(10)
    placed(made, 1, 5)
    placed(made, 2, 1)
    made.release(1, NOTHING)
    for _ in range(2):
        made.pin(2)
    made.unpin(2)
    assert made.place(3, 6 * GRANULE, PAST) is None
    assert made.resize_kv(3, until=NOTHING, moved=PAST) is None
    made.unpin(2)
    placed(made, 3, 6)


def test_a_slot_is_placed_once_and_unpinned_as_often_as_pinned() -> None:
    made = pool()
    placed(made, 1, 1)
    with pytest.raises(AssertionError, match="has bytes already"):
        made.place(1, 1, PAST)
    with pytest.raises(AssertionError, match="is not pinned"):
        made.unpin(1)


def test_a_pool_too_small_for_the_least_kv_blocks_is_rejected() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        pool(2, least_kv_blocks=2)


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["keep", "drop", "hold"])), max_size=12), st.data())
def test_an_adapter_fits_exactly_if_movable_neighbours_leave_enough_bytes(
    asked: list[tuple[int, str]], data: st.DataObject
) -> None:
    made = pool(24)
    kept = []
    for slot, (size, fate) in enumerate(asked, start=1):
        if made.place(slot, size * GRANULE, PAST) is not None:
            kept.append((slot, fate))
            made.unpin(slot)
    for slot, fate in kept:
        if fate == "drop":
            made.release(slot, NOTHING)
        elif fate == "hold":
            made.pin(slot)
    need = data.draw(st.integers(1, 24))
    taken = {slot: made.place_of(slot) for slot, fate in kept if fate != "drop"}
    free = [True] * 24
    for slot, start in taken.items():
        for granule in range(start // GRANULE, start // GRANULE + asked[slot - 1][0]):
            free[granule] = False
    walls = {granule for slot, fate in kept if fate == "hold" for granule in [taken[slot] // GRANULE]}
    rooms, room = [], 0
    for granule in range(24):
        if granule in walls:
            rooms.append(room)
            room = 0
        room += free[granule]
    grant = made.place(99, need * GRANULE, PAST)
    assert (grant is not None) == (max([*rooms, room]) >= need)
    assert all(made.place_of(slot) == taken[slot] for slot, fate in kept if fate == "hold")
    check_pool(made)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_move_keeps_its_bytes_whatever_it_overlaps(size: int, distance: int) -> None:
    memory = np.arange(100, dtype=np.uint8)
    for target, source, num_bytes in Move(1, 5, 5 + distance, size).copies():
        assert source + num_bytes <= target
        memory[target : target + num_bytes] = memory[source : source + num_bytes]
    assert list(memory[5 + distance : 5 + distance + size]) == list(range(5, 5 + size))


# --- on a device, under any schedule ---


class PoolCase:
    """A pool on a fake device, with copies into it and kernels that read it, all launched without host waits."""

    GRANULES, SLOTS = 24, 7

    def __init__(self, random: Random) -> None:
        self.random = random
        self.size = self.GRANULES * GRANULE
        self.driver = HostDriver(random.randrange(1 << 30), finds_races=True)
        self.memory, self.host = np.zeros(self.size, np.uint8), (np.arange(self.size) % 251 + 1).astype(np.uint8)
        self.lanes = Timelines(self.driver)
        self.pool = DevicePool(self.size, BLOCK, lora_bytes=20 * GRANULE, least_kv_blocks=1, granule=GRANULE)
        self.sizes: dict[int, int] = {}
        self.arrives: dict[int, Marks] = {}
        self.used: dict[int, Marks] = {}  # marks after the last kernel that reads it
        self.loading: dict[int, Marks] = {}
        self.lent: list[tuple[int, Marks]] = []  # read on the assist lane
        self.kv_after = NOTHING
        self.copied: set[int] = set()

    def image(self, slot: int) -> np.ndarray:
        """Returns the host's copy of an adapter."""
        return self.host[3 * slot :]

    def at(self, offset: int) -> int:
        """Returns the device address of an offset in the pool."""
        return address(self.memory) + offset

    def load(self) -> None:
        free = [slot for slot in range(1, self.SLOTS) if slot not in self.sizes]
        if not free:
            return
        slot, num_bytes = self.random.choice(free), self.random.randint(1, 8 * GRANULE)
        grant = self.pool.place(slot, num_bytes, self.lanes.next(Lane.COMPUTE))
        if grant is None:
            return
        self.move(grant)
        self.sizes[slot] = num_bytes
        self.lanes.wait(Lane.COPY, grant.after)
        stream = self.lanes.streams[Lane.COPY]
        if self.random.random() < 0.8:  # otherwise cancelled before any copy was issued
            self.driver.copy_to_device(self.at(grant.start), address(self.image(slot)), num_bytes, stream)
            self.copied.add(slot)
        self.arrives[slot] = self.loading[slot] = at(Lane.COPY, self.lanes.mark(Lane.COPY))
        if self.driver.left() and self.random.random() < 0.2:
            self.evict(slot)

    def move(self, grant: Grant) -> None:
        moving = {move.slot for move in grant.moves}
        assert not moving & (self.loading.keys() | {slot for slot, _ in self.lent}), "moved in use"
        issue_moves(self.driver, self.lanes, self.at(0), grant, lambda move, stream: None)

    def evict(self, slot: int) -> None:
        self.pool.release(slot, latest(self.arrives[slot], self.used.get(slot, NOTHING)))
        self.copied.discard(slot)
        for table in (self.sizes, self.arrives, self.loading, self.used):
            table.pop(slot, None)
        self.lent = [entry for entry in self.lent if entry[0] != slot]

    def evict_one(self) -> None:
        if self.sizes:
            self.evict(self.random.choice(list(self.sizes)))

    def read(self, lane: Lane) -> None:
        """Launches a kernel that reads an adapter which is loaded or being loaded."""
        if not self.sizes:
            return
        slot = self.random.choice(list(self.sizes))
        start, num_bytes = self.pool.place_of(slot), self.sizes[slot]
        self.lanes.wait(lane, self.arrives[slot])
        if lane is not Lane.COMPUTE:
            self.lanes.wait(lane, self.pool.moved(slot))
        self.kernel(lane, reads=(start, start + num_bytes))
        mark = self.lanes.mark(lane)
        self.used[slot] = latest(self.used.get(slot, NOTHING), at(lane, mark))
        if lane is Lane.ASSIST:
            self.pool.pin(slot)
            self.lent.append((slot, at(lane, mark)))

    def resize_kv(self) -> None:
        blocks = self.random.randint(0, 12)
        until, moved = self.lanes.issued(), self.lanes.next(Lane.COMPUTE)
        if (grant := self.pool.resize_kv(blocks, until=until, moved=moved)) is not None:
            self.move(grant)
            self.kv_after = latest(self.kv_after, grant.after)

    def write_kv(self) -> None:
        """Launches an iteration that writes to KV blocks."""
        if self.pool.kv_blocks:
            start = self.random.randrange(self.pool.kv_blocks) * BLOCK
            self.lanes.wait(Lane.COMPUTE, self.kv_after)
            self.kernel(Lane.COMPUTE, writes=(start, start + BLOCK))
            self.lanes.mark(Lane.COMPUTE)

    def kernel(self, lane: Lane, reads: tuple[int, int] = (0, 0), writes: tuple[int, int] = (0, 0)) -> None:
        spans = [(self.at(start), self.at(end)) for start, end in (reads, writes)]
        self.driver.issue(self.stream(lane), Operation("kernel", reads=spans[:1], writes=spans[1:]))

    def stream(self, lane: Lane) -> Stream:
        return self.lanes.streams[lane]

    def look(self) -> None:
        """Queries the device's progress."""
        passed = self.lanes.passed()
        for slot, marks in list(self.loading.items()):
            if passed[Lane.COPY] >= marks[Lane.COPY]:
                del self.loading[slot]
                self.pool.unpin(slot)
        for slot, marks in list(self.lent):
            if passed[Lane.ASSIST] >= marks[Lane.ASSIST]:
                self.lent.remove((slot, marks))
                self.pool.unpin(slot)
        self.pool.drop_passed(passed)

    def act(self) -> None:
        actions = [self.load, self.load, self.evict_one, self.resize_kv, self.write_kv, self.look]
        actions += [lambda: self.read(Lane.COMPUTE), lambda: self.read(Lane.ASSIST)]
        self.random.choice(actions)()
        check_pool(self.pool)
        for _ in range(self.random.choice((0, 0, 1, 4, 16))):
            self.driver.step()


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_no_byte_is_reused_while_launched_work_may_touch_it(seed: int) -> None:
    random = Random(seed)
    case = PoolCase(random)
    for _ in range(60):
        case.act()
    case.driver.run_all()
    case.look()
    assert not case.loading
    assert not case.lent
    for slot in case.copied:
        start, num_bytes = case.pool.place_of(slot), case.sizes[slot]
        expected = case.image(slot)[:num_bytes]
        assert np.array_equal(case.memory[start : start + num_bytes], expected), "bytes were lost in a move"


def test_passed_marks_are_dropped() -> None:
    made = pool()
    for number in range(1, 1000):
        placed(made, 1, 1 + number % 3)
        made.release(1, at(Lane.COMPUTE, number))
        made.drop_passed(at(Lane.COMPUTE, number - 2))
    assert made.place(1, GRANULE, PAST) is not None
    assert len(made._stale) <= 4
