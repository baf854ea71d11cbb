"""Checks, builds and connects the parts that only an instance with peers has. In the order of a start:

check_cluster   checks secrets, TLS and addresses before anything is loaded
make_cluster    builds the parts, after the engine
add_routes      adds the peers' routes before the server listens
start           listens for peers and joins the cluster, after the server has begun to listen
"""

import logging
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from random import Random

from aiohttp import web

from caraserve.cluster.membership.auth import LOOPBACK_SECRET, Keyring, SecretFile
from caraserve.cluster.membership.dns import (
    PeerResolver,
    check_count,
    is_loopback,
    is_wildcard,
    join_address,
    outward_address,
)
from caraserve.cluster.membership.node import Node, NodeConfig, NodeListener, QueryBody
from caraserve.cluster.placement.planner import PlacementPlanner
from caraserve.cluster.placement.reconciler import Reconciler
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.forward_auth import ForwardVerifier
from caraserve.cluster.routing.perf_model import DriftWatch
from caraserve.cluster.routing.policies import policy
from caraserve.cluster.routing.selector import (
    LOCAL,
    AdapterFetcher,
    InstanceSelector,
    LatencyTargets,
    refuses_new_requests,
)
from caraserve.cluster.state import persistence
from caraserve.cluster.state.publisher import Publisher
from caraserve.cluster.state.shared_settings import SharedSettings
from caraserve.cluster.transfer.adapter_pool import AdapterPool
from caraserve.cluster.transfer.adapter_store import KEEP_QUESTION
from caraserve.cluster.transfer.disk_cache import DiskCache, beside
from caraserve.cluster.transfer.peer_client import PeerClient
from caraserve.cluster.transfer.upload import Routes
from caraserve.cluster.transfer.upload_removal import REMOVE_QUESTION, UploadRemoval
from caraserve.config import ClusterConfig, HttpConfig, LoraConfig
from caraserve.core.machine_profile import Profile
from caraserve.engine.stats import EngineObservers
from caraserve.errors import ConfigError
from caraserve.http.app import add_peer_routes, start_peer_http
from caraserve.http.dispatch import ANSWERING_QUESTION, ClusterRouter, is_answering
from caraserve.http.proxy import PeerProxy
from caraserve.http.queue_rebalance import QueueRebalancer
from caraserve.http.tls_files import PemFile, TlsFiles, first_context, load_files
from caraserve.loop import Engine
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.lora.uploads import AdapterUploads
from caraserve.model.spec import ModelSpec
from caraserve.telemetry.metrics import Metrics
from caraserve.util.option_values import split_address

log = logging.getLogger(__name__)

# Assumed, not measured: a common disk and a network of 10 Gbit/s. An instance that has the adapter is always preferred.
_DISK_BYTES_PER_MS, _FETCH_MS, _FETCH_BYTES_PER_MS = 2e6, 5.0, 1e6

_LOOK_UP_S = 30.0  # limit for finding this instance's own address, without which it cannot start
_TEMPORARY_BYTES = 1 << 30
_WITH_PLACEMENT = ("auto", "loraserve", "s-lora-random", "s-lora-contiguous")  # routings that follow a placement


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
    """The secret and the certificates with which instances authenticate. `tls` is None for plain HTTP."""

    keys: SecretFile | Keyring
    tls: TlsFiles | None = None

    @property
    def listening(self) -> ssl.SSLContext | None:
        """The TLS context for other instances' connections."""
        return first_context(self.tls)

    @property
    def dialling(self) -> ssl.SSLContext | None:
        """The TLS context for connections to other instances."""
        return None if self.tls is None else self.tls.contexts[1]


def check_cluster(cluster: ClusterConfig, http: HttpConfig) -> ClusterCredentials:
    """Checks the options, and reads the secret and the certificates.

    Raises ConfigError, also for options that would let any machine or process join without a secret.
    """
    check_count(cluster.peers)
    if cluster.peer_host is not None and cluster.peer_port is None:
        raise ConfigError("--peer-host is the address of --peer-port; give both")
    tls = _tls(cluster)
    if cluster.cluster_secret_file is not None:
        return ClusterCredentials(SecretFile(cluster.cluster_secret_file), tls)
    advertised = [cluster.advertise] if cluster.advertise else []
    hosts = [cluster.peer_host or http.host, *(split_address(address)[0] for address in (*advertised, *cluster.peers))]
    for host in hosts:
        if not is_loopback(host):
            raise ConfigError(
                f"--cluster-secret-file is needed: without a secret, every machine that reaches {host} could join"
            )
    if http.needs_keys:
        raise ConfigError(
            "--cluster-secret-file is needed with --api-key, --admin-key or --api-key-file: without a secret, every "
            "process of this machine could send requests as another instance does, and needs no key"
        )
    return ClusterCredentials(Keyring((LOOPBACK_SECRET,)), tls)


def _tls(cluster: ClusterConfig) -> TlsFiles | None:
    """Returns the TLS contexts for listening and for connecting; None for plain HTTP. Raises ConfigError."""
    files = cluster.cluster_tls_cert, cluster.cluster_tls_key, cluster.cluster_tls_ca
    if files == (None, None, None):
        return None
    cert, key, ca = files
    if cert is None or key is None or ca is None:
        raise ConfigError("--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca belong together; give all three")
    if cluster.peer_port is None:
        raise ConfigError("--cluster-tls-cert needs --peer-port: clients speak plain HTTP on --port")
    return TlsFiles(partial(_peer_contexts, cert, key, ca), [cert, key, ca])


def _peer_contexts(cert: Path, key: Path, ca: Path) -> list[ssl.SSLContext]:
    """Returns the TLS contexts for listening and for connecting.

    They accept any certificate of the CA, whatever its name: the CA is the cluster's own, and instances' addresses
    change.
    """
    contexts = []
    for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        load_files(
            context,
            PemFile("--cluster-tls-cert", cert),
            PemFile("--cluster-tls-key", key),
            PemFile("--cluster-tls-ca", ca),
        )
        contexts.append(context)
    return contexts


def make_node(
    cluster: ClusterConfig, lora: LoraConfig, credentials: ClusterCredentials, model: str, base_name: str
) -> Node:
    """Builds the node. `model` is the base model's digest. Raises ConfigError."""
    if lora.registry is None:
        log.warning("without --registry this instance forgets the cluster's adapters when it ends")
    names = persistence.ClusterRegistryFile(persistence.cluster_registry_path(lora.registry) if lora.registry else None)
    identity = cluster.cluster_name, cluster.name, model, cluster.peers
    config = NodeConfig(*identity, credentials.keys, credentials.dialling, base_name)
    return Node(config, names, rng=Random())


def make_router(
    node: Node,
    engine: Engine,
    cluster: ClusterConfig,
    credentials: ClusterCredentials,
    fetcher: AdapterFetcher | None = None,
) -> ClusterRouter:
    """Builds the router between this instance and the others. Close it after the HTTP server has ended."""
    slo = LatencyTargets(cluster.slo_ttft_ms or inf, cluster.slo_tpot_ms or inf)
    routing = cluster.routing or "auto"
    selector = InstanceSelector(
        node,
        None if routing == LOCAL else policy(routing),
        slo,
        engine.catalog.find,
        lambda: refuses_new_requests(engine),
        fetcher=fetcher,
        rng=Random(),
    )
    asks = partial(is_answering, node)
    proxy = PeerProxy(lambda: node.name, lambda: node.keys, credentials.dialling, asks)
    verifier = ForwardVerifier(lambda: node.name, lambda: node.keys)
    return ClusterRouter(selector, proxy, verifier, QueueRebalancer(engine, selector))


def disk_bytes(most_bytes: int, *, is_temporary: bool) -> int:
    """Returns the disk space for other instances' adapters: at most 1 GiB of temporary files, often held in memory."""
    return min(most_bytes, _TEMPORARY_BYTES) if is_temporary else most_bytes


def placement_routing(routing: str) -> str | None:
    """Returns the routing whose placement the cluster follows, or None for routings without placement.

    With `local`, for requests that another router has routed, it is `auto`: its placement keeps copies of the adapters
    of instances that fail.
    """
    if routing == LOCAL:
        return "auto"
    return routing if routing in _WITH_PLACEMENT else None


@dataclass(frozen=True, slots=True)
class ClusterInstance:
    """The parts that an instance with peers has beside its engine."""

    config: ClusterConfig
    lora: LoraConfig
    credentials: ClusterCredentials
    engine: Engine
    observers: EngineObservers
    node: Node
    pool: AdapterPool
    settings: SharedSettings
    router: ClusterRouter
    planner: PlacementPlanner | None
    removal: UploadRemoval

    def routes(self) -> Routes:
        """Returns the HTTP routes for other instances, beside those of `add_peer_routes`."""
        return [*self.pool.store.uploads.routes(), *(self.planner.routes() if self.planner else ())]

    def add_routes(self, app: web.Application) -> None:
        """Adds the routes for peers to the clients' application, unless peers have a port of their own."""
        if self.config.peer_port is None:
            add_peer_routes(app, self.node, self.router, self.routes())

    def reread(self) -> None:
        """Has the secrets and the certificates read again now."""
        self.node.reread_secrets()
        if self.credentials.tls is not None:
            self.credentials.tls.reread()

    async def start(
        self,
        stack: AsyncExitStack,
        app: web.Application,
        http: HttpConfig,
        port: int,
        metrics: Metrics,
        profile: Profile | None,
    ) -> None:
        """Listens for peers and joins the cluster; `stack` undoes both. `port` is that of clients.

        Raises ConfigError.
        """
        host, peer_port = http.host, self.config.peer_port
        if peer_port is not None:
            host = self.config.peer_host or host
            runner, port = await start_peer_http(
                self.node, self.router, app, host, peer_port, self.credentials.listening, self.routes()
            )
            stack.push_async_callback(runner.cleanup)
        if self.credentials.tls is not None:
            self.node.background.run(stack, self.credentials.tls.watch, "TLS certificate of instances")
        await self.join(stack, metrics, profile, host, port)

    async def join(
        self, stack: AsyncExitStack, metrics: Metrics, profile: Profile | None, host: str, port: int
    ) -> None:
        """Joins the cluster; `stack` leaves it. Other instances can connect to `host` and `port`. Raises ConfigError.

        The pool starts before adapters are announced, so that it misses no change of their names, and forwarding
        starts after that, when other instances can find them.
        """
        if profile is None:
            log.warning(
                "without a profile of this machine the cluster takes it for as slow as its slowest instance with a "
                "profile; give --profile"
            )
        node, pool, selector = self.node, self.pool, self.router.selector
        drift = DriftWatch(profile, padded_rank=self.lora.padded_rank) if profile else None
        links = link_speeds(profile, self.lora)
        publisher = Publisher(node, self.engine, metrics.answers, drift, links, pool.adopt)
        listener = NodeListener(
            current_load=publisher.current_load,
            on_registry_change=publisher.apply_registry_changes,
            on_settings_change=self.settings.apply,
            on_holders_change=pool.on_holders_change,
            on_member_change=lambda record, before: self.router.proxy.member_changed(record),
            answer_query=self._answer_query,
        )
        stack.push_async_callback(node.stop)
        await node.start(await _advertised(self.config, host, port), listener)
        self.observers.iterations.append(publisher.watch)
        pool.begin(publisher)
        self.observers.adapters.append(pool.changed)
        self.observers.uploads.append(publisher.upload_changed)
        self.observers.removals.append(self.removal.removed)
        node.background.run(stack, pool.run, "cluster pool")
        for families in (publisher.families, node.families, node.background.families, pool.families):
            metrics.show(families)
        if self.planner is not None:
            self._start_placement(stack, self.planner, metrics)
        self.observers.settings.append(self.settings.changed)
        await self.settings.announce()
        await publisher.announce()
        selector.join()
        metrics.show(selector.routing_metrics.families)
        node.background.run(stack, publisher.run, "cluster publisher")
        if self.config.routing == "dlora":
            node.background.run(stack, self.router.rebalancer.run, "cluster queue rebalancer")

    def _start_placement(self, stack: AsyncExitStack, planner: PlacementPlanner, metrics: Metrics) -> None:
        """Starts the planner, and the moves of adapters that its plans ask for."""
        self.observers.iterations.append(planner.count_prompts)
        metrics.show(planner.families)
        self.node.background.run(stack, planner.run, "cluster planner")
        if not self.lora.mode.preloads:
            reconciler = Reconciler(self.node, self.pool)
            metrics.show(reconciler.families)
            self.node.background.run(stack, lambda: reconciler.run(lambda: planner.plan), "cluster reconciler")

    def _answer_query(self, peer: str, body: QueryBody) -> QueryBody:
        """Answers a query of another instance: for a promise to keep an adapter, for the removal of an uploaded one,
        whether a request that it has forwarded is still answered, or for a request's cost here."""
        match body[:1]:
            case (kind,) if kind == KEEP_QUESTION:
                return self.pool.store.answer(peer, body)
            case (kind,) if kind == REMOVE_QUESTION:
                return self.removal.answer(body)
            case (kind,) if kind == ANSWERING_QUESTION:
                return self.router.answer_query(peer, body)
        return self.router.selector.quote(peer, body)


def make_cluster(
    stack: AsyncExitStack,
    config: ClusterConfig,
    credentials: ClusterCredentials,
    lora: LoraConfig,
    engine: Engine,
    observers: EngineObservers,
    *,
    reader: AdapterReader,
    settings: ReplicatedSettings,
    uploads: AdapterUploads,
    model: ModelSpec,
    model_digest: str,
) -> ClusterInstance:
    """Builds all parts; `stack` closes them. Raises ConfigError."""
    node = make_node(config, lora, credentials, model_digest, engine.base_name)
    stack.push_async_callback(node.close)
    stored = DiskCache(beside(lora.registry) if lora.registry else None, model)
    transfers = PeerClient(lambda: node.keys, credentials.dialling)
    most_bytes = disk_bytes(config.adapter_disk_bytes, is_temporary=lora.registry is None)
    pool = AdapterPool(node, engine.catalog, reader, stored, transfers, model, most_bytes)
    # In modes that load all adapters at the start, this instance serves only those.
    router = make_router(node, engine, config, credentials, None if lora.mode.preloads else pool)
    stack.push_async_callback(router.close)
    stack.push_async_callback(transfers.close)
    stack.push_async_callback(pool.close)
    shared = SharedSettings(node, settings)
    removal = UploadRemoval(node, uploads)
    stack.push_async_callback(removal.close)
    planner = None
    if (routing := placement_routing(config.routing or "auto")) is not None:
        slo_ms, on_plan = config.slo_tpot_ms or inf, router.selector.adopt
        planner = PlacementPlanner(node, transfers, routing, lora.max_host_adapters_bytes, slo_ms, on_plan)
    return ClusterInstance(config, lora, credentials, engine, observers, node, pool, shared, router, planner, removal)


def link_speeds(profile: Profile | None, lora: LoraConfig) -> LinkSpeeds:
    """Returns the speeds at which this instance loads adapters; without a profile, loads from host memory are free."""
    blocks = lora.mode.stops_others
    disk_and_fetch = _DISK_BYTES_PER_MS, _FETCH_MS, _FETCH_BYTES_PER_MS
    if profile is None:
        return LinkSpeeds(0.0, inf, *disk_and_fetch, blocks_batch=blocks)
    return LinkSpeeds(profile.link_latency_ms, profile.link_bytes_per_s / 1000, *disk_and_fetch, blocks_batch=blocks)


async def _advertised(cluster: ClusterConfig, host: str, port: int) -> str:
    if cluster.advertise is not None:
        return cluster.advertise
    if not is_wildcard(host):
        return join_address(host, port)
    resolver = PeerResolver()
    for peer in cluster.peers:
        if (found := await outward_address(peer, resolver, _LOOK_UP_S)) is not None:
            return join_address(found, port)
    raise ConfigError(
        f"--host {host} is no address to which other instances could connect, and none of --peers "
        f"{','.join(cluster.peers)} was reached to find one; give --advertise HOST:PORT"
    )
