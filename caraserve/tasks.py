"""Tasks that run beside everything else, and are heard of when they fail. Level 0."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

log = logging.getLogger(__name__)


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
