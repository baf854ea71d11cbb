"""The digest of an adapter's bytes may be computed beside its first use: no answer ends before it is known, and none
that was computed with other bytes ends well. On the fake backend of hashes, where other bytes give other tokens."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from caraserve.errors import AdapterRejected
from tests.engine_harness import EngineHarness, SentRequest, in_harness, turn

PROMPT = [1, 2, 3, 4, 5, 6]  # more than a KV block


@pytest.fixture
def here() -> AbstractAsyncContextManager[EngineHarness]:
    return in_harness()


async def run(here: EngineHarness, jobs: int = 40) -> None:
    """Ends all reads and copies, and so many jobs of the lane, but no check of a digest."""
    for _ in range(jobs):
        await turn()
        while here.reader.reads:
            here.reader.reads.pop()(True)
        while here.backend.copies:
            here.backend.copies.pop()(True)
        if here.backend.lane:
            here.backend.step()
    await turn()


def ended(one: SentRequest) -> bool:
    return bool(one.deltas) and one.deltas[-1].finish is not None


async def test_tokens_are_sent_at_once_and_the_end_when_the_digest_is_known(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: False
    asked, task = here.ask(PROMPT, "a0", max_tokens=3)
    await run(here)
    assert len(asked.tokens) == 2
    assert not ended(asked)
    here.reader.checks.pop()()
    await task
    asked.check()
    assert asked.finish.reason == "length"
    assert asked.finish.served_by == "a0@digest-0"


async def test_a_request_that_waits_for_the_digest_holds_no_slot_and_no_blocks(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: False
    waiting = [here.ask(PROMPT, "a0", max_tokens=2) for _ in range(12)]  # the device has 5 slots
    await run(here)
    assert all(asked.tokens and not ended(asked) for asked, _ in waiting)
    here.reader.checks.pop()()
    await here.until_done([task for _, task in waiting])


async def test_with_other_bytes_running_and_ended_requests_end_with_an_error(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: True
    short, first = here.ask(PROMPT, "a0", max_tokens=1)
    long, second = here.ask(PROMPT, "a0", max_tokens=30)
    await run(here, jobs=12)
    assert long.tokens
    assert not ended(short)
    assert not ended(long)
    here.reader.checks.pop()()
    await first
    await second
    for asked in (short, long):
        assert isinstance(asked.finish.error, AdapterRejected)
        assert "digest-0" in asked.finish.error.message


async def test_other_adapters_do_not_wait_for_a_digest(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: False
    _, waiting = here.ask(PROMPT, "a0", max_tokens=1)
    await run(here)
    here.reader.is_wrong = None
    asked, task = here.ask(PROMPT, "a1", max_tokens=2)
    await run(here)
    await task
    asked.check()
    assert not waiting.done()
    here.reader.checks.pop()()
    await waiting


async def test_after_other_bytes_a_new_request_reads_the_files_again_and_reuses_nothing(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: True
    _, task = here.ask(PROMPT, "a0", max_tokens=2)
    await run(here)
    here.reader.checks.pop()()
    await task
    here.reader.is_wrong = None
    asked, task = here.ask(PROMPT, "a0", max_tokens=4)
    await here.until_done([task])
    asked.check()
    assert (asked.finish.reason, asked.finish.cached_tokens) == ("length", 0)


async def test_an_image_whose_digest_is_being_computed_is_not_evicted(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: False
    asked = [here.ask(PROMPT, f"a{number}", max_tokens=2) for number in range(4)]
    await run(here)
    assert [bool(one.tokens) for one, _ in asked] == [True, True, True, False], "the host cache has room for three"
    here.reader.checks.pop(0)()
    await here.until_done([task for _, task in asked])
    assert {one.finish.reason for one, _ in asked} == {"length"}


async def test_an_adapter_that_is_unloaded_meanwhile_stays_until_its_digest_is_known(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: False
    asked, task = here.ask(PROMPT, "a0", max_tokens=1)
    await run(here)
    unload = asyncio.create_task(here.engine.unload_adapter("a0"))
    await turn()
    assert not ended(asked)
    assert not unload.done()
    here.reader.checks.pop()()
    await unload
    assert (await task).finish.reason == "length"


async def test_an_image_whose_digest_is_being_computed_is_not_shown_to_others(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: False
    _, task = here.ask(PROMPT, "a0", max_tokens=1)
    await run(here)
    manager = here.engine.catalog.manager
    assert manager.image("digest-0") is None
    assert [adapter.digest for adapter in manager.in_host()] == ["digest-0"]
    here.reader.checks.pop()()
    assert manager.image("digest-0") is not None
    await task


async def test_a_client_that_leaves_while_the_digest_is_computed_disturbs_nothing(here: EngineHarness) -> None:
    here.reader.is_wrong = lambda: False
    asked, task = here.ask(PROMPT, "a0", max_tokens=2)
    await run(here)
    asked.stream.cancel()
    await turn()
    here.reader.checks.pop()()
    await task
