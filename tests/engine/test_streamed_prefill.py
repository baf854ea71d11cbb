"""Adapters that other instances send: what has come is used, whoever waits for the rest holds up nobody, and nothing is
given back that somebody reads or writes. Over a device that is a hash."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from caraserve.config import LOADING_MODES
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.lora.adapter import Adapter, AdapterTier, PartialImage
from caraserve.lora.arrival_estimates import ArrivalEstimates
from caraserve.lora.start_policy import LayerGroup, StartPolicy
from caraserve.model.dtype import Dtype
from tests.engine_world import Asked, World, in_world, turn

PROMPT = [1, 2, 3, 4, 5]


with_world = partial(in_world, mode="pipelined", streamed_batches=2)


async def run_lane(here: World) -> None:
    while here.backend.lane:
        here.backend.step()
        await turn()


async def come(here: World, layers: int = 1, read: int = -1) -> None:
    """The next layers of a read come, by default of the last one that began; time passes until they may be used."""
    for _ in range(layers):
        here.reader.coming[read]()
    here.backend.now_s += 1000.0
    await turn()
    await run_lane(here)


async def end_read(here: World, *, ok: bool = True, read: int = -1) -> None:
    here.reader.reads.pop(read)(ok)
    await turn()
    await run_lane(here)


async def begun(
    here: World, name: str = "a0", prompt: Sequence[int] = PROMPT, **params: Any
) -> "tuple[Asked, asyncio.Task[Asked]]":
    """A request whose prompt is computed as far as its adapter has come."""
    asked, task = here.ask(prompt, name, **{"max_tokens": 4} | params)
    await turn()
    await come(here)
    return asked, task


def version_of(here: World, name: str) -> Adapter:
    return here.engine.catalog.manager._names[name]


def used_bytes(here: World) -> int:
    return here.engine.catalog.manager._host_cache._arena.used_bytes


# --- what has come is used ---


def test_a_prompt_begins_when_the_first_layer_has_come_and_ends_when_the_last_has() -> None:
    async def test(here: World) -> None:
        asked, task = await begun(here)
        assert len(here.backend.asides) == 1
        assert version_of(here, "a0").tier is AdapterTier.STREAMING
        await come(here)
        await end_read(here)
        assert version_of(here, "a0").tier is AdapterTier.COPYING
        await here.until_done([task])
        asked.check()
        assert asked.finish.reason == "length"

    with_world(test)


def test_it_begins_at_once_however_long_the_rest_may_take() -> None:
    async def test(here: World) -> None:
        here.ask(PROMPT, "a0", max_tokens=2)
        await turn()
        here.backend.now_s += 1000.0
        here.reader.coming[0]()
        await turn()
        await run_lane(here)
        assert version_of(here, "a0").groups[-1].arrives_s > here.backend.now_s + 1000.0
        assert len(here.backend.asides) == 1
        await end_read(here)

    with_world(test)


def test_the_device_is_told_of_each_layer_but_the_last_which_comes_with_the_end() -> None:
    async def test(here: World) -> None:
        _, task = await begun(here)
        slot = version_of(here, "a0").slot
        for layers in (1, 2, 3, 3):
            assert here.backend.streamed[slot].layers == layers
            if here.reader.coming:
                await come(here)
        assert here.reader.coming == []
        await end_read(here)
        assert slot not in here.backend.streamed
        await here.until_done([task])

    with_world(test)


def test_what_had_come_before_a_request_was_admitted_is_used_at_once() -> None:
    async def test(here: World) -> None:
        first, one = here.ask([7], None, max_tokens=20)
        await turn()
        _, task = here.ask(PROMPT, "a0", max_tokens=2)
        await turn()
        here.reader.coming[0]()
        assert version_of(here, "a0").tier is AdapterTier.READING
        first.stream.cancel()
        await run_lane(here)
        assert version_of(here, "a0").tier is AdapterTier.STREAMING
        await here.until_done([one, task])

    with_world(test, slots=1)


@pytest.mark.parametrize(
    "kind", [{"mode": "overlapped"}, {"streamed_batches": 0}], ids=["no layerwise mode", "no such device"]
)
def test_where_layers_are_of_no_use_the_whole_is_awaited(kind: dict[str, Any]) -> None:
    async def test(here: World) -> None:
        _, task = here.ask(PROMPT, "a0", max_tokens=2)
        await turn()
        if here.streams:
            await come(here, layers=2)
        assert not here.backend.images
        await end_read(here)
        assert here.backend.images
        await here.until_done([task])

    with_world(test, **kind)


def test_where_there_is_no_room_for_it_it_is_copied_when_it_is_whole() -> None:
    async def test(here: World) -> None:
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

    with_world(test, device_adapters=1)


# --- nobody else waits ---


def test_iterations_go_on_meanwhile() -> None:
    async def test(here: World) -> None:
        other, task = here.ask([7, 8], None, max_tokens=20)
        _, streamed = await begun(here)
        await run_lane(here)
        assert task.done()
        other.check()
        assert not streamed.done()
        await here.until_done([streamed])

    with_world(test)


def test_no_more_prompts_begin_than_the_device_has_room_for() -> None:
    async def test(here: World) -> None:
        tasks = [here.ask([*PROMPT, index], "a0", max_tokens=2)[1] for index in range(4)]
        await turn()
        await come(here)
        assert len(here.backend.asides) == 2
        await here.until_done(tasks)
        assert [task.result().finish.reason for task in tasks] == ["length"] * 4

    with_world(test)


def test_who_lacks_blocks_gets_those_of_a_prompt_that_waits_for_the_network() -> None:
    async def test(here: World) -> None:
        asked, streamed = await begun(here, prompt=range(24))
        other, task = here.ask(range(40, 64), None, max_tokens=20)
        await turn()
        await run_lane(here)
        assert task.done()
        other.check()
        assert other.finish.reason == "length"
        await come(here)
        assert here.backend.asides == [], "once is enough: it waits for all of its adapter now"
        await here.until_done([streamed])
        asked.check()
        assert asked.finish.reason == "length"

    with_world(test, blocks=14, step_tokens=64)


def test_who_cannot_even_start_for_lack_of_blocks_gets_them_too() -> None:
    async def test(here: World) -> None:
        _, streamed = await begun(here, prompt=range(36))
        other, task = here.ask(range(40, 60), None, max_tokens=2)
        await turn()
        await run_lane(here)
        assert task.done()
        other.check()
        await here.until_done([streamed])

    with_world(test, blocks=13, step_tokens=64)


def test_who_leaves_gives_back_what_it_holds_at_once() -> None:
    async def test(here: World) -> None:
        asked, _ = await begun(here)
        asked.stream.cancel()
        await turn()
        await run_lane(here)
        assert here.engine.snapshot().kv_used_blocks == 0
        assert version_of(here, "a0").tier is AdapterTier.STREAMING, "its bytes come all the same"
        await end_read(here)

    with_world(test)


def test_a_drain_does_not_wait_for_the_network() -> None:
    async def test(here: World) -> None:
        await begun(here)
        drain = asyncio.create_task(here.engine.drain(timeout_s=0.0))
        await asyncio.wait_for(_until(drain.done, here), timeout=30)

    with_world(test)


async def _until(condition: Callable[[], bool], here: World) -> None:
    while not condition():
        await asyncio.sleep(0.001)
        await run_lane(here)


# --- what breaks ---


def test_when_the_rest_never_comes_nothing_is_given_back_before_nobody_reads_it() -> None:
    async def test(here: World) -> None:
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

    with_world(test)


def test_the_next_request_for_it_is_served() -> None:
    async def test(here: World) -> None:
        await begun(here)
        await end_read(here, ok=False)
        again, task = await begun(here)
        await here.until_done([task])
        again.check()
        assert again.finish.reason == "length"

    with_world(test)


def test_a_copy_that_fails_is_told_when_its_read_has_ended() -> None:
    """Bytes still come into the arena."""

    async def test(here: World) -> None:
        asked, task = await begun(here)
        here.backend.end_aside(0, "void")
        here.backend.fail_streamed(version_of(here, "a0").slot)
        await run_lane(here)
        assert not task.done()
        assert used_bytes(here) > 0
        await end_read(here)
        assert "could not be copied" in asked.finish.error.message
        here.engine.check()

    with_world(test)


def test_a_read_that_breaks_after_its_copy_has_failed_is_told_as_such() -> None:
    async def test(here: World) -> None:
        asked, _ = await begun(here)
        here.backend.fail_streamed(version_of(here, "a0").slot)
        await run_lane(here)
        await end_read(here, ok=False)
        await turn()
        assert "the disk failed" in asked.finish.error.message
        assert used_bytes(here) == 0

    with_world(test)


def test_one_that_is_unloaded_meanwhile_goes_when_it_has_come_and_its_last_request_has_ended() -> None:
    async def test(here: World) -> None:
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

    with_world(test)


# --- when it is expected ---

LAYERS, LAYER_BYTES, LINK_BYTES_PER_S = 4, 1000, 8000.0


def expected(layers: int, seconds: float) -> tuple[LayerGroup, ...]:
    """What is expected of an adapter of which so many layers came in so many seconds."""
    ends = tuple(LAYER_BYTES * (layer + 1) for layer in range(LAYERS))
    image = HostAdapter(AdapterSpec("digest", Dtype.F32, 8, ("q_proj",), ends, ()), aligned_bytes(ends[-1]))
    loading = StartPolicy(LOADING_MODES["pipelined"], LAYERS, LINK_BYTES_PER_S, costs=None)
    return ArrivalEstimates(loading, lambda: 100.0).expect_streamed(PartialImage(image, 100.0 - seconds, layers))


def test_the_rest_is_expected_to_come_as_fast_as_what_has_come() -> None:
    assert [group.in_host_s for group in expected(layers=2, seconds=8.0)] == [100.0, 100.0, 104.0, 108.0]


def test_each_layer_is_expected_on_the_device_when_the_link_has_brought_it() -> None:
    assert [group.arrives_s - group.in_host_s for group in expected(layers=1, seconds=8.0)] == [0.125] * LAYERS


def test_layers_of_one_that_comes_are_copied_one_by_one() -> None:
    assert [group.end for group in expected(layers=1, seconds=8.0)] == [1, 2, 3, 4]
