"""Downloads run on a thread of their own, and end when their caller is cancelled."""

import asyncio
import threading

import pytest

from caraserve.cluster.transfer.peer_client import PeerClient
from tests.cluster.nodes import KEYS


async def test_a_cancelled_caller_waits_until_nothing_writes_into_its_memory() -> None:
    transfers = PeerClient(lambda: KEYS, None)
    begun, ending, may_end = threading.Event(), threading.Event(), threading.Event()
    has_ended = False

    async def receives() -> None:
        nonlocal has_ended
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            may_end.wait(5)  # a piece is being hashed
            has_ended = True

    task = asyncio.create_task(transfers._on_thread(receives()))
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    await asyncio.to_thread(ending.wait, 5)
    task.cancel()  # a second time
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert has_ended
    await transfers.close()


async def test_an_error_on_the_thread_is_raised_in_the_caller() -> None:
    transfers = PeerClient(lambda: KEYS, None)

    async def fails() -> None:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        await transfers._on_thread(fails())
    await transfers.close()
