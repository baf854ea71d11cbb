"""Sockets and connections below the application: their number, and answers to bytes that never reach a handler.

aiohttp answers in plain text what it refuses itself, and logs a trace for many mistakes of clients, so its classes for
a listening socket and for a connection are extended here.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
from typing import Any

from aiohttp import HttpVersion10, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import StreamReader

from caraserve.errors import CaraServeError, ConfigError, ServerBusy
from caraserve.http.access.auth import PROBES
from caraserve.http.apis.api_format import shape_error
from caraserve.http.responses import SERVER, error_body, error_response, json_response

log = logging.getLogger("caraserve.http")

_SPARE_CONNECTIONS = 64  # beyond the limit, so that probes are answered when all others are in use
_OTHER_DESCRIPTORS = 128  # for files, workers and other instances
_FEWEST_CONNECTIONS = 16
_CLIENT_FAULTS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


def bind(host: str, port: int) -> list[socket.socket]:
    """Binds a socket to each address of `host`, all on one port; 0 picks a free one. The sockets do not listen yet: a
    port in use is found before the weights are read, and clients are refused meanwhile. Raises ConfigError."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # 0.0.0.0 beside :: is a socket of its own
            one.bind((address[0], port or sockets[0].getsockname()[1], *address[2:]))
    except OSError as error:
        for one in sockets:
            one.close()
        raise listen_error(error, host, port) from None
    return sockets


def listen_error(error: OSError, host: str, port: int) -> ConfigError:
    """The error for an address on which the server cannot listen."""
    where = f"cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{where}: another process does; choose another --port, or 0 for any free one")
    if error.errno == errno.EACCES:
        return ConfigError(f"{where}: ports below 1024 need privileges; choose another --port")
    reason = os.strerror(error.errno) if error.errno and not isinstance(error, socket.gaierror) else error.strerror
    return ConfigError(f"{where}: {reason or error}; check --host and --port")


class Runner(web.AppRunner):
    """Serves an application over this module's connections."""

    def __init__(self, app: web.Application, *, max_connections: int, write_s: float, **options: Any) -> None:
        """`write_s`: longest time that the kernel waits for a client to acknowledge bytes. `options`: aiohttp's."""
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
        """Keeps the number of connections within the limit: closes the oldest idle one for a new one. If none is idle,
        the new one only answers probes."""
        super().connection_made(handler, transport)
        count = len(self._connections)
        if count <= self._max_connections or not isinstance(handler, _Connection):
            return
        # Oldest first. A search over all connections, 0.1 µs each, and only when there are too many.
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
            refused = _last(error_response(busy))
            shape_error(request.path, refused)
            return refused
        return await self._made.request_handler(request)


class _Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ("is_surplus",)

    def __init__(self, manager: _Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self.is_surplus = False  # beyond the limit: answers only probes

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request or for the rest of its headers."""
        return self._waiter is not None and not self._waiter.done() and not self._force_close

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock, server = transport.get_extra_info("socket"), self._manager
        if sock is not None and isinstance(server, _Server):
            # The kernel ends a connection whose client acknowledges nothing, also after `close`.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, server.write_ms)
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The last response of a connection: to bytes that are no request, and to exceptions outside handlers."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        if status >= 500:
            self.log_exception("a request failed", exc_info=exc)
            return _last(error_response(CaraServeError("The server made a mistake; its log has the details.")))
        if isinstance(exc, LineTooLong):
            return _refusal(431, "A line of the request's headers is too long.")
        reason = (message or "").partition("\n")[0]  # the next lines repeat the client's bytes
        return _refusal(status, f"Not a valid HTTP request: {reason.strip(' :.')[:200]}.")

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Logs the server's errors only: clients that leave, or do not send HTTP, could fill the log."""
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
    """Makes a response the last one of its connection; the application does not add headers to it."""
    response.headers["Server"] = SERVER
    response.force_close()
    return response
