"""Tests of when the interpreter's garbage collector runs; test_garbage.py runs them in a process with few objects."""

import gc
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


class World:
    """A collector whose server is idle, and whose memory grows, when the test says so."""

    def __init__(self) -> None:
        self.is_idle, self.blocks = False, 1000
        self.collector = GarbageCollector(lambda: self.is_idle, num_blocks=lambda: self.blocks)
        self.collector.settle()
        self._left = weakref.ref(Node())

    @property
    def is_collected(self) -> bool:
        return self._left() is None

    def look(self, grown: int) -> None:
        self.blocks += grown
        self.collector.look()


def test_garbage_is_collected_when_memory_has_grown_and_no_request_is_under_way() -> None:
    world = World()
    world.is_idle = True
    world.look(garbage._GROWN_BLOCKS)
    assert not world.is_collected
    world.look(1)
    assert world.is_collected


def test_while_requests_run_garbage_is_collected_only_when_memory_has_grown_much() -> None:
    world = World()
    world.look(garbage._MUCH_GROWN_BLOCKS)
    assert not world.is_collected
    world.look(1)
    assert world.is_collected


def test_memory_counts_from_the_last_collection() -> None:
    world = World()
    world.is_idle = True
    world.look(garbage._GROWN_BLOCKS + 1)
    left = weakref.ref(Node())
    world.look(garbage._GROWN_BLOCKS)
    assert left() is not None
    world.look(1)
    assert left() is None


def test_what_outlives_a_look_is_in_no_later_short_collection() -> None:
    world, kept = World(), [Node() for _ in range(1000)]
    world.look(0)
    assert not {id(one) for one in gc.get_objects()} & {id(one) for one in kept}


async def test_it_looks_until_cancelled() -> None:
    looks = 0

    async def sleep(pause_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await GarbageCollector(lambda: True, num_blocks=lambda: 0, sleep=sleep).run()
