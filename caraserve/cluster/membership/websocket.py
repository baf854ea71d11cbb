"""The WebSocket transport between instances: one persistent connection to each peer, dialled or accepted.

Messages wait in the protocol's queues, which are bounded: a frame is pulled only when the connection can send it. So a
peer that does not read costs the memory of 256 control frames and one heartbeat.

    protocol ──pull──► writer task ──► WebSocket ──► the peer's reader task ──received──► its protocol
"""

import asyncio
import contextlib
import itertools
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import aiohttp
from aiohttp import web

from caraserve.cluster.membership.dns import PeerResolver
from caraserve.cluster.membership.messages import MAX_FRAME
from caraserve.util.tasks import log_defect

WEBSOCKET_PATH = "/cluster/ws"

_DIAL_S = 2.0  # name look-up included
_CLOSE_S = 1.0  # for sending the remaining frames and closing
_UNACKNOWLEDGED_MS = 10_000  # after which the kernel ends a connection whose data is not acknowledged
_MOST_SOCKETS = 512  # including peers whose key has not been verified yet

_WebSocket: TypeAlias = "web.WebSocketResponse | aiohttp.ClientWebSocketResponse[bool]"


class TransportListener(Protocol):
    """The protocol that handles what happens on connections."""

    def connected(self, connection_id: int, dialled: str | None) -> None: ...

    def received(self, connection_id: int, frame: bytes) -> None: ...

    def lost(self, connection_id: int) -> None: ...

    def pull(self, connection_id: int) -> bytes | None:
        """Returns the next frame to send, or None."""


@dataclass(slots=True, eq=False)
class _Socket:
    connection_id: int
    stream: _WebSocket
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False


class WebSocketTransport:
    """All connections of one instance."""

    def __init__(self, ends: TransportListener, tls: ssl.SSLContext | None, resolver: PeerResolver) -> None:
        """`tls`: for dialling; None: peers speak plain HTTP."""
        self._ends, self._tls = ends, tls
        self._open: dict[int, _Socket] = {}
        self._connection_ids = itertools.count()
        self._dialing: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Each WebSocket has a connection of its own, so the connector keeps none.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, resolver=resolver)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_DIAL_S)
        redirects = aiohttp.TraceConfig()  # `ws_connect` has no argument that refuses them
        redirects.on_request_redirect.append(_refuse_redirect)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[redirects])

    def dial(self, address: str) -> None:
        """Connects to HOST:PORT in the background, unless that is under way. Failures are not reported."""
        if address not in self._dialing:
            task = self._dialing[address] = asyncio.create_task(self._dial(address), name=f"dial {address}")
            task.add_done_callback(lambda _: self._dialing.pop(address, None))
            task.add_done_callback(log_defect)

    async def accept(self, request: web.Request) -> web.StreamResponse:
        """Handles a request for WEBSOCKET_PATH. Returns when the connection has ended."""
        if "Origin" in request.headers:  # only browsers send it, and web pages must not connect
            raise web.HTTPForbidden(text="This address is for other instances.")
        if len(self._open) >= _MOST_SOCKETS:
            raise web.HTTPServiceUnavailable(text="Too many connections.")
        stream = web.WebSocketResponse(timeout=_CLOSE_S, compress=False, max_msg_size=MAX_FRAME)
        await stream.prepare(request)
        await self._run_connection(stream, None)
        return stream

    def close(self, connection_id: int) -> None:
        """Sends the remaining frames of a connection, then ends it."""
        found = self._open.get(connection_id)
        if found is not None:
            found.closing = True
            found.wake.set()

    def flush(self, connection_ids: list[int]) -> None:
        """Wakes the writers of connections that have frames to send."""
        for connection_id in connection_ids:
            if (found := self._open.get(connection_id)) is not None:
                found.wake.set()

    async def end(self) -> None:
        """Sends the remaining frames, and closes all connections."""
        for task in self._dialing.values():
            task.cancel()
        for connection_id in list(self._open):
            self.close(connection_id)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=3 * _CLOSE_S)
        await self._session.close()

    async def _dial(self, address: str) -> None:
        url = f"{'wss' if self._tls else 'ws'}://{address}{WEBSOCKET_PATH}"
        closing = aiohttp.ClientWSTimeout(ws_close=_CLOSE_S)
        try:
            async with asyncio.timeout(_DIAL_S):
                stream = await self._session.ws_connect(
                    url, ssl=self._tls or True, timeout=closing, max_msg_size=MAX_FRAME
                )
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
            return
        self._dialing.pop(address, None)
        await self._run_connection(stream, address)

    async def _run_connection(self, stream: _WebSocket, dialled: str | None) -> None:
        """Reads and writes a connection until it ends."""
        task = asyncio.current_task()
        assert task is not None
        here = _Socket(next(self._connection_ids), stream)
        self._tasks.add(task)
        self._open[here.connection_id] = here
        # The kernel ends connections to a machine that has vanished, which acknowledges nothing.
        option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS
        _on_kernel_socket(stream, lambda raw: raw.setsockopt(*option))
        self._ends.connected(here.connection_id, dialled)
        writer = asyncio.create_task(self._write(here), name="cluster writer")
        writer.add_done_callback(log_defect)
        try:
            async for message in stream:
                if message.type is not aiohttp.WSMsgType.BINARY or here.closing:
                    break
                self._ends.received(here.connection_id, message.data)
                await asyncio.sleep(0)  # otherwise a burst of frames would block the event loop
        finally:
            self._open.pop(here.connection_id, None)
            self._tasks.discard(task)
            self._ends.lost(here.connection_id)
            await _finished(writer, here)

    async def _write(self, here: _Socket) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while True:
                while (frame := self._ends.pull(here.connection_id)) is not None:
                    await here.stream.send_bytes(frame)
                if here.closing:
                    break
                await here.wake.wait()
                here.wake.clear()
        await here.stream.close()  # which ends the reader too


async def _refuse_redirect(
    session: aiohttp.ClientSession, context: object, answer: aiohttp.TraceRequestRedirectParams
) -> None:
    """Refuses a redirect, so that the server at a peer's address cannot make this machine request another URL."""
    raise aiohttp.ClientConnectionError(f"{answer.url} redirects to another address")


async def _finished(writer: "asyncio.Task[None]", here: _Socket) -> None:
    """Gives the writer 2 s to send the remaining frames, then cuts the connection."""
    here.closing = True
    here.wake.set()
    try:
        await asyncio.wait([writer], timeout=2 * _CLOSE_S)
    finally:
        if not writer.done():
            writer.cancel()
            _on_kernel_socket(here.stream, lambda raw: raw.shutdown(socket.SHUT_RDWR))


def _on_kernel_socket(stream: _WebSocket, action: Callable[[socket.socket], None]) -> None:
    """Does what asyncio's transports do not offer; ignores connections that are gone."""
    shown = stream.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if shown is not None:
            with socket.socket(fileno=os.dup(shown.fileno())) as raw:
                action(raw)
