"""A stream yields every delta once and in order, merges deltas that a slow reader missed, and ends with the finish."""

import asyncio

import pytest

from caraserve.core.request import Finish, Phases, TokenDelta, TokenLogprob
from caraserve.engine.token_stream import TokenStream
from caraserve.engine.unread import UnreadAnswer, UnreadBudget

FINISH = Finish("stop", 3, 2, 0, Phases(1.0, 0.0, 2.0, 3.0))


def new_stream() -> TokenStream:
    return TokenStream(lambda: None, UnreadAnswer(UnreadBudget(1 << 20, lambda: None), "client"))


async def gathered(stream: TokenStream) -> list[TokenDelta]:
    return [delta async for delta in stream]


async def test_a_reader_that_keeps_up_gets_each_delta_as_it_was_put() -> None:
    stream = new_stream()
    reading = asyncio.create_task(gathered(stream))
    deltas = [TokenDelta("a", (1,)), TokenDelta("b", (2,)), TokenDelta("", (), finish=FINISH)]
    for delta in deltas:
        stream.put(delta)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert await reading == deltas


async def test_a_slow_reader_gets_missed_deltas_merged_into_one() -> None:
    stream = new_stream()
    one, two = TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)
    stream.put(TokenDelta("x", (9,), prompt_logprobs=(None, one)))
    stream.put(TokenDelta("a", (1,), logprobs=(one,), prompt_logprobs=(two,)))
    stream.put(TokenDelta("b", (2, 3), logprobs=(two, one), finish=FINISH))
    whole = TokenDelta("xab", (9, 1, 2, 3), (one, two, one), (None, one, two), FINISH)
    assert await gathered(stream) == [whole]


async def test_text_is_written_past_the_reader_until_it_cannot_be_and_comes_in_order() -> None:
    stream, written, takes = new_stream(), list[str](), [True, False, True]

    def write(text: str, num_tokens: int) -> bool:
        if taken := takes.pop(0):
            written.append(f"{text}{num_tokens}")
        return taken

    stream.write_with(write)
    stream.put_text("a", (1, 2))
    stream.put_text("b", (3,))  # it cannot be written now
    stream.put_text("c", (4,))  # nor may this one, before what is pending
    assert await anext(stream) == TokenDelta("bc", (3, 4))
    stream.put_text("d", (5,))  # the reader may not have sent the text before it yet
    assert await anext(stream) == TokenDelta("d", (5,))
    begins = asyncio.Event()

    async def read_on() -> None:
        begins.set()
        await gathered(stream)

    reading = asyncio.create_task(read_on())
    await begins.wait()
    stream.put_text("e", (6,))
    assert written == ["a2", "e1"]
    stream.put(TokenDelta("", (), finish=FINISH))
    await reading


async def test_after_the_finish_the_stream_stays_ended() -> None:
    stream = new_stream()
    stream.put(TokenDelta("a", (1,), finish=FINISH))
    await anext(stream)
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_reader_waits_for_the_next_delta() -> None:
    stream = new_stream()
    reading = asyncio.create_task(gathered(stream))
    await asyncio.sleep(0)
    assert not reading.done()
    stream.put(TokenDelta("a", (1,), finish=FINISH))
    assert [delta.text for delta in await reading] == ["a"]


async def test_cancelling_calls_the_owner() -> None:
    cancelled: list[bool] = []
    TokenStream(lambda: cancelled.append(True), UnreadAnswer(UnreadBudget(1 << 20, lambda: None), "client")).cancel()
    assert cancelled == [True]


async def test_a_reader_is_woken_for_the_first_token_then_for_each_interval_then_for_the_finish() -> None:
    stream = new_stream()
    stream.interval_tokens = 3
    reading = asyncio.create_task(gathered(stream))
    for token in range(9):
        stream.put(TokenDelta(str(token), (token,), finish=FINISH if token == 8 else None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [delta.text for delta in await reading] == ["0", "123", "456", "78"]


async def test_many_bytes_do_not_wait_for_the_interval() -> None:
    """An answer pauses by what is unread, also of tokens with many alternatives that wait for an interval."""
    stream = new_stream()
    stream.interval_tokens = 1 << 20
    stream.put(TokenDelta("", (0,)))
    await anext(stream)
    scored = TokenLogprob(1, -1.0, top_ids=tuple(range(20)), top_logprobs=(-1.0,) * 20)
    for _ in range(1000):
        stream.put(TokenDelta("", (1,), logprobs=(scored,)))
    assert (await anext(stream)).token_ids
