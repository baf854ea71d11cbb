"""Connections below the application: how many there may be, and what is answered before a request reaches a handler.

aiohttp answers what it refuses itself in plain text and logs a trace for much that is a client's
fault, so its classes for a listening socket and for one connection are extended here.
"""

import asyncio
import logging
import resource
import socket
from typing import Any

from aiohttp import HttpVersion10, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import StreamReader

from caraserve.errors import CaraServeError, ServerBusy
from caraserve.http.auth import PROBES
from caraserve.http.responses import SERVER, error_body, error_response, json_response

log = logging.getLogger("caraserve.http")

_SPARE_CONNECTIONS = 64  # beyond the most, so that probes are answered when all others are in use
_OTHER_DESCRIPTORS = 128  # that the process needs for files, workers and other instances
_FEWEST_CONNECTIONS = 16
_CLIENT_FAULTS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


class Runner(web.AppRunner):
    """Serves an application over connections of this module."""

    def __init__(self, app: web.Application, *, max_connections: int, write_s: float, **options: Any) -> None:
        """`write_s`: a client that takes nothing for so long is gone. `options`: aiohttp's."""
        super().__init__(app, access_log=None, logger=log, auto_decompress=False, **options)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(max_connections, max(_FEWEST_CONNECTIONS, descriptors - _OTHER_DESCRIPTORS))
        self._limits = most, write_s

    async def _make_server(self) -> "_Server":
        return _Server(await super()._make_server(), *self._limits)


class _Server(web.Server):
    """One listening socket's connections."""

    def __init__(self, made: web.Server, max_connections: int, write_s: float) -> None:
        super().__init__(
            self._answer,
            request_factory=self._make_request,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        self._made, self._max_connections = made, max_connections
        self.write_ms = round(1000 * write_s)

    def __call__(self) -> "_Connection":
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Keeps within the most connections: an idle one gives way to the new one. Where none is idle, the new one is
        there for probes alone."""
        super().connection_made(handler, transport)
        count = len(self._connections)
        if count <= self._max_connections or not isinstance(handler, _Connection):
            return
        # Oldest first. Looks through all, 0.1 µs each, only when more than the most are open.
        idle = next((one for one in self._connections if isinstance(one, _Connection) and one.is_idle), None)
        if idle is not None:
            idle.force_close()
        elif count <= self._max_connections + _SPARE_CONNECTIONS:
            handler.is_surplus = True
        else:
            transport.abort()

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        return self._made.request_factory(_without_slash(message), payload, protocol, writer, task)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.version < HttpVersion10:
            return _refusal(400, "HTTP/0.9 is not served; use HTTP/1.1.")
        expected = request.headers.get("Expect", "100-continue")
        if expected.lower() != "100-continue":
            return _refusal(417, f"Expect: {expected[:100]!r} is not served; 100-continue is.")
        if getattr(request.protocol, "is_surplus", False) and request.path not in PROBES:
            busy = ServerBusy(f"All of the {self._max_connections} connections are in use.", retry_after_s=1.0)
            return _last(error_response(busy))
        return await self._made.request_handler(request)


class _Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ("is_surplus",)

    def __init__(self, manager: _Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self.is_surplus = False  # there are too many connections for it to carry more than a probe

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, or for the rest of its headers."""
        return self._waiter is not None and not self._waiter.done() and not self._force_close

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock, server = transport.get_extra_info("socket"), self._manager
        if sock is not None and isinstance(server, _Server):
            # The kernel ends a connection whose client takes none of what was written, and after `close`, too.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, server.write_ms)
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An answer to bytes that are no request, and to what no handler caught. Closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        if status >= 500:
            self.log_exception("a request failed", exc_info=exc)
            return _last(error_response(CaraServeError("The server made a mistake; its log has the details.")))
        if isinstance(exc, LineTooLong):
            return _refusal(431, "A line of the request's headers is too long.")
        reason = (message or "").partition("\n")[0]  # what follows the first line are the bytes themselves
        return _refusal(status, f"Not a valid HTTP request: {reason.strip(' :.')[:200]}.")

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Logs faults of ours. A client that sends what is not HTTP, or leaves, would fill the log."""
        if not isinstance(options.get("exc_info"), _CLIENT_FAULTS):
            super().log_exception(*args, **options)


def _without_slash(message: RawRequestMessage) -> RawRequestMessage:
    """A request for `/v1/models/` as one for `/v1/models`."""
    path = message.url.raw_path
    if path == "/" or not path.endswith("/") or "//" in path:
        return message
    return message._replace(url=message.url.with_path(path[:-1], encoded=True, keep_query=True))


def _refusal(status: int, message: str) -> web.Response:
    return _last(json_response(error_body(message, "invalid_request_error", None, None), status=status))


def _last(response: web.Response) -> web.Response:
    """The answer before the connection is closed. No application signs it."""
    response.headers["Server"] = SERVER
    response.force_close()
    return response
