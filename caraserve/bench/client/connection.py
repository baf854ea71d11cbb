"""Sends requests over HTTP and records the arrival time of every piece of a response.

The client uses one core for thousands of stream events per second, and any delay of its own adds to the measured
latencies. So it only stores the bytes with their times; dialects.py parses them when the response is complete.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp

_SPARE = 8  # connections that are opened before the first request, so that opening one is rarely part of a latency
_PATIENCE_S = 10.0
_KEPT_S = 3600.0  # that a connection may be idle
_BUFFER_BYTES = 1 << 20  # of one response that has arrived and was not read: no server waits for the client
_CLOSED = "the server closed the connection before its answer was whole"


@dataclass(slots=True)
class HttpExchange:
    """A request's body and the response received so far. Times are those of `time.perf_counter`."""

    request: bytes
    done: Callable[["HttpExchange"], None]  # called once, when the exchange ends
    sent_s: float = 0.0
    done_s: float = 0.0
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
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


class Connections:
    """Connections to one endpoint: one for each exchange in flight, kept for later ones."""

    def __init__(self, root: str, path: str, headers: Mapping[str, str], context: ssl.SSLContext | None) -> None:
        """Requests are posted to `path` below the endpoint's `root`. Create them in the running event loop."""
        self._models, self._url = f"{root}/v1/models", f"{root}{path}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context or True, keepalive_timeout=_KEPT_S),
            headers={**headers, "Content-Type": "application/json", "Accept": "text/event-stream"},
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_BUFFER_BYTES,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def warm_up(self) -> None:
        """Opens 8 connections. Raises OSError if the server does not accept them."""
        try:
            await asyncio.gather(*(self._open() for _ in range(_SPARE)))
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError) as error:
            raise OSError(_CLOSED) from error

    def send(self, exchange: HttpExchange) -> None:
        """Sends a request on an idle connection, or on a new one, whose opening counts as latency. A failure ends the
        exchange."""
        exchange.sent_s = time.perf_counter()
        task = asyncio.get_running_loop().create_task(self._exchanged(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self) -> None:
        """Gives up all exchanges; the server sees disconnected clients."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Closes all connections."""
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _open(self) -> None:
        async with self._session.get(self._models, timeout=aiohttp.ClientTimeout(total=_PATIENCE_S)) as answer:
            await answer.read()

    async def _exchanged(self, exchange: HttpExchange) -> None:
        try:
            async with self._session.post(self._url, data=exchange.request, allow_redirects=False) as answer:
                exchange.status, exchange.headers = answer.status, answer.headers
                async for piece in answer.content.iter_any():
                    exchange.pieces.append((time.perf_counter(), piece))
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError):
            exchange.finish(_CLOSED)
        except OSError as error:
            exchange.finish(error.strerror or str(error))
        except aiohttp.ClientError as error:
            exchange.finish(f"the answer is not HTTP: {error}")
        else:
            exchange.finish()
