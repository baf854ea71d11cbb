"""A download may stall without limit: requests and adapters that wait for one give device memory and KV blocks to
others that need them. On the fake backend of hashes."""

import asyncio
from functools import partial

import pytest

from caraserve.lora.adapter import AdapterTier
from tests.engine.test_streamed_prefill import PROMPT, begun, come, end_read, run_lane, used_bytes, version_of
from tests.engine_harness import EngineHarness, SentRequest, in_harness, turn

with_harness = partial(in_harness, mode="pipelined", streamed_batches=2)


async def ends(here: EngineHarness, asked: SentRequest) -> None:
    """Checks that a request finishes while no download makes progress."""
    for _ in range(100):
        while here.backend.copies:
            here.backend.copies.pop()(True)
        await turn()
        await run_lane(here)
    assert asked.deltas, "it is still waiting"
    asked.check()
    assert asked.finish.reason == "length"


async def served(here: EngineHarness, name: str, prompt: list[int] = PROMPT) -> None:
    """Serves one request to its end, with an adapter that is downloaded at once."""
    asked, _ = here.ask(prompt, name, max_tokens=1)
    await turn()
    await end_read(here)
    await ends(here, asked)


async def taken(here: EngineHarness) -> "tuple[SentRequest, asyncio.Task[SentRequest]]":
    """Sets up a device with room for one adapter: a0 is being streamed to it, and a1 is in the host cache."""
    await served(here, "a1")
    first = await begun(here, "a0")
    assert version_of(here, "a0").tier is AdapterTier.STREAMING
    return first


async def wanted(here: EngineHarness, name: str = "a1") -> SentRequest:
    """Submits a request for an adapter that is complete in the host cache."""
    asked, _ = here.ask([9, 8, 7], name, max_tokens=3)
    await turn()
    return asked


# --- on the device ---


async def test_a_complete_adapter_gets_the_room_of_an_incomplete_one() -> None:
    async with with_harness(device_adapters=1) as here:
        await taken(here)
        await ends(here, await wanted(here))
        assert version_of(here, "a0").tier is AdapterTier.READING
        assert here.backend.side_batches == []
        await end_read(here)


async def test_an_adapter_that_lost_its_room_is_served_after_its_download() -> None:
    async with with_harness(device_adapters=1) as here:
        first, task = await taken(here)
        await ends(here, await wanted(here))
        await come(here)
        assert version_of(here, "a0").tier is AdapterTier.READING, "it does not stream again"
        await end_read(here)
        await here.until_done([task])
        first.check()
        assert first.finish.reason == "length"


async def test_an_adapter_that_lost_its_room_can_be_streamed_in_a_later_download() -> None:
    async with with_harness(device_adapters=1) as here:
        await taken(here)
        await ends(here, await wanted(here))
        await end_read(here, ok=False)
        await begun(here, "a0")
        assert version_of(here, "a0").tier is AdapterTier.STREAMING
        await end_read(here)


async def test_an_adapter_complete_before_it_was_unloaded_is_served_after_the_one_that_needed_its_room() -> None:
    async with with_harness(device_adapters=1) as here:
        first, task = await taken(here)
        other = await wanted(here)
        assert version_of(here, "a0").makes_room
        here.reader.reads.pop()(True)
        assert version_of(here, "a0").tier is AdapterTier.STREAMING
        await ends(here, other)
        await here.until_done([task])
        first.check()
        assert first.finish.reason == "length"


async def test_a_download_that_fails_before_its_adapter_was_unloaded_leaks_nothing() -> None:
    async with with_harness(device_adapters=1) as here:
        first, _ = await taken(here)
        before = used_bytes(here)
        other = await wanted(here)
        here.reader.reads.pop()(False)
        await ends(here, other)
        assert "the disk failed" in first.finish.error.message
        assert used_bytes(here) < before


async def test_an_adapter_that_loses_its_room_does_not_fail_because_of_an_earlier_failed_copy() -> None:
    async with with_harness(device_adapters=1) as here:
        first, task = await taken(here)
        here.backend.fail_streamed(version_of(here, "a0").slot)
        await run_lane(here)
        await ends(here, await wanted(here))
        await end_read(here)
        await here.until_done([task])
        first.check()
        assert first.finish.reason == "length"


@pytest.mark.parametrize("copied", [True, False])
async def test_an_incomplete_adapter_without_requests_is_unloaded_too(copied: bool) -> None:
    async with with_harness(device_adapters=1) as here:
        left, _ = await taken(here)
        if not copied:
            here.backend.fail_streamed(version_of(here, "a0").slot)
        left.stream.cancel()
        await turn()
        await run_lane(here)
        assert version_of(here, "a0").tier is AdapterTier.STREAMING
        await ends(here, await wanted(here))
        await end_read(here)
        assert version_of(here, "a0").tier is AdapterTier.HOST


async def test_no_more_incomplete_adapters_are_unloaded_than_necessary() -> None:
    async with with_harness(device_adapters=2) as here:
        await served(here, "a2")
        await begun(here, "a0")
        await begun(here, "a1")
        await ends(here, await wanted(here, "a2"))
        assert [version_of(here, name).tier for name in ("a0", "a1")] == [AdapterTier.STREAMING, AdapterTier.READING]
        await end_read(here)
        await end_read(here)


@pytest.mark.parametrize("breaks", [False, True], ids=["gives way", "breaks"])
async def test_no_side_batch_starts_with_an_adapter_that_is_about_to_be_unloaded(breaks: bool) -> None:
    """Otherwise it would stay on the device as long as new requests came."""
    async with with_harness(device_adapters=1) as here:
        await taken(here)
        if breaks:
            here.reader.reads.pop()(False)
        else:
            await wanted(here)
        assert version_of(here, "a0").is_leaving
        launched = len(here.backend.launched)
        here.ask([5, 6], "a0", max_tokens=2)
        await turn()
        assert not any(plan.is_side_batch for plan in here.backend.launched[launched:])
        await run_lane(here)
        assert version_of(here, "a0").tier is not AdapterTier.STREAMING
        if not breaks:
            here.reader.reads.pop()(True)


async def test_no_request_starts_with_an_adapter_whose_copy_has_failed_during_a_side_batch() -> None:
    """When the side batch ends, the image may be evicted, which other batches would still read."""
    async with with_harness() as here:
        first, _ = await begun(here, "a0")
        here.backend.fail_streamed(version_of(here, "a0").slot)
        await run_lane(here)
        await end_read(here)
        assert version_of(here, "a0").tier is AdapterTier.COPYING
        launched = len(here.backend.launched)
        second, _ = here.ask(range(30, 46), "a0", max_tokens=2)
        here.backend.now_s += 1000.0
        await turn()
        assert here.backend.launched[launched:] == []
        here.backend.end_side_batch(0)
        await turn()
        assert [asked.finish.reason for asked in (first, second)] == ["error", "error"]
        first.check()


async def test_no_request_continues_with_an_adapter_whose_copy_has_failed_and_its_blocks_are_not_reused() -> None:
    async with with_harness(step_tokens=64) as here:
        await begun(here, "a0")
        await end_read(here)
        here.backend.now_s = max(group.arrives_s for group in version_of(here, "a0").groups)
        second, _ = here.ask(range(30, 46), "a0", max_tokens=20)
        await turn()
        here.backend.copies.pop()(False)
        await run_lane(here)
        launched = len(here.backend.launched)
        await turn()
        assert len(here.backend.launched) == launched
        here.backend.end_side_batch(0)
        await turn()
        assert second.finish.reason == "error"
        assert second.tokens, "it had begun"
        second.check()
        again, _ = here.ask(range(30, 46), "a0", max_tokens=2)
        await turn()
        await ends(here, again)
        assert again.finish.cached_tokens == 0


async def test_at_most_as_many_adapters_as_streamed_prefills_are_streamed() -> None:
    async with with_harness(streamed_batches=1, device_adapters=3) as here:
        await begun(here, "a0")
        await begun(here, "a1")
        assert [version_of(here, name).tier for name in ("a0", "a1")] == [AdapterTier.STREAMING, AdapterTier.READING]
        await end_read(here)
        await end_read(here)


# --- KV blocks ---


async def test_a_decoding_request_is_not_preempted_while_a_streamed_prefill_can_be_recalled() -> None:
    async with with_harness(blocks=15, step_tokens=64) as here:
        await begun(here, prompt=range(24))
        decoding = [here.ask(range(first, first + 8), None, max_tokens=16)[0] for first in (40, 60)]
        for asked in decoding:
            await ends(here, asked)
        assert here.backend.outcomes["void"] == 1
        assert here.metrics.preemptions == 1, "the recalled prompt's own"
        await end_read(here)


@pytest.mark.parametrize("steps", range(9))
async def test_a_streamed_prompt_that_lacks_blocks_for_its_side_batch_holds_none(steps: int) -> None:
    """It has found six blocks of its prefix and lacks the last one; `steps` varies when its first layer arrives."""
    async with with_harness(device_adapters=1, adapters=6, blocks=14, step_tokens=64) as here:
        await served(here, "a0", prompt=list(range(25)))
        for index in range(1, 5):
            await served(here, f"a{index}", prompt=[50 + index])
        assert version_of(here, "a0").tier is AdapterTier.DISK
        other, _ = here.ask(range(60, 84), None, max_tokens=20)
        await turn()
        here.ask(range(25), "a0", max_tokens=2)
        await turn()
        for _ in range(steps):
            if here.backend.lane:
                here.backend.step()
            await turn()
        here.reader.coming[-1]()
        here.backend.now_s += 1000.0
        await ends(here, other)
        assert [active for active in here.engine._queues.running if not active.in_side_batch] == []
        await end_read(here)


@pytest.mark.parametrize(("blocks", "steps"), [(15, 3), (17, 7)])
async def test_a_decoding_request_is_not_preempted_for_a_prompt_that_will_wait_for_layers(
    blocks: int, steps: int
) -> None:
    """The prompt has found its prefix, and there are too few blocks for the rest."""
    async with with_harness(device_adapters=1, adapters=6, blocks=blocks, step_tokens=64) as here:
        await served(here, "a0", prompt=list(range(25)))
        for index in range(1, 5):
            await served(here, f"a{index}", prompt=[50 + index])
        decoding = [here.ask(range(first, first + 12), None, max_tokens=12)[0] for first in (40, 60)]
        await turn()
        here.ask(range(25), "a0", max_tokens=2)
        await turn()
        for _ in range(steps):
            if here.backend.lane:
                here.backend.step()
            await turn()
        here.reader.coming[-1]()
        here.backend.now_s += 1000.0
        for asked in decoding:
            await ends(here, asked)
        begun_with = [start.token_ids[0] for plan in here.backend.launched for start in plan.starts]
        assert (begun_with.count(40), begun_with.count(60)) == (1, 1), "a decoder has begun again"
        await end_read(here)


async def test_a_recalled_prompt_waits_for_the_copy_outside_iterations() -> None:
    """Also when the adapter's download has ended before the recall is processed."""
    async with with_harness(step_tokens=64) as here:
        await begun(here, "a0", prompt=range(24))
        here.backend.recall(0)
        while here.backend.lane:
            here.backend.step()
        launched = len(here.backend.launched)
        here.reader.reads.pop()(True)
        await turn()
        assert version_of(here, "a0").groups[-1].arrives_s > here.backend.now_s
        assert here.backend.launched[launched:] == []


async def test_a_streamed_prompt_that_lacks_blocks_to_start_does_not_delay_later_requests() -> None:
    async with with_harness(mode="auto", blocks=12, step_tokens=64) as here:
        await begun(here, "a0", prompt=range(24))
        await begun(here, "a1", prompt=range(40, 70))
        other, _ = here.ask([7, 8], None, max_tokens=2)
        await ends(here, other)
        assert [side_batch.row.count for side_batch in here.backend.side_batches] == [24], (
            "it is not recalled for the other"
        )
        assert [active.choice for active in here.engine._queues.loading] == [None]
        await end_read(here)
        await end_read(here)


# --- metrics and choices ---


async def test_waiting_for_a_download_does_not_count_as_time_of_an_iteration() -> None:
    async with with_harness() as here:
        asked, task = await begun(here)
        here.backend.now_s += 5000.0
        await end_read(here)
        await here.until_done([task])
        assert max(here.metrics.iterations_ms) == pytest.approx(1000.0)
        assert asked.finish.phases.stalled_ms >= 5_000_000.0


async def test_the_choice_of_auto_is_dropped_when_its_prompt_is_recalled() -> None:
    async with with_harness(mode="auto", step_tokens=64) as here:
        await begun(here, prompt=range(24))
        (active,) = here.engine._queues.running
        assert active.choice is not None
        here.backend.recall(0)
        await run_lane(here)
        assert list(here.engine._queues.loading) == [active]
        assert active.choice is None
        await end_read(here)
