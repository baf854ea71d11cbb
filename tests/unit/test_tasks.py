"""Tasks beside the rest: one that fails is heard of, and the stack that ends it is none the worse."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from caraserve.tasks import run_beside


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
