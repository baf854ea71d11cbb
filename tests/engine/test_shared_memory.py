"""The engine where KV blocks and adapters share memory: which of them get it when, and that every request ends. On the
fake backend of hashes; an adapter takes 120 bytes, a block 30."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.core.batch import DeviceLost
from caraserve.errors import BackendFailed
from caraserve.lora.device_loader import MAX_BYPASSES
from tests.engine_harness import EngineHarness, SentRequest, in_harness, turn


async def serve(here: EngineHarness, name: str | None, tokens: int = 3, prompt: int = 5) -> None:
    _, task = here.ask(range(prompt), name, max_tokens=tokens)
    await here.until_done([task])
    assert task.result().finish.reason == "length"
    task.result().check()


def on_device(here: EngineHarness) -> tuple[str, ...]:
    return tuple(sorted(here.engine.snapshot().device_adapters))


async def test_an_adapter_that_a_request_needs_gets_the_memory_of_free_blocks() -> None:
    async with in_harness(spare_bytes=0, blocks=20, device_adapters=4) as here:
        assert here.backend.kv_blocks == 20
        await serve(here, "a0")
        await serve(here, "a1")
        assert on_device(here) == ("a0", "a1")
        assert here.backend.kv_blocks == (600 - 240) // 30


async def test_idle_adapters_are_evicted_for_blocks_the_least_requested_first() -> None:
    async with in_harness(spare_bytes=120, blocks=20, device_adapters=4) as here:
        for name in ("a0", "a1", "a1"):
            await serve(here, name)
        tasks = [here.ask(range(index, index + 20), None, max_tokens=14)[1] for index in range(2)]
        await here.until_done(tasks)
        assert here.metrics.preemptions == 0
        assert on_device(here) == ("a1",)
        assert here.backend.kv_blocks >= 18


async def test_an_adapter_in_use_is_not_evicted_and_requests_are_preempted_instead() -> None:
    async with in_harness(spare_bytes=0, blocks=16, device_adapters=4) as here:
        kept, using = here.ask([7, 8, 9], "a0", max_tokens=40)
        tasks = [here.ask(range(index, index + 20), "a0", max_tokens=20)[1] for index in range(3)]
        await here.until_done([using, *tasks])
        kept.check()
        assert here.metrics.preemptions > 0
        assert on_device(here) == ("a0",)


async def test_while_the_pool_grows_requests_wait_for_blocks_and_none_is_preempted() -> None:
    async with in_harness(spare_bytes=400, blocks=5, device_adapters=4) as here:
        here.ask(range(10), None, max_tokens=30)
        here.ask(range(5, 15), None, max_tokens=30)
        await turn()
        while here.backend.lane:
            here.backend.step()
            await turn()
        assert here.backend.resizes, "more blocks have been asked for"
        assert here.metrics.preemptions == 0
        while here.backend.resizes or here.backend.lane:
            (here.backend.resizes.pop() if here.backend.resizes else here.backend.step)()
            await turn()
        assert here.metrics.preemptions == 0


async def test_blocks_are_requested_an_iteration_ahead_of_need() -> None:
    async with in_harness(spare_bytes=900, blocks=6, device_adapters=4) as here:
        asked, task = here.ask(range(10), None, max_tokens=30)
        await turn()
        while not task.done():
            under_way = list(here.backend.resizes)
            here.backend.step()
            await turn()
            assert task.done() or here.backend.lane, "the request waits"
            for granted in under_way:
                here.backend.resizes.remove(granted)
                granted()
            await turn()
        asked.check()
        assert here.backend.kv_blocks >= 10


async def test_all_requests_end_and_none_is_accepted_when_the_pool_cannot_grow() -> None:
    async with in_harness(spare_bytes=400, blocks=5, device_adapters=4) as here:
        here.backend.resize_failure = DeviceLost("it has fallen off the bus")
        tasks = [here.ask(range(index, index + 20), None, max_tokens=20)[1] for index in range(3)]
        await here.until_done(tasks)
        assert [task.result().finish.reason for task in tasks] == ["error"] * 3
        with pytest.raises(BackendFailed, match="it has fallen off the bus"):
            here.ask(range(5), None, max_tokens=1)


async def test_running_requests_get_their_blocks_before_an_adapter_that_waits() -> None:
    async with in_harness(spare_bytes=120, blocks=8, device_adapters=1) as here:
        base = [here.ask(range(index, index + 12), None, max_tokens=12)[1] for index in range(2)]
        await turn()
        _, cold = here.ask([3, 4], "a0", max_tokens=2)
        await turn()
        here.reader.reads.pop()(True)
        await here.until_done([*base, cold])
        assert here.metrics.preemptions == 0


async def test_a_waiting_adapter_gets_memory_despite_a_stream_of_base_model_requests() -> None:
    """Only a bounded number of requests may be admitted before it."""
    async with in_harness(spare_bytes=0, blocks=14, device_adapters=1, slots=4) as here:
        tasks = [here.ask([index % 97] * 24, None, max_tokens=16)[1] for index in range(4)]
        await turn()
        cold, waiting = here.ask([3, 4], "a0", max_tokens=2)
        while not waiting.done():
            tasks.append(here.ask([len(tasks) % 97] * 24, None, max_tokens=16)[1])
            for _ in range(12):
                await asyncio.sleep(0)
                here.end_something()
            assert len(tasks) < 400
        cold.check()


async def test_an_adapter_that_leaves_less_than_a_request_needs_is_refused() -> None:
    async with in_harness(spare_bytes=0, blocks=0, device_adapters=4) as here:
        room = here.engine.catalog.manager.memory
        assert room.most_adapter_bytes == 120
        assert room.excess(120) == 0
        assert room.excess(121) > 0


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32),
    spare=st.sampled_from([0, 40, 130, 300]),
    blocks=st.integers(0, 24),
    slots=st.integers(1, 5),
    mode=st.sampled_from(["overlapped", "pipelined", "assisted"]),
)
def test_far_more_adapters_and_requests_than_memory_all_finish(
    seed: int, spare: int, blocks: int, slots: int, mode: str
) -> None:
    async def body() -> None:
        sizes = {"spare_bytes": spare, "blocks": blocks, "slots": slots, "adapters": 12, "device_adapters": 4}
        async with in_harness(**sizes, mode=mode, assisted_batches=2) as here:
            rng = random.Random(seed)
            here.rng = rng
            names = [None, *(f"a{index}" for index in range(12))]
            tasks = []
            for index in range(40):
                prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 30))]
                tasks.append(here.ask(prompt, rng.choice(names), max_tokens=rng.randrange(1, 18))[1])
                if index % 3 == 0:
                    await asyncio.sleep(0)
                    here.end_something()
            await here.until_done(tasks)
            for task in tasks:
                task.result().check()
                assert task.result().finish.reason == "length"

    asyncio.run(body())


@pytest.mark.parametrize("seed", range(3))
async def test_after_all_requests_all_memory_is_available_to_kv_blocks_again(seed: int) -> None:
    async with in_harness(spare_bytes=200, blocks=15, device_adapters=4) as here:
        here.rng = random.Random(seed)
        await asyncio.gather(*(serve(here, name, tokens=9, prompt=12) for name in ("a0", None, "a1", "a2", None)))
        room = here.engine.catalog.manager.memory
        assert room.pool.held_end == 0
        assert room.blocks_without(room.adapter_bytes) == room.most_blocks


async def waiting_for_memory(
    here: EngineHarness,
) -> "tuple[asyncio.Task[SentRequest], list[asyncio.Task[SentRequest]]]":
    """Sets up an adapter that waits, because two requests of the base model hold the blocks whose memory it needs."""
    base = [here.ask([index] * 40, None, max_tokens=8)[1] for index in range(2)]
    await turn()
    while here.engine.catalog.manager.memory.pool.held_end < 22:
        here.backend.step()
        await turn()
    _, cold = here.ask([3, 4], "a0", max_tokens=2)
    await turn()
    here.reader.reads.pop()(True)
    await turn()
    assert not here.backend.copies
    assert here.engine.catalog.manager.device_loader.claims_memory
    return cold, base


async def test_an_adapter_gets_its_memory_when_requests_without_adapter_have_ended() -> None:
    async with in_harness(spare_bytes=0, blocks=24, device_adapters=4) as here:
        cold, base = await waiting_for_memory(here)
        await here.until_done([cold, *base])
        assert on_device(here) == ("a0",)


async def test_no_blocks_are_requested_ahead_while_an_adapter_waits_for_memory() -> None:
    async with in_harness(spare_bytes=40, blocks=24, device_adapters=4) as here:
        await waiting_for_memory(here)
        here.engine.catalog.manager.device_loader.grow_kv(0, 3)
        assert not here.backend.resizes


async def test_base_model_admissions_count_as_bypasses_of_an_adapter_that_waits_for_memory() -> None:
    async with in_harness(spare_bytes=0, blocks=24, device_adapters=4) as here:
        cold, base = await waiting_for_memory(here)
        manager = here.engine.catalog.manager
        for _ in range(MAX_BYPASSES):
            assert manager.device_loader.admits
            manager.device_loader.count_bypass(None)
        assert not manager.device_loader.admits
        await here.until_done([cold, *base])
        assert manager.device_loader.admits


async def test_a_request_cancelled_before_its_first_launch_never_reaches_the_device() -> None:
    """Its blocks may be taken from the pool by then."""
    async with in_harness(spare_bytes=0, blocks=24, device_adapters=4) as here:
        await serve(here, None, prompt=20)
        asked, _ = here.ask(range(20), None, max_tokens=3)
        queues = here.engine._queues
        queues.start(0.0, 0.0)
        assert queues.running[0].request.blocks
        asked.stream.cancel()
        await turn()
        assert here.engine._slots.take_new() == ((), ())


async def test_blocks_are_requested_when_the_next_request_to_start_lacks_them() -> None:
    async with in_harness(spare_bytes=900, blocks=11, device_adapters=4, step_tokens=64) as here:
        tasks = [here.ask([1] * 40, None, max_tokens=8)[1]]
        await turn()
        tasks.append(here.ask([2] * 40, None, max_tokens=8)[1])
        while here.backend.kv_claimed < 20:
            await turn()
            assert here.engine.snapshot().running == 1
            assert here.backend.lane or here.backend.resizes, "the second waits until the first has ended"
            (here.backend.resizes.pop() if here.backend.resizes else here.backend.step)()
