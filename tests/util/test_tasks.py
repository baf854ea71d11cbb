"""Tasks of one owner: one that fails is heard of, and all end with their owner."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from caraserve.util.tasks import TURN_OWNER, Tasks, in_shared_turns, in_turns, run_together


async def test_tasks_are_listed_until_they_end_and_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    tasks = Tasks()
    assert len(tasks) == 0
    failing = tasks.start(fail(), "fetch of a test")
    assert len(tasks) == 1
    await asyncio.wait([failing])
    await asyncio.sleep(0)
    assert len(tasks) == 0
    assert "the task fetch of a test has stopped" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_end_cancels_all_tasks_and_waits_for_them(caplog: pytest.LogCaptureFixture) -> None:
    tasks, ended = Tasks(), []

    async def go_on(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    for name in "ab":
        tasks.start(go_on(name), name)
    await asyncio.sleep(0)
    await tasks.end()
    assert sorted(ended) == ["a", "b"]
    assert not caplog.records


async def test_a_long_loop_sleeps_after_each_millisecond_of_work() -> None:
    work_ms, loop = iter(range(100)), asyncio.get_running_loop()
    began_s = loop.time()
    assert [item async for item in in_turns(range(10), now=lambda: 0.001 * next(work_ms))] == list(range(10))
    assert loop.time() - began_s >= 5 * 0.001


async def test_a_short_loop_does_not_sleep() -> None:
    other = asyncio.create_task(asyncio.sleep(0))
    assert len([item async for item in in_turns(range(10), now=lambda: 0.0)]) == 10
    assert not other.done()
    await other


def test_of_many_loops_over_what_clients_send_one_goes_on_every_2_ms() -> None:
    async def loop(work_ms: Iterator[int]) -> list[int]:
        return [item async for item in in_shared_turns(range(3), now=lambda: 0.001 * next(work_ms))]

    async def body() -> float:
        began_s = asyncio.get_running_loop().time()
        assert await asyncio.gather(*(loop(iter(range(100))) for _ in range(10))) == [[0, 1, 2]] * 10
        return asyncio.get_running_loop().time() - began_s

    for _ in range(2):  # each has its own event loop
        assert asyncio.run(body()) >= 28 * 0.002


async def test_many_loops_of_one_client_delay_a_loop_of_another_one_by_a_turn_each() -> None:
    ended: list[str] = []

    async def loop(owner: str, length: int) -> None:
        TURN_OWNER.set(owner)
        work_ms = iter(range(1000))
        async for _ in in_shared_turns(range(length), now=lambda: 0.001 * next(work_ms)):
            pass
        ended.append(owner)

    greedy = [asyncio.create_task(loop("greedy", 20)) for _ in range(10)]
    await asyncio.gather(loop("other", 5), *greedy)
    assert ended[0] == "other"


@pytest.mark.parametrize("count", [1, 40])
async def test_parts_run_together_and_their_results_are_in_order(count: int) -> None:
    running, most = 0, 0

    async def part(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (number % 3))
        running -= 1
        return number

    assert await run_together(map(part, range(count)), count) == list(range(count))
    assert most > count // 2


@pytest.mark.parametrize("failing", [0, 2, 29])
async def test_the_first_part_that_fails_ends_the_others_and_is_raised(failing: int) -> None:
    ended: list[int] = []

    async def part(number: int) -> int:
        if number == failing:
            raise ZeroDivisionError(number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)
        return number

    def parts() -> Iterator[Coroutine[Any, Any, int]]:
        for number in range(30):
            started.append(number)
            yield part(number)

    started: list[int] = []
    with pytest.raises(ZeroDivisionError, match=str(failing)):
        await run_together(parts(), 30)
    assert sorted([*ended, failing]) == started


async def test_parts_end_with_the_one_that_awaits_them() -> None:
    ended: list[int] = []
    begun = asyncio.Event()

    async def part(number: int) -> int:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)
        return number

    task = asyncio.create_task(run_together(map(part, range(3)), 3))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [0, 1, 2]
