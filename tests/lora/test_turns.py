"""Turns of changes and uploads: in the order in which they came, and no key holds up another one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from caraserve.errors import AdapterBusy, CaraServeError, ServerBusy
from caraserve.lora.turns import Turns
from tests.cluster.nodes import until
from tests.lora.uploads import receiving


def refusal(key: str, has_many: bool) -> CaraServeError:
    return CaraServeError("many" if has_many else "late")


class Users:
    """Users of turns, each of which ends when the test says so. The first letter of a name is its key."""

    def __init__(self, **limits: Any) -> None:
        self.turns, self.under_way = Turns(refusal, **{"of_key": 1, "waiting": 9} | limits), list[str]()
        self._ends: dict[str, asyncio.Event] = {}

    def begin(self, name: str) -> "asyncio.Task[None]":
        self._ends[name] = asyncio.Event()
        return asyncio.create_task(self._use(name))

    async def _use(self, name: str) -> None:
        async with self.turns.taken(name[0]):
            self.under_way.append(name)
            await self._ends[name].wait()
            self.under_way.remove(name)

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()


async def test_a_key_that_has_all_of_its_places_does_not_hold_up_another() -> None:
    users = Users(of_key=2, of_all=3)
    tasks = [users.begin(name) for name in ("a1", "a2", "a3", "b1", "c1")]
    await until(lambda: users.under_way == ["a1", "a2", "b1"])
    users.end("a1")  # the place is for the one that has waited longest
    await until(lambda: users.under_way == ["a2", "b1", "a3"])
    tasks[4].cancel()
    await asyncio.wait([tasks[4]])
    users.end("a2", "a3", "b1")
    await asyncio.gather(*tasks[:4])
    assert not any(map(users.turns.is_taken, "abc"))


async def test_users_of_one_key_follow_one_another_and_one_that_leaves_passes_its_turn_on() -> None:
    users = Users()
    tasks = [users.begin(name) for name in ("a1", "a2", "b1", "a3")]
    await until(lambda: users.under_way == ["a1", "b1"])
    tasks[1].cancel()
    users.end("a1")
    await until(lambda: users.under_way == ["b1", "a3"])
    assert users.turns.is_taken("a")
    users.end("b1", "a3")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False, True, False, False]
    assert not users.turns.is_taken("a")


@pytest.mark.parametrize(("limits", "reason"), [({"longest_wait_s": 0.01}, "late"), ({"waiting": 0}, "many")])
async def test_one_that_would_wait_too_long_or_with_too_many_is_refused_and_may_come_again(
    limits: dict[str, float], reason: str
) -> None:
    users = Users(**limits)
    first = users.begin("a1")
    await until(lambda: users.under_way == ["a1"])
    with pytest.raises(CaraServeError, match=reason):
        await users.begin("a2")
    users.end("a1")
    await first
    second = users.begin("a3")
    await until(lambda: users.under_way == ["a3"])
    users.end("a3")
    await second


async def test_the_refusals_of_changes_and_uploads_say_when_to_try_again(tmp_path: Path) -> None:
    async with receiving(tmp_path) as receiver:
        changes, uploads = receiver.catalog._changes, receiver.uploads._places
        for turns, has_many, text, kind in (
            (changes, True, "256 changes of 'a' are waiting; try again", AdapterBusy),
            (changes, False, "'a' is being changed, for more than 30 s; try again", AdapterBusy),
            (uploads, True, "16 adapters are being uploaded, or 4 by this client; try again", ServerBusy),
        ):
            error = turns._refusal("a", has_many)
            assert (error.message, error.retry_after_s, type(error)) == (text, 1.0, kind)  # type: ignore[attr-defined]
