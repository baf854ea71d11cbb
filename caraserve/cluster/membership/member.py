"""This instance as a member of its cluster: `ClusterProtocol` with sockets and clocks.

    await member.start(address, listener)   when HTTP listens; `address`: where other instances reach this one
    await member.stop()                     announces the leave and closes all connections
    await member.close()                    closes the registry file, when HTTP has ended
    await member.ended                      raises ConfigError when the cluster refuses this instance for good

All other methods run on the event loop and do not wait. `add_peer_routes` of http/app.py adds `member.accept` to a
port. Forwarded requests and adapter bytes use that port too: `record.address` is an instance's only address.
"""

import asyncio
import itertools
import logging
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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
from caraserve.cluster.state.lww_map import Entry, EntryValue, is_setting
from caraserve.cluster.state.persistence import ClusterRegistryFile
from caraserve.cluster.state.replicated_map import (
    REGISTRY,
    InstanceLoad,
    RegisteredAdapter,
    Tier,
    tier_of,
    upload_key,
    upload_of,
)
from caraserve.errors import ConfigError
from caraserve.telemetry.background import BackgroundTasks
from caraserve.telemetry.prometheus import family
from caraserve.util.tasks import in_turns

log = logging.getLogger(__name__)

_TICK_S = 0.08  # `ClusterProtocol.tick` must be called at least ten times a second
_RESOLVE_S = 10.0  # between look-ups of `--peers`
_REREAD_S = 2.0  # between reads of the secret file
_QUIET_S = 60.0  # between two log lines of one kind about one address

QueryBody = tuple[str | int | float, ...]


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """The cluster to join, and the credentials for it."""

    cluster: str
    name: str | None  # None: the address
    model: str  # digest of the base model
    peers: tuple[str, ...]  # HOST:PORT, each one address or a DNS name of many
    keys: SecretFile | Keyring
    tls: ssl.SSLContext | None = None  # for dialling
    base_name: str = ""  # by which clients ask for the base model: no adapter's name


@dataclass(frozen=True, slots=True)
class MemberListener:
    """Functions that a member calls on the event loop while it runs."""

    # Returns the load for the next heartbeat, given the event loop's lag in seconds.
    current_load: Callable[[float], InstanceLoad] = lambda lag_s: InstanceLoad("serving", lag_s=lag_s)
    # Gets the names that other instances registered, or removed (None).
    on_registry_change: Callable[[Mapping[str, RegisteredAdapter | None]], None] = lambda changes: None
    # Gets the entries of settings that other instances wrote.
    on_settings_change: Callable[[Sequence[Entry]], None] = lambda entries: None
    # Gets the record of an instance that joined, came back, became suspect, died or left.
    on_member_change: Callable[[MemberRecord], None] = lambda record: None
    # Called when the adapters that some instance advertises have changed, or the state of an instance.
    on_holders_change: Callable[[], None] = lambda: None
    # Returns the answer to a query, given the name of the instance that sent it and the query's body.
    answer_query: Callable[[str, QueryBody], QueryBody] = lambda peer, body: ()


class Member:
    """This instance in its cluster. Made before the port listens, started when it does."""

    def __init__(
        self,
        config: MemberConfig,
        names: ClusterRegistryFile,
        *,
        rng: Random,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = config.name or ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listener = MemberListener()
        self._config, self._names, self._rng, self._now = config, names, rng, now
        self._protocol: ClusterProtocol | None = None
        self._transport: WebSocketTransport | None = None
        self.background = BackgroundTasks()  # this member's own, and those of the parts that are built on it
        self._stack = AsyncExitStack()
        self._lag_s, self._heartbeat_s, self._status = 0.0, 0.0, "starting"
        self._outputs: deque[Output] = deque()
        self._query_numbers = itertools.count()
        self._queries: dict[tuple[str, int], asyncio.Future[QueryBody]] = {}
        self._logged_s: dict[tuple[str, str], float] = {}
        self._resolver = PeerResolver()
        self._unresolved: list[str] = []
        self._refused = 0  # entries refused so far, as last logged

    # ---- start and stop

    async def start(self, address: str, listener: MemberListener) -> None:
        """Starts to join the cluster, in the background, by dialling the peers. Raises ConfigError."""
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
        self._protocol, self._transport = protocol, WebSocketTransport(self, self._config.tls, self._resolver)
        self.background.run(self._stack, self._tick, "cluster tick")
        self.background.run(self._stack, self._upkeep, "cluster upkeep")

    async def accept(self, request: web.Request) -> web.StreamResponse:
        """Handles another instance's connection."""
        if self._transport is None:
            raise web.HTTPServiceUnavailable(text="This instance has not joined its cluster yet.")
        return await self._transport.accept(request)

    async def stop(self) -> None:
        """Announces that this instance leaves, and closes all connections."""
        await self._stack.aclose()
        if self._protocol is not None and self._transport is not None:
            self._protocol.leave(self._now())
            self._settle()
            await self._transport.end()
        self.ended.cancel()

    async def close(self) -> None:
        """Closes the registry file, after `stop` and after HTTP has ended."""
        await asyncio.to_thread(self._names.close)

    @property
    def keys(self) -> Keyring:
        """The secrets in use."""
        keys = self._config.keys
        return keys.keys if isinstance(keys, SecretFile) else keys

    # ---- the cluster's state

    @property
    def protocol(self) -> ClusterProtocol:
        """The protocol state. Raises AssertionError before `start`."""
        assert self._protocol is not None, "this instance has not started to join its cluster"
        return self._protocol

    def members(self) -> tuple[MemberRecord, ...]:
        """Returns the records of all known instances, the own one first, dead and departed ones included."""
        return self.protocol.members.records() if self._protocol else ()

    def live(self) -> tuple[MemberRecord, ...]:
        """Returns the records of the instances that are alive or suspect, the own one first."""
        members = self.protocol.members
        return (members.me, *filter(None, map(members.get, members.live())))

    def record(self, name: str) -> MemberRecord | None:
        """Returns the record of one instance."""
        return self.protocol.members.get(name)

    def load(self, name: str) -> tuple[InstanceLoad, float] | None:
        """Returns the newest load of an instance and its age in seconds."""
        if name == self.name:
            return self._listener.current_load(self._lag_s), 0.0
        return self.protocol.state.load(name, self._now())

    @property
    def registry_version(self) -> int:
        """A number that changes whenever the registry does."""
        return self._protocol.state.registry.root if self._protocol else 0

    @property
    def has_registry(self) -> bool:
        """Whether another instance's registry has once had nothing that this one's lacked."""
        return self._protocol is not None and self._protocol.state.agreed

    def adapters(self) -> Iterator[RegisteredAdapter]:
        """Yields all adapters of the registry, in no order."""
        return self._protocol.state.adapters() if self._protocol else iter(())

    async def adapters_in_turns(self) -> AsyncIterator[RegisteredAdapter]:
        """Yields the adapter of each name, as it is when its turn comes, and lets other tasks run in between. Names
        registered meanwhile may be missing."""
        state = self.protocol.state
        async for entry in in_turns(state.registry):
            if (adapter := state.adapter(entry.key)) is not None:
                yield adapter

    def adapter(self, name: str) -> RegisteredAdapter | None:
        """Returns the adapter that a name stands for, or None."""
        return self._protocol.state.adapter(name) if self._protocol else None

    def last_changed_s(self, name: str) -> float | None:
        """Returns the unix time at which a name was last registered or removed, or None."""
        entry = self.protocol.state.registry.get(name)
        return entry.time_ms / 1000 if entry else None

    def advertised(self, key: str) -> dict[str, EntryValue]:
        """Returns the value that each live instance advertises under a key, this one and suspects included."""
        protocol = self.protocol
        live = {protocol.members.me.name, *protocol.members.live()}
        return {name: value for name, value in protocol.state.holders(key).items() if name in live}

    def holders(self, digest: str) -> dict[str, Tier]:
        """Returns the instances that have a digest's bytes, with their tier. Only live ones; suspects are left out."""
        members = self.protocol.members
        said = ((members.get(name), value) for name, value in self.protocol.state.holders(digest).items())
        return {record.name: tier_of(value) for record, value in said if record and record.state == MemberState.ALIVE}

    def uploads(self, name: str) -> dict[str, RegisteredAdapter]:
        """Returns the other live instances that take requests for an adapter while it is uploaded to them, suspects
        included, with the adapter."""
        said = self.advertised(upload_key(name)) if self._protocol is not None else {}
        found = ((instance, upload_of(name, value)) for instance, value in said.items() if instance != self.name)
        return {instance: adapter for instance, adapter in found if adapter is not None}

    # ---- changes and queries by this instance

    def register(self, adapter: RegisteredAdapter) -> None:
        """Registers an adapter on all instances. Raises InvalidRequest."""
        self._names.save(self.protocol.register(adapter, self._now()))

    def remove(self, name: str) -> None:
        """Removes an adapter's name on all instances; harmless if there is none."""
        self._names.save(self.protocol.remove(name, self._now()))

    def share(self, entry: Entry) -> bool:
        """Shares a setting that this instance has written with all instances, unless there is a newer one. Returns
        False if the registry has no room for it."""
        return self.protocol.share(entry, self._now())

    def restore(self, entry: Entry) -> None:
        """Adds a setting of an earlier run to the registry, unless there is a newer one."""
        self.protocol.restore([entry], self._now())

    def advertise(self, key: str, value: EntryValue) -> None:
        """Advertises a value of this instance. Raises InvalidRequest."""
        self.protocol.advertise(key, value, self._now())

    def advertise_tier(self, digest: str, tier: Tier) -> None:
        """Advertises that this instance has all bytes of a digest, verified. Raises InvalidRequest."""
        self.advertise(digest, (int(tier),))

    def withdraw(self, key: str) -> None:
        """Withdraws what this instance advertises under a key."""
        self.protocol.withdraw(key, self._now())

    def advertise_upload(self, name: str, rank: int, num_bytes: int) -> None:
        """Advertises at once that this instance takes requests for an adapter while it is uploaded to it. Raises
        InvalidRequest."""
        self.advertise(upload_key(name), (rank, num_bytes))
        self._settle()

    def withdraw_upload(self, name: str) -> None:
        """Withdraws what `advertise_upload` has advertised."""
        self.withdraw(upload_key(name))

    async def query(self, peer: str, body: QueryBody, timeout_s: float) -> QueryBody | None:
        """Sends a query to another instance. Returns its answer, or None if none came in time."""
        number = next(self._query_numbers)
        answer: asyncio.Future[QueryBody] = asyncio.get_running_loop().create_future()
        self._queries[peer, number] = answer
        try:
            if not self.protocol.send_query(peer, PeerQuery(number, False, body)):
                return None
            self._settle()
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._queries[peer, number]

    def reread_secrets(self) -> None:
        """Reads the secret file again; an invalid one changes nothing."""
        keys = self._config.keys
        if isinstance(keys, SecretFile):
            try:
                if keys.reread():
                    self.protocol.rekey(keys.keys)
                    log.info("the cluster's secrets are new")
            except ConfigError as error:
                self._log_rarely(logging.ERROR, "secrets", "", "%s; the secrets from before stay", error.message)

    def families(self, labels: str) -> Iterator[str]:
        """Yields the metric families for GET /metrics: counts of instances by state, of refused entries, frames and
        instances, and of forgotten removals."""
        protocol = self.protocol
        states = [record.state for record in self.members()]
        members = [(f'state="{state.name.lower()}",{labels}', states.count(state)) for state in MemberState]
        yield family("caraserve:cluster_members", "gauge", "Instances by state, this one included.", members)
        for name, count, text in (
            (
                "entries_refused",
                protocol.state.refused,
                "Entries of other instances refused: wrong clocks, impostors, names or sizes that no adapter has.",
            ),
            (
                "frames_refused",
                protocol.malformed,
                "Frames of other instances refused: not signed with a secret of ours, or no message.",
            ),
            (
                "instances_refused",
                protocol.members.refused_names,
                "Times that an instance was not taken in, as there are too many.",
            ),
            (
                "removals_dropped",
                protocol.state.dropped,
                "Removals of names forgotten before their time, for want of room.",
            ),
        ):
            yield family(f"caraserve:cluster_{name}_total", "counter", text, [(labels, count)])

    # ---- TransportListener

    def connected(self, connection_id: int, dialled: str | None) -> None:
        """Implements `TransportListener`: handles a new connection."""
        self.protocol.connected(connection_id, self._now(), dialled=dialled)
        self._settle()

    def received(self, connection_id: int, frame: bytes) -> None:
        """Implements `TransportListener`: handles a received frame."""
        self.protocol.received(connection_id, frame, self._now())
        self._settle()

    def lost(self, connection_id: int) -> None:
        """Implements `TransportListener`: handles the end of a connection."""
        self.protocol.lost(connection_id, self._now())
        self._settle()

    def pull(self, connection_id: int) -> bytes | None:
        """Implements `TransportListener`: returns the next frame to send, or None."""
        return self.protocol.pull(connection_id, self._now())

    # ---- internals

    async def _tick(self) -> None:
        planned_s = self._now()
        while True:
            now = self._now()
            self._lag_s = max(now - planned_s, 0.8 * self._lag_s)
            if now >= self._heartbeat_s:
                load = self._listener.current_load(self._lag_s)
                self.protocol.set_load(load, now, urgent=load.status != self._status)
                self._status, self._heartbeat_s = load.status, now + 2 * _TICK_S
            self.protocol.tick(now, int(time.time() * 1000))
            self._settle()
            planned_s = self._now() + _TICK_S
            await asyncio.sleep(_TICK_S)

    async def _upkeep(self) -> None:
        resolve_s = self._now() + (_REREAD_S if self._unresolved else _RESOLVE_S)
        while True:
            await asyncio.sleep(_REREAD_S)
            self.reread_secrets()
            self._names.seen(int(time.time() * 1000))
            if (refused := self.protocol.state.refused) > self._refused:
                self._refused = refused
                text = "%d entries of other instances were refused so far; of the last one, %s"
                self._log_rarely(logging.WARNING, "entries", "", text, refused, self.protocol.state.objection)
            if self._now() >= resolve_s:
                seeds, self._unresolved = await resolve_peers(self._config.peers, self._resolver)
                resolve_s = self._now() + (_REREAD_S if self._unresolved else _RESOLVE_S)
                if seeds:  # when no name server answers, the seeds stay
                    self.protocol.seed(seeds)
            for peer in self._unresolved:
                self._log_rarely(logging.WARNING, "resolve", peer, "--peers %s does not resolve now", peer)

    def _settle(self) -> None:
        """Carries out the protocol's outputs, and sends what it has to send."""
        protocol, transport = self.protocol, self._transport
        assert transport is not None
        self._outputs.extend(protocol.take_outputs())
        while self._outputs:  # if one raises, the next call continues with the one after it
            self._handle_output(transport, self._outputs.popleft())
        transport.flush(protocol.writable())

    def _handle_output(self, transport: WebSocketTransport, output: Output) -> None:
        match output:
            case Dial(address):
                transport.dial(address)
            case CloseConnection(connection_id, reason, dialled):
                transport.close(connection_id)
                who = dialled or "an instance that connected to us"
                level = logging.WARNING if reason in (NO_ANSWER, UNKNOWN_SECRET) else logging.DEBUG
                self._log_rarely(level, reason, who, "the connection with %s ends: %s", who, reason)
            case MemberChanged(record):
                log.info("%s at %s is %s", record.name, record.address, record.state.name.lower())
                self._listener.on_member_change(record)
                self._listener.on_holders_change()
            case EntriesChanged(owner, entries) if owner == REGISTRY:
                if settings := [entry for entry in entries if is_setting(entry.key)]:
                    self._listener.on_settings_change(settings)
                names = [entry for entry in entries if not is_setting(entry.key)]
                self._names.save(names)
                # An entry of an unknown shape, as of a later version, is left out: it is no removal either.
                means = {entry.key: self.adapter(entry.key) for entry in names}
                gone = {entry.key for entry in names if entry.deleted}
                self._listener.on_registry_change(
                    {name: adapter for name, adapter in means.items() if adapter or name in gone}
                )
            case EntriesChanged():
                self._listener.on_holders_change()
            case PeerRefused(peer, reason):
                self._log_rarely(logging.WARNING, "refused", peer, "%s is refused: %s", peer, reason)
            case RefusedByPeer(peer, reason, must_exit):
                self._log_rarely(logging.ERROR, "refused us", peer, "%s refuses us: %s", peer or "an instance", reason)
                if must_exit and not self.ended.done():
                    self.ended.set_exception(ConfigError(f"this instance cannot join its cluster: {reason}"))
            case QueryReceived(peer, query):
                self._handle_query(peer, query)

    def _handle_query(self, peer: str, query: PeerQuery) -> None:
        if not query.is_answer:
            self.protocol.send_query(peer, PeerQuery(query.number, True, self._listener.answer_query(peer, query.body)))
        elif (future := self._queries.get((peer, query.number))) is not None and not future.done():
            future.set_result(query.body)

    def _log_rarely(self, level: int, kind: str, about: str, text: str, *values: object) -> None:
        """Logs a line, at most once in 60 s for one kind and address."""
        now = self._now()
        if now - self._logged_s.get((kind, about), -_QUIET_S) >= _QUIET_S:
            self._logged_s = {key: when for key, when in self._logged_s.items() if now - when < _QUIET_S}
            self._logged_s[kind, about] = now
            log.log(level, text, *values)
