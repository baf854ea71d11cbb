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
from collections.abc import Hashable
from typing import Any

from aiohttp import HttpVersion10, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import StreamReader

from caraserve.errors import CaraServeError, ConfigError, ServerBusy
from caraserve.http.access.auth import PROBES
from caraserve.http.connection_limit import ConnectionLimit
from caraserve.http.context import HttpTimings
from caraserve.http.generation_routes import shape_error
from caraserve.http.responses import SERVER, error_body, error_response, json_response
from caraserve.util.tasks import forget_frames

log = logging.getLogger("caraserve.http")

_OTHER_DESCRIPTORS = 128  # for files, workers and other instances
_FEWEST_CONNECTIONS = 16
_RETRY_S = 1.0
_LEAST_READ_BYTES = 32 << 10  # in `write_s`, by a client for which more than this is waiting
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

    def __init__(self, app: web.Application, *, max_connections: int, timings: HttpTimings, **options: Any) -> None:
        """`options`: aiohttp's."""
        options |= {"keepalive_timeout": timings.keepalive_s, "lingering_time": timings.linger_s}
        options |= {"access_log": None, "logger": log, "auto_decompress": False}
        super().__init__(app, shutdown_timeout=timings.stop_s, **options)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = min(max_connections, max(_FEWEST_CONNECTIONS, descriptors - _OTHER_DESCRIPTORS))
        self._timings = timings

    async def _make_server(self) -> "_Server":
        return _Server(await super()._make_server(), ConnectionLimit(self._most), self._timings)


class _Server(web.Server):
    """The connections of all sockets at which an application listens."""

    def __init__(self, made: web.Server, limit: "ConnectionLimit[_Connection]", timings: HttpTimings) -> None:
        super().__init__(
            self._answer,
            request_factory=self._make_request,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        self._made = made
        self.limit, self.timings = limit, timings

    def __call__(self) -> "_Connection":
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        assert isinstance(handler, _Connection)
        if not self.limit.add(handler):
            transport.abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        assert isinstance(handler, _Connection)
        self.limit.remove(handler)

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        assert isinstance(protocol, _Connection)
        protocol.begin(payload)
        return self._made.request_factory(_without_slash(message), payload, protocol, writer, task)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.version < HttpVersion10:
            return _refusal(400, "HTTP/0.9 is not served; use HTTP/1.1.")
        expected = request.headers.get("Expect", "100-continue")
        if expected.lower() != "100-continue":
            return _refusal(417, f"Expect: {expected[:100]!r} is not served; 100-continue is.")
        encodings = ",".join(request.headers.getall("Transfer-Encoding", ["chunked"]))
        if encodings.strip().lower() != "chunked":
            return _refusal(501, f"Transfer-Encoding: {encodings[:100]!r} is not served; chunked alone is.")
        connection = request.protocol
        assert isinstance(connection, _Connection)
        if request.path not in PROBES and not self.limit.give_place(connection):
            connection.stop_lingering()
            refused = _last(error_response(_all_in_use(self.limit)))
            shape_error(request.path, refused)
            return refused
        return await self._made.request_handler(request)


def _all_in_use(limit: "ConnectionLimit[_Connection]") -> ServerBusy:
    return ServerBusy(
        f"All of the {limit.most} connections are in use, or the {limit.most_of_client} that one address may have.",
        retry_after_s=_RETRY_S,
    )


class _Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ("_body", "_is_refused", "_server", "_stuck", "client")

    def __init__(self, manager: _Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self.client: Hashable = None
        self._server = manager
        self._body: StreamReader | None = None  # of the last request
        self._is_refused = False  # whether that was answered before its body had arrived
        self._stuck: asyncio.TimerHandle | None = None  # while the client does not read what was written

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request or for the rest of its headers."""
        return self._waiter is not None and not self._waiter.done() and not self._force_close

    @property
    def body_is_whole(self) -> bool:
        """Whether the body of the last request has arrived."""
        return self._body is None or self._body.is_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        timings = self._server.timings
        if (sock := transport.get_extra_info("socket")) is not None:
            # The kernel ends a connection whose client acknowledges nothing, also after `close`.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timings.write_s))
        self.client = _network(transport.get_extra_info("peername"))
        super().connection_made(transport)
        if self._keepalive_handle is not None and timings.first_request_s < timings.keepalive_s:
            self._keepalive_handle.cancel()
            self._next_keepalive_close_time = self._loop.time() + timings.first_request_s
            self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._is_refused and self._body is not None and not self._body.is_eof():
            # aiohttp would cancel the task that waits for the rest of the body, whose exception then keeps the task,
            # this connection and the request in a cycle. The end of the body ends the task as well.
            self._task_handler = None
            self._body.feed_eof()
        self._stop_watching()
        super().connection_lost(exc)
        self._body = None

    # --- requests ---

    def begin(self, body: StreamReader) -> None:
        """Notes that the headers of a request have arrived."""
        self._body, self._is_refused = body, False
        self._server.limit.request_began(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends the rest of a response. If the body has not ended yet, aiohttp waits for its rest afterwards."""
        finished: tuple[web.StreamResponse, bool] = await super().finish_response(request, resp, start_time)
        if isinstance(resp, web.Response):
            resp.body = None  # aiohttp keeps the response until the next one of this connection
        self._is_refused = not self.body_is_whole
        self._server.limit.request_ended(self)
        return finished

    def give_up(self) -> None:
        """Closes the connection for another one. A request whose body is still arriving is refused first."""
        if self._body is None or self._body.is_eof() or self._is_refused:
            self.force_close()
            return
        self.stop_lingering()
        self._body.set_exception(_all_in_use(self._server.limit))

    def stop_lingering(self) -> None:
        """Makes the connection close at once after a response, instead of waiting for the rest of a body."""
        self._lingering_time = 0.0

    # --- clients that do not read ---

    def pause_writing(self) -> None:
        """Watches the client, for which more than the transport's buffer holds is waiting."""
        super().pause_writing()
        assert self.transport is not None
        self._watch_client(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def _watch_client(self, transport: asyncio.Transport) -> None:
        unsent_bytes = transport.get_write_buffer_size()
        self._stuck = self._loop.call_later(self._server.timings.write_s, self._cut_stuck, transport, unsent_bytes)

    def _cut_stuck(self, transport: asyncio.Transport, unsent_bytes: int) -> None:
        """Cuts a connection whose client has read next to nothing for `write_s`; the handler is then cancelled."""
        if unsent_bytes - transport.get_write_buffer_size() < _LEAST_READ_BYTES:
            transport.abort()
        else:
            self._watch_client(transport)

    def _stop_watching(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    # --- what aiohttp refuses ---

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The last response of a connection: to bytes that are no request, and to exceptions outside handlers."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        if status >= 500:
            self.log_exception("a request failed", exc_info=exc)
        if exc is not None:
            forget_frames(exc)  # one of which is this connection's
        if status >= 500:
            return _last(error_response(CaraServeError("The server made a mistake; its log has the details.")))
        if isinstance(exc, LineTooLong):
            return _refusal(431, "A line of the request's headers is too long.")
        reason = (message or "").partition("\n")[0]  # the next lines repeat the client's bytes
        return _refusal(status, f"Not a valid HTTP request: {reason.strip(' :.')[:200]}.")

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Logs the server's errors only: clients that leave, or do not send HTTP, could fill the log."""
        if not isinstance(options.get("exc_info"), _CLIENT_FAULTS):
            super().log_exception(*args, **options)


def _network(peer: object) -> Hashable:
    """The address of a client; of an IPv6 address the first 64 bits, since a client may have all of the others."""
    host = peer[0] if isinstance(peer, tuple) else peer
    if isinstance(host, str) and ":" in host:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
    return host if isinstance(host, str) else None


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
