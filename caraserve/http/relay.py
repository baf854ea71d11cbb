"""A request's way to another instance and its answer's way back, byte for byte. Called by `dispatch.py`.

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
from typing import TypeVar

import aiohttp
import orjson
from aiohttp import web

from caraserve.cluster.cost import Estimate
from caraserve.cluster.forward import Peer
from caraserve.cluster.hop import INSTANCE, PREFIX, REFUSED, Hop, refusal_of, signed
from caraserve.cluster.router import Reason, Refusal
from caraserve.cluster.seal import Keyring
from caraserve.errors import BackendFailed, InstanceLost
from caraserve.http.context import CONTEXT, REQUEST_ID
from caraserve.http.messages import fault_body
from caraserve.http.sse import DONE, EventStream, event

_CONNECT_S = 0.5
_IDLE_S = 15.0  # shorter than the server's own patience, so that it is never the one who closes
_READ_BYTES = 64 << 10  # of an answer that wait here for a slow client, at most twice over
_LONGEST_EVENT = 32 << 20
_HASHED_IN_PLACE = 64 << 10  # bytes; more would hold up the event loop
_PASSED_ON = ("traceparent", "tracestate", "baggage", "Content-Type")
_PASSED_BACK = ("Content-Type", "Retry-After", "retry-after-ms", "x-caraserve-phases")

T = TypeVar("T")


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
class Parcel:
    """What is forwarded: the client's own body, and what its headers do not say."""

    body: bytes
    digest: bytes  # of the body
    id: str
    adapter: str | None
    adapter_digest: str
    seed: int | None


@dataclass(frozen=True, slots=True)
class Carried:
    """An answer that came back, whole or not."""

    response: web.StreamResponse
    tokens: int  # of it, as far as can be seen from outside
    lost: bool = False


async def body_digest(body: bytes) -> bytes:
    """What signatures say of a body."""
    if len(body) > _HASHED_IN_PLACE:
        return await asyncio.to_thread(lambda: hashlib.sha256(body).digest())
    return hashlib.sha256(body).digest()


class Relays:
    """Connections to all other instances, kept open between requests, and what is under way on them."""

    def __init__(self, me: Callable[[], str], keys: Callable[[], Keyring], tls: SSLContext | None) -> None:
        """`tls`: for connecting; None: instances speak plain HTTP."""
        self._me, self._keys, self._scheme = me, keys, "https" if tls else "http"
        self._open: dict[str, set[asyncio.Timeout]] = {}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=tls or True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            read_bufsize=_READ_BYTES,
        )

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()

    def dead(self, name: str) -> None:
        """Membership says so: whatever that instance was answering is lost, though its connections stand still."""
        for scope in self._open.pop(name, ()):
            if not scope.expired():
                scope.reschedule(0.0)

    async def carry(self, request: web.Request, peer: Peer, parcel: Parcel) -> Carried:
        """Has `peer` answer a client's request. Raises UnreachedError or RefusedError, the client unaware."""
        passage = _Passage(request, peer.name)
        try:
            async with asyncio.timeout(None) as scope:
                with self._watched(peer.name, scope):
                    return await self._exchange(passage, peer, parcel)
        except (_GoneError, TimeoutError) as error:
            if passage.out is None or not passage.out.started:
                raise UnreachedError(str(error)) from error
            return await passage.end_in_error()

    async def _exchange(self, passage: "_Passage", peer: Peer, parcel: Parcel) -> Carried:
        request = passage.request
        hop = Hop(
            *(parcel.id, peer.attempt, self._me(), peer.name, parcel.adapter, parcel.adapter_digest, parcel.seed),
            insists=peer.insists,
            time_ms=int(time.time() * 1000),
        )
        path = PREFIX + request.path
        headers = {name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None}
        headers |= signed(self._keys(), path, hop, parcel.digest) | {"X-Request-Id": request[REQUEST_ID]}
        url = f"{self._scheme}://{peer.address}{path}"
        upstream = await _of_peer(self._session.post(url, data=parcel.body, headers=headers, allow_redirects=False))
        try:
            return await passage.take(upstream)
        finally:
            upstream.close()  # which ends the work there, unless it has ended

    @contextlib.contextmanager
    def _watched(self, name: str, scope: asyncio.Timeout) -> Iterator[None]:
        scopes = self._open.setdefault(name, set())
        scopes.add(scope)
        try:
            yield
        finally:
            scopes.discard(scope)
            if not scopes and self._open.get(name) is scopes:
                del self._open[name]


class _Passage:
    """One answer on its way to the client."""

    def __init__(self, request: web.Request, name: str) -> None:
        self.request = request
        self.out: EventStream | None = None
        self._name = name
        self._events = 0

    async def take(self, upstream: aiohttp.ClientResponse) -> Carried:
        """Passes an answer on. Raises _GoneError or RefusedError."""
        if INSTANCE not in upstream.headers:
            raise _GoneError(
                f"{self._name} lets nothing in: {upstream.status} {(await _of_peer(upstream.text()))[:500]}"
            )
        if upstream.content_type == "text/event-stream":
            return await self._stream(upstream)
        body = await _of_peer(upstream.read())
        headers = {name: value for name in _PASSED_BACK if (value := upstream.headers.get(name)) is not None}
        response = web.Response(body=body, status=upstream.status, headers=headers)
        if (refused := upstream.headers.get(REFUSED)) is not None:
            raise RefusedError(refusal_of(refused), response)
        if (reason := _reason(upstream.status, body)) is not None:
            raise RefusedError(Refusal(reason, Estimate(inf, inf)), response)
        return Carried(response, _completion_tokens(body))

    async def _stream(self, upstream: aiohttp.ClientResponse) -> Carried:
        timings = self.request.app[CONTEXT].timings
        # The other side fills silences; these are for its own.
        async with EventStream(self.request, replace(timings, ping_s=2 * timings.ping_s)) as self.out:
            waiting = b""  # the beginning of an event: clients get whole ones, so that an error can follow any
            done = False
            while chunk := await _of_peer(upstream.content.readany()):
                waiting += chunk
                end = waiting.rfind(b"\n\n") + 2
                if end < 2:
                    if len(waiting) > _LONGEST_EVENT:
                        raise _GoneError(f"{self._name} sent an event without end")
                    continue
                events, waiting = waiting[:end], waiting[end:]
                self._events += events.count(b"data: {")
                done = events.endswith(DONE)
                try:
                    await self.out.send(events)
                except ConnectionError:
                    return Carried(self.out.response, self._events)  # the client has left
            if not done or waiting:
                raise _GoneError(f"{self._name} stopped in the middle")
        return Carried(self.out.response, self._events)

    async def end_in_error(self) -> Carried:
        """A stream that its instance will not end."""
        assert self.out is not None
        error = InstanceLost(f"The instance {self._name} that was answering has gone; send the request again.")
        self.out.response.force_close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(self.request.app[CONTEXT].timings.write_s):
                await self.out.send(event(fault_body(error)) + DONE)
        return Carried(self.out.response, self._events, lost=True)


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
    if status == 503:
        return "draining"
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
