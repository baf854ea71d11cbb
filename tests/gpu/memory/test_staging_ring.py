"""Small copies through pinned memory: the data arrives as sent, however late the device runs."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.gpu.driver.streams import Lane, Timelines
from caraserve.gpu.memory.staging_ring import StagingRing
from tests.gpu.fake_driver import FakeDriver

RING_BYTES, TARGET = 512, 1024


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_data_arrives_as_it_was_when_sent(seed: int) -> None:
    random = Random(seed)
    driver = FakeDriver(1 << 16)
    lanes = Timelines(driver)
    ring = StagingRing(driver, lanes, driver.memory[:RING_BYTES], 0)
    wanted: list[tuple[int, bytes]] = []
    place = TARGET
    for _ in range(30):
        data = np.frombuffer(random.randbytes(4 * random.randint(0, RING_BYTES // 4)), np.int32)
        lane = random.choice([Lane.COMPUTE, Lane.ASSIST])
        ring.send(place, data, lane)
        wanted.append((place, data.tobytes()))
        place += data.nbytes
        if random.random() < 0.3:
            lanes.mark(lane)
        for _ in range(random.choice([0, 0, 5])):
            driver.step(random.randrange)
    driver.run_all(random.randrange)
    for at, sent in wanted:
        assert driver.memory[at : at + len(sent)].tobytes() == sent


def test_a_column_is_copied_to_places_a_pitch_apart() -> None:
    driver = FakeDriver(4096)
    ring = StagingRing(driver, Timelines(driver), driver.memory[:RING_BYTES], 0)
    ring.send_column(TARGET, 24, np.array([7, 8, 9], np.int64), Lane.COMPUTE)
    driver.run_all()
    assert driver.memory[TARGET : TARGET + 72].view(np.int64).tolist() == [7, 0, 0, 8, 0, 0, 9, 0, 0]


def test_a_full_ring_does_not_make_a_mark_that_a_caller_has_announced() -> None:
    driver = FakeDriver(1 << 16)
    lanes = Timelines(driver)
    ring, promised = StagingRing(driver, lanes, driver.memory[:RING_BYTES], 0), lanes.next(Lane.COMPUTE)
    for number in range(5):
        ring.send(TARGET, np.full(RING_BYTES, number, np.uint8), Lane.COMPUTE)
    assert lanes.mark(Lane.COMPUTE) == promised[Lane.COMPUTE]
    driver.run_all()
    assert (driver.memory[TARGET : TARGET + RING_BYTES] == 4).all()
