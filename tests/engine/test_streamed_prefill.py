"""Streamed prefills: layers are used as they are downloaded, other requests are not delayed, and no memory is freed
that is still read or written. On the fake backend of hashes."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest

from caraserve.config import LOADING_MODES
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.lora.adapter import Adapter, AdapterTier, PartialImage
from caraserve.lora.arrival_estimates import ArrivalEstimates
from caraserve.lora.start_policy import ExpectedLayers, StartPolicy
from caraserve.model.dtype import Dtype
from tests.engine_harness import EngineHarness, SentRequest, in_harness, turn

PROMPT = [1, 2, 3, 4, 5]


with_harness = partial(in_harness, mode="pipelined", streamed_batches=2)


@pytest.fixture
def here() -> AbstractAsyncContextManager[EngineHarness]:
    return with_harness()


async def run_lane(here: EngineHarness) -> None:
    while here.backend.lane:
        here.backend.step()
        await turn()


async def come(here: EngineHarness, layers: int = 1, read: int = -1) -> None:
    """Delivers the next layers of a download, by default of the last one, and lets time pass until they may be used."""
    for _ in range(layers):
        here.reader.coming[read]()
    here.backend.now_s += 1000.0
    await turn()
    await run_lane(here)


async def end_read(here: EngineHarness, *, ok: bool = True, read: int = -1) -> None:
    here.reader.reads.pop(read)(ok)
    await turn()
    await run_lane(here)


async def begun(
    here: EngineHarness, name: str = "a0", prompt: Sequence[int] = PROMPT, **params: Any
) -> "tuple[SentRequest, asyncio.Task[SentRequest]]":
    """Submits a request, and starts its side batch with the first layers of its adapter."""
    asked, task = here.ask(prompt, name, **{"max_tokens": 4} | params)
    await turn()
    await come(here)
    return asked, task


def version_of(here: EngineHarness, name: str) -> Adapter:
    return here.engine.catalog.manager._names[name]


def used_bytes(here: EngineHarness) -> int:
    return here.engine.catalog.manager._host_cache._arena.used_bytes


# --- layers are used as they are downloaded ---


async def test_a_prompt_starts_with_the_first_downloaded_layer_and_ends_with_the_last(here: EngineHarness) -> None:
    asked, task = await begun(here)
    assert len(here.backend.side_batches) == 1
    assert version_of(here, "a0").tier is AdapterTier.STREAMING
    await come(here)
    await end_read(here)
    assert version_of(here, "a0").tier is AdapterTier.COPYING
    await here.until_done([task])
    asked.check()
    assert asked.finish.reason == "length"


async def test_a_prompt_starts_at_once_however_long_the_download_takes(here: EngineHarness) -> None:
    here.ask(PROMPT, "a0", max_tokens=2)
    await turn()
    here.backend.now_s += 1000.0
    here.reader.coming[0]()
    await turn()
    await run_lane(here)
    assert version_of(here, "a0").groups[-1].arrives_s > here.backend.now_s + 1000.0
    assert len(here.backend.side_batches) == 1
    await end_read(here)


async def test_the_copy_is_extended_by_each_layer_and_by_the_last_when_the_download_ends(here: EngineHarness) -> None:
    await begun(here)
    slot = version_of(here, "a0").slot
    for layers in (1, 2, 3, 3):
        assert here.backend.streamed[slot].layers == layers
        if here.reader.coming:
            await come(here)
    assert here.reader.coming == []
    await end_read(here)
    assert slot not in here.backend.streamed


async def test_layers_downloaded_before_a_request_was_admitted_are_used_at_once() -> None:
    async with with_harness(slots=1) as here:
        first, _ = here.ask([7], None, max_tokens=20)
        await turn()
        here.ask(PROMPT, "a0", max_tokens=2)
        await turn()
        here.reader.coming[0]()
        assert version_of(here, "a0").tier is AdapterTier.READING
        first.stream.cancel()
        await run_lane(here)
        assert version_of(here, "a0").tier is AdapterTier.STREAMING


@pytest.mark.parametrize(
    "kind", [{"mode": "overlapped"}, {"streamed_batches": 0}], ids=["no layerwise mode", "no such device"]
)
async def test_without_streaming_the_request_waits_for_the_whole_download(kind: dict[str, Any]) -> None:
    async with with_harness(**kind) as here:
        here.ask(PROMPT, "a0", max_tokens=2)
        await turn()
        if here.streams:
            await come(here, layers=2)
        assert not here.backend.images
        await end_read(here)
        assert here.backend.images


async def test_an_adapter_without_room_on_the_device_is_copied_after_its_download() -> None:
    async with with_harness(device_adapters=1) as here:
        holds, first = here.ask(PROMPT, "a1", max_tokens=30)
        await turn()
        await end_read(here)
        here.backend.copies.pop()(True)
        here.backend.step()
        _, second = here.ask(PROMPT, "a0", max_tokens=2)
        await turn()
        here.reader.coming[-1]()
        await turn()
        assert version_of(here, "a0").tier is AdapterTier.READING
        here.reader.reads.pop()(True)
        await turn()
        assert version_of(here, "a0").tier is AdapterTier.HOST
        await here.until_done([first, second])
        holds.check()


# --- other requests are not delayed ---


async def test_iterations_continue_during_a_streamed_prefill(here: EngineHarness) -> None:
    other, task = here.ask([7, 8], None, max_tokens=20)
    _, streamed = await begun(here)
    await run_lane(here)
    assert task.done()
    other.check()
    assert not streamed.done()


async def test_there_are_at_most_as_many_streamed_prefills_as_the_device_allows(here: EngineHarness) -> None:
    tasks = [here.ask([*PROMPT, index], "a0", max_tokens=2)[1] for index in range(4)]
    await turn()
    await come(here)
    assert len(here.backend.side_batches) == 2
    await here.until_done(tasks)
    assert [task.result().finish.reason for task in tasks] == ["length"] * 4


async def test_a_request_that_lacks_blocks_gets_those_of_a_streamed_prefill() -> None:
    async with with_harness(blocks=14, step_tokens=64) as here:
        asked, streamed = await begun(here, prompt=range(24))
        other, task = here.ask(range(40, 64), None, max_tokens=20)
        await turn()
        await run_lane(here)
        assert task.done()
        other.check()
        assert other.finish.reason == "length"
        await come(here)
        assert here.backend.side_batches == [], "once is enough: it waits for all of its adapter now"
        await here.until_done([streamed])
        asked.check()
        assert asked.finish.reason == "length"


async def test_a_request_that_cannot_start_for_lack_of_blocks_gets_those_of_a_streamed_prefill() -> None:
    async with with_harness(blocks=13, step_tokens=64) as here:
        await begun(here, prompt=range(36))
        other, task = here.ask(range(40, 60), None, max_tokens=2)
        await turn()
        await run_lane(here)
        assert task.done()
        other.check()


async def test_a_cancelled_streamed_prefill_releases_its_memory_at_once(here: EngineHarness) -> None:
    asked, _ = await begun(here)
    asked.stream.cancel()
    await turn()
    await run_lane(here)
    assert here.engine.snapshot().kv_used_blocks == 0
    assert version_of(here, "a0").tier is AdapterTier.STREAMING, "its bytes come all the same"
    await end_read(here)


async def test_a_drain_does_not_wait_for_a_download(here: EngineHarness) -> None:
    await begun(here)
    drain = asyncio.create_task(here.engine.drain(timeout_s=0.0))
    await asyncio.wait_for(_until(drain.done, here), timeout=30)


async def _until(condition: Callable[[], bool], here: EngineHarness) -> None:
    while not condition():
        await asyncio.sleep(0.001)
        await run_lane(here)


# --- failures ---


async def test_when_a_download_fails_its_memory_is_freed_only_after_its_last_reader_has_ended() -> None:
    async with with_harness() as here:
        asked, task = await begun(here)
        here.reader.reads.pop()(False)
        await turn()
        here.engine.check()
        assert used_bytes(here) > 0
        assert not task.done()
        await run_lane(here)
        await turn()
        assert used_bytes(here) == 0
        assert "the disk failed" in asked.finish.error.message
        assert here.backend.images == {}


async def test_the_next_request_after_a_failed_download_is_served(here: EngineHarness) -> None:
    await begun(here)
    await end_read(here, ok=False)
    again, task = await begun(here)
    await here.until_done([task])
    again.check()
    assert again.finish.reason == "length"


async def test_a_failed_copy_is_reported_when_the_download_has_ended(here: EngineHarness) -> None:
    """The download still writes into the arena."""
    asked, task = await begun(here)
    here.backend.end_side_batch(0, "void")
    here.backend.fail_streamed(version_of(here, "a0").slot)
    await run_lane(here)
    assert not task.done()
    assert used_bytes(here) > 0
    await end_read(here)
    assert "could not be copied" in asked.finish.error.message
    here.engine.check()


async def test_a_download_that_fails_after_its_copy_is_reported_as_a_failed_download(here: EngineHarness) -> None:
    asked, _ = await begun(here)
    here.backend.fail_streamed(version_of(here, "a0").slot)
    await run_lane(here)
    await end_read(here, ok=False)
    await turn()
    assert "the disk failed" in asked.finish.error.message
    assert used_bytes(here) == 0


async def test_an_adapter_unregistered_during_its_download_is_freed_after_the_download_and_its_last_request() -> None:
    async with with_harness() as here:
        asked, task = await begun(here)
        unloading = asyncio.create_task(here.engine.unload_adapter("a0"))
        await _until(lambda: here.engine.catalog.find("a0") is None, here)
        asked.stream.cancel()
        await turn()
        await run_lane(here)
        assert task.done()
        assert not unloading.done()
        await end_read(here)
        here.backend.copies.pop()(True)
        await run_lane(here)
        await unloading
        assert used_bytes(here) == 0
        assert here.backend.images == {}


# --- expected arrivals ---

LAYERS, LAYER_BYTES, LINK_BYTES_PER_S = 4, 1000, 8000.0


def expected(layers: int, seconds: float) -> tuple[ExpectedLayers, ...]:
    """Returns the expected arrivals of an adapter of which so many layers were downloaded in so many seconds."""
    ends = tuple(LAYER_BYTES * (layer + 1) for layer in range(LAYERS))
    image = HostAdapter(AdapterSpec("digest", Dtype.F32, 8, ("q_proj",), ends, ()), aligned_bytes(ends[-1]))
    loading = StartPolicy(LOADING_MODES["pipelined"], LAYERS, LINK_BYTES_PER_S, costs=None)
    return ArrivalEstimates(loading, lambda: 100.0).expect_streamed(PartialImage(image, 100.0 - seconds, layers))


def test_the_rest_of_a_download_is_expected_at_the_speed_so_far() -> None:
    assert [group.in_host_s for group in expected(layers=2, seconds=8.0)] == [100.0, 100.0, 104.0, 108.0]


def test_each_layer_is_expected_on_the_device_after_its_copy_over_the_link() -> None:
    assert [group.arrives_s - group.in_host_s for group in expected(layers=1, seconds=8.0)] == [0.125] * LAYERS


def test_layers_of_an_adapter_being_downloaded_are_copied_one_by_one() -> None:
    assert [group.end for group in expected(layers=1, seconds=8.0)] == [1, 2, 3, 4]
