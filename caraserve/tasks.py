"""Work beside other work: tasks that are heard of when they fail, and long loops that hold nobody up. Level 0."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_TURN_S = 0.001


async def in_turns(items: Iterable[T], now: Callable[[], float] = time.perf_counter) -> AsyncIterator[T]:
    """The items in order, with a turn of the event loop for everybody else after each millisecond of work on them."""
    began_s = now()
    for item in items:
        yield item
        if now() - began_s >= _TURN_S:
            await asyncio.sleep(0)
            began_s = now()


def log_defect(task: "asyncio.Task[Any]") -> None:
    """For `Task.add_done_callback`: whatever a task raises is a defect of ours, and would be silent."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the task %s has stopped", task.get_name(), exc_info=error)


def run_beside(stack: AsyncExitStack, work: Coroutine[Any, Any, None], name: str) -> None:
    """Starts what runs until `stack` ends it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(log_defect)

    async def end() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # which has been logged
            await task

    stack.push_async_callback(end)
