"""Instances with real sockets in one process, each on a port of its own."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from aiohttp import web

from caraserve.cluster.membership.auth import Keyring, SecretFile
from caraserve.cluster.membership.member import Member, MemberConfig, MemberListener, QueryBody
from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.membership.websocket import WEBSOCKET_PATH
from caraserve.cluster.routing.advertised import InstanceViews
from caraserve.cluster.state.persistence import ClusterRegistryFile
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter

KEYS = Keyring((b"a secret of the tests",))
# Other instances dial at any time. After these turns of the loop the server has all connections that were accepted
# before its socket was closed, and ends them when it stops. asyncio's server forgets one accepted in its last turn.
_TURNS = 5
_NEVER_S = 30.0  # what takes this long hangs, also where disk and processors have much else to do
LOAD = InstanceLoad("serving", kv_tokens=1000, kv_free_tokens=1000, queue_room=10)


async def until(condition: Callable[[], bool]) -> None:
    """Returns as soon as the condition is true; fails after a timeout."""
    async with asyncio.timeout(_NEVER_S):
        while not condition():  # noqa: ASYNC110 -- whatever a test waits for has no event
            await asyncio.sleep(0.01)


@dataclass
class Handlers:
    """The functions that a member's listener calls. Unlike the listener's fields, they may be replaced at any time."""

    current_load: Callable[[float], InstanceLoad] = lambda lag_s: LOAD
    on_registry_change: Callable[[Mapping[str, RegisteredAdapter | None]], None] = lambda changes: None
    on_member_change: Callable[[MemberRecord], None] = lambda record: None
    on_holders_change: Callable[[], None] = lambda: None
    answer_query: Callable[[str, QueryBody], QueryBody] = lambda peer, body: ()

    def listener(self) -> MemberListener:
        return MemberListener(
            current_load=lambda lag_s: self.current_load(lag_s),
            on_registry_change=lambda changes: self.on_registry_change(changes),
            on_member_change=lambda record: self.on_member_change(record),
            on_holders_change=lambda: self.on_holders_change(),
            answer_query=lambda peer, body: self.answer_query(peer, body),
        )


@dataclass
class Instance:
    """A member with a port, so that other nodes can connect to it."""

    member: Member
    views: InstanceViews
    handlers: Handlers
    runner: web.AppRunner
    door: socket.socket
    address: str

    async def stop(self) -> None:
        """Stops the member in order: it announces that it leaves."""
        await self.member.stop()
        asyncio.get_running_loop().remove_reader(self.door)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await self.runner.cleanup()
        await self.member.close()

    def sees(self, name: str) -> MemberState | None:
        record = self.member.record(name)
        return record.state if record else None


class Instances:
    """The instances of one test; all are stopped at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: dict[str, Instance] = {}
        self._first: str | None = None

    async def start(
        self,
        name: str,
        *,
        peers: tuple[str, ...] | None = None,
        keys: SecretFile | Keyring = KEYS,
        model: str = "m",
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        called: str | None = None,
        base_name: str = "",
        prepare: Callable[[Member, Handlers], None] = lambda member, handlers: None,
        routes: Callable[[Member], Sequence[web.RouteDef]] = lambda member: (),
    ) -> Instance:
        """Starts an instance. `peers`: by default the first instance started. `tls`: for listening and for dialling."""
        names = ClusterRegistryFile(self._folder / f"{name}.db")
        seeds = peers if peers is not None else (self._first,) if self._first else ("127.0.0.1:1",)
        config = MemberConfig("tests", called or name, model, seeds, keys, tls[1] if tls else None, base_name)
        member = Member(config, names, rng=Random(name))
        handlers = Handlers()
        prepare(member, handlers)
        app = web.Application()
        app.add_routes([web.get(WEBSOCKET_PATH, member.accept), *routes(member)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        door = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, door, ssl_context=tls[0] if tls else None).start()
        address = f"127.0.0.1:{door.getsockname()[1]}"
        self._first = self._first or address
        await member.start(address, handlers.listener())
        instance = self.running[name] = Instance(member, InstanceViews(member), handlers, runner, door, address)
        return instance

    async def together(self, *names: str) -> list[Instance]:
        """Starts instances, and returns them when each sees all."""
        started = [await self.start(name) for name in names]
        await until(self.agree)
        return started

    async def stop(self, name: str) -> None:
        if name in self.running:
            await self.running.pop(name).stop()

    def agree(self) -> bool:
        """Whether every instance sees exactly the running instances as alive."""
        names = set(self.running)
        return all(
            {record.name for record in one.member.members() if record.state == MemberState.ALIVE} == names
            and all(record.state in (MemberState.ALIVE, MemberState.LEFT) for record in one.member.members())
            for one in self.running.values()
        )


@contextlib.asynccontextmanager
async def instances(folder: Path) -> AsyncIterator[Instances]:
    """Yields an empty group; instances that are started in it are stopped at the end."""
    started = Instances(folder)
    try:
        yield started
    finally:
        await asyncio.gather(*(started.stop(name) for name in list(started.running)))
