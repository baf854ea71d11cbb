"""Assisted prefills as side batches: no other request waits for them, and the memory that they use stays until they
have ended. On the fake backend of hashes."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest

from caraserve.core.batch import Batch
from caraserve.core.request import FinishReason
from caraserve.lora.adapter import AdapterTier
from tests.engine_harness import EngineHarness, SentRequest, in_harness, turn

PROMPT = [1, 2, 3, 4, 5]

with_harness = partial(in_harness, mode="assisted", assisted_batches=2)


@pytest.fixture
def here() -> AbstractAsyncContextManager[EngineHarness]:
    return with_harness()


async def iterate(here: EngineHarness, times: int = 1) -> None:
    for _ in range(times):
        here.backend.step()
        await turn()


async def arrive_in_host(here: EngineHarness) -> None:
    """Ends all reads, so that copies begin."""
    while here.reader.reads:
        here.reader.reads.pop(0)(True)
    await turn()


async def begin_side_batch(
    here: EngineHarness, name: str = "a0", prompt: Sequence[int] = PROMPT, **params: Any
) -> "tuple[SentRequest, asyncio.Task[SentRequest]]":
    """Submits a request and starts its side batch."""
    asked, task = here.ask(prompt, name, **{"max_tokens": 4} | params)
    await turn()
    await arrive_in_host(here)
    begun = len(here.backend.side_batches)
    while len(here.backend.side_batches) == begun:
        await iterate(here)
    return asked, task


def side_batches(here: EngineHarness) -> list[Batch]:
    return [plan for plan in here.backend.launched if plan.is_side_batch]


async def test_a_prompt_whose_adapter_is_being_copied_gets_a_side_batch(here: EngineHarness) -> None:
    asked, _ = await begin_side_batch(here)
    (plan,) = side_batches(here)
    (row,) = plan.rows
    assert (row.start, row.count, row.samples, row.assist) == (0, len(PROMPT), True, True)
    here.backend.end_side_batch(0)
    await turn()
    assert len(asked.tokens) == 1, "its first token is there before its adapter is"


async def test_iterations_continue_at_full_speed_beside_a_side_batch(here: EngineHarness) -> None:
    other, _ = here.ask([7, 8], None, max_tokens=20)
    await turn()
    await begin_side_batch(here)
    before = len(other.tokens)
    await iterate(here, 8)
    assert len(other.tokens) >= before + 7


async def test_tokens_of_a_side_batch_are_sent_while_an_iteration_is_under_way(here: EngineHarness) -> None:
    here.ask([7, 8], None, max_tokens=20)
    await turn()
    asked, _ = await begin_side_batch(here)
    assert here.backend.lane
    here.backend.end_side_batch(0)
    await turn()
    assert len(asked.tokens) == 1


async def test_a_request_decodes_only_when_its_adapter_has_arrived_and_delays_no_iteration_before() -> None:
    async with with_harness() as here:
        asked, task = await begin_side_batch(here)
        here.backend.now_s = 0.0  # long before the expected end of the copy
        here.backend.end_side_batch(0)
        await turn()
        assert not here.backend.lane
        here.backend.copies.pop()(True)
        await here.until_done([task])
        asked.check()
        assert asked.finish.reason == "length"


async def test_there_are_at_most_as_many_assisted_prefills_as_the_device_allows() -> None:
    async with with_harness(device_adapters=4) as here:
        tasks = [here.ask(PROMPT, name, max_tokens=2)[1] for name in ("a0", "a1", "a2")]
        await turn()
        await arrive_in_host(here)
        assert len(side_batches(here)) == 2
        await here.until_done(tasks)
        assert [task.result().finish.reason for task in tasks] == ["length"] * 3


async def test_on_a_device_without_assisted_batches_workers_help_within_iterations() -> None:
    async with with_harness(assisted_batches=0) as here:
        here.ask(PROMPT, "a0", max_tokens=1)
        await turn()
        await arrive_in_host(here)
        (plan,) = here.backend.launched
        assert not plan.is_side_batch
        assert plan.rows[0].assist


async def test_a_long_prompt_is_computed_in_several_side_batches() -> None:
    async with with_harness(step_tokens=16) as here:
        await begin_side_batch(here, prompt=range(20))
        here.backend.end_side_batch(0)
        await turn()
        assert [plan.rows[0].count for plan in side_batches(here)] == [16, 4]


async def test_what_a_side_batch_leaves_as_the_adapter_has_arrived_is_computed_in_iterations() -> None:
    async with with_harness() as here:
        asked, task = await begin_side_batch(here, prompt=range(16))
        here.backend.copies.pop()(True)
        await iterate(here)
        launched = len(here.backend.launched)
        here.backend.end_side_batch(0, "left")
        await here.until_done([task])
        asked.check()
        assert [plan.rows[0].count for plan in side_batches(here)] == [16]
        (rest,) = here.backend.launched[launched].rows
        assert (rest.start, rest.count, rest.samples, rest.assist) == (8, 8, True, False)


async def test_a_cancelled_request_finishes_at_once_and_releases_its_memory_when_its_side_batch_ends() -> None:
    async with with_harness() as here:
        asked, task = await begin_side_batch(here)
        asked.stream.cancel()
        await turn()
        assert task.done()
        assert asked.finish.reason == "cancelled"
        assert here.engine.snapshot().kv_used_blocks == 2
        here.engine.check()
        here.backend.end_side_batch(0)
        await turn()
        assert here.engine.snapshot().kv_used_blocks == 0
        here.engine.check()


async def test_the_adapter_stays_on_the_device_until_the_side_batch_has_ended() -> None:
    async with with_harness(device_adapters=1) as here:
        asked, _ = await begin_side_batch(here)
        asked.stream.cancel()
        here.backend.copies.pop()(True)
        here.ask(PROMPT, "a1", max_tokens=2)
        await turn()
        await arrive_in_host(here)
        await iterate(here)
        assert not here.backend.copies, "the device has room for one"
        here.backend.end_side_batch(0)
        await turn()
        assert here.backend.copies


async def test_the_image_stays_in_the_host_cache_until_the_side_batch_has_ended(here: EngineHarness) -> None:
    """Workers may still compute a layer whose weights arrived after they began it."""
    manager = here.engine.catalog.manager
    await begin_side_batch(here)
    here.backend.copies.pop()(True)
    await iterate(here)
    (version,) = manager.on_device()
    assert version.needs_image
    here.backend.end_side_batch(0)
    await turn()
    assert not version.needs_image


async def test_a_copy_that_fails_during_a_side_batch_is_reported_when_that_has_ended(here: EngineHarness) -> None:
    asked, task = await begin_side_batch(here)
    here.backend.copies.pop()(False)
    await iterate(here)
    assert not task.done()
    here.backend.end_side_batch(0)
    await turn()
    assert asked.finish.reason == "error"
    assert "could not be copied" in asked.finish.error.message


async def test_a_request_of_a_side_batch_is_not_preempted() -> None:
    """Other requests are preempted instead, or wait."""
    async with with_harness(blocks=16) as here:
        _, helped = await begin_side_batch(here, prompt=range(16))
        tasks = [here.ask(range(index, index + 24), None, max_tokens=20)[1] for index in (1, 2)]
        await turn()
        for _ in range(60):
            if here.backend.lane:
                await iterate(here)
        here.backend.end_side_batch(0)
        await here.until_done([helped, *tasks])
        for task in (helped, *tasks):
            task.result().check()
        assert here.metrics.preemptions > 0


async def test_when_workers_fail_the_prompt_is_computed_again_without_them_and_no_other_request_loses_a_token(
    here: EngineHarness,
) -> None:
    other, second = here.ask([7, 8], None, max_tokens=12)
    await turn()
    asked, task = await begin_side_batch(here)
    here.backend.end_side_batch(0, "void")
    await here.until_done([task, second])
    assert len(side_batches(here)) == 1
    for one in (asked, other):
        one.check()
        assert one.finish.reason == "length"


async def test_after_a_retry_the_request_waits_for_its_weights(here: EngineHarness) -> None:
    await begin_side_batch(here)
    here.backend.now_s = 0.0
    here.backend.end_side_batch(0, "void")
    here.backend.now_s = 0.0
    await turn()
    assert not here.backend.lane, "the copy is expected later"
    here.backend.copies.pop()(True)


@pytest.mark.parametrize(("outcome", "reason"), [("failed", "error"), ("void", "cancelled"), ("done", "cancelled")])
async def test_a_drain_waits_for_the_side_batches_of_finished_requests(outcome: Any, reason: FinishReason) -> None:
    async with with_harness() as here:
        asked, _ = await begin_side_batch(here)
        if reason == "cancelled":
            asked.stream.cancel()
        await turn()
        drain = asyncio.create_task(here.engine.drain(timeout_s=60.0))
        await turn()
        assert not drain.done()
        here.backend.end_side_batch(0, outcome)
        await drain
        assert asked.finish.reason == reason
        assert here.engine.snapshot().kv_used_blocks == 0


async def test_a_failed_side_batch_fails_only_its_own_request(here: EngineHarness) -> None:
    other, second = here.ask([7, 8], None, max_tokens=12)
    await turn()
    asked, task = await begin_side_batch(here)
    here.backend.end_side_batch(0, "failed")
    await here.until_done([task, second])
    assert asked.finish.reason == "error"
    assert other.finish.reason == "length"
    other.check()


async def test_blocks_of_a_side_batch_are_reused_only_when_it_has_ended(here: EngineHarness) -> None:
    prompt = list(range(9))
    _, first = await begin_side_batch(here, prompt=prompt, max_tokens=1)
    _, second = here.ask([*prompt, 11], "a0", max_tokens=1)
    await turn()
    assert second_starts(here) == [0, 0]
    here.backend.end_side_batch(0)
    await here.until_done([first, second])
    _, third = here.ask([*prompt, 12], "a0", max_tokens=1)
    await here.until_done([third])
    assert third.result().finish.cached_tokens == 8


def second_starts(here: EngineHarness) -> list[int]:
    return [plan.rows[0].start for plan in side_batches(here)]


async def test_a_request_whose_adapter_is_missing_gets_no_side_batch(here: EngineHarness) -> None:
    _, task = here.ask(PROMPT, "a0", max_tokens=2)
    await turn()
    here.reader.reads.pop()(False)
    await turn()
    assert task.result().finish.reason == "error"
    assert side_batches(here) == []
    assert here.engine.catalog.manager.error_of("a0") is not None
    assert all(version.tier is not AdapterTier.COPYING for version in here.engine.catalog.manager.on_device())
