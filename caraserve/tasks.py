"""Work beside other work: tasks that are heard of when they fail, and long loops that hold nobody up. Level 0."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
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


class Tasks:
    """What one owner has under way. Each is known until it ends; whatever it raises is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator["asyncio.Task[None]"]:
        return iter(tuple(self._running))

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Begins some work; `name` is for the log."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(log_defect)
        return task

    async def end(self) -> None:
        """Cancels all, and returns when they have ended."""
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)
