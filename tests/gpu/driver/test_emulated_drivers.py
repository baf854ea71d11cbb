"""The emulated drivers reject a wait for a word whose write has not been issued, which could hang a device. They reject
a kernel that begins early after any other kernel than the one whose results it waits for."""

import numpy as np
import pytest

from caraserve.gpu.driver.api import Graph, Stream
from caraserve.gpu.driver.launch import Launch
from tests.gpu.captures import WaitBeforeWrite
from tests.gpu.fake_driver import FakeDriver
from tests.gpu.host_device import HostDriver


class Device:
    """A driver with two streams, a word of device memory and one of registered host memory."""

    def __init__(self, driver: FakeDriver | HostDriver) -> None:
        self.driver = driver
        self.one, self.other = driver.create_stream(0), driver.create_stream(0)
        self._words = np.zeros(32, np.uint32)  # memory of HostDriver
        self.word = 0 if isinstance(driver, FakeDriver) else int(self._words.ctypes.data)
        self.host_word = driver.register_host(self.word + 64, 64)

    def capture_wait(self, value: int) -> Graph:
        self.driver.begin_capture(self.one)
        self.driver.wait_value(self.one, self.word, value)
        return self.driver.end_capture(self.one)


@pytest.fixture(params=[lambda: FakeDriver(128), HostDriver], ids=["fake", "host"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param())


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


def launch(driver: HostDriver, kernel: Launch, ran: list[str]) -> None:
    driver.issue(kernel, Stream(1), lambda: ran.append(kernel.kernel), lambda: True)


def test_a_kernel_that_begins_early_runs_after_the_one_before_it() -> None:
    driver, ran = HostDriver(), list[str]()
    stream, event = driver.create_stream(0), driver.create_event()
    launch(driver, SHRINK, ran)
    launch(driver, EXPAND, ran)
    driver.record(event, stream)
    driver.synchronize(event)
    assert ran == ["bgmv_shrink", "bgmv_expand"]


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_a_kernel_may_begin_early_only_just_after_the_one_it_waits_for(captured: bool) -> None:
    driver = HostDriver()
    stream = driver.create_stream(0)
    if captured:
        driver.begin_capture(stream)
    launch(driver, SHRINK, [])
    driver.run(stream, lambda: None)
    with pytest.raises(AssertionError, match="bgmv_expand begins beside ''"):
        launch(driver, EXPAND, [])
