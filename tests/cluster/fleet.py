"""Many `ClusterProtocol`s in one process, on a simulated network, with a clock that only the tests move."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.connection import MAX_WAITING
from caraserve.cluster.membership.events import CloseConnection, Dial, Output, ProtocolSettings
from caraserve.cluster.membership.messages import MAX_FRAME
from caraserve.cluster.membership.protocol import ClusterProtocol
from caraserve.cluster.membership.swim import MAX_KNOWN, DetectorTiming, MemberChanged, MemberState

SECRET = b"a secret of the tests"
WALL_MS = 1_700_000_000_000
TICK_S = 0.1
KEYS = Keyring((SECRET,))
SETTLED_S = 6.0  # after this time connected, both ways, two instances must not declare each other dead


def protocol_of(
    name: str = "a", now: float = 0.0, *, keys: Keyring = KEYS, seed: object = None, **settings: str
) -> ClusterProtocol:
    """Returns the protocol of an instance that starts at that time, connected to no other. `seed`: by default its
    name."""
    given = {"cluster": "c", "model": "m", "name": name, "address": f"{name}:1"} | settings
    wall_ms = WALL_MS + int(now * 1000)
    return ClusterProtocol(ProtocolSettings(**given), keys, Random(str(seed or name)), now, wall_ms)


K = TypeVar("K")


def taken(protocol: ClusterProtocol, kind: type[K]) -> list[K]:
    """Takes all outputs of a protocol. Returns those of one kind."""
    return [output for output in protocol.take_outputs() if isinstance(output, kind)]


def closed(protocol: ClusterProtocol) -> list[int]:
    """Takes all outputs of a protocol. Returns the connections that are to be closed."""
    return [output.connection_id for output in taken(protocol, CloseConnection)]


@dataclass
class Node:
    """One run of an instance."""

    protocol: ClusterProtocol
    ends: set[int] = field(default_factory=set)
    stuck_until: float = 0.0  # until then its loop hangs: it does not tick, and arriving frames wait
    outputs: list[tuple[float, Output]] = field(default_factory=list)
    frames: int = 0
    lag_ended: float = -100.0


class Fleet:
    """Instances and the network between them. `loss` and `duplicates` are shares of frames. Each frame has a delay of
    its own, so frames may arrive out of order."""

    def __init__(self, seed: int = 0, *, loss: float = 0.0, duplicates: float = 0.0, delay_s: float = 0.005) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.loss, self.duplicates, self.delay_s = loss, duplicates, delay_s
        self.nodes: dict[str, Node] = {}
        self.cut: set[tuple[str, str]] = set()  # (from, to): frames are lost and connections fail
        self.last_cut: dict[tuple[str, str], float] = {}
        self.false_deaths: list[str] = []
        self.sent: Counter[str] = Counter()
        self._ends: dict[int, str] = {}  # end of a connection → whose it is; its other end is `end ^ 1`
        self._next_end = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._orders: dict[tuple[int, str], tuple[int, int, MemberState, str]] = {}

    # ---- instances

    def start(
        self, name: str, seeds: Iterable[str] = (), called: str | None = None, **settings: object
    ) -> ClusterProtocol:
        """Starts an instance; its machine's clock is up to 5 s off. `called`: its cluster name, if not `name`."""
        given = {
            "cluster": "c",
            "model": "m",
            "address": f"{name}:1",
            "seeds": tuple(f"{seed}:1" for seed in seeds),
            **settings,
        }
        secrets = given.pop("secrets", (SECRET,))
        skew = self.rng.uniform(-5, 5) if self.now else 0.0
        protocol = ClusterProtocol(
            ProtocolSettings(name=called or name, **given),
            Keyring(secrets),
            Random(self.rng.random()),
            self.now,
            WALL_MS + int((self.now + skew) * 1000),
        )
        node = self.nodes[name] = Node(protocol)
        self._at(self.rng.random() * TICK_S, lambda: self._tick(name, node))
        return protocol

    def kill(self, name: str, *, reset: bool = True) -> None:
        """Kills an instance. `reset` False: its machine vanishes, so that its peers' connections do not break."""
        node = self.nodes.pop(name)
        for end in node.ends:
            if reset:
                self._tell_lost(end ^ 1)
            self._ends.pop(end, None)

    def leave(self, name: str) -> None:
        """Ends an instance in order: it announces that it leaves."""
        node = self.nodes[name]
        node.protocol.leave(self.now)
        self._drain(name, node)
        self.kill(name)

    def stick(self, name: str, seconds: float) -> None:
        """Makes an instance's event loop hang."""
        self.nodes[name].stuck_until = self.now + seconds
        if seconds > DetectorTiming().suspect_s / 2:
            self.nodes[name].lag_ended = self.now + seconds

    # ---- the network

    def partition(self, one: Iterable[str], other: Iterable[str], *, reset: bool = False) -> None:
        """Cuts all links between the two sides. `reset`: their connections break at once."""
        for here in one:
            for there in other:
                self.cut |= {(here, there), (there, here)}
        if reset:
            for end, name in list(self._ends.items()):
                if (name, self._ends.get(end ^ 1, name)) in self.cut:
                    self._tell_lost(end, even_cut=True)

    def break_connection(self, which: int) -> None:
        """Breaks an open connection at both ends; `which` 0 is the oldest one."""
        end = sorted(end for end in self._ends if end % 2 == 0)[which]
        self._tell_lost(end)
        self._tell_lost(end + 1)

    def heal(self) -> None:
        """Restores all links."""
        for pair in self.cut:
            self.last_cut[pair] = self.now
        self.cut = set()

    def run(self, seconds: float) -> None:
        """Advances the clock and runs all events that are due."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until
        self.check()

    def run_until(self, condition: Callable[[], bool], seconds: float) -> float:
        """Advances the clock until the condition is true. Returns the seconds that it took; fails after `seconds`."""
        start = self.now
        while not condition():
            assert self.now - start < seconds, f"not within {seconds} s"
            self.run(0.02)
        return self.now - start

    # ---- observations and checks

    def agree(self) -> bool:
        """Whether every running instance sees exactly the running instances as alive."""
        names = set(self.nodes)
        return all(
            set(node.protocol.members.live()) == names - {name}
            and all(
                record.state == MemberState.ALIVE for record in node.protocol.members.records() if record.name in names
            )
            for name, node in self.nodes.items()
        )

    def same_entries(self) -> bool:
        """Whether all instances have equal copies of the registry and of each running instance's map."""
        roots = [
            {owner: root for owner, root in node.protocol.state.roots() if not owner or owner in self.nodes}
            for node in self.nodes.values()
        ]
        return all(mine == roots[0] for mine in roots)

    def events(self, name: str) -> list[tuple[float, MemberChanged]]:
        """Returns the member events of one instance, with their times."""
        return [(when, event) for when, event in self.nodes[name].outputs if isinstance(event, MemberChanged)]

    def state(self, viewer: str, name: str) -> MemberState | None:
        """Returns the state that one instance believes another to be in, or None."""
        record = self.nodes[viewer].protocol.members.get(name)
        return record.state if record else None

    def states(self, name: str) -> set[MemberState | None]:
        """Returns the states that the instances believe one of them to be in."""
        return {self.state(viewer, name) for viewer in self.nodes}

    def check(self) -> None:
        """Checks the invariants that hold at every moment."""
        assert self.false_deaths == []
        for viewer, node in self.nodes.items():
            records = node.protocol.members.records()
            assert len(records) <= MAX_KNOWN
            for record in records:
                # No view has a higher incarnation than the instance itself, and no view ever goes back.
                if record.name in self.nodes:
                    own = self.nodes[record.name].protocol.members.me
                    # Another epoch is of an earlier run with a faster clock, whose record has not arrived here yet.
                    assert record.epoch != own.epoch or record.incarnation <= own.incarnation
                key = (id(node.protocol), record.name)
                assert self._orders.get(key, record.order) <= record.order, f"{viewer} went back on {record.name}"
                self._orders[key] = record.order
            for connection in node.protocol._connections.values():
                assert connection.waiting <= MAX_WAITING + 3

    # ---- inside

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay, self._order, action))

    def _tick(self, name: str, node: Node) -> None:
        if self.nodes.get(name) is not node:
            return
        if self.now < node.stuck_until:
            self._at(node.stuck_until - self.now, lambda: self._tick(name, node))
            return
        node.protocol.tick(self.now)
        self._drain(name, node)
        self._at(TICK_S, lambda: self._tick(name, node))

    def _drain(self, name: str, node: Node) -> None:
        outputs = node.protocol.take_outputs()
        for end in node.protocol.writable():
            while (frame := node.protocol.pull(end, self.now)) is not None:
                self._send(name, end, frame)
        for output in outputs:
            node.outputs.append((self.now, output))
            if isinstance(output, Dial):
                self._at(self._delay(), lambda address=output.address: self._connect(name, node, address))
            elif isinstance(output, CloseConnection):
                self._tell_lost(output.connection_id ^ 1)
                self._lost(name, node, output.connection_id)
            elif isinstance(output, MemberChanged) and output.record.state == MemberState.DEAD:
                self._judge(name, output.record.name)

    def _judge(self, viewer: str, name: str) -> None:
        """Judges a declared death: it is false if the two were connected all the time and neither loop hung."""
        alive = self.nodes.get(name)
        pairs = ((viewer, name), (name, viewer))
        calm = all(pair not in self.cut and self.now - self.last_cut.get(pair, -100.0) > SETTLED_S for pair in pairs)
        if (
            alive is not None
            and calm
            and all(self.now - node.lag_ended > SETTLED_S for node in (alive, self.nodes[viewer]))
        ):
            met = [when for when, event in self.events(viewer) if event.record.name == name]
            if (
                met
                and self.now - met[0] > SETTLED_S
                and alive.protocol.members.me.epoch == self._epoch_seen(viewer, name)
            ):
                self.false_deaths.append(f"{viewer} says at {self.now:.2f} that {name} is dead")

    def _epoch_seen(self, viewer: str, name: str) -> int:
        record = self.nodes[viewer].protocol.members.get(name)
        return record.epoch if record else 0

    def _connect(self, name: str, node: Node, address: str) -> None:
        other = address.partition(":")[0]
        there = self.nodes.get(other)
        if there is None or self.nodes.get(name) is not node or (name, other) in self.cut or (other, name) in self.cut:
            return
        end = self._next_end
        self._next_end += 2
        self._ends |= {end: name, end + 1: other}
        node.ends.add(end)
        there.ends.add(end + 1)
        node.protocol.connected(end, self.now, dialled=address)
        there.protocol.connected(end + 1, self.now)
        self._drain(name, node)
        self._drain(other, there)

    def _send(self, name: str, end: int, frame: bytes) -> None:
        assert len(frame) <= MAX_FRAME
        self.nodes[name].frames += 1
        self.sent[name] += 1
        for _ in range(1 + (self.rng.random() < self.duplicates)):
            if self.rng.random() >= self.loss:
                self._at(self._delay(), lambda: self._deliver(name, end ^ 1, frame))

    def _deliver(self, source: str, end: int, frame: bytes) -> None:
        name = self._ends.get(end)
        if name is None or (source, name) in self.cut or (node := self.nodes.get(name)) is None:
            return
        if self.now < node.stuck_until:
            self._at(node.stuck_until - self.now + 0.001, lambda: self._deliver(source, end, frame))
            return
        node.protocol.received(end, frame, self.now)
        self._drain(name, node)

    def _tell_lost(self, end: int, *, even_cut: bool = False) -> None:
        name, other = self._ends.get(end), self._ends.get(end ^ 1)
        if name is not None and (even_cut or (other, name) not in self.cut) and name in self.nodes:
            node = self.nodes[name]  # not there, if it was connected to itself
            self._at(2 * self.delay_s, lambda: self._lost(name, node, end))  # after what was sent before it

    def _lost(self, name: str, node: Node, end: int) -> None:
        if self.nodes.get(name) is node and self._ends.pop(end, None) is not None:
            node.ends.discard(end)
            node.protocol.lost(end, self.now)
            self._drain(name, node)

    def _delay(self) -> float:
        return self.delay_s * (0.2 + 1.6 * self.rng.random())


def fleet_of(size: int, seed: int = 0, **network: float) -> Fleet:
    """Returns a fleet of `size` instances, each with the first two as seeds, which all see one another."""
    fleet = Fleet(seed, **network)
    names = [f"n{index}" for index in range(size)]
    for name in names:
        fleet.start(name, names[:2])
    fleet.run_until(fleet.agree, 10)
    return fleet
