"""What host names stand for, looked up so that a slow name server holds up nothing but what waits for it.

A look-up cannot be stopped: it ends when the system's resolver gives up, after half a minute perhaps. The threads that
the event loop has for such work are few, and others need them. So each look-up has a thread of its own, and one name is
looked up once at a time however many wait for it, and for however short a time.
"""

import asyncio
import socket
from concurrent.futures import Future
from threading import Thread
from typing import NamedTuple

from aiohttp.abc import AbstractResolver, ResolveResult


class Found(NamedTuple):
    """One address of a host."""

    family: int
    address: str


class Resolver(AbstractResolver):
    """For aiohttp's connectors, and for whoever wants the addresses alone."""

    def __init__(self) -> None:
        self._under_way: dict[str, Future[list[Found]]] = {}

    async def addresses(self, host: str) -> list[Found]:
        """All addresses of a host. Raises OSError when it has none. Takes as long as the system's resolver does."""
        try:
            return _look_up(host, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            pass  # a name
        future = self._under_way.get(host)
        if future is None:
            future = self._under_way[host] = Future()
            try:
                Thread(target=self._look_up, args=(host, future), name="caraserve-resolver", daemon=True).start()
            except RuntimeError as error:  # there are as many threads as may be
                del self._under_way[host]
                raise OSError(f"{host}: {error}") from error
        return await asyncio.shield(asyncio.wrap_future(future))

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """As aiohttp asks for it."""
        return [
            ResolveResult(
                hostname=host,
                host=found.address,
                port=port,
                family=found.family,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found in await self.addresses(host)
            if family in (socket.AF_UNSPEC, found.family)
        ]

    async def close(self) -> None:
        """Nothing: look-ups end by themselves."""

    def _look_up(self, host: str, future: "Future[list[Found]]") -> None:
        try:
            found = _look_up(host, socket.AI_ADDRCONFIG)
        except (OSError, UnicodeError) as error:
            del self._under_way[host]
            future.set_exception(OSError(f"{host}: {error}"))
        else:
            del self._under_way[host]
            future.set_result(found)


def _look_up(host: str, flags: int) -> list[Found]:
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [Found(family, _scoped(*map(str, address))) for family, _, _, _, address in infos]


def _scoped(address: str, port: str, flow: str = "0", scope: str = "0") -> str:
    return address if scope == "0" or "%" in address else f"{address}%{scope}"
