"""Hand-offs timed for a machine profile, over an emulated device and with a real worker."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from caraserve.cpu import handoff
from caraserve.cpu.lora_workers.timing import RoundTrip
from caraserve.gpu.driver.api import DriverError
from tests.gpu.host_backend import PATIENCE_S, Host, alone, host_tier
from tests.gpu.host_driver import HostDriver
from tests.gpu.torch_kernels import torch_kernels
from tests.oracle.subject import Subject


@contextmanager
def loaded_host(subject: Subject) -> Iterator[Host]:
    """Yields a device with an adapter in slot 1; its worker is not started."""
    loaded = SimpleQueue[Exception | None]()
    with torch_kernels(), alone(subject.model, lora_cpus=(min(os.sched_getaffinity(0)),)) as host:
        adapter = host_tier(host, {"r8": subject.adapters["r8"]}, subject.model)["r8"]
        host.backend.load_adapter(adapter, 1, loaded.put)
        assert loaded.get(timeout=PATIENCE_S) is None
        yield host


def start_worker(host: Host) -> None:
    host.backend.start_workers(lambda rank: 64)
    assert host.backend.workers.await_all(PATIENCE_S)


def timed(host: Host, tokens: int) -> RoundTrip:
    """Times hand-offs; on a busy machine a worker may be aborted because it did not run for half a second."""
    for _ in range(10):
        if (found := host.backend.time_hand_off(1, tokens)) is not None:
            return found
    raise AssertionError("no time in ten tries")


def test_hand_offs_are_timed_with_the_kernels_and_words_of_serving(subject: Subject) -> None:
    """Of all layers, though their weights are on the device; nothing is held afterwards."""
    with loaded_host(subject) as host:
        assert host.backend.time_hand_off(1, 1) is None, "there is no worker yet"
        start_worker(host)
        for tokens in (1, 16):
            found = timed(host, tokens)
            assert found.total_s > found.compute_s > 0
        (worker,) = host.backend.workers.states()
        assert worker.hand_offs % len(host.parts.plan.layers) == 0
        assert worker.hand_offs >= 2 * len(host.parts.plan.layers)
        host.check_at_rest()


def test_hand_offs_are_timed_in_one_launch(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = list[Any]()
    launch = HostDriver.launch_graph

    def counted(driver: HostDriver, graph: Any, stream: Any) -> None:
        launches.append(graph)
        launch(driver, graph, stream)

    with loaded_host(subject) as host:
        start_worker(host)
        monkeypatch.setattr(HostDriver, "launch_graph", counted)
        host.backend.time_hand_off(1, 1)
    assert len(launches) == 1


def test_no_time_is_given_for_a_worker_that_has_vanished(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was idle when the orders were written, and is gone when the device reads them."""
    launch = HostDriver.launch_graph

    with loaded_host(subject) as host:
        start_worker(host)
        words = host.parts.region.blocks.view(np.int64)
        present = int(words[handoff.INCARNATION // 8])

        def without_it(driver: HostDriver, graph: Any, stream: Any) -> None:
            words[handoff.INCARNATION // 8] = 0
            launch(driver, graph, stream)

        with monkeypatch.context() as patch:
            patch.setattr(HostDriver, "launch_graph", without_it)
            patch.setattr(HostDriver, "check_issued", lambda *wait: None)  # a wait without a write ends after 0.6 s
            assert host.backend.time_hand_off(1, 1) is None
        words[handoff.INCARNATION // 8] = present
        assert timed(host, 1)
        host.check_at_rest()


def test_no_time_is_given_without_memory_for_a_graph(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(driver: HostDriver, stream: Any) -> Any:
        driver.abandon_capture(stream)
        raise DriverError("out of memory")

    with loaded_host(subject) as host:
        start_worker(host)
        with monkeypatch.context() as patch:
            patch.setattr(HostDriver, "end_capture", refuse)
            assert host.backend.time_hand_off(1, 1) is None
        assert timed(host, 1)
        host.check_at_rest()


def test_a_failed_launch_keeps_no_sync_slot(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(driver: HostDriver, graph: Any, stream: Any) -> None:
        raise DriverError("the launch was refused")

    with loaded_host(subject) as host:
        start_worker(host)
        with monkeypatch.context() as patch:
            patch.setattr(HostDriver, "launch_graph", refuse)
            for _ in range(5):  # more often than there are sync slots
                with pytest.raises(DriverError, match="refused"):
                    host.backend.time_hand_off(1, 1)
        assert timed(host, 1)
