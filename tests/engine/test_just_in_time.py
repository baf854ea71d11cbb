"""What comes while the engine waits for the time to plan the next iteration takes part in it. On the fake backend,
whose iterations take a second and whose launches take no time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from caraserve.core.batch import Batch
from tests.engine_harness import EngineHarness, SentRequest, in_harness, turn


@contextlib.asynccontextmanager
async def waiting(**kind: Any) -> AsyncIterator[tuple[EngineHarness, "asyncio.Task[SentRequest]"]]:
    """Yields an engine that waits for the time to plan the next iteration of a request, and this request. It knows how
    long iterations with prompts take to be launched."""
    async with in_harness(just_in_time=True, **kind) as here:
        for first in range(4):
            await here.until_done([here.ask([first, 2, 3], None, max_tokens=1)[1]])
        _, task = here.ask([1, 2, 3], None, max_tokens=30)
        await turn()
        await until_waiting(here)
        yield here, task
        await here.until_done([task])


async def until_waiting(here: EngineHarness) -> None:
    """Ends iterations until the engine waits again."""
    while not here.alarm.is_set:
        await end_iteration(here)


async def end_iteration(here: EngineHarness) -> None:
    here.backend.step()
    await turn()


async def ring(here: EngineHarness) -> Batch:
    """Lets the time to plan come, and returns the iteration that is launched then."""
    before = len(here.backend.launched)
    here.alarm.ring()
    await turn()
    assert len(here.backend.launched) == before + 1
    return here.backend.launched[-1]


def counts(batch: Batch) -> list[int]:
    return [row.count for row in batch.rows]


async def test_requests_that_arrive_meanwhile_are_in_the_next_iteration() -> None:
    async with waiting() as (here, _):
        tasks = []
        for prompt in ([5, 6], [7, 8, 9]):
            tasks.append(here.ask(prompt, None, max_tokens=2)[1])
            await turn()
        assert len(here.backend.lane) == 1, "the next iteration is not launched yet"
        assert counts(await ring(here)) == [1, 2, 3]
        await here.until_done(tasks)
        for task in tasks:
            task.result().check()


async def test_without_an_alarm_each_iteration_is_launched_while_the_one_before_runs() -> None:
    async with in_harness() as here:
        _, task = here.ask([1, 2, 3], None, max_tokens=30)
        await turn()
        for _ in range(20):
            assert len(here.backend.lane) == 2
            await end_iteration(here)
        await here.until_done([task])


async def test_an_iteration_that_ends_earlier_than_expected_is_followed_by_the_next_at_once() -> None:
    async with waiting() as (here, task):
        here.backend.takes_s = lambda _: 0.5
        launched = len(here.backend.launched)
        await end_iteration(here)
        assert len(here.backend.launched) == launched + 1
        await here.until_done([task])
        task.result().check()


async def test_a_request_that_is_cancelled_meanwhile_is_not_in_the_next_iteration() -> None:
    async with waiting() as (here, _):
        asked, other = here.ask([5, 6], None, max_tokens=9)
        await turn()
        assert counts(await ring(here)) == [1, 2]
        await until_waiting(here)
        asked.stream.cancel()
        await turn()
        assert counts(await ring(here)) == [1]
        assert other.result().finish.reason == "cancelled"


async def test_the_load_of_a_request_for_which_a_slot_becomes_free_begins_at_once() -> None:
    async with waiting(slots=2) as (here, _):
        _, short = here.ask([5, 6], None, max_tokens=2)
        await turn()
        _, cold = here.ask([7, 8], "a0", max_tokens=2)
        await turn()
        here.reader.reads.pop()(True)
        while not short.done():
            await end_iteration(here)
        assert here.alarm.is_set
        assert here.backend.images, "its adapter is copied to the device"
        await here.until_done([cold])
        cold.result().check()


async def test_a_request_whose_side_batch_ends_meanwhile_is_in_the_next_iteration() -> None:
    async with waiting(mode="assisted", assisted_batches=1) as (here, _):
        _, cold = here.ask([5, 6], "a0", max_tokens=3)
        await turn()
        here.reader.reads.pop()(True)
        while not here.backend.side_batches:
            await turn()
            if here.alarm.is_set:
                here.alarm.ring()
            else:
                here.backend.step()
        await until_waiting(here)
        here.backend.end_side_batch(0)  # which takes until then
        await turn()
        assert counts(here.backend.launched[-1]) == [1, 1]
        await here.until_done([cold])
        cold.result().check()


async def test_nothing_is_waited_for_while_no_other_request_could_be_in_an_iteration() -> None:
    async with in_harness(just_in_time=True, slots=1) as here:
        tasks = [here.ask([first, 2, 3], None, max_tokens=12)[1] for first in range(4)]
        await here.until_done(tasks)
        assert here.alarm.settings == 0


async def test_a_load_that_begins_meanwhile_stops_iterations_in_mode_ondemand() -> None:
    async with waiting(exclusive=True) as (here, _):
        _, cold = here.ask([5, 6], "a0", max_tokens=2)
        await turn()
        launched = len(here.backend.launched)
        here.alarm.ring()
        await turn()
        await end_iteration(here)
        assert len(here.backend.launched) == launched
        await here.until_done([cold])
        cold.result().check()


async def test_an_iteration_that_fails_meanwhile_fails_its_requests_alone() -> None:
    async with waiting() as (here, task):
        _, arrived = here.ask([5, 6], None, max_tokens=2)
        await turn()
        here.backend.fail_next = True
        await end_iteration(here)
        await here.until_done([task, arrived])
        assert task.result().finish.reason == "error"
        arrived.result().check()
        assert arrived.result().finish.reason == "length"


async def test_drain_ends_requests_under_way() -> None:
    async with waiting() as (here, task):
        drained = asyncio.create_task(here.engine.drain(60.0))
        await here.until_done([task])
        await drained
        assert task.result().finish.reason == "length"
