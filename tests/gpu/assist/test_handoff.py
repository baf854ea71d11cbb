"""The hand-off kernels, run on the CPU with real workers: they add only complete results, and every wait ends."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from caraserve.cpu import handoff
from caraserve.gpu.kernels.work_orders import split_rows
from caraserve.model.dtype import Dtype
from tests.gpu.hand_offs import (
    ARRIVED,
    AWAITED,
    BY_DEVICE,
    BY_WORKERS,
    LOST,
    TOKENS,
    UNEVEN_WIDTHS,
    HandOff,
    comes_true,
)

TOLERANCE = {Dtype.F32: 1e-6, Dtype.BF16: 2**-8, Dtype.F16: 2**-11}
SHORT_NS = 30_000_000


@pytest.fixture(scope="module")
def hand_offs() -> Iterator[dict[int, HandOff]]:
    """Yields a `HandOff` by number of workers. With one, columns of y begin anywhere; with two, at multiples of 4."""
    made = {1: HandOff(1, UNEVEN_WIDTHS), 2: HandOff(2)}
    yield made
    for hand_off in made.values():
        hand_off.close()


@pytest.fixture
def pair(hand_offs: dict[int, HandOff]) -> HandOff:
    return fresh(hand_offs[2])


@pytest.fixture
def alone(hand_offs: dict[int, HandOff]) -> HandOff:
    return fresh(hand_offs[1])


def fresh(hand_off: HandOff) -> HandOff:
    hand_off.await_all()
    hand_off.workers.keep_awake(True)
    hand_off.arrived[0], hand_off.errors[0], hand_off.activation = 0, 0, Dtype.F32
    return hand_off


def check_sum(hand_off: HandOff) -> None:
    expected = hand_off.expected()
    deltas = expected - hand_off.exact(hand_off.before)  # rounded for the link, before the sum is
    allowed = TOLERANCE[hand_off.activation] * (np.maximum(np.abs(expected), 1) + np.abs(deltas)) + 1e-5
    assert (np.abs(hand_off.exact(hand_off.y) - expected) <= allowed).all()


@pytest.mark.parametrize("activation", Dtype)
@pytest.mark.parametrize("workers", [1, 2])
def test_deltas_of_all_workers_are_added(hand_offs: dict[int, HandOff], workers: int, activation: Dtype) -> None:
    made = fresh(hand_offs[workers])
    made.activation = activation
    made.begin()
    assert made.publish() == BY_WORKERS
    assert made.wait() == BY_WORKERS
    made.add()
    check_sum(made)
    assert [int(word[0]) for word in (made.words.x_flag, made.words.y_flag)] == [made.generation] * 2
    assert made.errors[0] == 0
    assert made.counter[0] == 0


def test_a_projection_without_an_adapter_is_not_touched(pair: HandOff) -> None:
    for deltas in pair.deltas:
        deltas[:] = 0xFF  # NaN, visible wherever it is added
    pair.begin()
    pair.publish()
    pair.wait()
    pair.add()
    assert not np.isnan(pair.y).any()
    assert pair.y[:, 140:204].tobytes() == pair.before[:, 140:204].tobytes()


def test_x_is_visible_before_the_flag(pair: HandOff) -> None:
    """Repeats a hand-off with different x: a worker or a sum that started too early would use an older one."""
    for round_ in range(60):
        pair.begin(seed=round_, rings=round_ % 2 == 0)
        assert pair.publish(grid=1 + round_ % 7, seed=round_) == BY_WORKERS
        assert pair.wait() == BY_WORKERS
        pair.add(grid=1 + round_ % 5)
        check_sum(pair)


def test_a_stream_may_wait_for_the_completion_counter_instead(pair: HandOff) -> None:
    """The counter is set when the last worker is done, and not before."""
    pair.begin()
    before = int(pair.words.y_flag[0])
    os.kill(pair.pid(1), signal.SIGSTOP)
    try:
        pair.publish()
        assert comes_true(lambda: pair.word(0, handoff.DONE) == pair.number)
        assert pair.words.y_flag[0] == before
    finally:
        os.kill(pair.pid(1), signal.SIGCONT)
    assert comes_true(lambda: bool(pair.words.y_flag[0] == pair.generation))
    assert pair.wait() == BY_WORKERS
    pair.add()
    check_sum(pair)


def test_weights_that_have_arrived_are_used(pair: HandOff) -> None:
    """No worker is asked, and a stream that waits for the completion counter continues."""
    pair.arrived[0] = ARRIVED
    pair.begin()
    asked = [pair.word(worker, handoff.REQUEST) for worker in range(2)]
    assert pair.publish() == BY_DEVICE
    assert pair.words.y_flag[0] == pair.generation
    assert pair.wait() == BY_DEVICE
    pair.add()
    assert pair.y.tobytes() == pair.before.tobytes()
    assert [pair.word(worker, handoff.REQUEST) for worker in range(2)] == asked


def test_weights_that_arrive_while_the_workers_compute_are_used(alone: HandOff) -> None:
    alone.begin()
    os.kill(alone.pid(), signal.SIGSTOP)
    try:
        assert alone.publish() == BY_WORKERS
        threading.Timer(0.02, alone.arrived.fill, [ARRIVED]).start()
        assert alone.wait() == BY_DEVICE
    finally:
        os.kill(alone.pid(), signal.SIGCONT)
    assert alone.words.left[0] == alone.generation
    alone.add()
    assert alone.y.tobytes() == alone.before.tobytes()


def test_without_workers_the_device_waits_for_the_weights(alone: HandOff) -> None:
    alone.begin(asks=False)
    assert alone.publish() == AWAITED
    threading.Timer(0.02, alone.arrived.fill, [ARRIVED]).start()
    assert alone.wait() == BY_DEVICE
    assert alone.words.left[0] != alone.generation
    alone.begin(asks=False, deadline_ns=SHORT_NS)
    alone.arrived[0] = 0
    assert alone.publish() == AWAITED
    assert alone.wait() == LOST
    alone.add()
    assert alone.y.tobytes() == alone.before.tobytes()


def test_an_order_of_zeros_waits_for_nothing(alone: HandOff) -> None:
    """The adapter has no module there."""
    alone.begin()
    alone.order[:] = 0
    assert alone.publish() == BY_DEVICE
    assert alone.wait() == BY_DEVICE
    alone.add()
    assert alone.y.tobytes() == alone.before.tobytes()
    assert alone.errors[0] == 0


def test_a_late_worker_is_not_asked_again(alone: HandOff) -> None:
    """Its slice is not changed before it is done; the layer waits for its weights."""
    alone.begin()
    os.kill(alone.pid(), signal.SIGSTOP)
    try:
        assert alone.publish() == BY_WORKERS
        slices = alone.blocks[0, handoff.COUNT // 8 :].copy()
        alone.begin(deadline_ns=SHORT_NS)
        assert alone.publish() == AWAITED
        assert alone.words.y_flag[0] == alone.generation
        assert (alone.blocks[0, handoff.COUNT // 8 :] == slices).all()
        assert alone.wait() == LOST
        assert alone.errors[0] == 1
        alone.begin()
        assert alone.publish() == AWAITED
        threading.Timer(0.02, alone.arrived.fill, [ARRIVED]).start()
        assert alone.wait() == BY_DEVICE
    finally:
        os.kill(alone.pid(), signal.SIGCONT)


def test_a_deadline_ends_the_wait(alone: HandOff) -> None:
    alone.begin(deadline_ns=SHORT_NS)
    os.kill(alone.pid(), signal.SIGSTOP)
    try:
        alone.publish()
        started_ns = time.monotonic_ns()
        assert alone.wait() == LOST
        assert time.monotonic_ns() - started_ns >= SHORT_NS
    finally:
        os.kill(alone.pid(), signal.SIGCONT)
    alone.add()
    assert alone.y.tobytes() == alone.before.tobytes()
    assert alone.errors[0] == 1


def test_a_watchdog_ends_the_wait_and_stops_later_hand_offs(alone: HandOff) -> None:
    alone.begin()
    os.kill(alone.pid(), signal.SIGSTOP)
    try:
        alone.publish()
        threading.Timer(0.02, alone.words.status.fill, [alone.generation]).start()
        assert alone.wait() == LOST
    finally:
        os.kill(alone.pid(), signal.SIGCONT)
    alone.await_all()
    asked = alone.word(0, handoff.REQUEST)
    assert alone.publish() == LOST
    assert alone.wait() == LOST
    alone.add()
    assert alone.y.tobytes() == alone.before.tobytes()
    assert alone.word(0, handoff.REQUEST) == asked


def test_a_killed_worker_makes_the_layer_wait_for_its_weights(pair: HandOff) -> None:
    """The next layer has a new worker."""
    pair.begin()
    killed = pair.pid(1)
    os.kill(killed, signal.SIGSTOP)
    pair.publish()
    os.kill(killed, signal.SIGKILL)
    threading.Timer(0.05, pair.arrived.fill, [ARRIVED]).start()
    assert pair.wait() == BY_DEVICE
    pair.arrived[0] = 0
    pair.await_all()
    assert comes_true(lambda: pair.word(0, handoff.DONE) == pair.word(0, handoff.REQUEST))  # the other may be late
    assert pair.pid(1) != killed
    pair.begin()
    assert pair.publish() == BY_WORKERS
    assert pair.wait() == BY_WORKERS
    pair.add()
    check_sum(pair)


def test_a_worker_killed_at_any_moment_adds_all_or_nothing(pair: HandOff) -> None:
    outcomes = set()
    for round_ in range(6):  # workers that die often are replaced slowly, so more rounds would take long
        pair.await_all()
        pid = pair.pid(round_ % 2)
        pair.begin(seed=round_, deadline_ns=SHORT_NS)
        pair.publish()
        time.sleep(round_ * 3e-5)
        os.kill(pid, signal.SIGKILL)
        outcomes.add(pair.wait())
        pair.add()
        if pair.outcome[0] == BY_WORKERS:
            check_sum(pair)
        else:
            assert pair.y.tobytes() == pair.before.tobytes()
    assert outcomes <= {BY_WORKERS, LOST}


def test_a_worker_without_a_process_is_not_asked(alone: HandOff) -> None:
    alone.begin(deadline_ns=SHORT_NS)
    present = alone.word(0, handoff.INCARNATION)
    alone.blocks[0, handoff.INCARNATION // 8] = 0
    try:
        assert alone.publish() == AWAITED
        assert alone.wait() == LOST
    finally:
        alone.blocks[0, handoff.INCARNATION // 8] = present


def test_numbers_and_generations_wrap(pair: HandOff) -> None:
    """Generations are 32-bit words. Numbers of hand-offs have 64 bits and pass 2^32 without wrapping."""
    pair.number = pair.generation = (1 << 32) - 3
    for round_ in range(6):
        pair.begin(seed=round_)
        assert pair.publish() == BY_WORKERS
        assert pair.wait() == BY_WORKERS
        assert pair.words.y_flag[0] == pair.generation
        pair.add()
        check_sum(pair)
    assert pair.generation == 3


def test_a_worker_stays_awake_for_a_device_that_cannot_wake_it(alone: HandOff) -> None:
    def is_asleep() -> bool:
        return alone.workers.states()[0].is_asleep

    assert not comes_true(is_asleep, 0.2)
    alone.workers.keep_awake(False)
    assert comes_true(is_asleep)
    alone.workers.keep_awake(True)
    assert not is_asleep()
    alone.begin()
    alone.publish()
    assert alone.wait() == BY_WORKERS


def test_rows_are_split_without_gaps() -> None:
    for most in range(1, TOKENS + 2):
        for workers in (1, 2, 7):
            parts = split_rows(TOKENS, most, workers)
            assert [first for first, _ in parts] == list(np.cumsum([0, *(rows for _, rows in parts)])[:-1])
            assert sum(rows for _, rows in parts) == TOKENS
            assert len(parts) == min(-(-TOKENS // most), workers)
