"""Whole instances on a simulated network: joining, leaving, failures, partitions, entries and loads."""

from random import Random
from statistics import median

import pytest

from caraserve.cluster.membership import swim
from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.events import (
    CLUSTER_FULL,
    CloseConnection,
    Dial,
    PeerRefused,
    ProtocolSettings,
    RefusedByPeer,
)
from caraserve.cluster.membership.protocol import ClusterProtocol
from caraserve.cluster.membership.swim import MAX_LIVE, MemberState
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter
from caraserve.errors import ConfigError
from tests.cluster.fleet import SECRET, WALL_MS, Fleet, fleet_of

OTHER_SECRET = b"another secret, newer"


def adapters(fleet: Fleet, name: str) -> set[str]:
    return {adapter.name for adapter in fleet.nodes[name].protocol.state.adapters()}


def deaths(fleet: Fleet) -> set[str]:
    """Returns the names of the instances that any other one has believed to be dead."""
    events = [event for name in fleet.nodes for _, event in fleet.events(name)]
    return {event.record.name for event in events if event.record.state == MemberState.DEAD}


def outputs(fleet: Fleet, name: str, kind: type) -> list[object]:
    return [output for _, output in fleet.nodes[name].outputs if isinstance(output, kind)]


# ---- coming


@pytest.mark.parametrize("size", [2, 5, 12])
def test_all_instances_see_one_another_within_2_s_of_the_last_start(size: int) -> None:
    fleet = Fleet(size)
    names = [f"n{index}" for index in range(size)]
    for name in names:
        fleet.start(name, names)
        fleet.run(0.3)
    assert fleet.run_until(fleet.agree, 2) < 2
    fleet.run(5)
    for name, node in fleet.nodes.items():
        assert set(node.protocol.peers()) == set(names) - {name}
        assert len(node.protocol._connections) == size - 1  # one connection a pair, and none to ourselves
        assert [event.record.state for _, event in fleet.events(name)] == [MemberState.ALIVE] * (size - 1)
        assert outputs(fleet, name, PeerRefused) == []


@pytest.mark.parametrize("most", [24, pytest.param(MAX_LIVE, marks=pytest.mark.slow)])  # it takes their square
def test_as_many_instances_as_may_be_join_and_the_next_one_is_refused(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swim, "MAX_LIVE", most)
    fleet = Fleet(3, delay_s=0.002)
    for index in range(most):
        fleet.start(f"n{index:02}", ["n00", "n01"])
    fleet.run_until(fleet.agree, 5)
    dials = sum(len(outputs(fleet, name, Dial)) for name in fleet.nodes)
    assert dials < 1.3 * most * (most - 1) / 2  # hardly a pair dials twice
    fleet.start("late", ["n00", "n01"])
    fleet.run(0.5)
    refusals = outputs(fleet, "late", RefusedByPeer)
    assert refusals
    assert all(isinstance(refusal, RefusedByPeer) and refusal.reason == CLUSTER_FULL for refusal in refusals)
    assert "Kubernetes" in CLUSTER_FULL
    assert all(fleet.state(name, "late") is None for name in fleet.nodes if name != "late")


def test_a_seed_that_starts_late_at_another_address_is_found() -> None:
    fleet = Fleet(1)
    fleet.start("a", ["b", "nowhere"])
    fleet.run(5)
    fleet.start("b", address="b:4321")
    fleet.run_until(fleet.agree, 2)
    fleet.run(3)
    assert len(fleet.nodes["a"].protocol._connections) == 1


def test_of_two_connections_either_may_break_without_a_suspicion() -> None:
    for which in (0, 1):
        fleet = Fleet(2)
        fleet.start("a", ["b"])
        fleet.start("b", ["a"])
        fleet.run_until(lambda f=fleet: all(len(node.protocol._connections) == 2 for node in f.nodes.values()), 1)
        fleet.run_until(fleet.agree, 1)
        fleet.run(0.1)
        fleet.break_connection(which)
        fleet.run(5)
        assert [event.record.state for name in "ab" for _, event in fleet.events(name)] == [MemberState.ALIVE] * 2
        assert all(node.protocol.peers() for node in fleet.nodes.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"secrets": (OTHER_SECRET,)}, None),
        ({"cluster": "another"}, "of cluster c, not another"),
        ({"model": "another"}, "serves another base model"),
    ],
)
def test_an_instance_of_another_cluster_is_in_no_view(settings: dict[str, object], said: str | None) -> None:
    fleet = fleet_of(2)
    fleet.start("stranger", ["n0", "n1"], **settings)
    fleet.run(8)
    for name in ("n0", "n1"):
        assert fleet.state(name, "stranger") is None
        assert fleet.state("stranger", name) is None
    refusals = [
        output.reason for output in outputs(fleet, "stranger", RefusedByPeer) if isinstance(output, RefusedByPeer)
    ]
    assert all(said is not None and said in reason for reason in refusals)
    assert bool(refusals) == (said is not None)
    assert fleet.agree() is False
    fleet.kill("stranger")
    assert fleet.agree()


@pytest.mark.parametrize(("name", "address"), [("", "a:1"), ('"', "a:1"), ("x" * 65, "a:1"), ("a", "ä:1")])
def test_a_name_or_address_that_others_would_refuse_does_not_start(name: str, address: str) -> None:
    with pytest.raises(ConfigError, match="plain ASCII"):
        ClusterProtocol(ProtocolSettings("c", "m", name, address), Keyring((SECRET,)), Random(1), 0.0, WALL_MS)


# ---- going


@pytest.mark.parametrize("seed", range(8))
def test_a_killed_process_is_suspect_at_once_and_dead_in_three_seconds(seed: int) -> None:
    fleet = fleet_of(5, seed)
    fleet.run(fleet.rng.random())
    fleet.kill("n3")
    assert fleet.run_until(lambda: fleet.states("n3") == {MemberState.SUSPECT}, 0.1) < 0.1
    assert fleet.run_until(lambda: fleet.states("n3") == {MemberState.DEAD}, 3) < 3
    assert all(event.record.name == "n3" for name in fleet.nodes for when, event in fleet.events(name) if when > 2)


@pytest.mark.parametrize("loss", [0.0, 0.05])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_machine_that_vanishes_is_dead_within_the_bound(size: int, loss: float) -> None:
    times = []
    for seed in range(4):
        fleet = fleet_of(size, seed)
        fleet.loss = loss
        fleet.run(1 + fleet.rng.random())
        fleet.kill("n1", reset=False)
        times.append(fleet.run_until(lambda f=fleet: f.states("n1") == {MemberState.DEAD}, 8))
    assert median(times) < 4.5


def test_an_instance_that_leaves_is_never_suspect() -> None:
    fleet = fleet_of(4)
    fleet.run(0.1)  # the last of them has heard the end of a handshake, too
    fleet.leave("n2")
    fleet.run(6)
    for name in fleet.nodes:
        assert [event.record.state for _, event in fleet.events(name) if event.record.name == "n2"] == [
            MemberState.ALIVE,
            MemberState.LEFT,
        ]
        assert not any(isinstance(output, Dial) for when, output in fleet.nodes[name].outputs if when > 2)
    fleet.start("n2", ["n0"])
    fleet.run_until(fleet.agree, 2)


@pytest.mark.parametrize("pause", [0.0, 0.5, 5.0])
def test_a_restart_is_seen_at_once_and_its_old_entries_are_corrected(pause: float) -> None:
    fleet = fleet_of(4)
    fleet.nodes["n2"].protocol.advertise("digest", ("host",), fleet.now)
    fleet.run(1)
    assert fleet.nodes["n0"].protocol.state.holders("digest") == {"n2": ("host",)}
    fleet.kill("n2")
    fleet.run(pause)
    fleet.start("n2", ["n0"])
    assert fleet.run_until(fleet.agree, 1.5) < 1.5
    assert fleet.run_until(lambda: not fleet.nodes["n0"].protocol.state.holders("digest"), 2) < 2
    fleet.run(10)
    assert fleet.agree()


# ---- networks


@pytest.mark.parametrize("reset", [False, True])
def test_a_partition_heals_into_one_view_within_two_seconds(reset: bool) -> None:
    fleet = fleet_of(6)
    left, right = ["n0", "n1", "n2"], ["n3", "n4", "n5"]
    fleet.partition(left, right, reset=reset)
    fleet.run(12)
    for name in left:
        assert set(fleet.nodes[name].protocol.members.live()) == set(left) - {name}
    fleet.nodes["n0"].protocol.register(RegisteredAdapter("left", "d" * 64, 8, 1), fleet.now)
    fleet.nodes["n3"].protocol.register(RegisteredAdapter("right", "e" * 64, 8, 1), fleet.now)
    fleet.kill("n5", reset=False)
    fleet.run(6)
    fleet.heal()
    assert fleet.run_until(lambda: fleet.agree() and fleet.same_entries(), 2) < 2
    assert adapters(fleet, "n4") == {"left", "right"}
    fleet.run(8)
    assert fleet.states("n5") == {MemberState.DEAD}


def test_halves_of_a_partition_find_each_other_without_any_seed() -> None:
    fleet = fleet_of(4)
    fleet.kill("n0")
    fleet.kill("n1")
    fleet.partition(["n2"], ["n3"])
    fleet.run(40)
    assert fleet.state("n2", "n3") == MemberState.DEAD
    fleet.heal()
    fleet.run_until(fleet.agree, 2)


def test_a_cut_between_two_is_bridged_by_the_others() -> None:
    fleet = fleet_of(4)
    fleet.partition(["n0"], ["n1"])
    fleet.run(30)
    assert all(event.record.state == MemberState.ALIVE for name in fleet.nodes for _, event in fleet.events(name))


def test_an_instance_silent_in_one_direction_is_not_dead_while_others_receive_its_frames() -> None:
    fleet = fleet_of(4)
    fleet.cut = {("n0", "n1")}
    fleet.run(30)
    assert deaths(fleet) == set()


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_views_converge_on_a_network_that_loses_frames(loss: float) -> None:
    fleet = Fleet(7, loss=loss, duplicates=0.1, delay_s=0.02)
    for index in range(6):
        fleet.start(f"n{index}", ["n0"])
    fleet.run_until(fleet.agree, 6)
    fleet.nodes["n1"].protocol.register(RegisteredAdapter("sql", "d" * 64, 8, 1), fleet.now)
    fleet.run_until(fleet.same_entries, 12)
    fleet.run(60)
    assert deaths(fleet) == set()


def test_a_loop_that_hangs_for_a_second_is_not_dead_and_suspects_no_instance() -> None:
    fleet = fleet_of(5)
    for _ in range(5):
        fleet.stick("n1", 1.0)
        fleet.run(2)
    fleet.stick("n2", 8.0)
    fleet.run(7.9)
    assert fleet.state("n0", "n2") == MemberState.DEAD
    fleet.run(0.2)
    assert [event for _, event in fleet.events("n2") if event.record.state != MemberState.ALIVE] == []
    fleet.run_until(fleet.agree, 2)
    assert deaths(fleet) == {"n2"}


# ---- entries and loads


def test_a_thousand_adapters_are_known_everywhere() -> None:
    fleet = fleet_of(5)
    for index in range(1000):
        fleet.nodes["n0"].protocol.register(RegisteredAdapter(f"adapter-{index}", f"{index:064x}", 8, 1), fleet.now)
    assert fleet.run_until(lambda: len(adapters(fleet, "n4")) == 1000, 2) < 2
    fleet.start("new", ["n3"])
    assert fleet.run_until(lambda: len(adapters(fleet, "new")) == 1000, 2) < 2
    fleet.run_until(fleet.same_entries, 2)


def test_loads_are_recent_and_an_urgent_one_is_sent_at_once() -> None:
    fleet = fleet_of(4)
    fleet.run(2)
    ages = [fleet.nodes["n0"].protocol.state.load(name, fleet.now) for name in ("n1", "n2", "n3")]
    assert all(age is not None and age[1] < 0.4 for age in ages)
    protocol = fleet.nodes["n1"].protocol
    protocol.set_load(InstanceLoad("draining", running=3), fleet.now, urgent=True)
    fleet.run(0.15)
    found = fleet.nodes["n0"].protocol.state.load("n1", fleet.now)
    assert found is not None
    assert found[0].status == "draining"


def test_secrets_rotate_without_an_interruption() -> None:
    fleet = fleet_of(3)
    for secrets in ((SECRET, OTHER_SECRET), (OTHER_SECRET, SECRET), (OTHER_SECRET,)):
        for node in fleet.nodes.values():
            node.protocol.rekey(Keyring(secrets))
            fleet.run(1)
    for node in fleet.nodes.values():
        assert node.protocol.malformed == 0
        assert not [output for _, output in node.outputs if isinstance(output, CloseConnection)][3:]
    assert fleet.agree()


def test_the_same_inputs_give_the_same_outputs() -> None:
    def record() -> list[object]:
        fleet = Fleet(11, loss=0.1, duplicates=0.1)
        for index in range(4):
            fleet.start(f"n{index}", ["n0"])
        fleet.run(3)
        fleet.kill("n1")
        fleet.run(4)
        return [(name, node.outputs, node.frames) for name, node in fleet.nodes.items()]

    assert record() == record()
