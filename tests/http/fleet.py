"""Several servers over fake engines that forward requests to one another, and peers that send any bytes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from ssl import SSLContext
from typing import Any

import aiohttp
from aiohttp import web

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.member import QueryBody
from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.routing.cost import Backlog
from caraserve.cluster.routing.forward_auth import CLAIMS_HEADER, INSTANCE_HEADER, PREFIX, ForwardVerifier
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.router import Instance
from caraserve.cluster.routing.selector import (
    LOCAL,
    AdapterFetcher,
    InstanceSelector,
    LatencyTargets,
    refuses_new_requests,
)
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter, Tier
from caraserve.core.combined_names import is_combined, members_of
from caraserve.http.app import add_peer_routes, make_app, start_http, start_peer_http
from caraserve.http.context import HttpTimings
from caraserve.http.dispatch import ANSWERING_QUESTION, ClusterRouter, QueueRebalancer, is_answering
from caraserve.http.proxy import PeerProxy
from caraserve.http.tracing import Tracer
from caraserve.lora.combinations import combination_of
from caraserve.lora.management import AdapterManagement
from caraserve.util.least_rate import LeastRate
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, http_config, new_metrics

KEYS = Keyring((b"a secret of the tests",))
NO_HURRY = LeastRate(60.0, 1.0)
MODEL = PerfModel(0.01, 0.1, 5.0, False, 1.0, 0.05, 0.001)


@dataclass
class World:
    """The true state of the cluster, which every instance sees unless a test gives it another view."""

    records: dict[str, MemberRecord] = field(default_factory=dict)
    loads: dict[str, Backlog] = field(default_factory=dict)
    names: dict[str, RegisteredAdapter] = field(default_factory=dict)
    held: dict[str, dict[str, Tier]] = field(default_factory=dict)
    uploads: dict[str, dict[str, RegisteredAdapter]] = field(default_factory=dict)  # name → instance → adapter
    routers: dict[str, ClusterRouter] = field(default_factory=dict)

    def add(self, name: str, port: int) -> None:
        self.records[name] = MemberRecord(name, f"127.0.0.1:{port}", 1, 0, MemberState.ALIVE)
        self.loads[name] = Backlog()


class View:
    """The cluster as one instance sees it. `stale` replaces the true instances by others."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.stale: tuple[Instance, ...] | None = None
        self.names: dict[str, RegisteredAdapter] | None = None
        self.registry_version = 1
        self.has_registry = False
        self._world = world

    def instances(self) -> tuple[Instance, ...]:
        if self.stale is not None:
            return self.stale
        return tuple(Instance(name, MODEL, backlog) for name, backlog in self._world.loads.items())

    def record(self, name: str) -> MemberRecord | None:
        return self._world.records.get(name)

    def adapter(self, name: str) -> RegisteredAdapter | None:
        return (self._world.names if self.names is None else self.names).get(name)

    def adapters(self) -> Iterator[RegisteredAdapter]:
        return iter(self._world.names.values())

    def holders(self, digest: str) -> Mapping[str, Tier]:
        return self._world.held.get(digest, {})

    def uploads(self, name: str) -> dict[str, RegisteredAdapter]:
        found = self._world.uploads.get(name, {})
        return {instance: adapter for instance, adapter in found.items() if instance != self.name}

    async def query(self, peer: str, body: QueryBody, timeout_s: float) -> QueryBody | None:
        router = self._world.routers.get(peer)
        if router is None:
            return (0,) if body[0] == ANSWERING_QUESTION else ()  # a raw peer
        if body[0] == ANSWERING_QUESTION:
            return router.answer_query(self.name, body)
        return router.selector.quote(self.name, body)

    async def accept(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPServiceUnavailable

    def members(self) -> tuple[MemberRecord, ...]:
        return tuple(self._world.records.values())

    def load(self, name: str) -> tuple[InstanceLoad, float] | None:
        return None

    def remove(self, name: str) -> None:
        self._world.names.pop(name, None)


def _found(engine: FakeEngine, name: str) -> Any:
    """Returns an instance's adapter or combination, as a catalog finds it."""
    members = [(engine.loaded.get(member), weight) for member, weight in members_of(name)]
    if not is_combined(name) or not all(info for info, _ in members):
        return engine.loaded.get(name)
    found: Any = members
    return combination_of(found)


@dataclass
class Server:
    """One instance of a test, with its fake engine."""

    engine: FakeEngine
    view: View
    router: ClusterRouter
    client: Client
    forwards: list[tuple[str, str]]  # (peer, id) of each attempt to forward
    paths: list[str]  # of its routes
    app: web.Application

    @property
    def routing_metrics(self) -> Any:
        return self.router.selector.routing_metrics


class RecordingProxy(PeerProxy):
    """A proxy that records the requests that it forwards."""

    forwards: list[tuple[str, str]]

    async def forward(self, request: Any, peer: Any, forwarded: Any) -> Any:
        self.forwards.append((peer.name, forwarded.id))
        return await super().forward(request, peer, forwarded)


RawPeer = Callable[[web.Request, "RawAnswer"], Awaitable[web.StreamResponse]]


@dataclass
class RawAnswer:
    """The request that reached a raw peer."""

    bodies: list[bytes] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)


class Fleet:
    """The instances of one test."""

    def __init__(
        self, stack: AsyncExitStack, session: aiohttp.ClientSession, routing: str, slo: LatencyTargets
    ) -> None:
        self.world = World()
        self.servers: dict[str, Server] = {}
        self._stack, self._session, self._routing, self._slo = stack, session, routing, slo

    def __getitem__(self, name: str) -> Server:
        return self.servers[name]

    async def start(
        self,
        name: str,
        engine: FakeEngine | None = None,
        timings: HttpTimings | None = None,
        tls: tuple[SSLContext, SSLContext] | None = None,
        fetcher: AdapterFetcher | None = None,
        tracer: Tracer | None = None,
        management: AdapterManagement | None = None,
        pace: LeastRate = NO_HURRY,
        **settings: Any,
    ) -> Server:
        """An instance with a fake engine. `tls`: to listen, for others, and to dial. `pace`: of others' answers."""
        engine = engine or FakeEngine()
        view = View(name, self.world)
        chosen = None if self._routing == LOCAL else Policy(self._routing)
        selector = InstanceSelector(
            *(view, view, chosen, self._slo, partial(_found, engine), lambda: refuses_new_requests(engine)),
            fetcher=fetcher,
            rng=Random(name),
        )
        selector.join()
        node: Any = view
        asks = partial(is_answering, node)
        proxy = RecordingProxy(lambda: name, lambda: KEYS, tls[1] if tls else None, asks, pace)
        proxy.forwards = []
        gate = ForwardVerifier(lambda: name, lambda: KEYS)
        router = ClusterRouter(selector, proxy, gate, QueueRebalancer(engine, selector))
        self._stack.push_async_callback(router.close)
        config = http_config(**settings)
        app = make_app(
            *(engine, config, new_metrics()),
            allow_lora_updates=True,
            timings=timings,
            cluster=view,
            router=router,
            tracer=tracer,
            management=management,
        )
        add_peer_routes(app, node, router)
        runner, port = await start_http(app, config)
        self._stack.push_async_callback(runner.cleanup)
        self.world.add(name, port)
        if tls is not None:
            runner, peer_port = await start_peer_http(node, router, app, "127.0.0.1", 0, tls[0])
            self._stack.push_async_callback(runner.cleanup)
            self.world.add(name, peer_port)
        self.world.routers[name] = router
        for adapter in engine.loaded.values():
            self.world.names[adapter.name] = RegisteredAdapter(
                adapter.name, adapter.digest, adapter.rank, adapter.num_bytes
            )
            self.world.held.setdefault(adapter.digest, {})[name] = Tier.HOST
        paths = [resource.canonical for resource in app.router.resources()]
        server = Server(engine, view, router, Client(self._session, port), proxy.forwards, paths, app)
        self.servers[name] = server
        return server

    async def start_raw(self, name: str, handler: RawPeer) -> RawAnswer:
        """Starts a peer whose `handler` writes every byte; only the instance header is added."""
        seen = RawAnswer()

        async def take(request: web.Request) -> web.StreamResponse:
            seen.bodies.append(await request.read())
            seen.claims.append(json.loads(request.headers[CLAIMS_HEADER]))
            seen.headers.append(request.headers)
            return await handler(request, seen)

        async def sign(request: web.Request, response: web.StreamResponse) -> None:
            response.headers[INSTANCE_HEADER] = name

        app = web.Application()
        app.router.add_post(PREFIX + "/{path:.*}", take)
        app.on_response_prepare.append(sign)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._stack.push_async_callback(runner.cleanup)
        self.world.add(name, int(runner.addresses[0][1]))
        return seen

    def add_absent(self, name: str) -> None:
        """Adds an instance that cannot be reached and that the cluster still takes for alive."""
        self.world.add(name, 1)


@asynccontextmanager
async def fleet(
    *names: str,
    routing: str = "first-fit",
    slo: LatencyTargets | None = None,
    raw: Mapping[str, RawPeer] | None = None,
) -> AsyncIterator[Fleet]:
    """Yields instances, and `raw` peers by name. With `first-fit`, a request goes to the first name that has room."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        running = Fleet(stack, session, routing, slo or LatencyTargets())
        for name in names:
            await running.start(name)
        for name, handler in (raw or {}).items():
            await running.start_raw(name, handler)
        yield running


async def streamed(*pieces: bytes, request: web.Request, die: bool = False) -> web.StreamResponse:
    """Writes these bytes as an event stream; with `die`, closes the connection after them."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)
    if die:
        assert request.transport is not None
        request.transport.abort()
    return response


def streams(*pieces: bytes, die: bool = False) -> RawPeer:
    """Returns a peer that answers with `streamed`."""

    async def handle(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        return await streamed(*pieces, request=request, die=die)

    return handle


def answers(make: Callable[[], web.Response]) -> RawPeer:
    """Returns a peer that answers with what `make` returns."""

    async def handle(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        return make()

    return handle


async def die(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
    """A peer that closes the connection."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


FULL = Backlog(requests=40)  # for first-fit
NEVER = inf
