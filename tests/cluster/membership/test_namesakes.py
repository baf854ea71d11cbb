"""Two instances with one name that are connected only through others: their records settle, and both report it."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from caraserve.cluster.membership.events import PeerRefused, RefusedByPeer
from caraserve.cluster.membership.swim import MemberRecord, MemberState, MemberUpdate
from caraserve.cluster.state.lww_map import EntryValue
from tests.cluster import nodes
from tests.cluster.fleet import Fleet
from tests.cluster.membership.test_swim import View, record


def elsewhere(epoch: int, state: MemberState = MemberState.ALIVE, address: str = "other:1") -> MemberUpdate:
    return MemberUpdate(MemberRecord("me", address, epoch, 0, state), "b" if state == MemberState.SUSPECT else "")


def namesakes(seed: int = 0) -> Fleet:
    """Returns a fleet in which `one` and `two` are both called a. `one` joins through x and `two` through y, and then x
    and y connect."""
    fleet = Fleet(seed)
    for name, friend in (("one", "x"), ("two", "y")):
        fleet.start(friend)
        fleet.start(name, [friend], called="a")
        fleet.run(1)
    fleet.nodes["y"].protocol.seed(("x:1",))
    return fleet


def complaints(fleet: Fleet, name: str) -> set[PeerRefused]:
    return {output for _, output in fleet.nodes[name].outputs if isinstance(output, PeerRefused)}


@pytest.mark.parametrize("seed", range(5))
def test_namesakes_stop_raising_their_epochs_and_each_reports_both_addresses(seed: int) -> None:
    fleet = namesakes(seed)
    first, second = (fleet.nodes[name].protocol.members.me.epoch for name in ("one", "two"))
    fleet.run(60)
    epochs = [fleet.nodes[name].protocol.members.me.epoch for name in ("one", "two")]
    assert max(epochs) <= max(first, second) + 6
    moved = len([event for when, event in fleet.events("x") if event.record.name == "a"])
    fleet.run(60)
    assert [fleet.nodes[name].protocol.members.me.epoch for name in ("one", "two")] == epochs
    assert len([event for when, event in fleet.events("x") if event.record.name == "a"]) == moved
    for name, other in (("one", "two"), ("two", "one")):
        reason = f"an instance at {name}:1 is called a, too; give each a --name of its own"
        assert complaints(fleet, name) == {PeerRefused(f"a at {other}:1", reason)}


@pytest.mark.parametrize("seed", range(5))
def test_an_instance_in_the_cluster_does_not_exit_because_of_a_namesake(seed: int) -> None:
    fleet = namesakes(seed)
    fleet.run(60)
    outputs = [output for name in ("one", "two") for _, output in fleet.nodes[name].outputs]
    refusals = [output for output in outputs if isinstance(output, RefusedByPeer)]
    assert refusals != []
    assert not any(output.must_exit for output in refusals)


@pytest.mark.parametrize("how", ["leave", "kill"])
@pytest.mark.parametrize("gone", ["one", "two"])
def test_when_one_namesake_leaves_the_other_gets_the_name(gone: str, how: str) -> None:
    fleet = namesakes()
    fleet.run(30)
    getattr(fleet, how)(gone)
    stays = "two" if gone == "one" else "one"

    def all_see_it() -> bool:
        seen = [fleet.nodes[viewer].protocol.members.get("a") for viewer in ("x", "y")]
        return all(one == fleet.nodes[stays].protocol.members.me for one in seen)

    fleet.run_until(all_see_it, 20)
    fleet.run(10)
    assert all_see_it()
    assert all("a" in set(fleet.nodes[viewer].protocol.peers()) for viewer in ("x", "y"))


def test_the_record_of_an_earlier_run_at_another_address_is_replaced_without_a_report() -> None:
    members = View("b").members
    members.take_events()
    members.merge(elsewhere(500), 1.0)
    assert (members.me.epoch, members.me.address) == (501, "me:1")
    members.merge(elsewhere(500, MemberState.SUSPECT), 2.0)
    members.merge(elsewhere(600, MemberState.DEAD), 3.0)
    assert members.me.epoch == 601
    assert members.take_events() == []


def test_frames_from_another_address_of_a_name_do_not_keep_its_instance_alive() -> None:
    view = View("b")
    for _ in range(100):
        view.wait(0.1)
        view.members.heard("b", "other:1", view.now)
    assert (found := view.members.get("b")) is not None
    assert found.state == MemberState.DEAD


def test_of_two_namesakes_with_one_epoch_one_raises_it() -> None:
    members = View("b").members
    members.merge(MemberUpdate(MemberRecord("me", "z:1", *record("me").order[:3]), ""), 1.0)
    assert members.me.epoch == record("me").epoch + 1


def test_the_epoch_is_raised_three_times_over_live_namesakes_and_always_over_ended_ones() -> None:
    members = View("b").members
    for address in ("other:1", "third:1", "other:1", "third:1", "other:1"):
        members.merge(elsewhere(members.me.epoch + 1, address=address), 1.0)
    assert members.me.epoch == record("me").epoch + 6  # by two, three times
    for state in (MemberState.DEAD, MemberState.LEFT):
        last = members.me.epoch + 10
        members.merge(elsewhere(last, state), 2.0)
        assert members.me == MemberRecord("me", "me:1", last + 1, 0, MemberState.ALIVE)


# --- what they say of themselves ---


class Namesakes(RuleBasedStateMachine):
    """Runs `one` and `two`, both called a and connected only to x and y. Whatever happens, all views settle, and the
    entries of a are those of the instance that x and y take for a."""

    @initialize(seed=st.integers(0, 1000), size=st.sampled_from([1, 20]))
    def begin(self, seed: int, size: int) -> None:
        self.fleet = namesakes(seed)
        self.held: dict[str, dict[str, EntryValue]] = {"one": {}, "two": {}}
        for name, tier in (("one", 1), ("two", 2)):
            for index in range(size):
                self.hold(name, f"both have {index}", tier)
                self.hold(name, f"{name} has {index}", 2)

    @rule(name=st.sampled_from(["one", "two"]), key=st.sampled_from(["p", "q", "one has 0"]), tier=st.integers(0, 2))
    def hold(self, name: str, key: str, tier: int) -> None:
        self.fleet.nodes[name].protocol.advertise(key, (tier,), self.fleet.now)
        self.held[name][key] = (tier,)

    @rule(name=st.sampled_from(["one", "two"]), key=st.sampled_from(["p", "both have 0", "two has 0"]))
    def drop(self, name: str, key: str) -> None:
        self.fleet.nodes[name].protocol.withdraw(key, self.fleet.now)
        self.held[name].pop(key, None)

    @rule(seconds=st.floats(0.05, 10))
    def wait(self, seconds: float) -> None:
        self.fleet.run(seconds)

    @rule(name=st.sampled_from(["one", "two"]), politely=st.booleans())
    def restart(self, name: str, politely: bool) -> None:
        """Restarts an instance; the entries of its earlier run no longer count."""
        self.fleet.leave(name) if politely else self.fleet.kill(name)
        self.fleet.start(name, ["x" if name == "one" else "y"], called="a")
        self.held[name] = {}

    @rule(reset=st.booleans())
    def part(self, reset: bool) -> None:
        self.fleet.partition(["one", "x"], ["two", "y"], reset=reset)

    @rule()
    def meet(self) -> None:
        self.fleet.heal()

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.heal()
        fleet.run(60)
        believed, sent = said(fleet), sum(fleet.sent.values())
        fleet.run(10)
        assert said(fleet) == believed
        assert sum(fleet.sent.values()) - sent <= 10 * 4 * 6 * 4  # heartbeats, syncs and Hellos, and no entries
        taken = {fleet.nodes[viewer].protocol.members.get("a") for viewer in ("x", "y")}
        (name,) = [name for name in ("one", "two") if {fleet.nodes[name].protocol.members.me} == taken]
        assert all(one == self.held[name] for one in believed)
        other = "two" if name == "one" else "one"
        reason = f"an instance at {other}:1 is called a, too; give each a --name of its own"
        assert PeerRefused(f"a at {name}:1", reason) in complaints(fleet, other)


def said(fleet: Fleet) -> list[dict[str, EntryValue]]:
    """Returns each instance's view of the entries of a."""
    maps = [node.protocol.state.map_of("a") or () for node in fleet.nodes.values()]
    return [{entry.key: entry.value for entry in lww_map if not entry.deleted} for lww_map in maps]


TestNamesakes = Namesakes.TestCase
TestNamesakes.settings = settings(max_examples=10, stateful_step_count=10, print_blob=True)


@pytest.mark.parametrize("how", ["leave", "kill"])
@pytest.mark.parametrize("gone", ["one", "two"])
def test_when_one_namesake_leaves_the_others_entries_are_believed(gone: str, how: str) -> None:
    fleet, count = namesakes(), 450
    for name in ("one", "two"):
        for index in range(count):
            fleet.nodes[name].protocol.advertise(f"{name} has {index}", (1,), fleet.now)
    fleet.run(60)
    getattr(fleet, how)(gone)
    stays = "two" if gone == "one" else "one"
    truth = {f"{stays} has {index}": (1,) for index in range(count)}
    fleet.run_until(lambda: all(one == truth for one in said(fleet)), 60)


async def test_the_log_names_both_instances_that_share_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with nodes.instances(tmp_path) as running:
        x = await running.start("x")
        one = await running.start("one", called="a", peers=(x.address,))
        y = await running.start("y", peers=("127.0.0.1:1",))
        two = await running.start("two", called="a", peers=(y.address,))
        await nodes.until(lambda: x.sees("a") == y.sees("a") == MemberState.ALIVE)
        y.member.protocol.seed((x.address,))
        both = {
            f"a at {here.address} is refused: an instance at {there.address} is called a, too; give each a --name of "
            "its own"
            for here, there in ((one, two), (two, one))
        }
        await nodes.until(lambda: both <= {line.getMessage() for line in caplog.records})
        assert not one.member.ended.done()
        assert not two.member.ended.done()
