"""Invariants under any mixture of loss, delay, repetition, partition, restart, departure and hanging loops."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from caraserve.cluster.membership.protocol import ClusterProtocol
from caraserve.cluster.state.lww_map import Entry
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from tests.cluster.fleet import fleet_of

NAMES = [f"n{index}" for index in range(5)]
ADAPTERS = [f"adapter-{index}" for index in range(6)]
BOUND_S = (
    10.0  # from the last disturbance until all is known: the longest suspicion, and a probe by a doubter of itself
)


class Cluster(RuleBasedStateMachine):
    """Runs a fleet through random events; the fleet checks at every step false deaths, incarnations and bounds."""

    @initialize(seed=st.integers(0, 10_000), size=st.integers(2, 4), rough=st.booleans())
    def begin(self, seed: int, size: int, rough: bool) -> None:
        self.rng = Random(seed)
        self.fleet = fleet_of(size, seed, delay_s=0.03 if rough else 0.003, duplicates=0.2 if rough else 0.0)
        self.fleet.loss = 0.05 if rough else 0.0
        self.held: dict[str, set[str]] = {name: set() for name in self.fleet.nodes}
        self.disks: dict[str, list[Entry]] = {}
        self.views: dict[tuple[int, str], tuple[int, str, bool, str]] = {}

    def any_protocol(self, index: int) -> tuple[str, ClusterProtocol]:
        names = sorted(self.fleet.nodes)
        return names[index % len(names)], self.fleet.nodes[names[index % len(names)]].protocol

    @rule(seconds=st.floats(0.05, 4))
    def wait(self, seconds: float) -> None:
        self.fleet.run(seconds)

    @rule(at=st.integers(0, 4), adapter=st.sampled_from(ADAPTERS), rank=st.sampled_from([8, 16, 64]))
    def register(self, at: int, adapter: str, rank: int) -> None:
        self.any_protocol(at)[1].register(RegisteredAdapter(adapter, f"{rank:064x}", rank, rank * 1000), self.fleet.now)

    @rule(at=st.integers(0, 4), adapter=st.sampled_from(ADAPTERS))
    def remove(self, at: int, adapter: str) -> None:
        protocol = self.any_protocol(at)[1]
        protocol.remove(adapter, self.fleet.now)
        assert protocol.state.adapter(adapter) is None

    @rule(at=st.integers(0, 4), adapter=st.sampled_from(ADAPTERS), tier=st.sampled_from(["host", "disk"]))
    def hold(self, at: int, adapter: str, tier: str) -> None:
        name, protocol = self.any_protocol(at)
        protocol.advertise(adapter, (tier,), self.fleet.now)
        self.held[name].add(adapter)

    @rule(at=st.integers(0, 4), adapter=st.sampled_from(ADAPTERS))
    def drop(self, at: int, adapter: str) -> None:
        name, protocol = self.any_protocol(at)
        protocol.withdraw(adapter, self.fleet.now)
        self.held[name].discard(adapter)

    @rule(split=st.integers(1, 15), reset=st.booleans())
    def partition(self, split: int, reset: bool) -> None:
        one = [name for index, name in enumerate(NAMES) if split >> index & 1]
        self.fleet.partition(one, [name for name in NAMES if name not in one], reset=reset)

    @rule(pair=st.permutations(NAMES))
    def cut_one_pair(self, pair: list[str]) -> None:
        """Cuts one pair. The others still reach both, so no instance that reaches one of them may declare it dead."""
        self.fleet.partition(pair[:1], pair[1:2])

    @rule()
    def heal(self) -> None:
        self.fleet.heal()

    @precondition(lambda self: len(self.fleet.nodes) > 1)
    @rule(at=st.integers(0, 4), reset=st.booleans(), politely=st.booleans(), keeps_disk=st.booleans())
    def end(self, at: int, reset: bool, politely: bool, keeps_disk: bool) -> None:
        name, protocol = self.any_protocol(at)
        self.disks[name] = list(protocol.state.registry) if keeps_disk else []
        self.held[name] = set()
        if politely:
            self.fleet.leave(name)
        else:
            self.fleet.kill(name, reset=reset)

    @precondition(lambda self: len(self.fleet.nodes) < len(NAMES))
    @rule(at=st.integers(0, 4))
    def start(self, at: int) -> None:
        absent = [name for name in NAMES if name not in self.fleet.nodes]
        name = absent[at % len(absent)]
        protocol = self.fleet.start(name, NAMES)
        protocol.restore(self.disks.get(name, []), self.fleet.now)
        self.held[name] = set()

    @rule(at=st.integers(0, 4), seconds=st.floats(0.1, 2))
    def hang(self, at: int, seconds: float) -> None:
        self.fleet.stick(self.any_protocol(at)[0], seconds)

    @rule()
    def calm(self) -> None:
        """Heals the network, and checks that all views become equal and right."""
        fleet = self.fleet
        fleet.heal()
        before = [entry for node in fleet.nodes.values() for entry in node.protocol.state.registry]
        fleet.run(BOUND_S)
        sent = sum(fleet.sent.values())
        loss, fleet.loss = fleet.loss, 0.0
        fleet.run(2.5)  # a loss in the last moment may have left a suspicion to be refuted
        fleet.loss = loss
        size = len(fleet.nodes)
        # Four heartbeats a second to each, a sync and its answers, and some Hellos.
        assert sum(fleet.sent.values()) - sent <= 2.5 * size * (6 * (size - 1) + 6) + 20
        assert fleet.agree()
        assert fleet.same_entries()
        newest: dict[str, Entry] = {}
        for entry in before:
            newest[entry.key] = max(newest.get(entry.key, entry), entry, key=lambda one: one.order)
        expected = {key for key, entry in newest.items() if not entry.deleted}
        for name, node in fleet.nodes.items():
            assert {adapter.name for adapter in node.protocol.state.adapters()} == expected
            assert set(node.protocol.peers()) == set(fleet.nodes) - {name}
            for adapter in ADAPTERS:
                holders = set(node.protocol.state.holders(adapter)) & set(fleet.nodes)
                assert holders == {other for other in fleet.nodes if adapter in self.held[other]}
            for other in set(fleet.nodes) - {name}:
                load = node.protocol.state.load(other, fleet.now)
                assert load is not None
                assert load[1] < 1.0

    @invariant()
    def no_fact_goes_back(self) -> None:
        """Checks that no key's entry becomes older, so that no removed entry comes back."""
        for node in self.fleet.nodes.values() if hasattr(self, "fleet") else ():
            for owner, _ in node.protocol.state.roots():
                for entry in node.protocol.state.map_of(owner) or ():
                    key = (id(node.protocol), f"{owner} {entry.key}")
                    assert self.views.get(key, entry.order) <= entry.order
                    self.views[key] = entry.order

    @invariant()
    def nothing_is_malformed(self) -> None:
        for node in self.fleet.nodes.values() if hasattr(self, "fleet") else ():
            assert node.protocol.malformed == 0
            assert node.protocol.state.refused == 0

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.calm()


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=10, stateful_step_count=30, print_blob=True)
