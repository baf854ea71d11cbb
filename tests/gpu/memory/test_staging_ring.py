"""Small copies through pinned memory: the data arrives as sent, however late the device runs."""

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.streams import Lane, Timelines
from caraserve.gpu.kernels.cuda_launch import PIECE
from caraserve.gpu.memory.staging_ring import BLOCK_BYTES, StagingRing
from tests.gpu.fake_driver import FakeDriver, Operation

RING_BYTES, TARGET = 2048, 4096


class Kernels:
    """Copies pieces, as the kernel in words.cu does, when the device gets to it."""

    multiprocessors = 1

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.pieces: list[int] = []  # of each launch

    def launch(self, launch: Launch, stream: Stream) -> None:
        assert launch.kernel == "scatter_words"
        table, memory = int(launch.arguments[0]), self.driver.memory
        table_end = table + launch.grid * PIECE.itemsize
        pieces = memory[table:table_end].view(PIECE).copy()
        self.pieces.append(launch.grid)
        rows = [row for piece in pieces for row in rows_of(piece)]

        def copy() -> None:
            assert (memory[table:table_end].view(PIECE) == pieces).all()
            for source, target, size in rows:
                memory[target : target + size] = memory[source : source + size]

        sources = [(int(piece["source"]), int(piece["source"]) + 4 * int(piece["words"])) for piece in pieces]
        writes = [(target, target + size) for _, target, size in rows]
        self.driver.issue(stream, Operation("scatter", [(table, table_end), *sources], writes, end=copy))


def rows_of(piece: np.void) -> Iterator[tuple[int, int, int]]:
    """Yields source, target and bytes of each row of a piece."""
    words, width = int(piece["words"]), int(piece["width"])
    for row, first in enumerate(range(0, words, width)):
        size = 4 * min(width, words - first)
        yield int(piece["source"]) + 4 * first, int(piece["target"]) + row * int(piece["pitch"]), size


class World:
    def __init__(self, lane: Lane = Lane.COMPUTE) -> None:
        self.driver = FakeDriver(1 << 17)
        self.kernels, self.lanes = Kernels(self.driver), Timelines(self.driver)
        memory = self.driver.memory[:RING_BYTES]
        self.ring = StagingRing(self.driver, self.kernels, self.lanes, lane, memory, 0)

    def at(self, address: int, num_bytes: int) -> bytes:
        return self.driver.memory[address : address + num_bytes].tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_data_arrives_as_it_was_when_sent(seed: int) -> None:
    random, world = Random(seed), World()
    most = random.choice([RING_BYTES // 16, RING_BYTES])
    wanted: list[tuple[int, bytes]] = []
    place = TARGET
    for _ in range(30):
        data = np.frombuffer(random.randbytes(4 * random.randint(0, most // 4)), np.int32)
        world.ring.send(place, data)
        wanted.append((place, data.tobytes()))
        place += data.nbytes
        if random.random() < 0.5:
            world.ring.flush()
            if random.random() < 0.6:
                world.lanes.mark(Lane.COMPUTE)
        for _ in range(random.choice([0, 0, 5])):
            world.driver.step(random.randrange)
    world.ring.flush()
    world.driver.run_all(random.randrange)
    for address, sent in wanted:
        assert world.at(address, len(sent)) == sent


def test_all_that_was_collected_is_issued_by_one_operation() -> None:
    world = World()
    for index in range(3):
        world.ring.send(TARGET + 64 * index, np.full(8, index, np.int32))
    world.ring.send_column(TARGET + 640, 24, np.array([7, 8, 9], np.int64))
    assert world.driver.left() == 0
    world.ring.flush()
    world.ring.flush()
    assert (world.driver.left(), world.kernels.pieces) == (1, [4])
    world.driver.run_all()
    assert world.driver.memory[TARGET : TARGET + 192].view(np.int32).tolist() == [
        *[0] * 16, *[1] * 8, *[0] * 8, *[2] * 8, *[0] * 8
    ]  # fmt: skip
    column = world.driver.memory[TARGET + 640 : TARGET + 712].view(np.int64)
    assert column.tolist() == [7, 0, 0, 8, 0, 0, 9, 0, 0]


def test_a_single_array_is_copied_without_a_kernel() -> None:
    world = World()
    world.ring.send(TARGET, np.arange(8, dtype=np.int32))
    world.ring.flush()
    world.driver.run_all()
    assert (world.kernels.pieces, world.driver.log) == ([], ["to device"])


def test_long_arrays_are_copied_by_several_blocks() -> None:
    world = World()
    big = np.arange(5 * BLOCK_BYTES // 8, dtype=np.int32)  # two and a half blocks
    memory = np.zeros(8 * len(big) * 4, np.uint8)
    world.driver.memory = np.concatenate([world.driver.memory, memory])
    start = len(world.driver.memory) - len(memory)
    ring_memory = world.driver.memory[start:]
    ring = StagingRing(world.driver, world.kernels, world.lanes, Lane.COMPUTE, ring_memory, start)
    items = np.arange(BLOCK_BYTES // 4 + 3, dtype=np.int32)
    ring.send(TARGET, big)
    ring.send_column(TARGET + big.nbytes, 8, items)
    ring.flush()
    world.driver.run_all()
    assert world.kernels.pieces == [3 + 2]
    assert world.at(TARGET, big.nbytes) == big.tobytes()
    column = world.driver.memory[TARGET + big.nbytes :][: 8 * len(items)].view(np.int32)
    assert column[::2].tolist() == items.tolist()


def test_a_full_ring_does_not_make_a_mark_that_a_caller_has_announced() -> None:
    world = World()
    promised = world.lanes.next(Lane.COMPUTE)
    for number in range(5):
        world.ring.send(TARGET, np.full(RING_BYTES, number, np.uint8))
    assert world.lanes.mark(Lane.COMPUTE) == promised[Lane.COMPUTE]
    world.driver.run_all()
    assert (world.driver.memory[TARGET : TARGET + RING_BYTES] == 4).all()


def test_a_mark_before_what_was_sent_is_issued_is_rejected() -> None:
    """It would free the bytes too early."""
    world = World()
    world.ring.send(TARGET, np.zeros(4, np.int32))
    world.lanes.mark(Lane.COMPUTE)
    with pytest.raises(AssertionError, match="a mark of COMPUTE was made before the arrays sent before it were issued"):
        world.ring.flush()


def test_a_full_ring_waits_for_its_own_lane_only() -> None:
    """The assist lane may wait for CPU workers meanwhile."""
    world = World()
    world.driver.issue(world.lanes.streams[Lane.ASSIST], Operation("waits for workers", ready=lambda: False))
    for number in range(3):
        world.ring.send(TARGET, np.full(RING_BYTES, number, np.uint8))
    assert world.driver.left() == 2  # the last copy, and the operation that waits


def test_arrays_that_are_not_whole_words_are_rejected() -> None:
    for target, size in ((TARGET, 3), (TARGET + 2, 4)):
        with pytest.raises(AssertionError, match=f"{size} bytes for address {target} are not whole words"):
            World().ring.send(target, np.zeros(size, np.uint8))
