"""Background tasks of the server: restarted when they fail, and reported in /metrics and /ready.

    runs ──fails──► waits 0.5 s, 1 s, 2 s, … 30 s, each less a random part of up to half ──► runs
    After a minute without failure a task is healthy again: its next failure is the first in a row.

Each failure is counted in /metrics and logged, the first in a row with a traceback. /ready names a task from its third
failure in a row until it is healthy again, so a restart that helps changes nothing for a load balancer.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from caraserve.telemetry.prometheus import family

log = logging.getLogger(__name__)

_FIRST_S, _LONGEST_S = 0.5, 30.0  # pauses before a restart
_HEALTHY_S = 60.0  # of running, after which earlier failures no longer count
_REPORTED = 3  # failures in a row that /ready names


@dataclass(slots=True)
class _State:
    failures: int = 0
    in_a_row: int = 0
    began_s: float | None = None  # None: it waits to be restarted


class BackgroundTasks:
    """The background tasks of one server, by name."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._now, self._sleep, self._chance = now, sleep, chance
        self._states: dict[str, _State] = {}

    def run(self, stack: AsyncExitStack, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Starts a task that calls `work()` again whenever it raises, until it returns or `stack` is closed.

        State between two calls belongs to the object of `work`. `name` is for the log, /metrics and /ready.
        """
        state = self._states[name] = _State()
        task = asyncio.create_task(self._run(work, name, state), name=name)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        stack.push_async_callback(end)
        task.add_done_callback(lambda _: self._states.pop(name, None))

    def failing(self) -> list[str]:
        """Returns the tasks that failed at least three times in a row and are not healthy yet."""
        return [name for name, state in self._states.items() if self._in_a_row(state) >= _REPORTED]

    def families(self, labels: str) -> Iterator[str]:
        """Returns the families of these tasks for GET /metrics."""
        states = [(f'task="{name}",{labels}', state) for name, state in self._states.items()]
        failures = [(series, state.failures) for series, state in states]
        text = "Failures of a background task; it is restarted after each."
        yield family("caraserve:background_task_failures_total", "counter", text, failures)
        text = "1 while a background task runs, 0 while it waits to be restarted."
        running = [(series, int(state.began_s is not None)) for series, state in states]
        yield family("caraserve:background_task_up", "gauge", text, running)

    def _in_a_row(self, state: _State) -> int:
        is_healthy = state.began_s is not None and self._now() - state.began_s >= _HEALTHY_S
        return 0 if is_healthy else state.in_a_row

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, state: _State) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            state.began_s = self._now()
            try:
                return await work()
            except (Exception, asyncio.CancelledError) as error:
                if task.cancelling():
                    raise
                # A CancelledError of something that the task awaited, not of the task itself.
                await self._sleep(self._failed(name, state, error))

    def _failed(self, name: str, state: _State, error: BaseException) -> float:
        """Counts and logs a failure. Returns the pause before the restart, in seconds."""
        state.in_a_row = self._in_a_row(state) + 1
        state.failures += 1
        state.began_s = None
        pause_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(state.in_a_row - 1, 16)) * (1.0 - 0.5 * self._chance())
        if state.in_a_row == 1:
            log.error("the task %s failed and is restarted in %.1f s", name, pause_s, exc_info=error)
        else:
            text = "the task %s failed %d times in a row, now with %.200s, and is restarted in %.1f s"
            log.error(text, name, state.in_a_row, repr(error), pause_s)
        return pause_s
