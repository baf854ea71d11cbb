"""Addresses of instances: what `--peers` says, what it resolves to, and whether it is this machine alone. Level 4."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

from caraserve.cluster.members import MAX_LIVE
from caraserve.cluster.ports import CROWDED
from caraserve.endpoints import split_address
from caraserve.errors import ConfigError


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


async def resolved(peers: Iterable[str]) -> tuple[tuple[str, ...], list[str]]:
    """All addresses behind the peers, each once and in order; and what does not resolve now."""
    found: dict[str, None] = {}
    missing: list[str] = []
    for peer in peers:
        host, port = split_address(peer)
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            missing.append(peer)
            continue
        found |= {join_address(str(info[4][0]), port): None for info in infos}
    return tuple(found), missing


def check_count(addresses: tuple[str, ...]) -> None:
    """Raises ConfigError for more than can connect each to each."""
    if len(addresses) > MAX_LIVE:
        raise ConfigError(f"--peers stands for {len(addresses)} instances: {CROWDED}")


def outward_address(peer: str) -> str | None:
    """The address of this machine from which a peer is reached; None if no way leads there. Sends nothing."""
    host, port = split_address(peer)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
