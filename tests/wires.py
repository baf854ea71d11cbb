"""Relays between the processes of a fleet, with which a test can cut only the links between two groups of them.

All processes dial the same addresses; a relay finds the dialling process by the socket's inode in /proc."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import TypeVar

PATIENCE_S = 10.0
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1

Result = TypeVar("Result")


class Relay:
    """A TCP relay before an instance that can be cut: connections break, and new ones are not relayed.

    `caller` returns the name of the process at the other end of a connection, for a cut that spares some.
    """

    def __init__(self, port: int, caller: Callable[[asyncio.StreamWriter], str] = lambda writer: "") -> None:
        self._to, self._caller = port, caller
        self._passes: Callable[[str], bool] = lambda caller: True
        self._server: asyncio.Server | None = None
        self._callers: dict[asyncio.StreamWriter, str] = {}
        self._conversations: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self, but: Collection[str] = ()) -> None:
        """Cuts all connections except those of some callers."""
        self._passes = but.__contains__
        for writer, caller in self._callers.items():
            if caller not in but:
                writer.transport.abort()

    def heal(self) -> None:
        self._passes = lambda caller: True

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._conversations)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        caller = self._caller(writer)
        writers = {writer: caller}
        self._callers |= writers
        try:
            if not self._passes(caller):
                writer.transport.abort()
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
            writers[far_writer] = self._callers[far_writer] = caller
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except ConnectionError:
            pass  # the instance has gone
        finally:
            self._conversations.discard(task)
            for each in writers:
                del self._callers[each]
                each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@dataclass
class Wires:
    """The relays, on a thread of their own. `pids`: name → process; each must be entered before it dials."""

    relays: dict[str, Relay] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)  # name → the port at which others reach the process
    pids: dict[str, int] = field(default_factory=dict)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def cut(self, *groups: Collection[str]) -> None:
        """Breaks all links between groups of processes."""

        async def cut() -> None:
            for group in groups:
                for name in group:
                    self.relays[name].cut(but=group)

        self._run(cut())

    def heal(self) -> None:
        async def heal() -> None:
            for relay in self.relays.values():
                relay.heal()

        self._run(heal())

    def caller(self, writer: asyncio.StreamWriter) -> str:
        """Returns the name of the process at the other end of a connection; empty if it has hung up."""
        there, here = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
        link = f"socket:[{_inode(there[1], here[1])}]" if there and here else ""
        return next((name for name, pid in self.pids.items() if link in _open_files(pid)), "")

    def _run(self, coroutine: "Coroutine[None, None, Result]") -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)


def _inode(port: int, to_port: int) -> int:
    """Returns the inode of the socket connected from one port of 127.0.0.1 to another, by sock_diag(7); 0 if it is
    closed. /proc/net/tcp would also list all connections of the last minute."""
    host = socket.inet_aton("127.0.0.1") + bytes(12)
    no_interface, no_cookie, any_state = 0, 0xFFFFFFFF, 0xFFFFFFFF
    which = struct.pack("!HH16s16s", port, to_port, host, host) + struct.pack("=III", no_interface, *[no_cookie] * 2)
    question = struct.pack("=BBHI", socket.AF_INET, socket.IPPROTO_TCP, 0, any_state) + which
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + question)
        answer = kernel.recv(4096)
    (kind,) = struct.unpack_from("=H", answer, 4)
    return int(struct.unpack_from("=I", answer, 84)[0]) if kind == _SOCK_DIAG_BY_FAMILY else 0


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                yield os.readlink(f"/proc/{pid}/fd/{number}")


@contextlib.contextmanager
def wires(ports: Mapping[str, int]) -> Iterator[Wires]:
    """Starts a relay for each process that listens, or will listen, at one of `ports`."""
    made = Wires()
    thread = Thread(target=made._loop.run_forever, name="wires")
    thread.start()
    try:
        for name, port in ports.items():
            relay = made.relays[name] = Relay(port, made.caller)
            made.ports[name] = made._run(relay.start())
        yield made
    finally:
        for relay in made.relays.values():
            made._run(relay.close())
        made._loop.call_soon_threadsafe(made._loop.stop)
        thread.join()
        made._loop.close()
