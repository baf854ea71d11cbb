"""The whole of an instance's part in the cluster, without a socket: bytes and time in, bytes and events out.

Whoever does the I/O calls `connected`, `received`, `lost` and, ten times a second or more often, `tick`; after each, it
does what `take_outputs` says and sends what `pull` gives for the links in `writable`. Nothing here waits, reads a clock
or draws a number that was not handed in, so the tests and the simulator run what the server runs.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from random import Random

from msgspec.structs import replace

from caraserve.cluster.membership import messages
from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.connection import Connection, Ignored, limit_accepted, should_replace
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
from caraserve.cluster.membership.message_fields import MAX_NAME
from caraserve.cluster.membership.swim import (
    MAX_LIVE,
    MemberRecord,
    MemberState,
    MemberTable,
    MemberUpdate,
    NameConflict,
    PingRelays,
)
from caraserve.cluster.state.anti_entropy import AntiEntropy
from caraserve.cluster.state.replicated_map import (
    REGISTRY,
    Entry,
    EntryValue,
    InstanceLoad,
    RegisteredAdapter,
    ReplicatedState,
)
from caraserve.errors import ConfigError

_MAX_NONCES = 4 * MAX_LIVE


class ClusterProtocol:
    """One instance. `now` is a monotonic clock's, `wall_ms` the time of day at that moment."""

    def __init__(self, settings: ProtocolSettings, keys: Keyring, rng: Random, now: float, wall_ms: int) -> None:
        """Raises ConfigError for a name or address that others could not read."""
        if not messages.is_valid_identity(settings.name, settings.address):
            raise ConfigError(
                f"--name {settings.name!r} at {settings.address!r}: plain ASCII, up to {MAX_NAME}, at HOST:PORT"
            )
        me = MemberRecord(settings.name, settings.address, wall_ms, 0, MemberState.ALIVE)
        self.members = MemberTable(me, settings.timing, rng, now)
        self.state = ReplicatedState(settings.name, settings.base_name)
        self.malformed = 0  # frames that were not what they should be
        self._settings = settings
        self._keys = keys
        self._rng = rng
        self._wall_offset_ms = wall_ms - now * 1000
        self._sharing = AntiEntropy(self.state, rng)
        self._dialling = Dialer(settings.name, settings.seeds, rng, now)
        self._links: dict[int, Connection] = {}
        self._nonces: deque[str] = deque(maxlen=_MAX_NONCES)  # by which we know ourselves at the other end
        self._peers: dict[str, Connection] = {}  # the connection in use with each instance in session
        self._spare: dict[int, float] = {}  # links that another one replaced, and since when
        self._relays = PingRelays(0.8 * settings.timing.probe_s)  # our no comes before the asker gives up on us
        self._load, self._sequence = InstanceLoad(), 0
        self._beat_s, self._sync_s = now, now + settings.sync_s * rng.random()
        self._crowded = False  # and it has been said
        self._was_in = False  # in session with anybody, ever
        self._outputs: list[Output] = []

    # ---- what the I/O does with us

    def connected(self, link: int, now: float, *, dialled: str | None = None) -> None:
        """A connection stands; `dialled` is the address if it was we who asked for it."""
        nonce = f"{self._rng.getrandbits(128):032x}"
        self._links[link] = Connection(link, dialled, nonce, self._keys, now)
        if self.members.me.state == MemberState.LEFT:
            self._links[link].close("we are leaving")
        elif dialled is not None:
            self._nonces.append(nonce)
        else:
            limit_accepted(self._links.values())
        self._settle()

    def lost(self, link: int, now: float) -> None:
        """A connection ended, whoever ended it."""
        gone = self._links.pop(link, None)
        self._spare.pop(link, None)
        if gone is not None and gone.peer is not None and self._peers.get(gone.peer.name) is gone:
            self._unlink(gone)
            if (spare := self._other_link(gone.peer.name)) is not None:
                self._peers[gone.peer.name] = spare
                del self._spare[spare.number]
            elif self.members.me.state != MemberState.LEFT:  # who leaves judges nobody any more
                self.members.lost(gone.peer.name, now)
        self._settle()

    def received(self, link: int, frame: bytes, now: float) -> None:
        """A frame came over a connection."""
        source = self._links.get(link)
        if source is not None and source.closing is None:
            message = source.open(frame, now)
            if isinstance(message, messages.Malformed):
                self.malformed += 1
            elif isinstance(message, messages.Hello):
                self._greeted(source, message, now)
            elif isinstance(message, messages.Refuse):
                if message.echo == source.nonce:
                    self._refused(source, message.reason, now)
            elif not isinstance(message, Ignored) and source.peer is not None:
                self.members.heard(source.peer.name, source.peer.address, now)
                self._handle(source, source.peer.name, message, now)
        self._settle()

    def tick(self, now: float, wall_ms: int | None = None) -> None:
        """Time has passed. `wall_ms`: the time of day now; clocks are put right while a server runs."""
        if wall_ms is not None:
            self._wall_offset_ms = wall_ms - now * 1000
        if self.members.me.state != MemberState.LEFT:
            self._take_part(now)
        self._watch_links(now)
        self._settle()

    def _take_part(self, now: float) -> None:
        for probe in self.members.tick(now):
            self._send(probe.target, messages.Ping(probe.number, self.members.updates(probe.target)))
            for via in probe.via:
                self._send(via, messages.PingRequest(probe.number, probe.target, self.members.updates(via)))
        for asker, asked in self._relays.expired(now):
            self._send(asker, messages.Nack(asked))
        for message in self._sharing.take_news(self._wall_ms(now)):
            self._send_all(message)
        if now >= self._beat_s:
            self._beat_s = now + self._settings.beat_s
            self._beat()
        if now >= self._sync_s:
            self._sync_s = now + self._settings.sync_s * (0.75 + self._rng.random() / 2)
            self._tidy(now)
            if self._peers:
                self._send(self._rng.choice(list(self._peers)), self._sync(answer=False))
        reached = [(link.dialled, link.peer) for link in self._links.values() if link.closing is None]
        due = self._dialling.due(self.members.records()[1:], reached, now)
        self._outputs += (Dial(address) for address in due)

    def writable(self) -> list[int]:
        """Links for which `pull` may give something."""
        return [number for number, link in self._links.items() if link.waiting]

    def pull(self, link: int, now: float) -> bytes | None:
        """The next frame to send over a link. What is not pulled waits, within bounds."""
        source = self._links.get(link)
        if source is None:
            return None
        me, settings = self.members.me, self._settings
        echo = source.peer.nonce if source.peer and not source.barred else ""
        who = (settings.cluster, settings.model, me.name, me.address, me.epoch)
        return source.pull(messages.Hello(messages.PROTOCOL_VERSION, *who, source.nonce, echo, source.up), now)

    def take_outputs(self) -> list[Output]:
        """What to do and what happened, since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- what the server does with us

    def set_load(self, load: InstanceLoad, now: float, *, urgent: bool = False) -> None:
        """Our load, for the next beat; `urgent` (drain, full) sends one with the next tick."""
        self._load = load
        if urgent:
            self._beat_s = now

    def register(self, adapter: RegisteredAdapter, now: float) -> list[Entry]:
        """Names an adapter, everywhere; gives what is to be kept of it. Raises InvalidRequest."""
        entries = self.state.register(adapter, self._wall_ms(now))
        self._sharing.tell(REGISTRY, entries)
        return entries

    def remove(self, name: str, now: float) -> list[Entry]:
        """Takes an adapter's name away, everywhere; gives what is to be kept of that."""
        entries = self.state.remove(name, self._wall_ms(now))
        self._sharing.tell(REGISTRY, entries)
        return entries

    def advertise(self, key: str, value: EntryValue, now: float) -> None:
        """Says that we hold a digest's bytes, or another entry about ourselves such as our profile."""
        self._sharing.tell(self._settings.name, self.state.advertise(key, value, self._wall_ms(now)))

    def withdraw(self, key: str, now: float) -> None:
        """Says that it is so no more."""
        self._sharing.tell(self._settings.name, self.state.withdraw(key, self._wall_ms(now)))

    def restore(self, entries: Iterable[Entry], now: float) -> None:
        """Adapter names kept from an earlier life, tombstones among them."""
        self.state.merge(REGISTRY, entries, self._wall_ms(now))

    def send_query(self, peer: str, quote: messages.PeerQuery) -> bool:
        """Asks a peer, or answers it; whether there is a connection to it."""
        self._send(peer, quote)
        return peer in self._peers

    def peers(self) -> Iterator[str]:
        """Instances in session with us."""
        return iter(tuple(self._peers))

    def seed(self, addresses: tuple[str, ...]) -> None:
        """Other addresses to find the cluster at, as when a DNS name resolves to others than before."""
        self._dialling.seeds = addresses

    def rekey(self, keys: Keyring) -> None:
        """Other secrets, from the next frame on."""
        self._keys = keys
        for link in self._links.values():
            link.rekey(keys)

    def leave(self, now: float) -> None:
        """Says goodbye; then nobody is let in or dialled."""
        self.members.leave()
        self._send_all(messages.Leave(self.members.me))
        self._settle()

    # ---- sessions

    def _greeted(self, link: Connection, hello: messages.Hello, now: float) -> None:
        ours = next((one for one in self._links.values() if one.nonce == hello.nonce), None)
        is_us = ours is not None or hello.nonce in self._nonces
        self._nonces.append(link.nonce)  # not before it has shown a key: strangers push nothing out
        if is_us:
            self._dialling.is_us(ours.dialled if ours else link.dialled)
            link.close("it is our own address")
            return
        known = self._peers.get(hello.name)
        heard = known is not None and now - known.heard_s <= self._settings.timing.silent_s
        reason = refusal_reason(self._settings, hello, known.peer if known and heard else None)
        if reason is None and not self.members.admits(hello.name):
            reason = CLUSTER_FULL
        if reason is not None:
            link.peer = hello
            link.refuse(reason, now)
            self._dialling.refused(link.dialled, now)
            self._outputs.append(PeerRefused(f"{hello.name} at {hello.address}", reason))
        elif link.greeted(hello, now):
            self._begin(link, hello, now)

    def _refused(self, link: Connection, reason: str, now: float) -> None:
        self._dialling.refused(link.dialled, now)
        if (
            link.peer is None or link.peer.protocol == messages.PROTOCOL_VERSION
        ):  # else we have refused it, for the same reason
            later = link.peer is not None and link.peer.epoch <= self.members.me.epoch
            ours_to_go = not self._was_in and (later or reason == CLUSTER_FULL)
            self._outputs.append(RefusedByPeer(link.peer.name if link.peer else link.dialled or "", reason, ours_to_go))
        link.close("it refused us")

    def _begin(self, link: Connection, hello: messages.Hello, now: float) -> None:
        """A peer has proved that it knows a secret, and does so now."""
        self._was_in = True
        self.members.merge(
            MemberUpdate(MemberRecord(hello.name, hello.address, hello.epoch, 0, MemberState.ALIVE), ""), now
        )
        self.members.heard(hello.name, hello.address, now)
        self._dialling.reached(link.dialled, hello.name)
        old = self._peers.get(hello.name)
        if old is not None:
            if not should_replace(link, old, hello, self._settings.name):
                self._spare[link.number] = now
                return
            self._spare[old.number] = now
        self._peers[hello.name] = link
        link.send(self._sync(answer=False))

    def _other_link(self, name: str) -> Connection | None:
        """The spare connection to an instance."""
        links = (link for link in self._links.values() if link.number in self._spare and link.closing is None)
        return next((link for link in links if link.peer is not None and link.peer.name == name), None)

    def _unlink(self, link: Connection) -> None:
        if link.peer is not None and self._peers.get(link.peer.name) is link:
            del self._peers[link.peer.name]
            self._sharing.lost(link.peer.name)

    def _watch_links(self, now: float) -> None:
        for link in self._links.values():
            link.watch(self._settings, now)
            if now - self._spare.get(link.number, now) > self._settings.spare_s:
                link.close("another connection to it is in use")

    def _settle(self) -> None:
        """Turns what the parts have come to into outputs."""
        self.state.is_outbid = self.members.is_outbid
        for event in self.members.take_events():
            if isinstance(event, NameConflict):
                self._outputs.append(name_conflict_refusal(self._settings, event.address))
            else:
                self.state.know(event.record.name)
                self._outputs.append(event)
        if self.members.refused_names and not self._crowded:
            self._crowded = True
            self._outputs.append(PeerRefused("an instance", CLUSTER_FULL))
        for link in self._links.values():
            if link.closing is not None and not link.told:
                link.told = True
                self._unlink(link)
                self._outputs.append(CloseConnection(link.number, link.closing, link.dialled))

    # ---- messages

    def _handle(self, link: Connection, name: str, message: messages.Message, now: float) -> None:
        match message:
            case messages.Heartbeat() | messages.Sync() | messages.Leave():
                self._take_view(link, name, message, now)
            case messages.Ping() | messages.PingRequest() | messages.Ack() | messages.Nack():
                self._take_probe(link, name, message, now)
            case messages.Compare():
                for part in self._sharing.answer(message):
                    link.send(part)
            case messages.Entries(owner=owner):
                news, question = self._sharing.take(name, message, now, self._wall_ms(now))
                if news:
                    self._outputs.append(EntriesChanged(owner, tuple(news)))
                if question is not None:
                    link.send(question)
            case messages.PeerQuery():
                self._outputs.append(QueryReceived(name, message))

    def _take_view(
        self, link: Connection, name: str, message: messages.Heartbeat | messages.Sync | messages.Leave, now: float
    ) -> None:
        match message:
            case messages.Heartbeat(record, sequence, load, registry_root, advertised_root, updates) if (
                record.name == name
            ):
                self._merge((MemberUpdate(record, ""), *updates), now)
                if self.members.get(name) is None:
                    self._unlink(link)
                    link.refuse(CLUSTER_FULL, now)
                    return
                self.state.take_load(name, record.epoch, sequence, load, now)
                self._saw_roots(link, name, ((REGISTRY, registry_root), (name, advertised_root)), now)
            case messages.Sync(answer, records, roots):
                for record in records:
                    self.members.merge(
                        MemberUpdate(record, name if record.state == MemberState.SUSPECT else ""), now, by_sync=True
                    )
                self._saw_roots(link, name, roots, now)
                if not answer:
                    link.send(self._sync(answer=True))
            case messages.Leave(record) if record.name == name:
                self._merge((MemberUpdate(record, ""),), now)
                link.close("it leaves")

    def _take_probe(
        self,
        link: Connection,
        name: str,
        message: messages.Ping | messages.PingRequest | messages.Ack | messages.Nack,
        now: float,
    ) -> None:
        match message:
            case messages.Ping(number, updates):
                self._merge(updates, now)
                link.send(messages.Ack(number, self.members.me))
            case messages.PingRequest(number, target, updates):
                self._merge(updates, now)
                self._relay(name, number, target, now)
            case messages.Ack(number, record):
                asker, asked = self._relays.answered(number)
                self._send(asker, messages.Ack(asked, record))
                self.members.acked(number, record, now)
            case messages.Nack(number):
                self.members.nacked(number, name)

    def _merge(self, updates: Iterable[MemberUpdate], now: float) -> None:
        for update in updates:
            self.members.merge(update, now)

    def _saw_roots(self, link: Connection, name: str, roots: Iterable[tuple[str, int]], now: float) -> None:
        for owner, root in roots:
            question = self._sharing.saw_root(name, owner, root, now)
            if question is not None:
                link.send(question)

    def _relay(self, asker: str, asked: int, target: str, now: float) -> None:
        number = self._relays.start(asker, asked, now) if target in self._peers else None
        if number is None:
            self._send(asker, messages.Nack(asked))
        else:
            self._send(target, messages.Ping(number, self.members.updates(target)))

    def _beat(self) -> None:
        self._sequence += 1
        names, mine = self.state.map_of(REGISTRY), self.state.map_of(self._settings.name)
        roots = (names.root if names else 0, mine.root if mine else 0)
        beat = messages.Heartbeat(self.members.me, self._sequence, self._load, *roots, ())
        for name, link in self._peers.items():
            link.send(replace(beat, updates=self.members.updates(name)))

    def _sync(self, *, answer: bool) -> messages.Sync:
        return messages.Sync(answer, self.members.records(), self.state.roots())

    def _tidy(self, now: float) -> None:
        self.state.expire(self._wall_ms(now))
        for owner, _ in self.state.roots():
            if owner != REGISTRY and self.members.get(owner) is None:
                self.state.forget(owner)

    def _send(self, name: str, message: messages.Message) -> None:
        link = self._peers.get(name)
        if link is not None:
            link.send(message)

    def _send_all(self, message: messages.Message) -> None:
        for link in self._peers.values():
            link.send(message)

    def _wall_ms(self, now: float) -> int:
        return int(self._wall_offset_ms + now * 1000)
