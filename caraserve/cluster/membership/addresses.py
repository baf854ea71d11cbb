"""Addresses of instances: what `--peers` says, what it resolves to, and whether it is this machine alone."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

from caraserve.cluster.membership.dns import Found, Resolver
from caraserve.cluster.membership.events import CROWDED
from caraserve.cluster.membership.swim import MAX_LIVE
from caraserve.errors import ConfigError
from caraserve.util.endpoints import split_address

_PATIENCE_S = 2.0  # with name servers


def join_address(host: str, port: int) -> str:
    """HOST:PORT, or [IPV6]:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine is reached there. A name that others may resolve otherwise is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_wildcard(host: str) -> bool:
    """Whether it stands for all of this machine's addresses, so that nobody can connect to it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


async def resolved(
    peers: Iterable[str], resolver: Resolver, patience_s: float = _PATIENCE_S
) -> tuple[tuple[str, ...], list[str]]:
    """All addresses behind the peers, each once and in order; and what does not resolve now, or not soon."""
    peers = tuple(peers)
    answers = await asyncio.gather(*(_addresses(split_address(peer)[0], resolver, patience_s) for peer in peers))
    found: dict[str, None] = {}
    for peer, answer in zip(peers, answers, strict=True):
        found |= {join_address(address, split_address(peer)[1]): None for _, address in answer}
    return tuple(found), [peer for peer, answer in zip(peers, answers, strict=True) if not answer]


async def _addresses(host: str, resolver: Resolver, patience_s: float) -> list[Found]:
    try:
        async with asyncio.timeout(patience_s):
            return await resolver.addresses(host)
    except (OSError, TimeoutError):
        return []


def check_count(addresses: tuple[str, ...]) -> None:
    """Raises ConfigError for more than can connect each to each."""
    if len(addresses) > MAX_LIVE:
        raise ConfigError(f"--peers stands for {len(addresses)} instances: {CROWDED}")


async def outward_address(peer: str, resolver: Resolver, patience_s: float = _PATIENCE_S) -> str | None:
    """The address of this machine from which a peer is reached; None if no way leads there. Sends the peer nothing."""
    host, port = split_address(peer)
    for family, address in await _addresses(host, resolver, patience_s):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, port))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None
