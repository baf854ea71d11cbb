"""Small copies through pinned memory: the data arrives as sent, however late the device runs."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.core.lora_layout import aligned_bytes
from caraserve.gpu.driver.streams import Lane, Timelines
from caraserve.gpu.memory.staging_ring import BLOCK_BYTES, StagingRing
from caraserve.model.dtype import Dtype
from tests.gpu.host_device import HostKernels
from tests.gpu.host_driver import HostDriver, Operation
from tests.gpu.lora_case import address

RING_BYTES = 2048


class Copies:
    """A ring of the compute lane, and the device memory that it copies to."""

    def __init__(self, seed: int = 0, ring_bytes: int = RING_BYTES) -> None:
        self.driver = HostDriver(seed, finds_races=True)
        self.lanes = Timelines(self.driver)
        self.memory, self.target = aligned_bytes(ring_bytes), aligned_bytes(1 << 17)
        self.target[:] = 0
        kernels = HostKernels(self.driver, Dtype.F32)
        self.ring = StagingRing(self.driver, kernels, self.lanes, Lane.COMPUTE, self.memory, address(self.memory))

    def place(self, at: int = 0) -> int:
        return address(self.target) + at


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_data_arrives_as_it_was_when_sent(seed: int) -> None:
    random, made = Random(seed), Copies(seed)
    most = random.choice([RING_BYTES // 16, RING_BYTES])
    wanted: list[tuple[int, bytes]] = []
    at = 0
    for _ in range(30):
        data = np.frombuffer(random.randbytes(4 * random.randint(0, most // 4)), np.int32)
        made.ring.send(made.place(at), data)
        wanted.append((at, data.tobytes()))
        at += data.nbytes
        if random.random() < 0.5:
            made.ring.flush()
            if random.random() < 0.6:
                made.lanes.mark(Lane.COMPUTE)
        for _ in range(random.choice([0, 0, 5])):
            made.driver.step()
    made.ring.flush()
    made.driver.run_all()
    for start, sent in wanted:
        assert made.target[start : start + len(sent)].tobytes() == sent


def test_all_that_was_collected_is_issued_by_one_operation() -> None:
    made = Copies()
    for index in range(3):
        made.ring.send(made.place(64 * index), np.full(8, index, np.int32))
    made.ring.send_column(made.place(640), 24, np.array([7, 8, 9], np.int64))
    assert made.driver.left() == 0
    made.ring.flush()
    made.ring.flush()
    made.driver.run_all()
    assert made.driver.log == ["scatter_words"]
    assert made.target[:192].view(np.int32).tolist() == [*[0] * 16, *[1] * 8, *[0] * 8, *[2] * 8, *[0] * 8]
    assert made.target[640:712].view(np.int64).tolist() == [7, 0, 0, 8, 0, 0, 9, 0, 0]


def test_a_single_array_is_copied_without_a_kernel() -> None:
    made = Copies()
    made.ring.send(made.place(), np.arange(8, dtype=np.int32))
    made.ring.flush()
    made.driver.run_all()
    assert made.driver.log == ["to device"]
    assert made.target[:32].view(np.int32).tolist() == list(range(8))


def test_long_arrays_are_copied_by_several_blocks() -> None:
    big = np.arange(5 * BLOCK_BYTES // 8, dtype=np.int32)  # two and a half blocks
    made = Copies(ring_bytes=8 * big.nbytes)
    items = np.arange(BLOCK_BYTES // 4 + 3, dtype=np.int32)
    made.ring.send(made.place(), big)
    made.ring.send_column(made.place(big.nbytes), 8, items)
    made.ring.flush()
    made.driver.run_all()
    assert made.driver.log == ["scatter_words"]
    assert made.target[: big.nbytes].tobytes() == big.tobytes()
    assert made.target[big.nbytes :][: 8 * len(items)].view(np.int32)[::2].tolist() == items.tolist()


def test_a_full_ring_does_not_make_a_mark_that_a_caller_has_announced() -> None:
    made = Copies()
    promised = made.lanes.next(Lane.COMPUTE)
    for number in range(5):
        made.ring.send(made.place(), np.full(RING_BYTES, number, np.uint8))
    assert made.lanes.mark(Lane.COMPUTE) == promised[Lane.COMPUTE]
    made.driver.run_all()
    assert (made.target[:RING_BYTES] == 4).all()


def test_a_mark_before_what_was_sent_is_issued_is_rejected() -> None:
    """It would free the bytes too early."""
    made = Copies()
    made.ring.send(made.place(), np.zeros(4, np.int32))
    made.lanes.mark(Lane.COMPUTE)
    with pytest.raises(AssertionError, match="a mark of COMPUTE was made before the arrays sent before it were issued"):
        made.ring.flush()


def test_a_full_ring_waits_for_its_own_lane_only() -> None:
    """The assist lane may wait for CPU workers meanwhile."""
    made = Copies()
    made.driver.issue(made.lanes.streams[Lane.ASSIST], Operation("waits for workers", ready=lambda: False))
    for number in range(3):
        made.ring.send(made.place(), np.full(RING_BYTES, number, np.uint8))
    assert made.driver.left() == 2  # the last copy, and the operation that waits


def test_arrays_that_are_not_whole_words_are_rejected() -> None:
    made = Copies()
    for at, size in ((0, 3), (2, 4)):
        with pytest.raises(AssertionError, match=f"{size} bytes for address {made.place(at)} are not whole words"):
            made.ring.send(made.place(at), np.zeros(size, np.uint8))
