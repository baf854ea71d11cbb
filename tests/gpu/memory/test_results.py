"""Results on their way back: in the order of asking, in so many blocks, with the time that was lost to loads."""

import threading
from queue import SimpleQueue

import numpy as np
import pytest

from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.driver.streams import Lane, Timelines
from caraserve.gpu.forward.batch import result_bytes
from caraserve.gpu.forward.iteration import stall_s
from caraserve.gpu.memory.results import ResultBlocks, Waiter
from tests.gpu.host_device import HostDriver

PATIENCE_S = 10.0


@pytest.mark.parametrize(
    ("arrivals", "stalled_s"),
    [
        ([], 0.0),
        ([(0, 9.0)], 0.0),  # before it began
        ([(0, 12.0)], 2.0),  # it began with the first layer's arrival
        ([(2, 12.0)], 0.0),  # half of the layers take two seconds anyway
        ([(2, 13.0)], 2.0),  # layers took half a second each: one before, one after the stall
        ([(0, 11.0), (2, 13.0)], 2.0),  # the same two: they are not added up
        ([(3, 14.0)], 4.0),  # in the last moment: what was computed took no time
        ([(0, 99.0)], 4.0),  # seen after the end: no more than all of it
    ],
)
def test_an_iteration_has_stalled_for_what_its_layers_do_not_account_for(
    arrivals: list[tuple[int, float]], stalled_s: float
) -> None:
    assert stall_s(10.0, 14.0, 4, arrivals) == pytest.approx(stalled_s)


def test_callbacks_come_in_order_whatever_ends_first() -> None:
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
