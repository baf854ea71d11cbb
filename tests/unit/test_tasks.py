"""Tasks beside the rest: one that fails is heard of, and the stack that ends it is none the worse."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from caraserve.tasks import Tasks, run_beside


def test_a_task_that_fails_is_logged_and_disturbs_no_ending(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        failed = asyncio.Event()

        async def fail() -> None:
            failed.set()
            raise ZeroDivisionError

        async with AsyncExitStack() as stack:
            run_beside(stack, fail(), "publisher of a test")
            await failed.wait()

    asyncio.run(body())
    assert "the task publisher of a test has stopped" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_the_stack_ends_a_task_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> bool:
        running, ended = asyncio.Event(), asyncio.Event()

        async def go_on() -> None:
            running.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with AsyncExitStack() as stack:
            run_beside(stack, go_on(), "x")
            await running.wait()
        return ended.is_set()

    assert asyncio.run(body())
    assert not caplog.records


def test_an_owners_tasks_are_known_until_they_end_and_a_defect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def body() -> list[int]:
        tasks = Tasks()
        known = [len(tasks)]
        failing = tasks.start(fail(), "fetch of a test")
        known.append(len(tasks))
        await asyncio.wait([failing])
        await asyncio.sleep(0)
        return [*known, len(tasks)]

    assert asyncio.run(body()) == [0, 1, 0]
    assert "the task fetch of a test has stopped" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_an_owner_ends_all_its_tasks_and_waits_for_them(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> list[str]:
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
        return sorted(ended)

    assert asyncio.run(body()) == ["a", "b"]
    assert not caplog.records
