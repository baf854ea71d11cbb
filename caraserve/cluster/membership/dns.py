"""Name resolution for connections to peers, and the addresses of instances.

A look-up cannot be cancelled: it ends when the system's resolver gives up, which may take half a minute. Look-ups in
the event loop's thread pool, which is what aiohttp's ThreadedResolver uses, would fill that pool, and any pool of
fixed size delays other names while its threads wait for a name server that does not answer. So each look-up has a
thread of its own, and a name is looked up once at a time, however many callers wait for it or have given up.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from concurrent.futures import Future
from threading import Thread

from aiohttp.abc import AbstractResolver, ResolveResult

from caraserve.cluster.membership.events import CLUSTER_FULL
from caraserve.cluster.membership.swim import MAX_LIVE
from caraserve.errors import ConfigError
from caraserve.util.option_values import split_address

HostAddress = tuple[int, str]  # family, address


class PeerResolver(AbstractResolver):
    """A resolver for aiohttp's connectors, and for callers that need the addresses alone."""

    def __init__(self) -> None:
        self._under_way: dict[str, Future[list[HostAddress]]] = {}

    async def addresses(self, host: str) -> list[HostAddress]:
        """Returns all addresses of a host. Raises OSError when it has none. Takes as long as the system's resolver."""
        try:
            return _look_up(host, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            pass  # a name
        future = self._under_way.get(host)
        if future is None:
            future = self._under_way[host] = Future()
            future.add_done_callback(lambda _: self._under_way.pop(host))
            try:
                Thread(target=_resolve, args=(host, future), name="caraserve-resolver", daemon=True).start()
            except RuntimeError as error:  # the limit of threads is reached
                future.set_exception(OSError(f"{host}: {error}"))
        return await asyncio.shield(asyncio.wrap_future(future))

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Implements aiohttp's AbstractResolver."""
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=address, port=port, family=own_family, proto=0, flags=flags)
            for own_family, address in await self.addresses(host)
            if family in (socket.AF_UNSPEC, own_family)
        ]

    async def close(self) -> None:
        """Does nothing: look-ups end by themselves."""


def _resolve(host: str, future: "Future[list[HostAddress]]") -> None:
    try:
        future.set_result(_look_up(host, socket.AI_ADDRCONFIG))
    except (OSError, UnicodeError) as error:
        future.set_exception(OSError(f"{host}: {error}"))


def _look_up(host: str, flags: int) -> list[HostAddress]:
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [(family, _scoped(*map(str, address))) for family, _, _, _, address in infos]


def _scoped(address: str, port: str, flow: str = "0", scope: str = "0") -> str:
    return address if scope == "0" or "%" in address else f"{address}%{scope}"


# --- addresses of instances ---

_PATIENCE_S = 2.0  # for the name servers to answer


def join_address(host: str, port: int) -> str:
    """Returns HOST:PORT, or [IPV6]:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether a host is reachable from this machine only. Names other than localhost are not: they may
    resolve otherwise elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_wildcard(host: str) -> bool:
    """Returns whether a host stands for all of this machine's addresses, to which no other machine can connect."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


async def resolve_peers(
    peers: Iterable[str], resolver: PeerResolver, patience_s: float = _PATIENCE_S
) -> tuple[tuple[str, ...], list[str]]:
    """Returns all addresses behind the peers, each once and in order, and the peers that do not resolve within
    `patience_s`."""
    peers = tuple(peers)
    answers = await asyncio.gather(*(_addresses(split_address(peer)[0], resolver, patience_s) for peer in peers))
    found: dict[str, None] = {}
    for peer, answer in zip(peers, answers, strict=True):
        found |= {join_address(address, split_address(peer)[1]): None for _, address in answer}
    return tuple(found), [peer for peer, answer in zip(peers, answers, strict=True) if not answer]


async def _addresses(host: str, resolver: PeerResolver, patience_s: float) -> list[HostAddress]:
    try:
        async with asyncio.timeout(patience_s):
            return await resolver.addresses(host)
    except (OSError, TimeoutError):
        return []


def check_count(addresses: tuple[str, ...]) -> None:
    """Raises ConfigError for more instances than can connect each to each."""
    if len(addresses) > MAX_LIVE:
        raise ConfigError(f"--peers stands for {len(addresses)} instances: {CLUSTER_FULL}")


async def outward_address(peer: str, resolver: PeerResolver, patience_s: float = _PATIENCE_S) -> str | None:
    """Returns the address of this machine from which a peer is reached, or None without a route. Sends nothing to
    the peer."""
    host, port = split_address(peer)
    for family, address in await _addresses(host, resolver, patience_s):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, port))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None
