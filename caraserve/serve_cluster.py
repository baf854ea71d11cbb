"""What makes a server one of several: its part in the cluster, checked, built and wired. For `serve.py`.

check_cluster   before anything is loaded: secrets, TLS, addresses
make_node       with the engine; its routes go into the application
make_router     the same, for requests that other instances may answer
join            when the port listens
"""

import asyncio
import logging
import signal
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf
from random import Random

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
from caraserve.cluster.routing.forwarding import LOCAL, Forwarding, LatencyTargets, refuses_new_requests
from caraserve.cluster.routing.perf_model import DriftWatch
from caraserve.cluster.routing.policies import policy
from caraserve.cluster.state import persistence
from caraserve.cluster.state.publisher import Publisher
from caraserve.cluster.transfer import disk_cache
from caraserve.cluster.transfer.adapter_pool import AdapterPool
from caraserve.cluster.transfer.adapter_store import KEEP_QUESTION
from caraserve.cluster.transfer.peer_client import PeerClient
from caraserve.cluster.transfer.upload import Routes
from caraserve.config import PRELOADED_MODES, ClusterConfig, HttpConfig, LoraConfig
from caraserve.core.batch import ScheduledRow
from caraserve.core.machine_profile import Profile
from caraserve.engine.active_request import ActiveRequest
from caraserve.errors import ConfigError
from caraserve.http.dispatch import ClusterRouter
from caraserve.http.proxy import PeerProxy
from caraserve.http.queue_rebalance import QueueRebalancer
from caraserve.loop import Engine
from caraserve.lora.catalog import AdapterReader
from caraserve.model.spec import ModelSpec
from caraserve.telemetry.metrics import Metrics
from caraserve.util.endpoints import split_address

log = logging.getLogger(__name__)

# A common disk, and a network of 10 Gbit/s: nobody has measured them here, and a holder is always to be preferred.
_DISK_BYTES_PER_MS, _FETCH_MS, _FETCH_BYTES_PER_MS = 2e6, 5.0, 1e6

_LOOK_UP_S = 30.0  # for the address that others reach us by: nothing is served before it is known
_PATIENCE_S = 5.0  # until an instance that hears of no other one takes itself for the first

_TEMPORARY_BYTES = 1 << 30
_PLANNED = ("auto", "loraserve", "s-lora-random", "s-lora-contiguous")  # routings that go by a placement


@dataclass(frozen=True, slots=True)
class Admission:
    """What an instance shows to others, and asks of them."""

    keys: SecretFile | Keyring
    listening: ssl.SSLContext | None
    dialling: ssl.SSLContext | None


def check_cluster(cluster: ClusterConfig, http: HttpConfig) -> Admission:
    """Raises ConfigError for what cannot work or would be open to anybody."""
    check_count(cluster.peers)
    if cluster.peer_host is not None and cluster.peer_port is None:
        raise ConfigError("--peer-host is the address of --peer-port; give both")
    listening, dialling = _tls(cluster)
    if cluster.cluster_secret_file is not None:
        return Admission(SecretFile(cluster.cluster_secret_file), listening, dialling)
    advertised = [cluster.advertise] if cluster.advertise else []
    hosts = [cluster.peer_host or http.host, *(split_address(address)[0] for address in (*advertised, *cluster.peers))]
    for host in hosts:
        if not is_loopback(host):
            raise ConfigError(
                f"--cluster-secret-file is needed: without a secret, anybody who reaches {host} could join"
            )
    if http.keys:
        raise ConfigError(
            "--cluster-secret-file is needed with --api-key or --admin-key: without a secret, every process of this "
            "machine could send requests as another instance does, and needs no key"
        )
    return Admission(Keyring((LOOPBACK_SECRET,)), listening, dialling)


def _tls(cluster: ClusterConfig) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Contexts for listening and for dialling: whoever shows a certificate of the CA is let in, whatever its name. That
    CA is the cluster's own, and addresses of instances come and go."""
    files = cluster.cluster_tls_cert, cluster.cluster_tls_key, cluster.cluster_tls_ca
    if files == (None, None, None):
        return None, None
    cert, key, ca = files
    if cert is None or key is None or ca is None:
        raise ConfigError("--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca belong together; give all three")
    if cluster.peer_port is None:
        raise ConfigError("--cluster-tls-cert needs --peer-port: clients speak plain HTTP on --port")
    contexts = []
    for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(cert, key)
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--cluster-tls-cert {cert}, -key {key}, -ca {ca}: {error.strerror or error}") from None
        contexts.append(context)
    return contexts[0], contexts[1]


def make_node(cluster: ClusterConfig, lora: LoraConfig, admission: Admission, model: str, base_name: str) -> Node:
    """`model`: the base model's digest. Raises ConfigError."""
    if lora.registry is None:
        log.warning("without --registry this instance forgets the cluster's adapters when it ends")
    names = persistence.ClusterRegistryFile(persistence.cluster_registry_path(lora.registry) if lora.registry else None)
    who = cluster.cluster_name, cluster.name, model, cluster.peers
    config = NodeConfig(*who, admission.keys, admission.dialling, base_name)
    return Node(config, names, rng=Random())


def make_router(node: Node, engine: Engine, cluster: ClusterConfig, admission: Admission) -> ClusterRouter:
    """The router between this instance and the others. Close it when HTTP has ended."""
    slo = LatencyTargets(cluster.slo_ttft_ms or inf, cluster.slo_tpot_ms or inf)
    routing = cluster.routing or "auto"
    chosen = None if routing == LOCAL else policy(routing)
    forwarding = Forwarding(node, chosen, slo, engine.catalog.find, lambda: refuses_new_requests(engine), rng=Random())
    proxy = PeerProxy(lambda: node.name, lambda: node.keys, admission.dialling)
    verifier = ForwardVerifier(lambda: node.name, lambda: node.keys)
    return ClusterRouter(forwarding, proxy, verifier, QueueRebalancer(engine, forwarding))


@dataclass(frozen=True, slots=True)
class FleetAdapters:
    """Made with the node, joined with it, closed after it."""

    node: Node
    pool: AdapterPool
    transfers: PeerClient
    planner: PlacementPlanner | None
    can_fetch: bool  # False: the adapters of the start are all that this instance will ever serve

    def routes(self) -> Routes:
        """For the port on which other instances ask."""
        return [*self.pool.store.uploads.routes(), *(self.planner.routes() if self.planner else ())]

    def answer_query(self, forwarding: Forwarding, peer: str, body: QueryBody) -> QueryBody:
        """Answers another instance: whether this one keeps an adapter, or what a request would cost here."""
        return self.pool.store.answer(peer, body) if body[:1] == (KEEP_QUESTION,) else forwarding.quote(peer, body)

    def prepare(self, forwarding: Forwarding) -> None:
        """Before the node starts."""
        if self.can_fetch:
            forwarding.fetcher = self.pool
        if self.planner is not None:
            self.planner.on_plan = forwarding.adopt

    def join(self, stack: AsyncExitStack, publisher: Publisher, engine: Engine, metrics: Metrics) -> None:
        """When the node has started; from then on adapters may be loaded and fetched. `stack` undoes it."""
        self.pool.begin(publisher)
        engine.catalog.on_change = self.pool.changed
        metrics.show(self.pool.families)
        background = self.node.background
        background.run(stack, self.pool.run, "cluster pool")
        planner = self.planner
        if planner is None:
            return
        demand = planner.demand

        def watch(rows: Sequence[tuple[ActiveRequest, ScheduledRow]], ms: float) -> None:
            publisher.watch(rows, ms)
            wall_s = time.time()
            for opened, row in rows:
                asked = opened.request.asked
                if asked.adapter is not None and row.start + row.count >= opened.request.prompt_tokens:
                    demand.count(asked.adapter, wall_s)

        engine.watch = watch
        metrics.show(planner.families)
        background.run(stack, planner.run, "cluster planner")
        if self.can_fetch:
            mending = Reconciler(self.node, self.pool)
            metrics.show(mending.families)
            background.run(stack, lambda: mending.run(lambda: planner.plan), "cluster mending")

    async def close(self) -> None:
        """Ends transfers."""
        await self.pool.close()
        await self.transfers.close()


def disk_bytes(most_bytes: int, *, is_temporary: bool) -> int:
    """What other instances' adapters may take on our disk. Where temporary files are is often memory, or small."""
    return min(most_bytes, _TEMPORARY_BYTES) if is_temporary else most_bytes


def planned(routing: str) -> str | None:
    """The routing by whose placement a fleet keeps its adapters; None: by none. Where somebody else routes there is one
    all the same, or nothing would copy again what an instance had that is gone."""
    if routing == LOCAL:
        return "auto"
    return routing if routing in _PLANNED else None


def make_fleet_adapters(
    node: Node,
    engine: Engine,
    reader: AdapterReader,
    model: ModelSpec,
    lora: LoraConfig,
    cluster: ClusterConfig,
    tls: ssl.SSLContext | None,
) -> FleetAdapters:
    """`tls`: for dialling. Raises ConfigError."""
    stored = disk_cache.DiskCache(disk_cache.beside(lora.registry) if lora.registry else None, model)
    transfers = PeerClient(lambda: node.keys, tls)
    most_bytes = disk_bytes(cluster.adapter_disk_bytes, is_temporary=lora.registry is None)
    pool = AdapterPool(node, engine.catalog, reader, stored, transfers, model, most_bytes)
    planner = None
    if (routing := planned(cluster.routing or "auto")) is not None:
        slo_ms = cluster.slo_tpot_ms or inf
        planner = PlacementPlanner(node, transfers, routing, lora.max_host_adapters_bytes, slo_ms)
    return FleetAdapters(node, pool, transfers, planner, lora.loading_mode not in PRELOADED_MODES)


async def join(
    stack: AsyncExitStack,
    node: Node,
    router: ClusterRouter,
    adapters: FleetAdapters,
    engine: Engine,
    metrics: Metrics,
    profile: Profile | None,
    cluster: ClusterConfig,
    links: LinkSpeeds,
    where: tuple[str, int],
    padded_rank: int | None = None,
) -> Publisher:
    """Connects the engine with the cluster. `where`: host and port on which others can connect now. `padded_rank`: that
    of `LoraConfig`. `stack` undoes it.

    Raises ConfigError.
    """
    if profile is None:
        log.warning(
            "without a profile of this machine the fleet takes it for as slow as its slowest instance that has one; "
            "give --profile"
        )
    drift = DriftWatch(profile, padded_rank=padded_rank) if profile else None
    publisher = Publisher(node, engine, metrics.answers, drift, links, adapters.pool.adopt)
    forwarding = router.forwarding
    adapters.prepare(forwarding)
    listener = NodeListener(
        current_load=publisher.current_load,
        on_registry_change=publisher.apply_registry_changes,
        on_holders_change=adapters.pool.on_holders_change,
        on_member_change=lambda record, before: router.proxy.member_changed(record),
        answer_query=lambda peer, body: adapters.answer_query(forwarding, peer, body),
    )
    stack.push_async_callback(node.stop)
    await node.start(await _advertised(cluster, *where), listener)
    engine.watch = publisher.watch
    metrics.show(publisher.families)
    metrics.show(node.families)
    metrics.show(node.background.families)
    adapters.join(stack, publisher, engine, metrics)
    await publisher.announce()
    forwarding.joined, forwarding.introduced = True, introduction(node)
    metrics.show(forwarding.routing_metrics.families)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, node.reread_secrets)
    node.background.run(stack, publisher.run, "cluster publisher")
    if cluster.routing == "dlora":
        node.background.run(stack, router.rebalancer.run, "cluster queue moves")
    return publisher


def introduction(node: Node, now: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """Whether clients may come: this instance knows the cluster's names, or there is nobody to tell it any."""
    ends_s = now() + _PATIENCE_S
    return lambda: node.protocol.state.agreed or now() >= ends_s


def links_of(profile: Profile | None, lora: LoraConfig) -> LinkSpeeds:
    """How fast adapters come onto this instance's device, as far as the profile knows."""
    blocks = lora.loading_mode == "ondemand"
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
        f"--host {host} is no address that others could connect to, and no way to --peers "
        f"{','.join(cluster.peers)} was found that would tell; give --advertise HOST:PORT"
    )
