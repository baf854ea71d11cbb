"""Adapters of requests that wait for a slot are read into the host cache meanwhile, at no cost for other requests."""

from functools import partial

from caraserve.core.lora_layout import ALIGN_BYTES
from caraserve.errors import CaraServeError
from caraserve.lora.adapter import AdapterTier
from tests.engine_harness import in_harness, turn
from tests.lora.tiers import CacheTiers as Tiers

with_harness = partial(in_harness, slots=1, device_adapters=4)


async def test_adapters_of_the_next_requests_are_prefetched_while_all_slots_are_taken() -> None:
    async with with_harness() as here:
        tasks = [here.ask([1, 2], name, max_tokens=9)[1] for name in (None, "a0", "a1", "a2")]
        await turn()
        assert len(here.reader.reads) == 2, "no more at a time"
        here.reader.reads.pop(0)(True)
        here.backend.step()
        await turn()
        assert here.engine.snapshot().host_adapters == ("a0",)
        assert here.engine.snapshot().num_on_device == 0
        assert not here.backend.copies, "the device copy waits for admission"
        assert len(here.reader.reads) == 2
        await here.until_done(tasks)
        assert here.engine.catalog.manager.counters.disk_reads == 3


async def test_with_exclusive_loads_nothing_is_prefetched() -> None:
    """The read would stop the device for a request that is not even admitted."""
    async with with_harness(exclusive=True) as here:
        for name in (None, "a0"):
            here.ask([1, 2], name, max_tokens=9)
        await turn()
        assert not here.reader.reads


async def test_a_failed_prefetch_is_repeated_when_the_request_is_admitted() -> None:
    async with with_harness() as here:
        tasks = [here.ask([1, 2], name, max_tokens=3)[1] for name in (None, "a0")]
        await turn()
        here.reader.reads.pop()(False)
        await here.until_done(tasks)
        assert [task.result().finish.reason for task in tasks] == ["length", "length"]


def test_a_prefetch_evicts_no_image_that_an_unfinished_request_will_need() -> None:
    tiers = Tiers(host_bytes=2 * ALIGN_BYTES)
    for name in "abc":
        tiers.add(name)
    waiting = [tiers.manager.pin(name) for name in "abc"]
    for version in waiting:
        tiers.manager.prefetch(version)
    tiers.settle()
    tiers.manager.prefetch(waiting[2])
    assert [version.tier for version in waiting] == [AdapterTier.HOST, AdapterTier.HOST, AdapterTier.DISK]
    tiers.manager.unpin(waiting[0])
    tiers.manager.prefetch(waiting[2])
    tiers.settle()
    assert [version.tier for version in waiting] == [AdapterTier.DISK, AdapterTier.HOST, AdapterTier.HOST]


def test_a_prefetched_image_is_evicted_for_an_adapter_of_an_admitted_request() -> None:
    tiers = Tiers(host_bytes=ALIGN_BYTES)
    tiers.add("a")
    tiers.add("b")
    waiting = tiers.manager.pin("a")
    tiers.manager.prefetch(waiting)
    tiers.settle()
    admitted = tiers.ask("b")
    tiers.settle()
    assert (waiting.tier, admitted.tier) == (AdapterTier.DISK, AdapterTier.DEVICE)


def test_a_request_admitted_during_its_adapters_prefetch_uses_that_read() -> None:
    tiers = Tiers()
    tiers.add("a")
    version = tiers.manager.pin("a")
    tiers.manager.prefetch(version)
    tiers.now_s = 7.0
    tiers.manager.acquire(version)
    tiers.settle()
    assert version.tier is AdapterTier.DEVICE
    assert version.asked_s == 7.0
    assert tiers.manager.counters.disk_reads == 1


def test_a_request_cancelled_during_its_adapters_prefetch_leaks_nothing() -> None:
    tiers = Tiers()
    tiers.add("a")
    version = tiers.manager.pin("a")
    tiers.manager.prefetch(version)
    tiers.manager.unregister("a")
    tiers.manager.unpin(version)
    tiers.settle()
    assert tiers.manager.is_forgotten(version)
    assert tiers.arena.used_bytes == 0


def test_a_failed_prefetch_is_repeated_after_a_while() -> None:
    tiers = Tiers()
    tiers.add("a")
    there, tiers.disk["a"] = tiers.disk["a"], CaraServeError("no instance has it")
    version = tiers.manager.pin("a")
    tiers.manager.prefetch(version)
    tiers.settle()
    tiers.disk["a"] = there
    tiers.manager.prefetch(version)
    tiers.settle()
    assert version.tier is AdapterTier.FAILED
    tiers.now_s += 5.0
    tiers.manager.prefetch(version)
    tiers.settle()
    assert version.tier is AdapterTier.HOST
