"""Background tasks: one that fails runs again after a pause, and operators see it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest

from caraserve.telemetry.background import BackgroundTasks


class TaskHarness:
    """A clock that moves when a test says so, pauses that last until then, and work that fails on demand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0
        self.pauses: list[float] = []
        self.tasks = BackgroundTasks(lambda: self.now_s, self._pause, lambda: 0.0)
        self._fault: asyncio.Future[None] | None = None
        self._resumed: asyncio.Event | None = None

    async def work(self) -> None:
        self.calls += 1
        self._fault = asyncio.get_running_loop().create_future()
        await self._fault

    async def fail(self, error: BaseException | None = None) -> None:
        """The task fails, and waits for its restart."""
        assert self._fault is not None
        if isinstance(error, asyncio.CancelledError):
            self._fault.cancel()
        else:
            self._fault.set_exception(error or ZeroDivisionError("of a test"))
        await settled()

    async def restart(self) -> None:
        """The pause is over."""
        assert self._resumed is not None
        self.now_s += self.pauses[-1]
        self._resumed.set()
        await settled()

    def metric(self, name: str) -> str:
        (line,) = [line for line in "".join(self.tasks.families('x="y"')).splitlines() if line.startswith(name)]
        return line.removeprefix(name)

    async def _pause(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self._resumed = asyncio.Event()
        await self._resumed.wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def running() -> AsyncIterator[TaskHarness]:
    here = TaskHarness()
    async with AsyncExitStack() as stack:
        here.tasks.run(stack, here.work, "planner")
        await settled()
        yield here


@pytest.fixture
def here() -> AbstractAsyncContextManager[TaskHarness]:
    return running()


async def test_a_task_that_fails_runs_again_after_pauses_that_double(here: TaskHarness) -> None:
    for _ in range(9):
        await here.fail()
        await here.restart()
    assert here.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert here.calls == 10


async def test_chance_shortens_a_pause_by_half_at_most() -> None:
    pauses: list[float] = []
    enough = asyncio.Event()

    async def fail() -> None:
        raise ZeroDivisionError

    async def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 200:
            enough.set()
            await asyncio.Event().wait()

    async with AsyncExitStack() as stack:
        BackgroundTasks(sleep=pause).run(stack, fail, "x")
        await enough.wait()
    assert all(15.0 <= pause_s <= 30.0 for pause_s in pauses[7:])
    assert len(set(pauses)) > 100


async def test_a_task_that_ran_for_a_minute_restarts_with_short_pauses(here: TaskHarness) -> None:
    for ran_s in (1.0, 59.0, 61.0, 0.0):
        here.now_s += ran_s
        await here.fail()
        await here.restart()
    assert here.pauses == [0.5, 1.0, 0.5, 1.0]


async def test_a_task_counts_as_failing_from_its_third_failure_until_it_has_run_for_a_minute(here: TaskHarness) -> None:
    found = []
    for _ in range(3):
        await here.fail()
        found.append(here.tasks.failing())
        await here.restart()
    assert found == [[], [], ["planner"]]
    here.now_s += 59.0
    assert here.tasks.failing() == ["planner"]
    here.now_s += 1.0
    assert here.tasks.failing() == []


async def test_metrics_show_which_task_is_down_and_its_failures(here: TaskHarness) -> None:
    up, failures = "caraserve:background_task_up", "caraserve:background_task_failures_total"

    def shown() -> tuple[str, str]:
        return here.metric(up + "{"), here.metric(failures + "{")

    assert shown() == ('task="planner",x="y"} 1', 'task="planner",x="y"} 0')
    await here.fail()
    assert shown() == ('task="planner",x="y"} 0', 'task="planner",x="y"} 1')
    await here.restart()
    assert shown() == ('task="planner",x="y"} 1', 'task="planner",x="y"} 1')


async def test_each_failure_is_one_record_and_only_the_first_in_a_row_has_a_traceback(
    caplog: pytest.LogCaptureFixture, here: TaskHarness
) -> None:
    for _ in range(4):
        await here.fail(ValueError("x" * 10_000))
        await here.restart()
    assert [(record.levelname, record.exc_info is not None) for record in caplog.records] == [
        ("ERROR", True),
        *[("ERROR", False)] * 3,
    ]
    assert "the task planner failed 2 times in a row, now with ValueError(" in caplog.messages[1]
    assert all(len(message) < 400 for message in caplog.messages)


async def test_a_cancellation_of_another_task_is_a_failure(here: TaskHarness) -> None:
    await here.fail(asyncio.CancelledError())
    await here.restart()
    assert here.calls == 2


@pytest.mark.parametrize("waits", [False, True])
async def test_the_stack_ends_a_task_that_runs_and_one_that_waits(
    waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as here:
        if waits:
            await here.fail()
        caplog.clear()
    assert not caplog.records
    assert "planner" not in "".join(here.tasks.families(""))


async def test_a_task_that_returns_is_not_restarted() -> None:
    async def work() -> None:
        return

    tasks = BackgroundTasks()
    async with AsyncExitStack() as stack:
        tasks.run(stack, work, "x")
        await settled()
        assert 'task="x"' not in "".join(tasks.families(""))
