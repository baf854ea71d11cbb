"""Forwards requests to other instances and passes their answers back, byte for byte.

Until the client has received a byte, any failure of the other instance is raised, so that a third one can answer. After
that, its failure ends the stream with an error event. A client that leaves cancels the handler, which closes the
connection to the other instance and so cancels the generation there. Reading from the other instance and writing to the
client can both raise ConnectionError; only the former is a reason to try again, so `PeerWatch` converts it.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from ssl import SSLContext
from typing import Any, Literal

import aiohttp
import orjson
from aiohttp import web

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.dns import PeerResolver
from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.routing.cost import CostEstimate
from caraserve.cluster.routing.forward_auth import (
    INSTANCE_HEADER,
    PREFIX,
    REFUSED_HEADER,
    ForwardClaims,
    forward_headers,
    parse_refusal,
)
from caraserve.cluster.routing.router import Reason, Refusal
from caraserve.cluster.routing.selector import PeerTarget
from caraserve.errors import BackendFailed, Draining, InstanceLost, ServerBusy, Unreachable
from caraserve.http.access.adapter_choice import SERVED_BY_HEADER
from caraserve.http.body.json_reader import Body
from caraserve.http.client import CLIENT
from caraserve.http.context import CONTEXT, REQUEST_ID, SERVED_BY
from caraserve.http.deadline import remaining_time_header
from caraserve.http.generation_routes import GENERATION_ROUTES
from caraserve.http.peer_watch import PeerFailedError, PeerWatch
from caraserve.http.request_log import SUMMARY, model_label
from caraserve.http.streaming import EventStream, error_in, tokens_in, without_progress
from caraserve.http.tracing import forward_headers_of
from caraserve.util.least_rate import LeastRate

_CONNECT_S = 0.5
_REACH_S = 1.0  # to connect, with the look-up of the name
_IDLE_S = 15.0  # shorter than the server's keep-alive, so that the server never closes a connection as it is used again
_READ_BYTES = 64 << 10  # of an answer, buffered for a slow client; up to twice as much
_LONGEST_EVENT = 32 << 20
# The silence is three of the pings of a healthy instance; at 16 KiB/s, an event of 1 MiB may take a minute more.
_PACE = LeastRate(grace_s=45.0, bytes_per_s=16 << 10)
_CHECKED_BYTES = 64 << 10  # of an answer in JSON: larger ones take over 0.1 ms, and only their ends are looked at
_EVENT_STARTS = (b"data:", b"event:", b"id:", b":")  # of the lines that instances send first
_HASHED_IN_PLACE = 64 << 10  # bytes; hashing more would block the event loop for over 50 µs
_DIGITS = re.compile(rb"[0-9]{1,15}")
_TOKEN_KEYS = (b'"completion_tokens":', b'"output_tokens":')  # of the usage
_REQUEST_HEADERS = ("traceparent", "Content-Type")
_LIST_HEADERS = ("tracestate", "baggage", "If-Match")  # of a request; their lines are one list
_RESPONSE_HEADERS = ("Content-Type", "Retry-After", "retry-after-ms", "x-caraserve-phases")

End = Literal["whole", "lost", "cut"]  # lost: its instance failed; cut: its client left, or this instance stops

log = logging.getLogger("caraserve.http")


class UnreachedError(Exception):
    """No answer came, and the client has received nothing."""


class RefusedError(Exception):
    """The other instance does not answer the request. `response`: what it sent instead."""

    def __init__(self, refusal: Refusal, response: web.Response) -> None:
        super().__init__(refusal.reason)
        self.refusal, self.response = refusal, response


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """The client's body, and the claims that are signed with it."""

    body: Body
    digest: str  # of the body
    id: str
    adapter: str | None
    adapter_digest: str
    defaults_digest: str
    seed: int | None
    stream: bool  # whether it asks for a stream
    most_answer_bytes: int  # of the largest answer that it could ask for, whole


@dataclass(frozen=True, slots=True)
class ProxyResult:
    """An answer that came back, whole or not."""

    response: web.StreamResponse
    tokens: int  # of the answer, or of what has come of it
    end: End = "whole"


async def body_digest(body: Body) -> str:
    """SHA-256 of a body, in hex."""
    if len(body) > _HASHED_IN_PLACE:
        return await asyncio.to_thread(lambda: hashlib.sha256(body).hexdigest())
    return hashlib.sha256(body).hexdigest()


class PeerProxy:
    """Connections to all other instances, kept open between requests, and the requests under way on them."""

    def __init__(
        self,
        me: Callable[[], str],
        keys: Callable[[], Keyring],
        tls: SSLContext | None,
        is_answering: Callable[[str, str, int], Awaitable[bool]],
        pace: LeastRate = _PACE,
    ) -> None:
        """`me`: this instance's name. `tls`: for connecting; None: instances use plain HTTP. `is_answering`: asks an
        instance whether it still answers a request, given by its id and the attempt. `pace`: of answers that come."""
        self._me, self._keys, self._scheme = me, keys, "https" if tls else "http"
        self._is_answering, self._pace = is_answering, pace
        self._scopes: dict[str, set[asyncio.Timeout]] = {}  # of the requests under way, by instance
        self._epochs: dict[str, int] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = self._overdue = False
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=tls or True, resolver=PeerResolver())
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=_REACH_S, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            read_bufsize=_READ_BYTES,
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()

    async def drain(self, timeout_s: float) -> None:
        """Forwards nothing more, waits for the requests under way, and ends them with an error after `timeout_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._overdue = True
            for name in tuple(self._scopes):
                self._abort(name)

    def member_changed(self, record: MemberRecord) -> None:
        """Aborts the requests at an instance that has died or restarted: its connections may stay open in silence. An
        instance that leaves ends its streams first."""
        before = self._epochs.get(record.name, record.epoch)
        self._epochs[record.name] = record.epoch
        if record.state == MemberState.DEAD or record.epoch != before:
            self._abort(record.name)

    def _abort(self, name: str) -> None:
        for scope in self._scopes.get(name, ()):
            if not scope.expired():
                scope.reschedule(0.0)

    async def forward(self, request: web.Request, peer: PeerTarget, forwarded: ForwardedRequest) -> ProxyResult:
        """Has `peer` answer a client's request. Raises UnreachedError, RefusedError, Draining or DeadlineExceeded when
        the client has received nothing."""
        if self._draining:
            raise Draining("The server is stopping.", retry_after_s=1.0)
        upstream = _UpstreamResponse(request, peer.name, forwarded)
        try:
            async with asyncio.timeout(None) as scope:
                is_answering = partial(self._is_answering, peer.name, forwarded.id, peer.attempt)
                watch = PeerWatch(scope, self._pace, is_answering)
                with self._under_way(peer.name, scope), closing(watch):
                    result = await self._exchange(upstream, watch, request, peer, forwarded)
        except (PeerFailedError, TimeoutError) as error:
            stopped = Draining("The server stopped before the answer was complete.", retry_after_s=1.0)
            if upstream.started:
                result = await upstream.end_with_error(stopped if self._overdue else None)
            elif self._overdue:
                raise stopped from error
            else:
                failure = watch.failure or str(error)
                log.warning("request %s: no answer from %s: %s", request[REQUEST_ID], peer.name, failure)
                raise UnreachedError(failure) from error
        if result.end == "lost":
            text = "request %s: %s failed in the middle of an answer%s"
            log.warning(text, request[REQUEST_ID], peer.name, watch.failure and f": {watch.failure}")
        summary = request[SUMMARY]
        summary.forwarded_to, summary.completion_tokens = peer.name, result.tokens
        summary.phases = None  # of an attempt on this instance
        if forwarded.adapter is not None:
            summary.model = model_label(request.get(SERVED_BY) or f"{forwarded.adapter}@{forwarded.adapter_digest}")
        return result

    async def _exchange(
        self,
        upstream: "_UpstreamResponse",
        watch: PeerWatch,
        request: web.Request,
        peer: PeerTarget,
        forwarded: ForwardedRequest,
    ) -> ProxyResult:
        claims = ForwardClaims(
            id=forwarded.id,
            attempt=peer.attempt,
            sender=self._me(),
            receiver=peer.name,
            adapter=forwarded.adapter,
            digest=forwarded.adapter_digest,
            defaults_digest=forwarded.defaults_digest,
            seed=forwarded.seed,
            force=peer.force,
            time_ms=int(time.time() * 1000),
            body_digest=forwarded.digest,
            client=request[CLIENT].name,
            weight=request[CLIENT].weight,
            owns_cache=request[CLIENT].owns_cache,
        )
        path = PREFIX + request.path
        headers = {name: value for name in _REQUEST_HEADERS if (value := request.headers.get(name)) is not None}
        headers |= {name: ", ".join(lines) for name in _LIST_HEADERS if (lines := request.headers.getall(name, []))}
        headers |= forward_headers(self._keys(), path, claims) | {"X-Request-Id": request[REQUEST_ID]}
        headers |= remaining_time_header(request)
        url, body = f"{self._scheme}://{peer.address}{path}", memoryview(forwarded.body)
        with forward_headers_of(request, peer.name) as trace_headers:
            sent = self._session.post(url, data=body, headers=headers | trace_headers, allow_redirects=False)
            response = await watch.head(sent)
            try:
                return await upstream.pass_back(response, watch)
            finally:
                response.close()  # cancels the generation there, unless it has ended

    @contextlib.contextmanager
    def _under_way(self, name: str, scope: asyncio.Timeout) -> Iterator[None]:
        scopes = self._scopes.setdefault(name, set())
        scopes.add(scope)
        self._idle.clear()
        try:
            yield
        finally:
            scopes.discard(scope)
            if not scopes:
                del self._scopes[name]
            if not self._scopes:
                self._idle.set()


class _UpstreamResponse:
    """The answer of another instance to one client's request."""

    def __init__(self, request: web.Request, peer: str, forwarded: ForwardedRequest) -> None:
        self._request, self._peer, self._forwarded = request, peer, forwarded
        self._events: EventStream | None = None
        self._tokens: int | None = None  # of a stream so far; None if it says nothing of them
        self._format = GENERATION_ROUTES[request.path].stream_format

    @property
    def started(self) -> bool:
        """Whether the client may have received a byte."""
        return self._events is not None and self._events.started

    async def pass_back(self, response: aiohttp.ClientResponse, watch: PeerWatch) -> ProxyResult:
        """Passes an answer to the client. Raises PeerFailedError, RefusedError or ServerBusy."""
        if INSTANCE_HEADER not in response.headers:
            text = (await watch.piece(response.content))[:500].decode(errors="replace")
            raise PeerFailedError(f"{self._peer} does not accept forwarded requests: {response.status} {text}")
        if response.status == 200 and self._forwarded.stream and response.content_type == "text/event-stream":
            return await self._stream(response, watch)
        body = await self._whole(response, watch)
        if not _is_answer(response, body, self._forwarded.stream):
            start = body[:100].decode(errors="replace")
            raise PeerFailedError(f"{self._peer} sent what no instance answers: {response.status} {start!r}")
        headers = {name: value for name in _RESPONSE_HEADERS if (value := response.headers.get(name)) is not None}
        whole = web.Response(body=body, status=response.status, headers=headers)
        if (refused := response.headers.get(REFUSED_HEADER)) is not None:
            raise RefusedError(parse_refusal(refused), whole)
        if (reason := _refusal_reason(response.status, body)) is not None:
            raise RefusedError(Refusal(reason, CostEstimate(inf, inf)), whole)
        self._note_version(response)
        return ProxyResult(whole, _completion_tokens(body))

    def _note_version(self, response: aiohttp.ClientResponse) -> None:
        """Notes what has answered, once the answer cannot come from another instance any more."""
        if (served_by := response.headers.get(SERVED_BY_HEADER)) is not None:
            self._request[SERVED_BY] = served_by

    async def _whole(self, response: aiohttp.ClientResponse, watch: PeerWatch) -> bytes:
        """Reads an answer that is no stream, and counts its bytes with those of the request. Raises PeerFailedError
        beyond the largest answer that was asked for, and ServerBusy when all requests under way are too large."""
        bodies, most_bytes = self._request.app[CONTEXT].bodies, self._forwarded.most_answer_bytes
        pieces, size = list[bytes](), response.content_length or 0
        if size <= most_bytes:
            size = 0
            while piece := await watch.piece(response.content):
                size += len(piece)
                if size > most_bytes:
                    break
                bodies.reserve(self._request, len(self._forwarded.body) + size)
                pieces.append(piece)
        if size > most_bytes:
            raise PeerFailedError(f"{self._peer} sent more than {most_bytes} bytes, which no answer has")
        return b"".join(pieces)

    async def _stream(self, response: aiohttp.ClientResponse, watch: PeerWatch) -> ProxyResult:
        timings = self._request.app[CONTEXT].timings
        # The other instance sends pings; these are for the case that it does not.
        timings = replace(timings, ping_s=2 * timings.ping_s)
        chunk = await watch.piece(response.content)  # until it has come, another instance can answer
        async with EventStream(self._request, timings, self._format) as events:
            self._events = events
            # The start of an event: clients get whole events, so that an error can follow any of them.
            partial_event = bytearray()
            done = False
            while chunk:
                searched = max(0, len(partial_event) - 1)  # two newlines end an event, and may come in two chunks
                partial_event += chunk
                if (end := partial_event.rfind(b"\n\n", searched) + 2) >= 2:
                    whole = self._count(self._checked(bytes(partial_event[:end])))
                    del partial_event[:end]
                    done = whole.endswith(self._format.stream_end)
                    if error := error_in(whole):
                        self._request[SUMMARY].error = error
                    if not events.started:
                        self._note_version(response)
                    try:
                        if whole:
                            await events.send(whole)
                    except ConnectionError:
                        return ProxyResult(events.response, self._tokens_so_far(), "cut")
                    finally:
                        self._request[SUMMARY].completion_tokens = self._tokens_so_far()
                    watch.restart()
                elif len(partial_event) > _LONGEST_EVENT:
                    raise PeerFailedError(f"{self._peer} sent an event of more than {_LONGEST_EVENT} bytes")
                chunk = await watch.piece(response.content)
            if not done or partial_event:
                raise PeerFailedError(f"{self._peer} ended a stream too early")
        return ProxyResult(events.response, self._tokens_so_far())

    def _checked(self, events: bytes) -> bytes:
        """Raises PeerFailedError for what is no event stream."""
        if not events.startswith(_EVENT_STARTS):
            raise PeerFailedError(f"{self._peer} sent a stream that is none of events: {events[:100]!r}")
        return events

    def _count(self, events: bytes) -> bytes:
        """Notes how many tokens there are after these events. Returns what the client gets of them."""
        events, so_far = without_progress(events)
        total = tokens_in(events)
        if (count := so_far if total is None else total) is not None:
            self._tokens = count
        return events

    def _tokens_so_far(self) -> int:
        """The tokens of a stream, or its events if it says nothing of them."""
        assert self._events is not None
        return self._events.num_events if self._tokens is None else self._tokens

    async def end_with_error(self, stopped: Draining | None) -> ProxyResult:
        """Ends a stream whose instance has failed, or (`stopped`) that takes longer than this instance's drain."""
        assert self._events is not None
        lost = InstanceLost(f"The instance {self._peer} that was answering has gone; send the request again.")
        tokens = self._tokens_so_far()  # without the error
        await self._events.end_with_error(stopped or lost)
        return ProxyResult(self._events.response, tokens, "cut" if stopped else "lost")


def _is_answer(response: aiohttp.ClientResponse, body: bytes, to_stream: bool) -> bool:
    """Whether an answer that is no stream has a form that instances send: a JSON object, but not to a request for a
    stream, or an error in OpenAI's shape."""
    if response.content_type != "application/json" or (response.status == 200 and to_stream):
        return False
    if response.status == 200:
        if len(body) > _CHECKED_BYTES:
            return body.startswith(b"{") and body.endswith(b"}")
        return isinstance(_parsed(body), dict)
    return response.status >= 400 and _error_of(body) is not None


def _refusal_reason(status: int, body: bytes) -> Reason | None:
    """The reason for which another instance may answer; None where this response is the answer."""
    if status == 429:
        return "full"
    if status == 503 and _error_code(body) == ServerBusy.code:
        return "full"
    if status == 503:
        return "unreachable" if _error_code(body) == Unreachable.code else "draining"
    return "failed" if status == 500 and _error_code(body) == BackendFailed.code else None


def _error_code(body: bytes) -> object:
    """The code of an error in OpenAI's shape; None where the body has another shape."""
    error = _error_of(body)
    return None if error is None else error["code"]


def _error_of(body: bytes) -> dict[str, Any] | None:
    """The error in a body in OpenAI's shape; None where the body has another shape."""
    value = _parsed(body)
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict) or not error.keys() >= {"message", "type", "param", "code"}:
        return None
    return error if isinstance(error["message"], str) else None


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _completion_tokens(body: bytes) -> int:
    """The completion tokens of an answer, found without parsing it: it may be tens of megabytes. The usage is its last
    part, after the arguments of calls, which may have the same keys."""
    end = max([at + len(key) for key in _TOKEN_KEYS if (at := body.rfind(key)) >= 0], default=len(body))
    found = _DIGITS.match(body, end)
    return 0 if found is None else int(found[0])
