"""Downloads run on a thread of their own, and end when their caller is cancelled or their peer is too slow."""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator

import pytest

from caraserve.cluster.membership.peer_client import PeerClient, TransferFailure
from caraserve.util.least_rate import LeastRate
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


# --- peers that send slowly ---

PACE = LeastRate(grace_s=0.2, bytes_per_s=100_000)
HEAD, BODY = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", bytes(range(250)) * 200
SIZES = [30_000, 20_000]
HASHES = [hashlib.sha256(BODY[:30_000]).digest(), hashlib.sha256(BODY[30_000:]).digest()]


@contextlib.asynccontextmanager
async def peer_that_sends(
    start: bytes, again: bytes = b"", pause_s: float = 0.01
) -> AsyncIterator[tuple[PeerClient, str]]:
    """Yields a client, and the address of a peer that answers with `start`, then with `again` without end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(start)
            while not writer.is_closing():
                writer.write(again)
                await writer.drain()
                await asyncio.sleep(pause_s)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = PeerClient(lambda: KEYS, None, PACE)
    try:
        async with asyncio.timeout(3):
            yield client, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await client.close()
        server.close()


SLOW = {
    "nothing": (b"", b""),
    "headers byte by byte": (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "interim responses": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "no body": (HEAD % len(BODY), b""),
    "body byte by byte": (HEAD % len(BODY), b"x"),
    "nearly all at once, then byte by byte": (HEAD % len(BODY) + BODY[:49_000], BODY[:1]),
}


@pytest.mark.parametrize(("start", "again"), SLOW.values(), ids=SLOW)
async def test_an_answer_that_comes_too_slowly_ends(start: bytes, again: bytes) -> None:
    async with peer_that_sends(start, again) as (client, address):
        assert await client.page(address, "/x", len(BODY)) is TransferFailure.FAILED
        right = list[None]()
        into = memoryview(bytearray(len(BODY)))
        got = await client.chunks(address, "/x", SIZES, HASHES, into, lambda: right.append(None))
        assert got is TransferFailure.FAILED
        assert len(right) == (len(start) > 40_000)


async def test_an_answer_at_the_least_rate_is_received() -> None:
    """It takes longer than `grace_s`."""
    async with peer_that_sends(HEAD % len(BODY), BODY[:1250], 0.015) as (client, address):
        client._pace = LeastRate(0.5, 10_000)
        assert await client.page(address, "/x", len(BODY)) == BODY


@pytest.mark.parametrize("start", [HEAD % (2 * len(BODY)), b"HTTP/1.1 200 OK\r\n\r\n"], ids=["longer", "without end"])
async def test_chunks_have_come_when_their_bytes_have(start: bytes) -> None:
    """The peer keeps the answer open."""
    async with peer_that_sends(start + BODY) as (client, address):
        into = memoryview(bytearray(len(BODY)))
        client._pace = LeastRate(60.0, 1.0)
        assert await client.chunks(address, "/x", SIZES, HASHES, into, lambda: None) is None
        assert into == BODY
