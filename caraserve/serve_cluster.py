"""Checks, builds and connects the parts that only an instance with peers has. In the order of a start:

check_cluster   checks secrets, TLS and addresses before anything is loaded
make_cluster    builds the parts, after the engine
add_routes      adds the peers' routes before the server listens
start           listens for peers and joins the cluster, after the server has begun to listen
"""

import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
from caraserve.cluster.membership.member import Member
from caraserve.cluster.node import LocalParts, Node, make_node
from caraserve.cluster.routing.forward_auth import ForwardVerifier
from caraserve.cluster.routing.selector import InstanceSelector
from caraserve.config import ClusterConfig, HttpConfig, LoraConfig
from caraserve.errors import ConfigError
from caraserve.http.app import add_peer_routes, start_peer_http
from caraserve.http.dispatch import ANSWERING_QUESTION, ClusterRouter, QueueRebalancer, is_answering
from caraserve.http.proxy import PeerProxy
from caraserve.http.tls_files import PemFile, TlsFiles, first_context, load_files
from caraserve.loop import Engine
from caraserve.util.option_values import split_address

_LOOK_UP_S = 30.0  # limit for finding this instance's own address, without which it cannot start


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


@dataclass(frozen=True, slots=True)
class ClusterInstance:
    """The parts that an instance with peers has beside its engine, and its router between clients and instances."""

    config: ClusterConfig
    credentials: ClusterCredentials
    node: Node
    router: ClusterRouter

    @property
    def member(self) -> Member:
        """This instance in its cluster."""
        return self.node.member

    def add_routes(self, app: web.Application) -> None:
        """Adds the routes for peers to the clients' application, unless peers have a port of their own."""
        if self.config.peer_port is None:
            add_peer_routes(app, self.member, self.router, self.node.routes())

    def reread(self) -> None:
        """Has the secrets and the certificates read again now."""
        self.member.reread_secrets()
        if self.credentials.tls is not None:
            self.credentials.tls.reread()

    async def start(self, stack: AsyncExitStack, app: web.Application, http: HttpConfig, port: int) -> None:
        """Listens for peers and joins the cluster; `stack` undoes both. `port` is that of clients.

        Raises ConfigError.
        """
        host, peer_port, run = http.host, self.config.peer_port, self.member.background.run
        if peer_port is not None:
            host = self.config.peer_host or host
            runner, port = await start_peer_http(
                self.member, self.router, app, host, peer_port, self.credentials.listening, self.node.routes()
            )
            stack.push_async_callback(runner.cleanup)
        if self.credentials.tls is not None:
            run(stack, self.credentials.tls.watch, "TLS certificate of instances")
        address = await _advertised(self.config, host, port)
        answers = {ANSWERING_QUESTION: self.router.answer_query}
        await self.node.join(stack, address, self.router.proxy.member_changed, answers)
        if self.config.routing == "dlora":
            run(stack, self.router.rebalancer.run, "cluster queue rebalancer")


def make_cluster(
    stack: AsyncExitStack, config: ClusterConfig, lora: LoraConfig, credentials: ClusterCredentials, local: LocalParts
) -> ClusterInstance:
    """Builds all parts; `stack` closes them. Raises ConfigError."""
    node = make_node(stack, config, lora, credentials.keys, credentials.dialling, local)
    router = make_router(node.member, node.selector, local.engine, credentials)
    stack.push_async_callback(router.close)
    return ClusterInstance(config, credentials, node, router)


def make_router(
    member: Member, selector: InstanceSelector, engine: Engine, credentials: ClusterCredentials
) -> ClusterRouter:
    """Builds the router between this instance and the others. Close it after the HTTP server has ended."""
    asks = partial(is_answering, member)
    proxy = PeerProxy(lambda: member.name, lambda: member.keys, credentials.dialling, asks)
    verifier = ForwardVerifier(lambda: member.name, lambda: member.keys)
    return ClusterRouter(selector, proxy, verifier, QueueRebalancer(engine, selector))


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
