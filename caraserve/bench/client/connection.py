"""HTTP/1.1 connections that record the arrival time of every piece of a response.

The client uses one core for thousands of stream events per second, and any delay of its own adds to the measured
latencies. So it only stores the bytes with their times; dialects.py parses them when the response is complete. With
aiohttp's client a first token is seen 0.5 ms later, and 8,000 events a second take 0.59 of a core instead of 0.32.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

_SPARE = 8  # idle connections kept open, so that opening one is rarely part of a latency
_CLOSED = "the server closed the connection before its answer was whole"
_START = b"HTTP/1."
_MOST_HEAD_BYTES = 1 << 16
_NO_BODY = (204, 304)


class ResponseParser:
    """Cuts the bytes of one HTTP/1.1 response into its status, its headers and its body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.is_last = False  # of its connection
        self._rest = b""  # an incomplete head or line
        self._left: int | None = 0  # bytes of the body or of a chunk; None: until the connection closes
        self._is_chunked = self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Takes what has arrived; returns the part of the body that is in it. Raises ValueError if it is not HTTP."""
        data, self._rest = self._rest + data, b""
        while self.status < 200:  # of 1xx another response follows
            head, end, rest = data.partition(b"\r\n\r\n")
            if not head.startswith(_START[: len(head)]) or len(head) > _MOST_HEAD_BYTES:
                raise ValueError(repr(data[:20]))
            if not end:
                self._rest = data
                return b""
            self._read_head(head)
            data = rest
        if self._is_chunked:
            return self._unchunked(data)
        if self._left is not None:
            self._left -= len(data)
            self.is_complete = self._left <= 0
        return data

    def close(self) -> bool:
        """Says that the connection has been closed; returns whether the response is complete."""
        return self.is_complete or (self.status >= 200 and self._left is None and not self._is_chunked)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        self.status = int(status[:3])
        named = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in named}
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "0" if self.status in _NO_BODY else None)
        self._left = 0 if self._is_chunked else None if length is None else int(length)
        asked = self.headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close").lower()
        self.is_last = asked == "close" or self._left is None

    def _unchunked(self, data: bytes) -> bytes:
        """Returns the contents of the chunks in some bytes of a body."""
        pieces = []
        while data:
            if self._left:
                pieces.append(data[: self._left])
                data = data[self._left :]
                self._left -= len(pieces[-1])
                continue
            line, end, rest = data.partition(b"\r\n")
            if not end:
                self._rest = data
                break
            data = rest
            if self._in_trailer:
                self.is_complete = self.is_complete or not line
            elif line:  # an empty one ends a chunk
                self._left = int(line.partition(b";")[0], 16)
                self._in_trailer = self._left == 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(slots=True)
class HttpExchange:
    """A request and the response received so far. Times are those of `time.perf_counter`."""

    request: bytes
    done: Callable[["HttpExchange"], None]  # called once, when the exchange ends
    sent_s: float = 0.0
    done_s: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # arrival times and bytes of the body
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def finish(self, error: str | None = None) -> None:
        """Ends the exchange, with an error if given; further calls do nothing."""
        if self.done_s == 0.0:
            self.done_s, self.error = time.perf_counter(), error
            self.done(self)


class _Connection(asyncio.Protocol):
    """A connection that carries one exchange after another."""

    def __init__(self, free: Callable[["_Connection"], None], lost: Callable[["_Connection"], None]) -> None:
        self._free, self._lost = free, lost
        self._exchange: HttpExchange | None = None
        self._parser = ResponseParser()
        self._transport: asyncio.Transport | None = None

    def send(self, exchange: HttpExchange) -> None:
        assert self._transport is not None
        self._exchange, self._parser = exchange, ResponseParser()
        exchange.sent_s = exchange.sent_s or time.perf_counter()
        self._transport.write(exchange.request)

    def abort(self) -> None:
        """Closes the connection at once, even during an exchange; the server sees a disconnected client."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's callbacks ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        now_s, exchange, parser = time.perf_counter(), self._exchange, self._parser
        if exchange is None:
            self.abort()  # it was not asked
            return
        try:
            if body := parser.feed(data):
                exchange.pieces.append((now_s, body))
        except ValueError as error:
            self._end(f"the answer is not HTTP: {error}")
            self.abort()
            return
        if parser.is_complete:
            self._end(None)
            if parser.is_last:
                self.abort()
            else:
                self._free(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(self)
        is_complete = error is None and self._parser.close()
        self._end(None if is_complete else str(error) if error else _CLOSED)

    def _end(self, error: str | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.status, exchange.headers = self._parser.status, self._parser.headers
            exchange.finish(error)


class Connections:
    """Connections to one endpoint: one for each exchange in flight, and some idle ones."""

    def __init__(self, root: str, context: ssl.SSLContext | None) -> None:
        """`root`: the endpoint's, of which only host and port matter here."""
        parts = urlsplit(root)
        self._address = parts.hostname or "", parts.port or (443 if context else 80)
        self._context = context
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._opening = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def warm_up(self) -> None:
        """Opens 8 idle connections. Raises OSError if the server does not accept connections."""
        for _ in range(_SPARE):
            self._idle.append(await self._connect())

    def send(self, exchange: HttpExchange) -> None:
        """Sends a request on an idle connection, or on a new one when it is open. A failure ends the exchange."""
        if self._idle:
            self._idle.pop().send(exchange)
        else:
            exchange.sent_s = time.perf_counter()  # the time to open a connection counts as latency
            self._spawn(exchange)
        if len(self._idle) + self._opening < _SPARE:
            self._spawn(None)

    def close(self) -> None:
        """Ends all exchanges with an error."""
        for task in self._tasks:
            task.cancel()
        for connection in list(self._open):
            connection.abort()

    def _spawn(self, exchange: HttpExchange | None) -> None:
        task = asyncio.get_running_loop().create_task(self._connect_for(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_for(self, exchange: HttpExchange | None) -> None:
        self._opening += 1
        try:
            connection = await self._connect()
        except OSError as error:
            if exchange is not None:
                exchange.finish(error.strerror or str(error))
            return
        except asyncio.CancelledError:
            if exchange is not None:
                exchange.finish(_CLOSED)
            raise
        finally:
            self._opening -= 1
        if exchange is None:
            self._idle.append(connection)
        else:
            connection.send(exchange)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._idle.append, self._forget), *self._address, ssl=self._context
        )
        self._open.add(connection)
        return connection

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
