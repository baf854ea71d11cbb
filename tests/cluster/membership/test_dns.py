"""Name servers that do not answer for long: callers time out, and other look-ups and work are not delayed."""

import asyncio
import errno
import socket
import threading
from collections.abc import Awaitable, Iterator
from typing import Any

import aiohttp
import pytest

from caraserve.cluster.membership import dns, websocket
from caraserve.cluster.membership.dns import PeerResolver, resolve_peers
from caraserve.cluster.membership.peer_client import PeerClient, TransferFailure
from caraserve.cluster.membership.websocket import WebSocketTransport
from caraserve.http.proxy import PeerProxy
from tests.cluster.nodes import KEYS, Instances, until

MANY = 100  # names at a silent server; no pool of threads that a program has by itself is as large


class NameServer:
    """Resolves `quick` at once, and `slow…` only once `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: list[str] = []
        self.gave_up = False
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: int | None, *args: int, **kinds: int) -> list[Any]:
        flags = kinds.get("flags", args[3] if len(args) > 3 else 0)
        if not flags & socket.AI_NUMERICHOST:
            self.asked.append(host)
            if host.startswith("slow"):
                self.gave_up |= not self.answers.wait(10)  # a test that fails ends, too
            if host == "nobody":
                raise socket.gaierror(socket.EAI_NONAME, "no such name")
            host = "127.0.0.1"
        return list(self._real(host, port, *args, **kinds))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.answers.set()
    for thread in threading.enumerate():
        if thread.name == "caraserve-resolver":
            thread.join()


class Ends:
    """Records the connections that were made."""

    def __init__(self) -> None:
        self.dialled: asyncio.Queue[str | None] = asyncio.Queue()

    def connected(self, connection: int, dialled: str | None) -> None:
        self.dialled.put_nowait(dialled)

    def received(self, connection: int, frame: bytes) -> None: ...

    def lost(self, connection: int) -> None: ...

    def pull(self, connection: int) -> bytes | None: ...


async def test_a_silent_name_server_delays_no_other_name_and_no_other_work(server: NameServer) -> None:
    resolver = PeerResolver()
    waiting = [asyncio.create_task(resolver.addresses(f"slow-{index}")) for index in range(MANY)]
    assert [address for _, address in await resolver.addresses("quick")] == ["127.0.0.1"]
    assert await asyncio.to_thread(lambda: "done") == "done"
    assert not any(task.done() for task in waiting)
    server.answers.set()
    assert {address for task in waiting for _, address in await task} == {"127.0.0.1"}


async def test_a_name_with_many_callers_is_looked_up_once_even_when_they_give_up(server: NameServer) -> None:
    resolver = PeerResolver()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await resolver.addresses("slow")
    waiting = [asyncio.create_task(resolver.addresses("slow")) for _ in range(3)]
    await asyncio.sleep(0)
    server.answers.set()
    assert len({tuple(await task) for task in waiting}) == 1
    assert server.asked == ["slow"]
    await resolver.addresses("slow")
    assert server.asked == ["slow", "slow"]  # what it stands for may have changed


async def test_names_that_resolve_do_not_wait_for_those_that_do_not(server: NameServer) -> None:
    found, missing = await resolve_peers(
        ("slow:1", "nobody:2", "quick:3", "127.0.0.2:4"), PeerResolver(), patience_s=0.5
    )
    assert found == ("127.0.0.1:3", "127.0.0.2:4")
    assert missing == ["slow:1", "nobody:2"]


async def test_a_connection_whose_name_does_not_resolve_times_out_and_others_are_made(
    running: Instances, server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends()
    quick = "quick:" + (await running.start("a")).address.partition(":")[2]
    ours = WebSocketTransport(ends, None, PeerResolver())
    for index in range(MANY):
        ours.dial(f"slow-{index}:1")
    ours.dial(quick)
    assert await asyncio.wait_for(ends.dialled.get(), 10) == quick
    monkeypatch.setattr(websocket, "_DIAL_S", 0.01)
    ours.dial("slow:1")
    await ours._dialing["slow:1"]
    assert "slow" in server.asked
    assert not server.gave_up
    await ours.end()


async def test_forwarding_to_unresolved_names_leaves_the_thread_pool_free(server: NameServer) -> None:
    async def answers(peer: str, request_id: str, attempt: int) -> bool:
        return True

    relays = PeerProxy(lambda: "a", lambda: KEYS, None, answers)
    async with asyncio.TaskGroup() as group:
        for index in range(MANY):
            group.create_task(_given_up(relays._session.get(f"http://slow-{index}:1/")))
        await until(lambda: len(server.asked) == MANY)
        assert await asyncio.to_thread(lambda: "done") == "done"
        server.answers.set()
    await relays.close()


async def _given_up(request: Awaitable[object]) -> None:
    with pytest.raises((aiohttp.ClientError, TimeoutError)):
        await request


async def test_downloads_from_one_name_do_not_wait_for_names_that_do_not_resolve(
    running: Instances, server: NameServer
) -> None:
    transfers = PeerClient(lambda: KEYS, None)
    port = (await running.start("a")).address.partition(":")[2]
    waiting = [asyncio.create_task(transfers.page(f"slow-{index}:1", "/", 1)) for index in range(MANY)]
    await asyncio.sleep(0)
    assert await transfers.page(f"quick:{port}", "/nothing/is/here", 1) is TransferFailure.ABSENT
    server.answers.set()
    assert set(await asyncio.gather(*waiting)) == {TransferFailure.FAILED}
    await transfers.close()


async def test_a_name_is_looked_up_again_after_no_thread_could_be_started(
    server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = PeerResolver()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert await resolve_peers(("quick:1",), resolver) == ((), ["quick:1"])
    assert await resolve_peers(("quick:1",), resolver) == (("127.0.0.1:1",), [])


async def test_an_address_of_an_unsupported_family_has_no_outward_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*kind: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(dns.socket, "socket", no_socket)
    assert await dns.outward_address("127.0.0.1:1", PeerResolver()) is None
