"""Changes of one name: one at a time, in the order in which they came, and others' changes are not held up."""

import asyncio

import pytest

from caraserve.errors import AdapterBusy
from caraserve.lora import name_locks
from caraserve.lora.name_locks import NameLocks
from tests.cluster.nodes import until


class Changes:
    """Changes of names, each of which ends when the test says so."""

    def __init__(self, locks: NameLocks) -> None:
        self.locks, self.under_way = locks, list[int]()
        self._gates: dict[int, asyncio.Event] = {}

    def begin(self, number: int, name: str) -> "asyncio.Task[None]":
        self._gates[number] = asyncio.Event()
        return asyncio.create_task(self._change(number, name))

    async def _change(self, number: int, name: str) -> None:
        async with self.locks.held(name):
            self.under_way.append(number)
            await self._gates[number].wait()
            self.under_way.remove(number)

    def end(self, number: int) -> None:
        self._gates[number].set()


async def test_changes_of_a_name_follow_one_another_beside_those_of_other_names() -> None:
    changes = Changes(NameLocks())
    tasks = [changes.begin(number, name) for number, name in enumerate("aaba")]
    await until(lambda: changes.under_way == [0, 2])
    tasks[1].cancel()  # its client has left: its turn passes to the next
    changes.end(0)
    await until(lambda: changes.under_way == [2, 3])
    assert changes.locks.is_held("a")
    for number in (2, 3):
        changes.end(number)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False, True, False, False]
    assert not changes.locks.is_held("a")


async def test_a_change_that_waits_too_long_is_refused_and_may_be_repeated() -> None:
    changes = Changes(NameLocks(longest_wait_s=0.01))
    first = changes.begin(0, "a")
    await until(lambda: changes.under_way == [0])
    with pytest.raises(AdapterBusy, match="'a' is being changed") as refusal:
        await changes.begin(1, "a")
    assert (refusal.value.status, refusal.value.retry_after_s) == (409, 1.0)
    changes.end(0)
    await first
    second = changes.begin(2, "a")
    await until(lambda: changes.under_way == [2])
    changes.end(2)
    await second


async def test_the_queue_of_a_name_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_locks, "_MOST_WAITING", 2)
    changes = Changes(NameLocks())
    tasks = [changes.begin(number, "a") for number in range(3)]
    await until(lambda: changes.under_way == [0])
    with pytest.raises(AdapterBusy, match="2 changes of 'a' are waiting"):
        await changes.begin(3, "a")
    for number in range(3):
        changes.end(number)
    await asyncio.gather(*tasks)
