"""Results: callbacks in order, blocks that are reused, and the time lost to loads."""

import threading
from queue import SimpleQueue

import numpy as np
import pytest

from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.driver.streams import Lane, Timelines
from caraserve.gpu.forward.iteration import stall_s
from caraserve.gpu.memory.results import ResultBlocks, Waiter, result_bytes
from tests.gpu.host_driver import HostDriver

PATIENCE_S = 10.0


@pytest.mark.parametrize(
    ("arrivals", "stalled_s"),
    [
        ([], 0.0),
        ([(0, 9.0)], 0.0),  # seen before the iteration began
        ([(0, 12.0)], 2.0),  # computing began when the first layer arrived
        ([(2, 12.0)], 0.0),  # half of the layers take two seconds anyway
        ([(2, 13.0)], 2.0),  # layers took half a second each: one second before the stall, one after
        ([(0, 11.0), (2, 13.0)], 2.0),  # the same stall of 2 s: stalls are not added up
        ([(3, 14.0)], 4.0),  # at the last moment: computing took no time
        ([(0, 99.0)], 4.0),  # seen after the end: the stall is at most the whole iteration
    ],
)
def test_a_stall_is_the_time_that_layer_times_do_not_explain(
    arrivals: list[tuple[int, float]], stalled_s: float
) -> None:
    assert stall_s(10.0, 14.0, 4, arrivals) == pytest.approx(stalled_s)


def test_callbacks_run_in_the_order_of_their_requests() -> None:
    driver, called, done = HostDriver(), list[str](), threading.Event()
    streams = Timelines(driver).streams
    driver.held = {Lane.COMPUTE}
    waiter = Waiter(driver, "test")
    waiter.when_done(streams[Lane.COMPUTE], lambda failure: called.append(f"late {failure}"))
    waiter.when_done(streams[Lane.COPY], lambda failure: called.append(f"early {failure}"))
    waiter.after_those(lambda: called.append("none"))
    waiter.after_those(done.set)
    assert not done.wait(0.02)
    assert called == []
    driver.held = set()
    assert done.wait(PATIENCE_S)
    waiter.close()
    assert called == ["late None", "early None", "none"]


def test_a_failed_device_and_a_failing_callback_do_not_stop_later_callbacks() -> None:
    driver, called = HostDriver(), SimpleQueue[DriverError | None]()
    stream = Timelines(driver).streams[Lane.COMPUTE]
    driver.held = {Lane.COMPUTE}
    waiter = Waiter(driver, "test")

    def refuse(failure: DriverError | None) -> None:
        raise ValueError("not now")

    waiter.when_done(stream, called.put)
    waiter.when_done(stream, refuse)
    waiter.when_done(stream, called.put)
    driver.failed = True
    waiter.close()
    assert isinstance(called.get_nowait(), DriverError)
    assert isinstance(called.get_nowait(), DriverError)


def test_acquire_waits_until_a_block_is_released() -> None:
    outputs = 3
    memories = [np.zeros(result_bytes(outputs), np.uint8) for _ in range(2)]
    blocks = ResultBlocks([(memory, index) for index, memory in enumerate(memories)], outputs)
    taken = [blocks.acquire() for _ in memories]
    assert sorted(address for _, address in taken) == [0, 1]
    third = SimpleQueue[int]()
    thread = threading.Thread(target=lambda: third.put(blocks.acquire()[1]))
    thread.start()
    assert third.empty()
    blocks.release(*taken[1])
    assert third.get(timeout=PATIENCE_S) == taken[1][1]
    thread.join()
