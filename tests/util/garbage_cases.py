"""Tests of when the interpreter's garbage collector runs; test_garbage.py runs them in a process with few objects."""

import gc
import mmap
import weakref
from collections.abc import Iterator

import pytest

from caraserve.util import garbage
from caraserve.util.garbage import GarbageCollector


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class CollectorHarness:
    """A collector whose server is idle, and whose memory grows, when the test says so."""

    def __init__(self) -> None:
        self.is_idle, self.blocks, self.bytes = False, 1000, 1 << 20
        self.collector = GarbageCollector(
            lambda: self.is_idle, num_blocks=lambda: self.blocks, private_bytes=lambda: self.bytes
        )
        self.collector.settle()
        self._left = weakref.ref(Node())

    @property
    def is_collected(self) -> bool:
        return self._left() is None

    def look(self, grown: int = 0, *, grown_bytes: int = 0) -> None:
        self.blocks += grown
        self.bytes += grown_bytes
        self.collector.look()


def test_garbage_is_collected_when_memory_has_grown_and_no_request_is_under_way() -> None:
    here = CollectorHarness()
    here.is_idle = True
    here.look(garbage._GROWN_BLOCKS)
    assert not here.is_collected
    here.look(1)
    assert here.is_collected


def test_while_requests_run_garbage_is_collected_only_when_memory_has_grown_much() -> None:
    here = CollectorHarness()
    here.look(garbage._BUSY_FACTOR * garbage._GROWN_BLOCKS)
    assert not here.is_collected
    here.look(1)
    assert here.is_collected


def test_memory_counts_from_the_last_collection() -> None:
    here = CollectorHarness()
    here.is_idle = True
    here.look(garbage._GROWN_BLOCKS + 1)
    left = weakref.ref(Node())
    here.look(garbage._GROWN_BLOCKS)
    assert left() is not None
    here.look(1)
    assert left() is None


def test_memory_counts_from_its_least_since_the_last_collection() -> None:
    here = CollectorHarness()
    here.look(garbage._BUSY_FACTOR * garbage._GROWN_BLOCKS + 1, grown_bytes=50 * garbage._GROWN_BYTES)
    left = weakref.ref(Node())
    here.is_idle = True
    here.look(-garbage._BUSY_FACTOR * garbage._GROWN_BLOCKS, grown_bytes=-50 * garbage._GROWN_BYTES)  # the load ends
    here.look(garbage._GROWN_BLOCKS, grown_bytes=garbage._GROWN_BYTES)
    assert left() is not None
    here.look(1)
    assert left() is None


@pytest.mark.parametrize(("is_idle", "factor"), [(True, 1), (False, garbage._BUSY_FACTOR)])
def test_garbage_is_collected_when_objects_grow_that_have_no_blocks(is_idle: bool, factor: int) -> None:
    here = CollectorHarness()
    here.is_idle = is_idle
    here.look(grown_bytes=factor * garbage._GROWN_BYTES)
    assert not here.is_collected
    here.look(grown_bytes=1)
    assert here.is_collected


def test_a_mapping_takes_the_memory_that_was_written() -> None:
    before = garbage._private_bytes()
    with mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as body:
        body[:] = b"x" * len(body)
        assert garbage._private_bytes() - before == pytest.approx(64 << 20, rel=0.1)


def test_what_the_start_has_left_is_in_no_later_collection() -> None:
    kept = [Node()]
    here = CollectorHarness()
    left = weakref.ref(kept.pop())
    here.look(garbage._BUSY_FACTOR * garbage._GROWN_BLOCKS + 1)
    assert here.is_collected
    assert left() is not None  # only a look at all objects of the start would find it


def test_garbage_is_found_also_if_it_was_in_use_for_long() -> None:
    here, kept = CollectorHarness(), [Node()]
    here.look(0)
    left = weakref.ref(kept.pop())
    here.look(garbage._BUSY_FACTOR * garbage._GROWN_BLOCKS + 1)
    assert left() is None


async def test_it_looks_until_cancelled() -> None:
    looks = 0

    async def sleep(pause_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await GarbageCollector(lambda: True, num_blocks=lambda: 0, sleep=sleep).run()
