"""The cluster protocol of one instance, without I/O: bytes and time go in, bytes and events come out.

The caller does the I/O: it calls `connected`, `received` and `lost` for connections, and `tick` at least ten times a
second. After each call it carries out `take_outputs` and sends what `pull` returns for the connections in `writable`.
Clock readings and random numbers are arguments, so the tests run the same code as the server.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from random import Random

from msgspec.structs import replace

from caraserve.cluster.membership import messages
from caraserve.cluster.membership.anti_entropy import AntiEntropy
from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.connection import Connection, limit_accepted, should_replace
from caraserve.cluster.membership.dialer import Dialer
from caraserve.cluster.membership.events import (
    CLUSTER_FULL,
    CloseConnection,
    Dial,
    EntriesChanged,
    Output,
    PeerRefused,
    ProtocolSettings,
    QueryReceived,
    RefusedByPeer,
    name_conflict_refusal,
    refusal_reason,
)
from caraserve.cluster.membership.swim import (
    MAX_LIVE,
    MemberRecord,
    MemberState,
    MemberTable,
    MemberUpdate,
    NameConflict,
    PingRelays,
)
from caraserve.cluster.state.lww_map import MAX_NAME, Entry, EntryValue
from caraserve.cluster.state.replicated_map import REGISTRY, InstanceLoad, RegisteredAdapter, ReplicatedState
from caraserve.errors import ConfigError

_MAX_NONCES = 4 * MAX_LIVE


class ClusterProtocol:
    """The protocol state of one instance. `now` is a monotonic clock's time in seconds, `wall_ms` unix time in ms."""

    def __init__(self, settings: ProtocolSettings, keys: Keyring, rng: Random, now: float, wall_ms: int) -> None:
        """Raises ConfigError for a name or address that other instances would refuse."""
        if not messages.is_valid_identity(settings.name, settings.address):
            raise ConfigError(
                f"--name {settings.name!r} at {settings.address!r}: plain ASCII, up to {MAX_NAME}, at HOST:PORT"
            )
        me = MemberRecord(settings.name, settings.address, wall_ms, 0, MemberState.ALIVE)
        self.members = MemberTable(me, settings.timing, rng, now)
        self.state = ReplicatedState(settings.name, settings.base_name)
        self.malformed = 0  # frames that did not verify or decode
        self._settings = settings
        self._keys = keys
        self._rng = rng
        self._wall_offset_ms = wall_ms - now * 1000
        self._anti_entropy = AntiEntropy(self.state, rng)
        self._dialer = Dialer(settings.name, settings.seeds, rng, now)
        self._connections: dict[int, Connection] = {}
        self._nonces: deque[str] = deque(maxlen=_MAX_NONCES)  # own ones: a Hello with one comes from this instance
        self._peers: dict[str, Connection] = {}  # the connection in use with each instance in session
        self._spare: dict[int, float] = {}  # connections that another one replaced, and since when
        self._relays = PingRelays(0.8 * settings.timing.probe_s)  # so that a nack arrives before the asker's timeout
        self._load, self._sequence = InstanceLoad(), 0
        self._heartbeat_s, self._sync_s = now, now + settings.sync_s * rng.random()
        self._crowded = False  # whether CLUSTER_FULL has been reported
        self._was_in = False  # whether this instance has ever been in session with a peer
        self._outputs: list[Output] = []

    # ---- for the I/O

    def connected(self, connection_id: int, now: float, *, dialled: str | None = None) -> None:
        """Adds a connection. `dialled`: its address, if this instance opened it."""
        nonce = f"{self._rng.getrandbits(128):032x}"
        self._connections[connection_id] = Connection(connection_id, dialled, nonce, self._keys, now)
        if self.members.me.state == MemberState.LEFT:
            self._connections[connection_id].close("we are leaving")
        elif dialled is not None:
            self._nonces.append(nonce)
        else:
            limit_accepted(self._connections.values())
        self._settle()

    def lost(self, connection_id: int, now: float) -> None:
        """Removes a connection that ended at either side."""
        gone = self._connections.pop(connection_id, None)
        self._spare.pop(connection_id, None)
        if gone is not None and gone.peer is not None and self._peers.get(gone.peer.name) is gone:
            self._end_session(gone)
            spares = [self._connections[number] for number in self._spare]
            usable = [one for one in spares if one.closing is None and one.peer and one.peer.name == gone.peer.name]
            if usable:
                self._peers[gone.peer.name] = usable[0]
                del self._spare[usable[0].number]
            elif self.members.me.state != MemberState.LEFT:  # a leaving instance suspects no peer
                self.members.lost(gone.peer.name, now)
        self._settle()

    def received(self, connection_id: int, frame: bytes, now: float) -> None:
        """Handles a frame that arrived over a connection."""
        source = self._connections.get(connection_id)
        if source is not None and source.closing is None:
            message = source.open(frame, now)
            if isinstance(message, messages.Malformed):
                self.malformed += 1
            elif isinstance(message, messages.Hello):
                self._greeted(source, message, now)
            elif isinstance(message, messages.Refuse):
                if message.echo == source.nonce:
                    self._refused(source, message.reason, now)
            elif message is not None and source.peer is not None:
                self.members.heard(source.peer.name, source.peer.address, now)
                self._handle(source, source.peer.name, message, now)
        self._settle()

    def tick(self, now: float, wall_ms: int | None = None) -> None:
        """Does what is due. `wall_ms`: unix time in ms, because clocks are corrected while a server runs."""
        if wall_ms is not None:
            self._wall_offset_ms = wall_ms - now * 1000
        if self.members.me.state != MemberState.LEFT:
            self._take_part(now)
        for connection in self._connections.values():
            connection.watch(self._settings, now)
            if now - self._spare.get(connection.number, now) > self._settings.spare_s:
                connection.close("another connection to it is in use")
        self._settle()

    def _take_part(self, now: float) -> None:
        for probe in self.members.tick(now):
            self._send(probe.target, messages.Ping(probe.number, self.members.updates(probe.target)))
            for via in probe.via:
                self._send(via, messages.PingRequest(probe.number, probe.target, self.members.updates(via)))
        for asker, asked in self._relays.expired(now):
            self._send(asker, messages.Nack(asked))
        for message in self._anti_entropy.next_frames(self._wall_ms(now)):
            self._send_all(message)
        if now >= self._heartbeat_s:
            self._heartbeat_s = now + self._settings.heartbeat_s
            self._send_heartbeats()
        if now >= self._sync_s:
            self._sync_s = now + self._settings.sync_s * (0.75 + self._rng.random() / 2)
            self._tidy(now)
            if self._peers:
                self._send(self._rng.choice(list(self._peers)), self._sync(answer=False))
        connections = [one for one in self._connections.values() if one.closing is None]
        reached = [(one.dialled, one.peer) for one in connections]
        self._outputs += map(Dial, self._dialer.due(self.members.records()[1:], reached, now))

    def writable(self) -> list[int]:
        """Returns the ids of connections for which `pull` may return a frame."""
        return [number for number, connection in self._connections.items() if connection.waiting]

    def pull(self, connection_id: int, now: float) -> bytes | None:
        """Returns the next frame to send over a connection, or None. Frames wait here, within bounds, until pulled."""
        source = self._connections.get(connection_id)
        if source is None:
            return None
        me, settings = self.members.me, self._settings
        echo = source.peer.nonce if source.peer and not source.barred else ""
        who = (settings.cluster, settings.model, me.name, me.address, me.epoch)
        return source.pull(messages.Hello(messages.PROTOCOL_VERSION, *who, source.nonce, echo, source.up), now)

    def take_outputs(self) -> list[Output]:
        """Returns the actions to carry out and the events since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- for the server

    def set_load(self, load: InstanceLoad, now: float, *, urgent: bool = False) -> None:
        """Sets the load for the next heartbeat; `urgent` (drain, full) sends one with the next tick."""
        self._load = load
        if urgent:
            self._heartbeat_s = now

    def register(self, adapter: RegisteredAdapter, now: float) -> list[Entry]:
        """Registers an adapter on all instances. Returns the entries to persist. Raises InvalidRequest."""
        return self._pushed(REGISTRY, self.state.register(adapter, self._wall_ms(now)))

    def remove(self, name: str, now: float) -> list[Entry]:
        """Removes an adapter's name on all instances. Returns the entries to persist."""
        return self._pushed(REGISTRY, self.state.remove(name, self._wall_ms(now)))

    def advertise(self, key: str, value: EntryValue, now: float) -> None:
        """Advertises a value of this instance, such as the tier of a digest that it has. Raises InvalidRequest."""
        self._pushed(self._settings.name, self.state.advertise(key, value, self._wall_ms(now)))

    def withdraw(self, key: str, now: float) -> None:
        """Withdraws what was advertised under a key."""
        self._pushed(self._settings.name, self.state.withdraw(key, self._wall_ms(now)))

    def _pushed(self, owner: str, entries: list[Entry]) -> list[Entry]:
        self._anti_entropy.push(owner, entries)
        return entries

    def restore(self, entries: Iterable[Entry], now: float) -> None:
        """Merges registry entries, tombstones included, that an earlier run persisted."""
        self.state.merge(REGISTRY, entries, self._wall_ms(now))

    def share(self, entry: Entry, now: float) -> bool:
        """Adds an entry that this instance has written to the registry of all instances, unless a newer one is there.
        Returns False if there is no room for it."""
        if self.state.has_room(entry):
            news, _ = self.state.merge(REGISTRY, [entry], self._wall_ms(now))
            self._anti_entropy.push(REGISTRY, news)
        newest = self.state.registry.get(entry.key)
        return newest is not None and newest.order >= entry.order

    def send_query(self, peer: str, quote: messages.PeerQuery) -> bool:
        """Sends a query to a peer, or an answer. Returns whether there is a session with it."""
        self._send(peer, quote)
        return peer in self._peers

    def peers(self) -> Iterator[str]:
        """Yields the names of instances in session with this one."""
        return iter(tuple(self._peers))

    def seed(self, addresses: tuple[str, ...]) -> None:
        """Replaces the seed addresses, for example when a DNS name resolves to other addresses than before."""
        self._dialer.seeds = addresses

    def rekey(self, keys: Keyring) -> None:
        """Signs and verifies with other secrets from the next frame on."""
        self._keys = keys
        for connection in self._connections.values():
            connection.rekey(keys)

    def leave(self, now: float) -> None:
        """Sends `Leave` to all peers; from then on no connection is accepted or dialled."""
        self.members.leave()
        self._send_all(messages.Leave(self.members.me))
        self._settle()

    # ---- sessions

    def _greeted(self, connection: Connection, hello: messages.Hello, now: float) -> None:
        ours = next((one for one in self._connections.values() if one.nonce == hello.nonce), None)
        is_us = ours is not None or hello.nonce in self._nonces
        self._nonces.append(connection.nonce)  # only now that its key has verified: others must not fill the list
        if is_us:
            self._dialer.is_us(ours.dialled if ours else connection.dialled)
            connection.close("it is our own address")
            return
        known = self._peers.get(hello.name)
        heard = known is not None and now - known.heard_s <= self._settings.timing.silent_s
        reason = refusal_reason(self._settings, hello, known.peer if known and heard else None)
        if reason is None and not self.members.admits(hello.name):
            reason = CLUSTER_FULL
        if reason is not None:
            connection.peer = hello
            connection.refuse(reason, now)
            self._dialer.refused(connection.dialled, now)
            self._outputs.append(PeerRefused(f"{hello.name} at {hello.address}", reason))
        elif connection.greeted(hello, now):
            self._begin(connection, hello, now)

    def _refused(self, connection: Connection, reason: str, now: float) -> None:
        self._dialer.refused(connection.dialled, now)
        peer = connection.peer
        # One of another version has been refused by this instance for the same reason.
        if peer is None or peer.protocol == messages.PROTOCOL_VERSION:
            later = peer is not None and peer.epoch <= self.members.me.epoch
            must_exit = not self._was_in and (later or reason == CLUSTER_FULL)
            self._outputs.append(RefusedByPeer(peer.name if peer else connection.dialled or "", reason, must_exit))
        connection.close("it refused us")

    def _begin(self, connection: Connection, hello: messages.Hello, now: float) -> None:
        """Starts the session after the peer has proved that it has a secret and is not a recording."""
        self._was_in = True
        record = MemberRecord(hello.name, hello.address, hello.epoch, 0, MemberState.ALIVE)
        self.members.merge(MemberUpdate(record, ""), now)
        self.members.heard(hello.name, hello.address, now)
        self._dialer.reached(connection.dialled, hello.name)
        old = self._peers.get(hello.name)
        if old is not None:
            if not should_replace(connection, old, hello, self._settings.name):
                self._spare[connection.number] = now
                return
            self._spare[old.number] = now
        self._peers[hello.name] = connection
        connection.send(self._sync(answer=False))

    def _end_session(self, connection: Connection) -> None:
        if connection.peer is not None and self._peers.get(connection.peer.name) is connection:
            del self._peers[connection.peer.name]
            self._anti_entropy.lost(connection.peer.name)

    def _settle(self) -> None:
        """Turns events of the member table and of connections into outputs."""
        self.state.is_outbid = self.members.is_outbid
        for event in self.members.take_events():
            if isinstance(event, NameConflict):
                self._outputs.append(name_conflict_refusal(self._settings, event.address))
            else:
                self.state.add_owner(event.record.name)
                self._outputs.append(event)
        if self.members.refused_names and not self._crowded:
            self._crowded = True
            self._outputs.append(PeerRefused("an instance", CLUSTER_FULL))
        for connection in self._connections.values():
            if connection.closing is not None and not connection.is_close_sent:
                connection.is_close_sent = True
                self._end_session(connection)
                self._outputs.append(CloseConnection(connection.number, connection.closing, connection.dialled))

    # ---- messages

    def _handle(self, connection: Connection, name: str, message: messages.Message, now: float) -> None:
        match message:
            case messages.Heartbeat() | messages.Sync() | messages.Leave():
                self._take_view(connection, name, message, now)
            case messages.Ping() | messages.PingRequest() | messages.Ack() | messages.Nack():
                self._take_probe(connection, name, message, now)
            case messages.Compare():
                for part in self._anti_entropy.answer(message):
                    connection.send(part)
            case messages.Entries(owner=owner):
                news, question = self._anti_entropy.on_entries(name, message, now, self._wall_ms(now))
                if news:
                    self._outputs.append(EntriesChanged(owner, tuple(news)))
                if question is not None:
                    connection.send(question)
            case messages.PeerQuery():
                self._outputs.append(QueryReceived(name, message))

    def _take_view(self, connection: Connection, name: str, message: messages.Message, now: float) -> None:
        match message:
            case messages.Heartbeat(record, sequence, load, registry_root, advertised_root, updates) if (
                record.name == name
            ):
                self._merge((MemberUpdate(record, ""), *updates), now)
                if self.members.get(name) is None:
                    self._end_session(connection)
                    connection.refuse(CLUSTER_FULL, now)
                    return
                self.state.take_load(name, record.epoch, sequence, load, now)
                self._saw_roots(connection, name, ((REGISTRY, registry_root), (name, advertised_root)), now)
            case messages.Sync(answer, records, roots):
                for record in records:
                    self.members.merge(
                        MemberUpdate(record, name if record.state == MemberState.SUSPECT else ""), now, by_sync=True
                    )
                self._saw_roots(connection, name, roots, now)
                if not answer:
                    connection.send(self._sync(answer=True))
            case messages.Leave(record) if record.name == name:
                self._merge((MemberUpdate(record, ""),), now)
                connection.close("it leaves")

    def _take_probe(self, connection: Connection, name: str, message: messages.Message, now: float) -> None:
        match message:
            case messages.Ping(number, updates):
                self._merge(updates, now)
                connection.send(messages.Ack(number, self.members.me))
            case messages.PingRequest(number, target, updates):
                self._merge(updates, now)
                ping = self._relays.start(name, number, now) if target in self._peers else None
                if ping is None:
                    self._send(name, messages.Nack(number))
                else:
                    self._send(target, messages.Ping(ping, self.members.updates(target)))
            case messages.Ack(number, record):
                asker, asked = self._relays.answered(number)
                self._send(asker, messages.Ack(asked, record))
                self.members.acked(number, record, now)
            case messages.Nack(number):
                self.members.nacked(number, name)

    def _merge(self, updates: Iterable[MemberUpdate], now: float) -> None:
        for update in updates:
            self.members.merge(update, now)

    def _saw_roots(self, connection: Connection, name: str, roots: Iterable[tuple[str, int]], now: float) -> None:
        for owner, root in roots:
            question = self._anti_entropy.on_root(name, owner, root, now)
            if question is not None:
                connection.send(question)

    def _send_heartbeats(self) -> None:
        self._sequence += 1
        mine = self.state.map_of(self._settings.name)
        roots = (self.state.registry.root, mine.root if mine else 0)
        heartbeat = messages.Heartbeat(self.members.me, self._sequence, self._load, *roots, ())
        for name, connection in self._peers.items():
            connection.send(replace(heartbeat, updates=self.members.updates(name)))

    def _sync(self, *, answer: bool) -> messages.Sync:
        return messages.Sync(answer, self.members.records(), self.state.roots())

    def _tidy(self, now: float) -> None:
        self.state.expire(self._wall_ms(now))
        for owner, _ in self.state.roots():
            if owner != REGISTRY and self.members.get(owner) is None:
                self.state.forget(owner)

    def _send(self, name: str, message: messages.Message) -> None:
        connection = self._peers.get(name)
        if connection is not None:
            connection.send(message)

    def _send_all(self, message: messages.Message) -> None:
        for connection in self._peers.values():
            connection.send(message)

    def _wall_ms(self, now: float) -> int:
        return int(self._wall_offset_ms + now * 1000)
