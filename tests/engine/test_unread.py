"""Answers that are read too slowly: they pause, hold nothing but their unread bytes, go on, or end with an error."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any
from unittest.mock import patch

import pytest

from caraserve.core.request import TokenDelta, TokenLogprob
from caraserve.engine import token_stream, unread
from caraserve.engine.token_stream import TokenStream
from caraserve.engine.unread import UnreadAnswer, UnreadBudget, size_of
from caraserve.errors import Displaced, Overloaded, ReaderTooSlow, ServerBusy
from tests.engine_harness import EngineHarness, asked_for, in_harness, turn

FREE, SHARE = 2_000, 6_000  # about 6 and 20 tokens of the fake engine


@pytest.fixture
def here() -> AbstractAsyncContextManager[EngineHarness]:
    return in_harness()


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with patch.multiple(unread, FREE_BYTES=FREE, _SHARE_BYTES=SHARE), patch.object(token_stream, "FREE_BYTES", FREE):
        yield


async def generate(here: EngineHarness, until: Callable[[], bool], most: int = 1000) -> None:
    """Ends iterations until something holds."""
    for _ in range(most):
        if until():
            return
        here.end_something()
        await turn()
    raise AssertionError("it never holds")


async def read_until_ended(stream: TokenStream) -> int:
    return sum([len(delta.token_ids) async for delta in stream])


async def test_an_answer_that_is_not_read_pauses_and_gives_its_slot_and_blocks_to_others() -> None:
    async with in_harness(slots=1) as here:
        slow, reading = here.ask([1, 2, 3], "a0", max_tokens=30)
        reading.cancel()  # its client reads nothing
        await generate(here, lambda: here.engine.unread.paused == 1)
        await generate(here, lambda: here.engine.snapshot().running == 0)
        snapshot = here.engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.kv_used_blocks) == (0, 1, 0)
        assert SHARE < slow.stream.unread.unread_bytes < SHARE + 1000
        other, task = here.ask([4, 5, 6], "a1", max_tokens=20)  # on a device with one slot
        await here.until_done([task])
        other.check()
        assert here.engine.snapshot().waiting == 1
        await here.until_done([asyncio.create_task(slow.collect())])
        slow.check()
        assert slow.finish.completion_tokens == 30


async def test_an_answer_goes_on_when_half_of_it_is_read(here: EngineHarness) -> None:
    slow, reading = here.ask([1, 2, 3], None, max_tokens=30)
    reading.cancel()
    await generate(here, lambda: here.engine.snapshot().running == 0 and here.engine.unread.paused == 1)
    taken: list[TokenDelta] = []
    while slow.stream.unread.is_paused:
        taken.append(await anext(slow.stream))
    assert slow.stream.unread.unread_bytes <= SHARE / 2 + 1000
    assert max(map(size_of, taken)) <= FREE + 500  # no more at once: the reader keeps it until it is sent
    slow.deltas += taken
    await here.until_done([asyncio.create_task(slow.collect())])
    slow.check()
    assert slow.finish.reason == "length"


async def test_while_the_budget_is_exceeded_every_answer_pauses_that_is_not_nearly_read(here: EngineHarness) -> None:
    here.engine.unread.max_bytes = SHARE
    asked = [here.ask([number], None, max_tokens=30) for number in range(3)]
    for _, reading in asked:
        reading.cancel()
    fast, task = here.ask([9], None, max_tokens=30)
    await here.until_done([task])
    fast.check()
    await generate(here, lambda: here.engine.snapshot().running == 0)
    assert here.engine.unread.held_bytes < SHARE + 3 * 1000
    await here.until_done([asyncio.create_task(one.collect()) for one, _ in asked])
    for one, _ in asked:
        one.check()


async def test_while_the_budget_is_exceeded_an_answer_of_which_too_little_is_read_in_a_minute_ends_with_an_error(
    pass_time: Callable[[float], None], here: EngineHarness
) -> None:
    slow, reading = here.ask([1, 2, 3], None, max_tokens=30)
    reading.cancel()
    await generate(here, lambda: here.engine.unread.paused == 1)
    await anext(slow.stream)
    pass_time(unread._LOOK_S)
    await turn()
    assert here.engine.unread.ended == 0  # there is memory
    here.engine.unread.max_bytes = FREE
    pass_time(unread._LOOK_S)
    await generate(here, lambda: here.engine.snapshot().waiting == 0)
    assert here.engine.unread.ended == 1
    assert here.engine.unread.held_bytes <= FREE  # what the reader has taken
    with pytest.raises(ReaderTooSlow):
        await anext(slow.stream)
    assert here.engine.unread.held_bytes == 0


async def test_a_finished_answer_counts_until_it_is_read_and_ends_too(pass_time: Callable[[float], None]) -> None:
    async with in_harness() as here:
        slow, reading = here.ask([1, 2, 3], None, max_tokens=15)
        reading.cancel()
        await generate(here, lambda: slow.stream.unread.unread_bytes > FREE and here.engine.snapshot().running == 0)
        here.engine.unread.max_bytes = FREE
        pass_time(unread._LOOK_S)
        await turn()
        with pytest.raises(ReaderTooSlow):
            await anext(slow.stream)
        assert here.engine.unread.held_bytes == 0


async def test_a_slow_reader_that_reads_on_keeps_its_answer(pass_time: Callable[[float], None]) -> None:
    async with in_harness() as here:
        slow, reading = here.ask([1, 2, 3], None, max_tokens=40)
        reading.cancel()
        while not (slow.deltas and slow.deltas[-1].finish):
            for _ in range(20):
                here.end_something()
                await turn()
            next_delta = asyncio.ensure_future(anext(slow.stream))
            await generate(here, next_delta.done)
            slow.deltas.append(next_delta.result())
            here.engine.unread.max_bytes = SHARE if here.engine.unread.held_bytes < FREE else FREE
            pass_time(unread._LOOK_S / 2)
            await turn()
        assert here.engine.unread.paused > 0
        slow.check()


async def test_an_answer_that_is_cancelled_or_left_does_not_count(here: EngineHarness) -> None:
    for finished in (False, True):
        slow, reading = here.ask([1, 2, 3], None, max_tokens=15 if finished else 40)
        reading.cancel()
        await generate(here, lambda: len(here.engine._queues.running) == 0 and here.engine.unread.held_bytes > FREE)
        slow.stream.cancel()
        assert here.engine.unread.held_bytes == 0
        await generate(here, lambda: here.engine.snapshot().waiting == 0)


async def test_paused_requests_take_places_of_their_client_in_the_queue_and_of_no_other(here: EngineHarness) -> None:
    here.engine._config.max_queue = 3  # type: ignore[misc]
    asked = [here.ask([number], None, client="slow", max_tokens=40) for number in range(3)]
    for _, reading in asked:
        reading.cancel()
    await generate(here, lambda: here.engine.snapshot().running == 0 and here.engine.unread.paused == 3)
    with pytest.raises(Overloaded):
        here.ask([9], None, client="slow")
    other, task = here.ask([9], None, client="other")
    await here.until_done([task])
    other.check()
    last, _ = asked[-1]
    async for delta in last.stream:
        last.deltas.append(delta)
    assert isinstance(last.finish.error, Displaced)
    assert here.engine.snapshot().waiting == 2
    for one, _ in asked:
        one.stream.cancel()


async def test_a_request_that_waits_for_its_adapter_pauses_with_the_others_of_its_answer(here: EngineHarness) -> None:
    streams = list(here.engine.submit_each([asked_for([number], "a0", max_tokens=40) for number in range(2)]))
    await turn()
    assert len(here.engine._queues.loading) == 2
    streams[0].unread.add(SHARE + 1)
    await generate(here, lambda: not here.engine._queues.loading)
    assert here.engine.snapshot().waiting == 2
    assert not here.backend.launched
    streams[0].unread.read(SHARE + 1)
    reading = asyncio.gather(*map(read_until_ended, streams))
    await generate(here, reading.done)
    assert reading.result() == [40, 40]


async def test_the_other_answers_to_the_same_body_do_not_start_while_it_is_paused() -> None:
    async with in_harness(slots=1) as here:
        request = asked_for([1], None, max_tokens=40)
        streams = list(here.engine.submit_each([request] * 4))  # on a device with one slot
        await generate(here, lambda: here.engine.unread.paused == 1 and here.engine.snapshot().running == 0)
        assert here.engine.snapshot().waiting == 4
        assert len(here.backend.launched) < 30
        for stream in streams:
            stream.cancel()


async def test_a_whole_answer_without_memory_is_refused_and_small_ones_are_not() -> None:
    budget = UnreadBudget(10_000, lambda: None)
    large, small = UnreadAnswer(budget, "one"), UnreadAnswer(budget, "one")
    large.keep(9_000)
    small.keep(FREE)
    with pytest.raises(ServerBusy):
        large.keep(1)
    small.keep(0)
    large.drop_kept()
    small.drop_kept()
    assert budget.held_bytes == 0


async def test_a_client_with_less_than_an_equal_part_of_the_budget_is_not_restricted_by_others() -> None:
    budget = UnreadBudget(10_000, lambda: None)
    greedy, other = UnreadAnswer(budget, "greedy"), UnreadAnswer(budget, "other")
    greedy.add(SHARE)
    UnreadAnswer(budget, "greedy").add(SHARE)
    other.keep(FREE + 2_000)
    other.drop_kept()
    other.add(FREE + 1)
    assert not other.is_paused
    greedy.add(1)
    assert greedy.is_paused
    other.add(5_000 - FREE)  # now more than half
    assert other.is_paused


@pytest.mark.parametrize(
    ("delta", "least", "most"),
    [
        (TokenDelta("a", (1,)), 200, 400),
        (TokenDelta("a", (1,), (TokenLogprob(1, -1.0, (1,) * 20, (-1.0,) * 20),)), 1500, 2500),
        (TokenDelta("", (), prompt_logprobs=(None, TokenLogprob(1, -1.0))), 300, 700),
        (TokenDelta("", (), embedding=bytes(4000)), 4000, 4500),
    ],
    ids=["token", "logprobs", "prompt", "embedding"],
)
def test_the_size_of_a_delta_is_about_its_memory(delta: TokenDelta, least: int, most: int) -> None:
    assert least <= size_of(delta) <= most


async def test_the_metrics_show_what_is_unread() -> None:
    budget = UnreadBudget(10_000, lambda: None)
    answer: Any = UnreadAnswer(budget, "client")
    answer.add(7_000)
    text = "".join(budget.families('x="y"'))
    assert 'caraserve:unread_answer_bytes{x="y"} 7000\n' in text
    assert 'caraserve:max_unread_answer_bytes{x="y"} 10000\n' in text
    assert 'caraserve:answers_paused_total{x="y"} 1\n' in text
    assert 'caraserve:slow_readers_ended_total{x="y"} 0\n' in text
