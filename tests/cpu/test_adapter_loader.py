"""The emulated link: copies end at computed times. Time passes only during a wait."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from caraserve.cpu import adapter_loader as module
from caraserve.cpu.adapter_loader import EmulatedLink

BYTES_PER_S = 1024.0  # a power of two: times are exact
PATIENCE_S = 60.0


class Clock:
    """A clock, and an event whose waits always time out; the clock then shows when the wait ended."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.meanwhile: Callable[[], None] | None = None  # action of another thread during the next wait

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        self.now_s = max(self.now_s, until_s)


@contextlib.contextmanager
def emulated(bytes_per_s: float | None) -> Iterator[tuple[EmulatedLink, Clock]]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        patch.setattr(module, "threading", SimpleNamespace(Event=lambda: clock))
        yield EmulatedLink(bytes_per_s), clock


def copy(link: EmulatedLink, num_bytes: int) -> None:
    link.copy(zeros(num_bytes), zeros(num_bytes))


def zeros(num_bytes: int) -> NDArray[np.uint8]:
    return np.zeros(num_bytes, np.uint8)


@pytest.mark.parametrize("bytes_per_s", [None, BYTES_PER_S])
def test_a_copy_copies_the_bytes(bytes_per_s: float | None) -> None:
    source, target = np.arange(200, dtype=np.uint8), zeros(200)
    with emulated(bytes_per_s) as (link, _):
        link.copy(target, source)
    assert target.tobytes() == source.tobytes()


def test_without_a_bandwidth_a_copy_does_not_wait() -> None:
    with emulated(None) as (link, clock):
        copy(link, 1 << 20)
        assert clock.now_s == 0


@given(copies=st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 4096)), max_size=10))
def test_a_copy_takes_the_time_of_its_bytes_even_after_idle_time(copies: list[tuple[int, int]]) -> None:
    with emulated(BYTES_PER_S) as (link, clock):
        for idle, num_bytes in copies:
            clock.now_s += idle / 1024
            asked_s = clock.now_s
            copy(link, num_bytes)
            assert clock.now_s == asked_s + num_bytes / BYTES_PER_S


@given(first=st.integers(0, 4096), second=st.integers(0, 4096))
def test_a_copy_waits_for_the_one_before_it(first: int, second: int) -> None:
    with emulated(BYTES_PER_S) as (link, clock):
        clock.meanwhile = lambda: copy(link, second)
        copy(link, first)
        assert clock.now_s == (first + second) / BYTES_PER_S


def test_a_new_bandwidth_applies_to_the_next_copy() -> None:
    with emulated(BYTES_PER_S) as (link, clock):
        copy(link, 1024)
        link.bytes_per_s = 2 * BYTES_PER_S
        copy(link, 1024)
        assert clock.now_s == 1.5


def test_close_ends_a_wait() -> None:
    link = EmulatedLink(bytes_per_s=1.0)
    copying = threading.Thread(target=copy, args=(link, 1 << 20), daemon=True)
    copying.start()
    link.close()
    copying.join(PATIENCE_S)
    assert not copying.is_alive()
