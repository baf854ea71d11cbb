"""One instance in the cluster, with sockets and clocks: the core's I/O.

    await node.start(address)       when HTTP listens: `address` is where others reach us
    await node.stop()               says goodbye and closes all connections
    await node.close()              closes the file of names, when HTTP has ended
    await node.ended                why we must stop, as a ConfigError, should the cluster turn us away

What others build on it, all on the event loop and without waiting:

    node.instances()                router.Instance of every live instance, ours included; none while none is measured
    node.record(name)               members.Record: its address (where requests for it go, too), state and epoch
    node.members(), node.load(name) everybody, in any state; the newest load with its age
    node.adapters(), node.adapter(name)     entries.Adapter: what names mean everywhere
    node.holders(digest)            {instance: cost.Tier} of those alive who have an adapter's bytes
    node.register(adapter), node.remove(name)   a name for all; raises InvalidRequest
    node.advertise(digest, tier), node.withdraw(digest)  our own bytes; `hold` once they are verified
    node.publish(model, links)      our performance model or None, again whenever it changes

What a node calls is in `NodeListener`.

`add_peer_routes` of http/peers.py puts `node.accept` on a port. Forwarded requests and adapter bytes belong on that
port, too: `record.address` is the only address that is known of an instance.
"""

import asyncio
import itertools
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random

from aiohttp import web

from caraserve.cluster.membership.auth import Keyring, SecretFile
from caraserve.cluster.membership.connection import NO_ANSWER, UNKNOWN_SECRET
from caraserve.cluster.membership.dns import PeerResolver, check_count, resolve_peers
from caraserve.cluster.membership.events import (
    CloseConnection,
    Dial,
    EntriesChanged,
    Output,
    PeerRefused,
    ProtocolSettings,
    QueryReceived,
    RefusedByPeer,
)
from caraserve.cluster.membership.messages import PeerQuery
from caraserve.cluster.membership.protocol import ClusterProtocol
from caraserve.cluster.membership.swim import MemberChanged, MemberRecord, MemberState
from caraserve.cluster.membership.websocket import WebSocketTransport
from caraserve.cluster.routing.cost import LinkSpeeds, Tier
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.router import Instance
from caraserve.cluster.state.advertised import LINKS, MODEL, InstanceViews, links_value, model_value, tier_of
from caraserve.cluster.state.persistence import ClusterRegistryFile
from caraserve.cluster.state.replicated_map import REGISTRY, InstanceLoad, RegisteredAdapter
from caraserve.errors import ConfigError
from caraserve.telemetry.background import BackgroundTasks
from caraserve.telemetry.prometheus import family

log = logging.getLogger(__name__)

_TICK_S = 0.08  # the core wants ten a second or more
_RESOLVE_S = 10.0  # between looks at DNS
_REREAD_S = 2.0  # between looks at the secret file
_QUIET_S = 60.0  # between two log lines of one kind about one address

QueryBody = tuple[str | int | float, ...]


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Which cluster, and how to get in."""

    cluster: str
    name: str | None  # None: the address
    model: str  # digest of the base model
    peers: tuple[str, ...]  # HOST:PORT, each one address or a DNS name of many
    keys: SecretFile | Keyring
    tls: ssl.SSLContext | None = None  # for dialling
    base_name: str = ""  # by which clients ask for the base model: no adapter's name


@dataclass(frozen=True, slots=True)
class NodeListener:
    """What a node calls, on the event loop, while it runs."""

    # The load for the next heartbeat, given by how many seconds the event loop lags.
    current_load: Callable[[float], InstanceLoad] = lambda lag_s: InstanceLoad("serving", lag_s=lag_s)
    # Names that other instances registered, or removed (None).
    on_registry_change: Callable[[Mapping[str, RegisteredAdapter | None]], None] = lambda changes: None
    # An instance joined, came back, became suspect, died or left; its state before is None if it is new.
    on_member_change: Callable[[MemberRecord, MemberState | None], None] = lambda record, before: None
    # The adapters that some instance advertises have changed, or the state of an instance.
    on_holders_change: Callable[[], None] = lambda: None
    # The answer to a query of another instance, given its name and the query's body.
    answer_query: Callable[[str, QueryBody], QueryBody] = lambda peer, body: ()


class Node:
    """See above. Made before the port listens, started when it does."""

    def __init__(
        self, config: NodeConfig, names: ClusterRegistryFile, *, rng: Random, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = config.name or ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listener = NodeListener()
        self._config, self._names, self._rng, self._now = config, names, rng, now
        self._protocol: ClusterProtocol | None = None
        self._sockets: WebSocketTransport | None = None
        self.background = BackgroundTasks()  # this node's own, and those of the parts that are built on it
        self._stack = AsyncExitStack()
        self._lag_s, self._beat_s, self._status = 0.0, 0.0, "starting"
        self._outputs: deque[Output] = deque()
        self._numbers = itertools.count()
        self._questions: dict[tuple[str, int], asyncio.Future[QueryBody]] = {}
        self._seen = InstanceViews()
        self._told: dict[tuple[str, str], float] = {}
        self._resolver = PeerResolver()
        self._unresolved: list[str] = []
        self._refused = 0  # entries, when we last looked

    # ---- life

    async def start(self, address: str, listener: NodeListener) -> None:
        """Joins: dials the peers until it is known, and goes on doing so. Raises ConfigError."""
        self._listener = listener
        seeds, self._unresolved = await resolve_peers(self._config.peers, self._resolver)
        check_count(seeds)
        wall_ms = int(time.time() * 1000)
        self.name = self._config.name or address
        who = self._config.cluster, self._config.model, self.name, address
        settings = ProtocolSettings(*who, seeds, base_name=self._config.base_name)
        protocol = ClusterProtocol(settings, self.keys, self._rng, self._now(), wall_ms)
        protocol.restore(self._names.restore(wall_ms), self._now())
        self._names.seen(wall_ms)
        self._protocol, self._sockets = protocol, WebSocketTransport(self, self._config.tls, self._resolver)
        self.background.run(self._stack, self._tick, "cluster tick")
        self.background.run(self._stack, self._look_around, "cluster upkeep")

    async def accept(self, request: web.Request) -> web.StreamResponse:
        """The handler of another instance's connection."""
        if self._sockets is None:
            raise web.HTTPServiceUnavailable(text="This instance has not joined its cluster yet.")
        return await self._sockets.accept(request)

    async def stop(self) -> None:
        """Leaves, so that nobody suspects anything."""
        await self._stack.aclose()
        if self._protocol is not None and self._sockets is not None:
            self._protocol.leave(self._now())
            self._settle()
            await self._sockets.end()
        self.ended.cancel()

    async def close(self) -> None:
        """Ends what is left after `stop`, when nobody gives or takes away names any more: HTTP has ended."""
        await asyncio.to_thread(self._names.close)

    @property
    def keys(self) -> Keyring:
        """The secrets that hold now."""
        keys = self._config.keys
        return keys.keys if isinstance(keys, SecretFile) else keys

    # ---- what is known

    @property
    def protocol(self) -> ClusterProtocol:
        """The state behind all this. Raises AssertionError before `start`."""
        assert self._protocol is not None, "the node has not started"
        return self._protocol

    def members(self) -> tuple[MemberRecord, ...]:
        """Everybody known, ourselves first, the dead and departed included."""
        return self.protocol.members.records() if self._protocol else ()

    def record(self, name: str) -> MemberRecord | None:
        """One of them."""
        return self.protocol.members.get(name)

    def load(self, name: str) -> tuple[InstanceLoad, float] | None:
        """The newest load of an instance and its age in seconds."""
        return (
            (self._listener.current_load(self._lag_s), 0.0)
            if name == self.name
            else self.protocol.state.load(name, self._now())
        )

    def instances(self) -> tuple[Instance, ...]:
        """What a router chooses among. Built anew only where a beat, a profile or a state has changed."""
        live = (self.protocol.members.me, *filter(None, map(self.record, self.protocol.members.live())))
        lww_map = self.protocol.state.map_of
        return self._seen.all((record, self.load(record.name), lww_map(record.name)) for record in live)

    @property
    def registry_version(self) -> int:
        """Another number whenever names or what they mean have changed."""
        lww_map = self._protocol.state.map_of(REGISTRY) if self._protocol else None
        return lww_map.root if lww_map else 0

    def adapters(self) -> Iterator[RegisteredAdapter]:
        """All names and what they mean, in no order."""
        return self._protocol.state.adapters() if self._protocol else iter(())

    def adapter(self, name: str) -> RegisteredAdapter | None:
        """What a name means; None if nobody gave it."""
        return self._protocol.state.adapter(name) if self._protocol else None

    def last_changed_s(self, name: str) -> float | None:
        """When a name was last given or taken away, in unix time; None if it never was."""
        lww_map = self.protocol.state.map_of(REGISTRY)
        entry = lww_map.get(name) if lww_map else None
        return entry.time_ms / 1000 if entry else None

    def holders(self, digest: str) -> dict[str, Tier]:
        """Who has its bytes and how near to their device. Only those alive: suspects may be back, and are left out."""
        members = self.protocol.members
        said = ((members.get(name), value) for name, value in self.protocol.state.holders(digest).items())
        return {record.name: tier_of(value) for record, value in said if record and record.state == MemberState.ALIVE}

    # ---- what is said

    def register(self, adapter: RegisteredAdapter) -> None:
        """Gives a name its meaning on all instances. Raises InvalidRequest."""
        self._names.save(self.protocol.register(adapter, self._now()))

    def remove(self, name: str) -> None:
        """Takes a name away on all instances; harmless where nobody knows it."""
        self._names.save(self.protocol.remove(name, self._now()))

    def advertise(self, digest: str, tier: Tier) -> None:
        """We have its bytes, all of them and verified."""
        self.protocol.advertise(digest, (int(tier),), self._now())

    def withdraw(self, digest: str) -> None:
        """We have them no more."""
        self.protocol.withdraw(digest, self._now())

    def publish(self, model: PerfModel | None, links: LinkSpeeds) -> None:
        """How fast we are; None: nobody has measured it."""
        self.protocol.advertise(MODEL, model_value(model), self._now())
        self.protocol.advertise(LINKS, links_value(links), self._now())

    async def query(self, peer: str, body: QueryBody, timeout_s: float) -> QueryBody | None:
        """A question to another instance, and what it answers."""
        number = next(self._numbers)
        answer: asyncio.Future[QueryBody] = asyncio.get_running_loop().create_future()
        self._questions[peer, number] = answer
        try:
            if not self.protocol.send_query(peer, PeerQuery(number, False, body)):
                return None
            self._settle()
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._questions[peer, number]

    def reread_secrets(self) -> None:
        """Takes the secrets that the file has now; those we have stay when it is of no use."""
        keys = self._config.keys
        if isinstance(keys, SecretFile):
            try:
                if keys.reread():
                    self.protocol.rekey(keys.keys)
                    log.info("the cluster's secrets are new")
            except ConfigError as error:
                self._say(logging.ERROR, "secrets", "", "%s; the secrets from before stay", error.message)

    def families(self, labels: str) -> Iterator[str]:
        """For GET /metrics: what we did not take in, or not keep."""
        protocol = self.protocol
        counts = {
            "entries": (
                protocol.state.refused,
                "Entries of other instances refused: wrong clocks, impostors, names or sizes that no adapter has.",
            ),
            "frames": (
                protocol.malformed,
                "Frames of other instances refused: not signed with a secret of ours, or no message.",
            ),
            "instances": (
                protocol.members.refused_names,
                "Times that an instance was not taken in, as there are too many.",
            ),
        }
        for what, (count, text) in counts.items():
            yield family(f"caraserve:cluster_{what}_refused_total", "counter", text, [(labels, count)])
        text = "Removals of names forgotten before their time, for want of room."
        yield family("caraserve:cluster_removals_dropped_total", "counter", text, [(labels, protocol.state.dropped)])

    # ---- what happens on connections

    def connected(self, link: int, dialled: str | None) -> None:
        """For `WebSocketTransport`, as the three below."""
        self.protocol.connected(link, self._now(), dialled=dialled)
        self._settle()

    def received(self, link: int, frame: bytes) -> None:
        """A frame came."""
        self.protocol.received(link, frame, self._now())
        self._settle()

    def lost(self, link: int) -> None:
        """A connection ended."""
        self.protocol.lost(link, self._now())
        self._settle()

    def pull(self, link: int) -> bytes | None:
        """The next frame to send."""
        return self.protocol.pull(link, self._now())

    # ---- inside

    async def _tick(self) -> None:
        planned_s = self._now()
        while True:
            now = self._now()
            self._lag_s = max(now - planned_s, 0.8 * self._lag_s)
            if now >= self._beat_s:
                self._beat(now)
            self.protocol.tick(now, int(time.time() * 1000))
            self._settle()
            planned_s = self._now() + _TICK_S
            await asyncio.sleep(_TICK_S)

    def _beat(self, now: float) -> None:
        load = self._listener.current_load(self._lag_s)
        self.protocol.set_load(load, now, urgent=load.status != self._status)
        self._status, self._beat_s = load.status, now + 2 * _TICK_S

    async def _look_around(self) -> None:
        resolve_s = self._now() + (_REREAD_S if self._unresolved else _RESOLVE_S)
        while True:
            await asyncio.sleep(_REREAD_S)
            self.reread_secrets()
            self._names.seen(int(time.time() * 1000))
            if (refused := self.protocol.state.refused) > self._refused:
                self._refused = refused
                text = "%d entries of other instances were refused so far; of the last one, %s"
                self._say(logging.WARNING, "entries", "", text, refused, self.protocol.state.objection)
            if self._now() >= resolve_s:
                seeds, self._unresolved = await resolve_peers(self._config.peers, self._resolver)
                resolve_s = self._now() + (_REREAD_S if self._unresolved else _RESOLVE_S)
                if seeds:  # a name server that is away makes nobody leave
                    self.protocol.seed(seeds)
            for peer in self._unresolved:
                self._say(logging.WARNING, "resolve", peer, "--peers %s does not resolve now", peer)

    def _settle(self) -> None:
        """Does what the core says, and has sent what it wants to send."""
        protocol, sockets = self.protocol, self._sockets
        assert sockets is not None
        self._outputs.extend(protocol.take_outputs())
        while self._outputs:  # should one fail, the next call goes on with those after it
            output = self._outputs.popleft()
            if isinstance(output, Dial):
                sockets.dial(output.address)
            elif isinstance(output, CloseConnection):
                sockets.close(output.link)
                who = output.dialled or "an instance that connected to us"
                level = logging.WARNING if output.reason in (NO_ANSWER, UNKNOWN_SECRET) else logging.DEBUG
                self._say(level, output.reason, who, "the connection with %s ends: %s", who, output.reason)
            else:
                self._take(output)
        sockets.flush(protocol.writable())

    def _take(self, output: Output) -> None:
        match output:
            case MemberChanged(record, before):
                log.info("%s at %s is %s", record.name, record.address, record.state.name.lower())
                self._listener.on_member_change(record, before)
                self._listener.on_holders_change()
            case EntriesChanged(owner, entries) if owner == REGISTRY:
                self._names.save(entries)
                # What a later version means by a value is unknown here: as if nothing had been said, and no removal.
                means = {entry.key: self.adapter(entry.key) for entry in entries}
                gone = {entry.key for entry in entries if entry.deleted}
                self._listener.on_registry_change(
                    {name: adapter for name, adapter in means.items() if adapter or name in gone}
                )
            case EntriesChanged():
                self._listener.on_holders_change()
            case PeerRefused(peer, reason):
                self._say(logging.WARNING, "refused", peer, "%s is refused: %s", peer, reason)
            case RefusedByPeer(peer, reason, ours_to_go):
                self._say(logging.ERROR, "refused us", peer, "%s refuses us: %s", peer or "an instance", reason)
                if ours_to_go and not self.ended.done():
                    self.ended.set_exception(ConfigError(f"this instance cannot join its cluster: {reason}"))
            case QueryReceived(peer, quote):
                self._quoted(peer, quote)

    def _quoted(self, peer: str, quote: PeerQuery) -> None:
        if not quote.is_answer:
            self.protocol.send_query(peer, PeerQuery(quote.number, True, self._listener.answer_query(peer, quote.body)))
        elif (future := self._questions.get((peer, quote.number))) is not None and not future.done():
            future.set_result(quote.body)

    def _say(self, level: int, kind: str, about: str, text: str, *values: object) -> None:
        """A log line, but not of one kind about one address all the time."""
        now = self._now()
        if now - self._told.get((kind, about), -_QUIET_S) >= _QUIET_S:
            self._told = {key: when for key, when in self._told.items() if now - when < _QUIET_S}
            self._told[kind, about] = now
            log.log(level, text, *values)
