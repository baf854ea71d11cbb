"""The host region is registered in pieces, beside the rest of a start, and copies from a piece wait for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from caraserve.cpu.shared_memory import SharedRegion
from caraserve.errors import ConfigError
from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.memory import registered_memory
from caraserve.gpu.memory.registered_memory import RegisteredMemory
from scripts.laboratory.gpu.null_device import NullDriver

MIB = 1 << 20
FIXED, WHOLE = 3 * MIB, 40 * MIB
OFFSET = 1 << 40  # of the device's addresses
PATIENCE_S = 30.0


class PinningDriver(NullDriver):
    """Notes what is registered. `before`: called with the number of calls so far before each call."""

    def __init__(self, before: Callable[[int], None] = lambda count: None) -> None:
        super().__init__()
        self.registered: dict[int, int] = {}
        self._before, self._calls = before, 0

    def register_host(self, host_address: int, num_bytes: int) -> int:
        self._calls += 1
        self._before(self._calls - 1)
        self.registered[host_address] = num_bytes
        return host_address + OFFSET

    def unregister_host(self, host_address: int) -> None:
        del self.registered[host_address]


@contextmanager
def registered(driver: PinningDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RegisteredMemory, int]]:
    """Yields the memory and the region's address; checks at the end that nothing stays registered."""
    monkeypatch.setattr(registered_memory, "_PIECE_BYTES", 8 * MIB)
    region = SharedRegion(WHOLE)
    memory = RegisteredMemory(driver, region, FIXED)
    try:
        yield memory, region.base
    finally:
        memory.close()
        region.close()
        assert not driver.registered


def test_all_of_it_is_registered_once_in_pieces_that_meet_at_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PinningDriver()
    with registered(driver, monkeypatch) as (memory, base):
        memory.await_all()
        pieces = sorted(driver.registered.items())
        ends = [start + size for start, size in pieces]
        assert [start for start, _ in pieces] == [base, *ends[:-1]]
        assert ends[-1] == base + WHOLE
        assert ends[0] - base >= FIXED
        assert all(size <= 10 * MIB for _, size in pieces)
        assert all(end % (2 * MIB) == 0 for end in ends[:-1])
        assert memory.on_device(base + WHOLE - 1) == base + WHOLE - 1 + OFFSET


def test_what_is_needed_at_once_waits_for_no_other_piece_and_a_piece_only_for_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()
    driver = PinningDriver(lambda count: count < 2 or (goes_on.wait(PATIENCE_S), None)[1])
    with registered(driver, monkeypatch) as (memory, base):
        memory.await_range(base, FIXED)
        memory.await_range(base + FIXED, 6 * MIB)
        waiting = threading.Thread(target=memory.await_range, args=(base + 30 * MIB, MIB))
        waiting.start()
        assert len(driver.registered) == 2
        assert waiting.is_alive()
        goes_on.set()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        assert base + 31 * MIB <= max(start + size for start, size in driver.registered.items())


@pytest.mark.parametrize("failing", [0, 2])
def test_memory_that_cannot_be_pinned_is_an_error_that_names_the_option(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(count: int) -> None:
        if count == failing:
            raise DriverError("no room")

    def register() -> None:
        with registered(PinningDriver(refuse), monkeypatch) as (memory, base):
            memory.await_range(base, FIXED)
            memory.await_all()

    with pytest.raises(ConfigError, match=r"^40.0 MiB of host memory cannot be pinned \(no room\); lower --m"):
        register()


def test_closing_waits_for_no_piece_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def stop(count: int) -> None:
        if count == 1:
            begun.set()
            goes_on.wait(PATIENCE_S)

    driver = PinningDriver(stop)
    with registered(driver, monkeypatch) as (memory, _):
        begun.wait(PATIENCE_S)
        memory._is_closed = True
        goes_on.set()
    assert driver._calls == 2
