"""Results of an iteration reach its requests in short turns of the event loop, and finished requests are freed."""

import asyncio
import gc

import pytest

from caraserve.engine.active_request import ActiveRequest
from tests.engine_harness import EngineHarness, in_harness, turn


async def turns_of_first_tokens(here: EngineHarness, requests: int) -> list[int]:
    """Returns, for each of several requests in one iteration, the turn of the event loop in which its token came."""
    turns = 0
    asked = [here.ask([7, index], None, max_tokens=2) for index in range(requests)]
    await turn()
    here.backend.step()
    came: dict[int, int] = {}
    while len(came) < requests:
        await asyncio.sleep(0)
        turns += 1
        for index, (one, _) in enumerate(asked):
            if one.deltas:
                came.setdefault(index, turns)
    await here.until_done([task for _, task in asked])
    return list(came.values())


@pytest.mark.parametrize(("clock_step_s", "several"), [(0.0, False), (0.003, True)])
async def test_other_tasks_run_between_results_that_take_long(clock_step_s: float, several: bool) -> None:
    async with in_harness(clock_step_s=clock_step_s) as here:
        assert (len(set(await turns_of_first_tokens(here, 4))) > 1) is several


def active_requests() -> list[ActiveRequest]:
    """Returns those of this process, which other tests may have left."""
    return [found for found in gc.get_objects() if type(found) is ActiveRequest]


def test_a_finished_request_is_freed_without_a_garbage_collection() -> None:
    async def body() -> None:
        async with in_harness() as here:
            one, task = here.ask([7, 8], None, max_tokens=1)
            assert len(active_requests()) == before + 1
            await here.until_done([task])
            await here.settle()
            assert one.finish.reason == "length"
            assert len(active_requests()) == before

    gc.collect()
    before = len(active_requests())
    gc.disable()
    try:
        asyncio.run(body())
    finally:
        gc.enable()
