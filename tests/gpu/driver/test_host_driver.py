"""The emulated driver rejects what could hang a device or race on it: a wait for a word whose write was not issued, a
kernel that begins early beside another than the one whose results it waits for, and accesses that nothing orders."""

from collections.abc import Callable

import numpy as np
import pytest

from caraserve.gpu.driver.api import DriverError, Graph, Stream
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.streams import Lane, SideStream
from tests.gpu.host_driver import HostDriver, Operation, Race, WaitBeforeWrite


class Device:
    """A driver with two streams, a word of device memory and one of registered host memory."""

    def __init__(self) -> None:
        self.driver = HostDriver()
        self.one, self.other = self.driver.create_stream(0), self.driver.create_stream(0)
        self._words = np.zeros(32, np.uint32)
        self.word = int(self._words.ctypes.data)
        self.host_word = self.driver.register_host(self.word + 64, 64)

    def capture_wait(self, value: int) -> Graph:
        self.driver.begin_capture(self.one)
        self.driver.wait_value(self.one, self.word, value)
        return self.driver.end_capture(self.one)


@pytest.fixture
def device() -> Device:
    return Device()


def test_a_wait_after_the_write_that_ends_it_is_accepted(device: Device) -> None:
    device.driver.write_value(device.other, device.word, 3)
    for value in (2, 3):
        device.driver.wait_value(device.one, device.word, value)
    device.driver.launch_graph(device.capture_wait(3), device.one)


@pytest.mark.parametrize("writes", [[], [2], [3, 0]], ids=["none", "too low", "reset since"])
def test_a_wait_before_the_write_that_ends_it_is_rejected(device: Device, writes: list[int]) -> None:
    for value in writes:
        device.driver.write_value(device.other, device.word, value)
    with pytest.raises(WaitBeforeWrite):
        device.driver.wait_value(device.one, device.word, 3)


def test_a_graph_is_checked_at_each_launch(device: Device) -> None:
    graph = device.capture_wait(1)
    with pytest.raises(WaitBeforeWrite):
        device.driver.launch_graph(graph, device.one)
    device.driver.write_value(device.other, device.word, 1)
    device.driver.launch_graph(graph, device.one)
    device.driver.write_value(device.other, device.word, 0)
    with pytest.raises(WaitBeforeWrite):
        device.driver.launch_graph(graph, device.one)


def test_a_write_counts_when_its_graph_is_launched(device: Device) -> None:
    device.driver.begin_capture(device.other)
    device.driver.write_value(device.other, device.word, 1)
    graph = device.driver.end_capture(device.other)
    with pytest.raises(WaitBeforeWrite):
        device.driver.wait_value(device.one, device.word, 1)
    device.driver.launch_graph(graph, device.other)
    device.driver.wait_value(device.one, device.word, 1)


def test_host_and_workers_may_write_a_word_of_theirs_later(device: Device) -> None:
    device.driver.wait_value(device.one, device.host_word, 1)
    device.driver.unregister_host(device.host_word)
    with pytest.raises(WaitBeforeWrite):
        device.driver.wait_value(device.one, device.host_word, 1)


# --- kernels that begin early ---

SHRINK, EXPAND = Launch("bgmv", "bgmv_shrink", 1, 1, ()), Launch("bgmv", "bgmv_expand", 1, 1, (), begins_early=True)


def launch(driver: HostDriver, stream: Stream, kernel: Launch, ran: list[str]) -> None:
    driver.issue_kernel(kernel, stream, lambda: ran.append(kernel.kernel), lambda: True)


def test_a_kernel_that_begins_early_runs_after_the_one_before_it() -> None:
    driver, ran = HostDriver(), list[str]()
    stream, event = driver.create_stream(0), driver.create_event()
    launch(driver, stream, SHRINK, ran)
    launch(driver, stream, EXPAND, ran)
    driver.record(event, stream)
    driver.synchronize(event)
    assert ran == ["bgmv_shrink", "bgmv_expand"]


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_a_kernel_may_begin_early_only_just_after_the_one_it_waits_for(captured: bool) -> None:
    driver = HostDriver()
    stream = driver.create_stream(0)
    if captured:
        driver.begin_capture(stream)
    launch(driver, stream, SHRINK, [])
    driver.run(stream, lambda: None)
    with pytest.raises(AssertionError, match="bgmv_expand begins beside ''"):
        launch(driver, stream, EXPAND, [])


# --- graphs of two streams ---


def note(driver: HostDriver, stream: Stream, name: str, ran: list[str]) -> None:
    driver.run(stream, lambda: ran.append(name))


def capture_fork(driver: HostDriver, stream: Stream, other: Stream, ran: list[str], *, join: bool = True) -> Graph:
    side = SideStream(driver, other)
    driver.begin_capture(stream)
    note(driver, stream, "before", ran)
    side.fork(stream, lambda beside: note(driver, beside, "beside", ran))
    note(driver, stream, "meanwhile", ran)
    if join:
        side.join(stream)
    note(driver, stream, "after", ran)
    return driver.end_capture(stream)


@pytest.mark.parametrize("last", [None, *Lane])
def test_a_graph_of_two_streams_keeps_their_order_at_every_launch(last: Lane | None) -> None:
    driver, ran = HostDriver(seed=3, last=last), list[str]()
    streams = {lane: driver.create_stream(0) for lane in Lane}
    graph = capture_fork(driver, streams[Lane.COMPUTE], streams[Lane.LORA], ran)
    assert not ran
    for _ in range(3):
        driver.launch_graph(graph, streams[Lane.COMPUTE])
    driver.run_all()
    for start in range(0, 12, 4):
        assert ran[start] == "before"
        assert set(ran[start + 1 : start + 3]) == {"beside", "meanwhile"}
        assert ran[start + 3] == "after"


def test_a_capture_whose_side_stream_is_not_joined_is_rejected(device: Device) -> None:
    with pytest.raises(DriverError, match="has not been waited for"):
        capture_fork(device.driver, device.one, device.other, [], join=False)
    assert not device.driver.captures(device.one)
    assert not device.driver.captures(device.other)


# --- races ---


def ordered_by_event(driver: HostDriver, first: Stream, then: Stream) -> None:
    event = driver.create_event()
    driver.record(event, first)
    driver.wait_event(then, event)


def ordered_by_word(driver: HostDriver, first: Stream, then: Stream) -> None:
    driver.write_value(first, WORD, 1)
    driver.wait_value(then, WORD, 1)


def ordered_by_the_host(driver: HostDriver, first: Stream, then: Stream) -> None:
    event = driver.create_event()
    driver.record(event, first)
    driver.synchronize(event)


WORDS = np.zeros(16, np.uint32)
WORD = int(WORDS.ctypes.data)


@pytest.mark.parametrize("order", [ordered_by_event, ordered_by_word, ordered_by_the_host])
def test_accesses_that_something_orders_are_no_race(order: Callable[[HostDriver, Stream, Stream], None]) -> None:
    driver = HostDriver(finds_races=True)
    first, then = driver.create_stream(0), driver.create_stream(0)
    driver.issue(first, Operation("write", writes=[(0, 8)]))
    order(driver, first, then)
    driver.issue(then, Operation("read", reads=[(4, 12)]))
    driver.run_all()


@pytest.mark.parametrize("seed", range(6))
def test_a_race_is_found_in_whichever_order_the_accesses_run(seed: int) -> None:
    driver = HostDriver(seed, finds_races=True)
    for name in ("one", "other"):
        driver.issue(driver.create_stream(0), Operation(name, writes=[(0, 8)]))
    with pytest.raises(Race, match=r"touch \[0, 8\) at the same time"):
        driver.run_all()
