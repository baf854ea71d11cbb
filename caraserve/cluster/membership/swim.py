"""Failure detection and membership by the rules of SWIM. No I/O, no clock.

Records are ordered by (epoch, incarnation, state), and of two records of an instance the greater wins. The epoch is
the start of the instance in ms, so a restart replaces the record of the earlier run at once. Only the instance
itself raises its incarnation: that is how it refutes a suspicion, or its own death.

    ALIVE ──silent and no probe answered, or its connection broke───► SUSPECT ──not refuted in time──► DEAD
      ▲────────────────── a higher incarnation, or a higher epoch ─────────┴──────────────────────────────┘
    An instance declares itself LEFT when it shuts down; only its own higher epoch or incarnation replaces that record.

If the clock of an instance's earlier run was ahead, the instance replaces that run's record with a higher epoch. Two
instances that share a name by mistake would raise their epochs without end, so each stops after 3 times and reports it.

From Lifeguard: probes wait longer while this instance itself is slow, a suspicion times out earlier the more instances
share it, every frame to a suspect carries the suspicion, and time during which the own event loop did not run counts
for no timeout. (Das et al., "SWIM"; Dadgar et al., "Lifeguard".)
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from caraserve.cluster.state.lww_map import Address, Count, Name, NameOrEmpty

MAX_LIVE = 64  # n² connections and heartbeats are cheap up to here; larger fleets are better served by a router
MAX_KNOWN = 4 * MAX_LIVE  # records kept, dead and left instances included: bounds memory if names are invented
MAX_UPDATES = 16  # in one frame
_MAX_HEALTH = 4
_MOST_OUTBIDS = 3  # times to raise the own epoch over another record of this name: earlier runs are few


class MemberState(IntEnum):
    """The believed state of an instance; of two records of one incarnation the greater state wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class MemberRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state that one instance believes another one to be in, or declares for itself."""

    name: Name
    address: Address
    epoch: Count  # the start of the instance, in ms since 1970
    incarnation: Count
    state: MemberState

    @property
    def order(self) -> tuple[int, int, MemberState, str]:
        """The key by which records are ordered. The order is total, so that merging in any sequence gives one result;
        the address only breaks ties."""
        return (self.epoch, self.incarnation, self.state, self.address)


class MemberUpdate(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record that is passed on from instance to instance, attached to other messages."""

    record: MemberRecord
    suspected_by: NameOrEmpty  # the instance that suspects it; empty in any other state


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """An instance joined, came back, became suspect, died or left. `before` is None for a new name."""

    record: MemberRecord
    before: MemberState | None


@dataclass(frozen=True, slots=True)
class NameConflict:
    """A live instance at another address has this instance's name."""

    address: str


@dataclass(frozen=True, slots=True)
class PeerProbe:
    """A probe: ping `target` directly and through each of `via`; answers carry `number`."""

    number: int
    target: str
    via: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DetectorTiming:
    """Seconds and counts of the failure detector, for heartbeats every 250 ms in one data centre."""

    silent_s: float = 0.75  # three heartbeats
    probe_s: float = 0.5
    suspect_s: float = 2.0  # for up to 10 instances; grows with log10 of their number, as updates take longer
    stretch: float = 3.0  # a suspicion by one instance alone lasts this many times as long
    confirmations: int = 3  # further accusers after which a suspicion lasts shortest
    lag_s: float = 0.5  # a longer gap between ticks means that the own event loop did not run
    vias: int = 3  # instances through which a target is probed
    spread: float = 3.0  # λ: an update goes out λ·log2(n+1) times
    forget_s: float = 3600.0  # for which dead instances are remembered and dialled


@dataclass(slots=True)
class _Member:
    record: MemberRecord
    heard_s: float
    since_s: float  # of the present state
    accusers: set[str] = field(default_factory=set)
    probe: PeerProbe | None = None
    probe_sent_s: float = 0.0
    nacks: set[str] = field(default_factory=set)


class MemberTable:
    """The records of all instances, as one instance sees them. `take_events` returns the changes.

    `now` is a monotonic clock's time in seconds."""

    def __init__(self, me: MemberRecord, timing: DetectorTiming, rng: Random, now: float) -> None:
        self.me = me
        self.refused_names = 0  # names that were not added because MAX_LIVE live ones are known
        self._timing = timing
        self._rng = rng
        self._others: dict[str, _Member] = {}
        self._queue: dict[tuple[str, str], tuple[MemberUpdate, int]] = {}  # (name, accuser) → update, times sent
        self._events: list[MemberChanged | NameConflict] = []
        # Lifeguard's local health: 0 while this instance keeps up with its timers and probes, up to 4 if not. Probes
        # wait 1 + this many times as long.
        self.health = 0
        self._troubled_s = self._ticked_s = now
        self._probes = 0
        self.is_outbid = False  # others take another instance of this name for this one, and it no longer objects
        self._outbids, self._outbid = 0, ""  # how often the epoch was raised, and the last other address of the name
        self._spread_me()

    # ---- queries

    def get(self, name: str) -> MemberRecord | None:
        """Returns the record of an instance, this one included, or None."""
        if name == self.me.name:
            return self.me
        member = self._others.get(name)
        return member.record if member else None

    def records(self) -> tuple[MemberRecord, ...]:
        """Returns all records, the own one first."""
        return (self.me, *(member.record for member in self._others.values()))

    def live(self) -> tuple[str, ...]:
        """Returns the names of the other instances that are alive or suspect."""
        return tuple(name for name, member in self._others.items() if member.record.state < MemberState.DEAD)

    def suspicion_s(self, accusers: int) -> float:
        """Returns after how many seconds an instance suspected by `accusers` instances is declared dead."""
        timing, size = self._timing, len(self.live()) + 1
        low = timing.suspect_s * max(1.0, math.log10(size))
        wanted = min(timing.confirmations, size - 2)  # all but the suspect and the first accuser
        if wanted <= 0:
            return low
        share = math.log(min(accusers, wanted + 1)) / math.log(wanted + 1) if accusers else 0.0
        return low * (timing.stretch - (timing.stretch - 1) * share)

    def take_events(self) -> list[MemberChanged | NameConflict]:
        """Returns the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    # ---- input

    def admits(self, name: str) -> bool:
        """Returns whether the instance is known and live, or there is room for one more."""
        member = self._others.get(name)
        known = member is not None and member.record.state < MemberState.DEAD
        return known or len(self.live()) + 1 < MAX_LIVE

    def merge(self, update: MemberUpdate, now: float, *, by_sync: bool = False) -> None:
        """Merges an update. DEAD received by a sync counts as SUSPECT: it may be old, or from the other side of a
        partition."""
        record = update.record
        if record.name == self.me.name:
            self._answer(record, now)
            return
        member = self._others.get(record.name)
        if member is None:
            # Dead or left instances are not added: instances that still remember one would return it endlessly to
            # those that have forgotten it. An instance that missed the death at most adds a name that stays silent.
            if record.state < MemberState.DEAD:
                self._admit(update, now)
            return
        if record.state == MemberState.DEAD and member.record.state < MemberState.DEAD:
            # An instance whose frames arrive here is not dead either. It receives the update in a frame and refutes it.
            heard = now - member.heard_s <= self._timing.silent_s
            if (by_sync or heard) and record.order[:2] >= member.record.order[:2]:
                record = replace(record, state=MemberState.SUSPECT)
                update = MemberUpdate(record, update.suspected_by or self.me.name)
        if record.order > member.record.order:
            comes_back = member.record.state >= MemberState.DEAD > record.state
            if comes_back and not self.admits(record.name):
                self.refused_names += 1
                return
            self._set(member, record, now, accuser=update.suspected_by)
        elif record == member.record and record.state == MemberState.SUSPECT:
            self._confirm(member, update.suspected_by)

    def heard(self, name: str, address: str, now: float) -> None:
        """Records that a frame of the instance with that name and address arrived, directly or through a relay."""
        member = self._others.get(name)
        if member is not None and member.record.address == address:
            member.heard_s = max(member.heard_s, now)
            member.probe = None

    def lost(self, name: str, now: float) -> None:
        """Marks an instance as suspect because its connection broke. This detects a dead process in milliseconds."""
        member = self._others.get(name)
        if member is not None and member.record.state == MemberState.ALIVE:
            member.heard_s = min(member.heard_s, now - self._timing.silent_s)
            self._suspect(member, now)

    def acked(self, number: int, record: MemberRecord, now: float) -> None:
        """Records the answer to a probe. The target's own record in it refutes a suspicion."""
        member = self._others.get(record.name)
        if member is not None and member.probe is not None and member.probe.number == number:
            self.health = max(0, self.health - 1)
            self.heard(record.name, record.address, now)
        self.merge(MemberUpdate(record, ""), now)

    def nacked(self, number: int, by: str) -> None:
        """Records that relay `by` got no answer from the target either, so that the fault is not on this side."""
        for member in self._others.values():
            if member.probe is not None and member.probe.number == number and by in member.probe.via:
                member.nacks.add(by)

    def leave(self) -> None:
        """Declares that this instance leaves. No other state of this incarnation replaces LEFT."""
        self.me = replace(self.me, state=MemberState.LEFT)
        self._spread_me()

    # ---- timers

    def tick(self, now: float) -> list[PeerProbe]:
        """Ends probes, suspicions and old records whose time is over. Returns the probes to send."""
        gap, self._ticked_s = now - self._ticked_s, now
        if gap > self._timing.lag_s:
            self._stood_still(gap, now)
            return []
        if self.health and now - self._troubled_s > 4 * self._timing.probe_s:
            self.health, self._troubled_s = self.health - 1, now
        probes: list[PeerProbe] = []
        for name, member in list(self._others.items()):
            if member.record.state >= MemberState.DEAD:
                if now - member.since_s > self._timing.forget_s:
                    self._forget(name)
                continue
            if member.record.state == MemberState.SUSPECT and self._is_due(member, now):
                self._set(member, replace(member.record, state=MemberState.DEAD), now)
            elif member.probe is None:
                if now - member.heard_s > self._timing.silent_s:
                    probes.append(self._probe(member, now))
            elif now - member.probe_sent_s > self._timing.probe_s * (1 + self.health):
                self._probe_failed(member, now)
                probes.append(self._probe(member, now))
        return probes

    # ---- output

    def updates(self, to: str) -> tuple[MemberUpdate, ...]:
        """Returns the updates to attach to a frame for `to`, least sent first, and counts them as sent."""
        chosen: list[MemberUpdate] = []
        member = self._others.get(to)
        if member is not None and member.record.state in (MemberState.SUSPECT, MemberState.DEAD):
            # In every frame to it, whatever the count: only that instance can refute the record.
            chosen.append(
                MemberUpdate(member.record, self.me.name if member.record.state == MemberState.SUSPECT else "")
            )
        limit = math.ceil(self._timing.spread * math.log2(len(self.live()) + 2))
        for key, (update, sent) in sorted(self._queue.items(), key=lambda item: item[1][1]):
            if len(chosen) == MAX_UPDATES:
                break
            if update.record.name == to:
                continue
            chosen.append(update)
            if sent + 1 >= limit:
                del self._queue[key]
            else:
                self._queue[key] = (update, sent + 1)
        return tuple(chosen)

    # ---- internals

    def _answer(self, record: MemberRecord, now: float) -> None:
        """Refutes another instance's record of this one if it would replace this instance's own."""
        if self.me.state == MemberState.LEFT or record.order <= self.me.order:
            return
        is_elsewhere = record.address != self.me.address
        self.is_outbid = is_elsewhere and record.state < MemberState.DEAD and not self._may_outbid(record.address)
        if self.is_outbid:
            return
        if record.epoch > self.me.epoch or is_elsewhere:
            self.me = replace(self.me, epoch=record.epoch + 1, incarnation=0)
        else:
            self.me = replace(self.me, incarnation=record.incarnation + 1)
            self._trouble(now)
        self._spread_me()

    def _may_outbid(self, address: str) -> bool:
        """Whether to raise the own epoch over that of a record of the same name at another address."""
        if address == self._outbid:  # it answered, so it is no record of an earlier run
            self._events.append(NameConflict(address))
        self._outbids, self._outbid = self._outbids + 1, address
        return self._outbids <= _MOST_OUTBIDS

    def _admit(self, update: MemberUpdate, now: float) -> None:
        if not self.admits(update.record.name):
            self.refused_names += 1
            return
        if len(self._others) >= MAX_KNOWN - 1:
            gone = [name for name, member in self._others.items() if member.record.state >= MemberState.DEAD]
            self._forget(min(gone, key=lambda name: self._others[name].since_s))  # live ones are fewer than that
        member = self._others[update.record.name] = _Member(update.record, now, now)
        if update.record.state == MemberState.SUSPECT:
            member.accusers = {update.suspected_by}
        self._events.append(MemberChanged(update.record, None))
        self._spread(update)

    def _set(self, member: _Member, record: MemberRecord, now: float, *, accuser: str = "") -> None:
        before, member.record, member.since_s = member.record, record, now
        if record.state != MemberState.SUSPECT:
            member.probe = None
        if record.state == MemberState.ALIVE:
            member.heard_s = max(member.heard_s, now - self._timing.silent_s / 2)  # leaves it time to send a frame
        member.accusers = {accuser} if record.state == MemberState.SUSPECT else set()
        if (before.state, before.epoch, before.address) != (record.state, record.epoch, record.address):
            self._events.append(MemberChanged(record, before.state))
        self._spread(MemberUpdate(record, accuser if record.state == MemberState.SUSPECT else ""))

    def _confirm(self, member: _Member, accuser: str) -> None:
        """Adds an accuser, and spreads the suspicion while another accuser still shortens it."""
        if accuser not in member.accusers and len(member.accusers) <= self._timing.confirmations:
            member.accusers.add(accuser)
            self._spread(MemberUpdate(member.record, accuser))

    def _suspect(self, member: _Member, now: float) -> None:
        if member.record.state == MemberState.ALIVE:
            self._set(member, replace(member.record, state=MemberState.SUSPECT), now, accuser=self.me.name)
        else:
            self._confirm(member, self.me.name)

    def _is_due(self, member: _Member, now: float) -> bool:
        """Whether a suspect is to be declared dead. One whose frames arrive is not: it will refute the suspicion."""
        silent = now - member.heard_s > self._timing.silent_s
        return silent and now - member.since_s > self.suspicion_s(len(member.accusers))

    def _probe(self, member: _Member, now: float) -> PeerProbe:
        name = member.record.name
        able = [
            other for other in self.live() if other != name and self._others[other].record.state == MemberState.ALIVE
        ]
        self._probes += 1
        via = tuple(self._rng.sample(able, min(self._timing.vias, len(able))))
        member.probe, member.probe_sent_s, member.nacks = PeerProbe(self._probes, name, via), now, set()
        return member.probe

    def _probe_failed(self, member: _Member, now: float) -> None:
        if member.probe is not None and len(member.nacks) < len(member.probe.via):
            self._trouble(now)  # some relays did not even send a nack: the fault may be on this side
        self._suspect(member, now)

    def _stood_still(self, gap: float, now: float) -> None:
        """Shifts all timers by the time during which the own event loop did not run."""
        self._trouble(now)
        for member in self._others.values():
            member.heard_s += gap
            member.since_s += gap
            member.probe_sent_s += gap

    def _trouble(self, now: float) -> None:
        self.health, self._troubled_s = min(_MAX_HEALTH, self.health + 1), now

    def _forget(self, name: str) -> None:
        del self._others[name]
        self._unspread(name)

    def _spread_me(self) -> None:
        self._spread(MemberUpdate(self.me, ""))

    def _spread(self, update: MemberUpdate) -> None:
        name = update.record.name
        queued = next((one.record for (about, _), (one, _) in self._queue.items() if about == name), None)
        if update.record.state != MemberState.SUSPECT or queued != update.record:
            self._unspread(name)
        self._queue[name, update.suspected_by] = (update, 0)

    def _unspread(self, name: str) -> None:
        for key in [key for key in self._queue if key[0] == name]:
            del self._queue[key]


_FIRST_RELAY = 2**40  # the numbers of this instance's own probes are smaller
_MAX_RELAYS = 256


class PingRelays:
    """Pings sent on behalf of other instances, each open for `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._open: dict[int, tuple[str, int, float]] = {}
        self._number = _FIRST_RELAY

    def start(self, asker: str, asked: int, now: float) -> int | None:
        """Starts a ping for `asker`, whose request has the number `asked`. Returns the number to ping with, or None
        if 256 are open."""
        if len(self._open) >= _MAX_RELAYS:
            return None
        self._number += 1
        self._open[self._number] = (asker, asked, now + self._wait_s)
        return self._number

    def answered(self, number: int) -> tuple[str, int]:
        """Ends a ping. Returns the asker and the number of its request; an empty name if that ping is not open."""
        return self._open.pop(number, ("", 0, 0.0))[:2]

    def expired(self, now: float) -> list[tuple[str, int]]:
        """Ends the pings without an answer in time. Returns the asker of each, and the number of its request."""
        numbers = [number for number, (_, _, until) in self._open.items() if now > until]
        return [self._open.pop(number)[:2] for number in numbers]
