"""A request's way to another instance and its answer's way back, byte for byte.

Before the client has been sent anything, whatever goes wrong there is raised, so that the request can go elsewhere.
After that, the death of the other instance ends the stream with an error event. A client that leaves cancels this, and
closing the connection cancels the other side. Reads of the other instance and writes to the client fail apart: both
raise ConnectionError, and only one of them is a reason to try again.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from ssl import SSLContext
from typing import Literal, TypeVar

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
from caraserve.cluster.routing.forwarding import PeerTarget
from caraserve.cluster.routing.router import Reason, Refusal
from caraserve.errors import BackendFailed, Draining, InstanceLost, ServerBusy, Unreachable
from caraserve.http.context import CLIENT, CONTEXT, REQUEST_ID
from caraserve.http.deadline import remaining
from caraserve.http.json_reader import Body
from caraserve.http.responses import fault_body
from caraserve.http.streaming import DONE, EventStream

_CONNECT_S = 0.5
_REACH_S = 1.0  # the name server's part in it included
_IDLE_S = 15.0  # shorter than the server's own patience, so that it is never the one who closes
_READ_BYTES = 64 << 10  # of an answer that wait here for a slow client, at most twice over
_LONGEST_EVENT = 32 << 20
_HASHED_IN_PLACE = 64 << 10  # bytes; more would hold up the event loop
_PASSED_ON = ("traceparent", "tracestate", "baggage", "Content-Type")
_PASSED_BACK = ("Content-Type", "Retry-After", "retry-after-ms", "x-caraserve-phases")

T = TypeVar("T")
End = Literal["whole", "lost", "cut"]  # lost: with its instance; cut: by its client's leaving, or our own stop


class UnreachedError(Exception):
    """No answer came, and the client has been sent nothing."""


class RefusedError(Exception):
    """The other instance does not take the request. `response`: its own words."""

    def __init__(self, refusal: Refusal, response: web.Response) -> None:
        super().__init__(refusal.reason)
        self.refusal, self.response = refusal, response


class _GoneError(Exception):
    """The other instance, or the way to it."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """What is forwarded: the client's own body, and what its headers do not say."""

    body: Body
    digest: str  # of the body
    id: str
    adapter: str | None
    adapter_digest: str
    seed: int | None


@dataclass(frozen=True, slots=True)
class ProxyResult:
    """An answer that came back, whole or not."""

    response: web.StreamResponse
    tokens: int  # of it, as far as can be seen from outside
    end: End = "whole"


async def body_digest(body: Body) -> str:
    """What a hop says of its body."""
    if len(body) > _HASHED_IN_PLACE:
        return await asyncio.to_thread(lambda: hashlib.sha256(body).hexdigest())
    return hashlib.sha256(body).hexdigest()


class PeerProxy:
    """Connections to all other instances, kept open between requests, and what is under way on them."""

    def __init__(self, me: Callable[[], str], keys: Callable[[], Keyring], tls: SSLContext | None) -> None:
        """`tls`: for connecting; None: instances speak plain HTTP."""
        self._me, self._keys, self._scheme = me, keys, "https" if tls else "http"
        self._open: dict[str, set[asyncio.Timeout]] = {}
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
        """Ends all connections."""
        await self._session.close()

    async def drain(self, timeout_s: float) -> None:
        """Forwards nothing more, lets what is under way end, and ends in an error what has not after `timeout_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._overdue = True
            for name in tuple(self._open):
                self._give_up(name)

    def changed(self, record: MemberRecord) -> None:
        """Membership's news of an instance. Its death, or that it lives anew, means that whatever it was answering is
        lost, though its connections stand still. One that left has ended its streams first."""
        before = self._epochs.get(record.name, record.epoch)
        self._epochs[record.name] = record.epoch
        if record.state == MemberState.DEAD or record.epoch != before:
            self._give_up(record.name)

    def _give_up(self, name: str) -> None:
        for scope in self._open.get(name, ()):
            if not scope.expired():
                scope.reschedule(0.0)

    async def carry(self, request: web.Request, peer: PeerTarget, parcel: ForwardedRequest) -> ProxyResult:
        """Has `peer` answer a client's request. Raises UnreachedError, RefusedError, Draining or DeadlineExceeded, the
        client unaware."""
        if self._draining:
            raise Draining("The server is stopping.", retry_after_s=1.0)
        passage = _Passage(request, peer.name)
        try:
            async with asyncio.timeout(None) as scope:
                with self._watched(peer.name, scope):
                    return await self._exchange(passage, peer, parcel)
        except (_GoneError, TimeoutError) as error:
            stopped = Draining("The server stopped before the answer was complete.", retry_after_s=1.0)
            if passage.out is not None and passage.out.started:
                return await passage.end_in_error(stopped if self._overdue else None)
            raise stopped if self._overdue else UnreachedError(str(error)) from error

    async def _exchange(self, passage: "_Passage", peer: PeerTarget, parcel: ForwardedRequest) -> ProxyResult:
        request = passage.request
        hop = ForwardClaims(
            *(parcel.id, peer.attempt, self._me(), peer.name, parcel.adapter, parcel.adapter_digest, parcel.seed),
            force=peer.force,
            time_ms=int(time.time() * 1000),
            body_digest=parcel.digest,
            client=request[CLIENT].name,
        )
        path = PREFIX + request.path
        headers = {name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None}
        headers |= forward_headers(self._keys(), path, hop) | {"X-Request-Id": request[REQUEST_ID]} | remaining(request)
        url = f"{self._scheme}://{peer.address}{path}"
        body = memoryview(parcel.body)
        upstream = await _of_peer(self._session.post(url, data=body, headers=headers, allow_redirects=False))
        try:
            return await passage.take(upstream)
        finally:
            upstream.close()  # which ends the work there, unless it has ended

    @contextlib.contextmanager
    def _watched(self, name: str, scope: asyncio.Timeout) -> Iterator[None]:
        scopes = self._open.setdefault(name, set())
        scopes.add(scope)
        self._idle.clear()
        try:
            yield
        finally:
            scopes.discard(scope)
            if not scopes:
                del self._open[name]
            if not self._open:
                self._idle.set()


class _Passage:
    """One answer on its way to the client."""

    def __init__(self, request: web.Request, name: str) -> None:
        self.request = request
        self.out: EventStream | None = None
        self._name = name
        self._events = 0

    async def take(self, upstream: aiohttp.ClientResponse) -> ProxyResult:
        """Passes an answer on. Raises _GoneError or RefusedError."""
        if INSTANCE_HEADER not in upstream.headers:
            raise _GoneError(
                f"{self._name} lets nothing in: {upstream.status} {(await _of_peer(upstream.text()))[:500]}"
            )
        if upstream.content_type == "text/event-stream":
            return await self._stream(upstream)
        body = await _of_peer(upstream.read())
        headers = {name: value for name in _PASSED_BACK if (value := upstream.headers.get(name)) is not None}
        response = web.Response(body=body, status=upstream.status, headers=headers)
        if (refused := upstream.headers.get(REFUSED_HEADER)) is not None:
            raise RefusedError(parse_refusal(refused), response)
        if (reason := _reason(upstream.status, body)) is not None:
            raise RefusedError(Refusal(reason, CostEstimate(inf, inf)), response)
        return ProxyResult(response, _completion_tokens(body))

    async def _stream(self, upstream: aiohttp.ClientResponse) -> ProxyResult:
        timings = self.request.app[CONTEXT].timings
        # The other side fills silences; these are for its own.
        async with EventStream(self.request, replace(timings, ping_s=2 * timings.ping_s)) as self.out:
            waiting = bytearray()  # the beginning of an event: clients get whole ones, so that an error can follow any
            done = False
            while chunk := await _of_peer(upstream.content.readany()):
                unseen = max(0, len(waiting) - 1)  # an event's end may be cut in two
                waiting += chunk
                end = waiting.rfind(b"\n\n", unseen) + 2
                if end < 2:
                    if len(waiting) > _LONGEST_EVENT:
                        raise _GoneError(f"{self._name} sent an event without end")
                    continue
                events = bytes(waiting[:end])
                del waiting[:end]
                self._events += events.count(b"data: {")
                done = events.endswith(DONE)
                try:
                    await self.out.send(events)
                except ConnectionError:
                    return ProxyResult(self.out.response, self._events, "cut")
            if not done or waiting:
                raise _GoneError(f"{self._name} stopped in the middle")
        return ProxyResult(self.out.response, self._events)

    async def end_in_error(self, stopped: Draining | None) -> ProxyResult:
        """A stream that will not end by itself: its instance has gone, or this one (`stopped`) waits no longer."""
        assert self.out is not None
        gone = InstanceLost(f"The instance {self._name} that was answering has gone; send the request again.")
        await self.out.end_in_error(fault_body(stopped or gone))
        return ProxyResult(self.out.response, self._events, "cut" if stopped else "lost")


async def _of_peer(work: Awaitable[T]) -> T:
    """Something of the other instance; its failure is nobody else's."""
    try:
        return await work
    except (aiohttp.ClientError, OSError) as error:
        raise _GoneError(f"{type(error).__name__}: {error}") from error


def _reason(status: int, body: bytes) -> Reason | None:
    """Why an error is one that another instance might not give; None: it is the answer."""
    if status == 429:
        return "full"
    if status == 503 and _code(body) == ServerBusy.code:
        return "full"
    if status == 503:
        return "unreachable" if _code(body) == Unreachable.code else "draining"
    return "failed" if status == 500 and _code(body) == BackendFailed.code else None


def _code(body: bytes) -> object:
    """Of an error in OpenAI's shape."""
    try:
        return orjson.loads(body)["error"]["code"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return None


def _completion_tokens(body: bytes) -> int:
    """Of a whole answer, without reading all of it."""
    _, found, rest = body.rpartition(b'"completion_tokens":')
    digits = rest[: rest.find(b",")] if found else b""
    return int(digits) if digits.isdigit() else 0
