"""Work that runs beside the requests for as long as the server does: restarted when it fails, and shown.

    runs ──fails──► waits 0.5 s, 1 s, 2 s, … 30 s, each less up to half of it by chance ──► runs
    A task that has run for a minute counts as well again: its next failure is the first one.

Every failure is counted in /metrics and is one line of the log; the first one in a row has a traceback. /ready names a
task from its third failure in a row until it is well again: a restart that helps changes nothing for a load balancer.
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
_WELL_S = 60.0  # of running, after which failures of before count no more
_MANY = 3  # failures in a row


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
        """Runs `work()` until it returns or `stack` ends it, and calls it again whenever it raises. What it has to
        keep from one call to the next belongs to its object. `name` is for the log, /metrics and /ready."""
        state = self._states[name] = _State()
        task = asyncio.create_task(self._run(work, name, state), name=name)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        stack.push_async_callback(end)
        task.add_done_callback(lambda _: self._states.pop(name, None))

    def failing(self) -> list[str]:
        """The tasks that have failed several times in a row and are not yet well again."""
        return [name for name, state in self._states.items() if self._in_a_row(state) >= _MANY]

    def families(self, labels: str) -> Iterator[str]:
        """For GET /metrics."""
        states = [(f'task="{name}",{labels}', state) for name, state in self._states.items()]
        failures = [(series, state.failures) for series, state in states]
        text = "Times that a background task failed; it is restarted after each."
        yield family("caraserve:background_task_failures_total", "counter", text, failures)
        text = "1 while a background task runs, 0 while it waits to be restarted."
        running = [(series, int(state.began_s is not None)) for series, state in states]
        yield family("caraserve:background_task_up", "gauge", text, running)

    def _in_a_row(self, state: _State) -> int:
        is_well = state.began_s is not None and self._now() - state.began_s >= _WELL_S
        return 0 if is_well else state.in_a_row

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
                # A CancelledError that is not for this task comes of something that it waited for.
                await self._sleep(self._failed(name, state, error))

    def _failed(self, name: str, state: _State, error: BaseException) -> float:
        """Counts and logs a failure. The pause before the restart, in seconds."""
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
