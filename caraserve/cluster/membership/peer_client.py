"""Requests bytes from other instances over HTTP, signed, on a thread of its own.

The event loop that serves requests gets only results: receiving and hashing take none of its time. A chunk counts once
its hash is right; bytes after the last such chunk are ignored. An answer that comes too slowly, or begins too late,
ends as a failure, so that no peer can hold a place for long.
"""

import asyncio
import contextlib
import hashlib
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from caraserve.cluster.membership.auth import SIGNATURE_HEADER, Keyring, is_signed_request, sign_request
from caraserve.cluster.membership.dns import PeerResolver
from caraserve.util.least_rate import LeastRate

T = TypeVar("T")
_NextPiece = Callable[[], Awaitable[bytes]]

_TROUBLES = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
_CONNECT_S = 1.0
_REACH_S = 2.0  # to connect, name look-up included
_PACE = LeastRate(grace_s=5.0, bytes_per_s=16 << 10)  # of every answer, from the request on
_KEPT_ALIVE_S = 15.0
_CLOSING_S = 0.05  # aiohttp closes connections some turns of the loop after their session


def check_peer(request: web.Request, keys: Keyring) -> None:
    """Raises HTTPForbidden for a request that no instance of this cluster has signed within 30 s."""
    signature = request.headers.get(SIGNATURE_HEADER, "")
    if not is_signed_request(keys, signature, request.method, request.path_qs, time.time()):
        raise web.HTTPForbidden(text="This address is for other instances.")


class TransferFailure(Enum):
    """Why a peer did not send the requested bytes."""

    FAILED = "failed"  # no connection, or it broke
    BUSY = "busy"
    ABSENT = "absent"  # it does not have them
    CORRUPT = "corrupt"  # wrong bytes


class PeerClient:
    """Requests bytes from other instances."""

    def __init__(self, keys: Callable[[], Keyring], tls: ssl.SSLContext | None, pace: LeastRate = _PACE) -> None:
        """`tls`: for connecting; None: peers use plain HTTP."""
        self._keys, self._tls, self._pace = keys, tls, pace
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="caraserve-download", daemon=True)
        self._thread.start()

    async def page(self, address: str, path: str, most_bytes: int) -> bytes | TransferFailure:
        """Gets the whole body of a small answer."""
        return await self._on_thread(self._page(address, path, most_bytes))

    async def chunks(
        self,
        address: str,
        path: str,
        sizes: Sequence[int],
        hashes: Sequence[bytes],
        into: memoryview,
        on_verified: Callable[[], None],
    ) -> TransferFailure | None:
        """Gets a body of chunks of these sizes into `into`, which is as long. `hashes`: SHA-256 of each chunk. Calls
        `on_verified` on this event loop for each chunk with the right hash, in order; its bytes do not change any more.
        Returns why the next chunk failed, or None."""
        note_verified = partial(asyncio.get_running_loop().call_soon_threadsafe, on_verified)
        return await self._on_thread(self._chunks(address, path, sizes, hashes, into, note_verified))

    async def close(self) -> None:
        """Ends all work in progress, and the thread."""
        await self._on_thread(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._loop.close()

    async def _on_thread(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work on the thread. A cancelled caller waits for its end too: it writes into the caller's memory."""
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _copy_outcome(task, ended))

        self._loop.call_soon_threadsafe(begin)
        end = asyncio.wrap_future(ended)
        try:
            return await asyncio.shield(end)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            while not end.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([end])
            if not end.cancelled():
                end.exception()  # retrieved, so that asyncio does not log it
            raise

    # --- on the thread ---

    def _get(self, address: str, path: str) -> Any:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_ALIVE_S, resolver=PeerResolver())
            timeout = aiohttp.ClientTimeout(None, connect=_REACH_S, sock_connect=_CONNECT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        url = f"{'https' if self._tls else 'http'}://{address}{path}"
        headers = {SIGNATURE_HEADER: sign_request(self._keys(), "GET", path, time.time())}
        return self._session.get(url, headers=headers, ssl=self._tls or True, allow_redirects=False)

    @contextlib.asynccontextmanager
    async def _answer(self, address: str, path: str) -> AsyncIterator[_NextPiece | TransferFailure]:
        """Yields a function that returns the next bytes of an answer's body, empty at its end, or why there is none.
        Raises an error of `_TROUBLES` when the answer breaks off or comes too slowly."""
        now = self._loop.time
        deadline_s = self._pace.deadline_s(now())
        async with asyncio.timeout_at(deadline_s) as limit, self._get(address, path) as answer:

            async def next_piece() -> bytes:
                nonlocal deadline_s
                piece: bytes = await answer.content.readany()
                deadline_s = self._pace.deadline_s(now(), len(piece), deadline_s)
                limit.reschedule(deadline_s)
                return piece

            yield _failure(answer.status) or next_piece

    async def _page(self, address: str, path: str, most_bytes: int) -> bytes | TransferFailure:
        body = bytearray()
        try:
            async with self._answer(address, path) as next_piece:
                if isinstance(next_piece, TransferFailure):
                    return next_piece
                while piece := await next_piece():
                    body += piece
                    if len(body) > most_bytes:
                        return TransferFailure.CORRUPT
        except _TROUBLES:
            return TransferFailure.FAILED
        return bytes(body)

    async def _chunks(
        self,
        address: str,
        path: str,
        sizes: Sequence[int],
        hashes: Sequence[bytes],
        into: memoryview,
        on_verified: Callable[[], object],
    ) -> TransferFailure | None:
        count = at = checked = 0
        try:
            async with self._answer(address, path) as next_piece:
                if isinstance(next_piece, TransferFailure):
                    return next_piece
                while piece := await next_piece():
                    if at + len(piece) > len(into):
                        return TransferFailure.CORRUPT
                    into[at : at + len(piece)] = piece
                    at += len(piece)
                    while count < len(sizes) and at - checked >= sizes[count]:
                        if hashlib.sha256(into[checked : checked + sizes[count]]).digest() != hashes[count]:
                            return TransferFailure.CORRUPT
                        checked += sizes[count]
                        count += 1
                        on_verified()
                    if count == len(sizes):
                        return None  # the peer may keep the answer open
        except _TROUBLES:
            pass
        return TransferFailure.FAILED

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(_CLOSING_S)


def _copy_outcome(task: asyncio.Task[T], to: Future[T]) -> None:
    """Copies a finished task's result, error or cancellation to a future."""
    if task.cancelled():
        to.cancel()
    elif (error := task.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(task.result())


def _failure(status: int) -> TransferFailure | None:
    if status in (200, 206):
        return None
    return {503: TransferFailure.BUSY, 404: TransferFailure.ABSENT}.get(status, TransferFailure.FAILED)
