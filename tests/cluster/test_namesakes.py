"""Two instances started with one name, which only others know both: neither is led astray for ever, and both say so."""

from pathlib import Path

import pytest

from caraserve.cluster.members import Record, Rumour, State
from caraserve.cluster.ports import PeerRefused, RefusedUs
from tests.cluster import nodes
from tests.cluster.fleet import Fleet
from tests.cluster.test_members import View, record


def elsewhere(epoch: int, state: State = State.ALIVE, address: str = "other:1") -> Rumour:
    return Rumour(Record("me", address, epoch, 0, state), "b" if state == State.SUSPECT else "")


def namesakes(seed: int = 0) -> Fleet:
    """`one` and `two` are both called a; each has come by an instance of its own, and those two then meet."""
    fleet = Fleet(seed)
    for name, friend in (("one", "x"), ("two", "y")):
        fleet.start(friend)
        fleet.start(name, [friend], called="a")
        fleet.run(1)
    fleet.nodes["y"].core.seed(("x:1",))
    return fleet


def complaints(fleet: Fleet, name: str) -> set[PeerRefused]:
    return {output for _, output in fleet.nodes[name].outputs if isinstance(output, PeerRefused)}


@pytest.mark.parametrize("seed", range(5))
def test_they_stop_outbidding_each_other_and_each_names_both_addresses(seed: int) -> None:
    fleet = namesakes(seed)
    first, second = (fleet.nodes[name].core.members.me.epoch for name in ("one", "two"))
    fleet.run(60)
    epochs = [fleet.nodes[name].core.members.me.epoch for name in ("one", "two")]
    assert max(epochs) <= max(first, second) + 6
    moved = len([event for when, event in fleet.events("x") if event.record.name == "a"])
    fleet.run(60)
    assert [fleet.nodes[name].core.members.me.epoch for name in ("one", "two")] == epochs
    assert len([event for when, event in fleet.events("x") if event.record.name == "a"]) == moved
    for name, other in (("one", "two"), ("two", "one")):
        reason = f"an instance at {name}:1 is called a, too; give each a --name of its own"
        assert complaints(fleet, name) == {PeerRefused(f"a at {other}:1", reason)}


@pytest.mark.parametrize("seed", range(5))
def test_who_is_in_already_does_not_end_for_a_namesake(seed: int) -> None:
    fleet = namesakes(seed)
    fleet.run(60)
    outputs = [output for name in ("one", "two") for _, output in fleet.nodes[name].outputs]
    refusals = [output for output in outputs if isinstance(output, RefusedUs)]
    assert refusals != []
    assert not any(output.ours_to_go for output in refusals)


@pytest.mark.parametrize("how", ["leave", "kill"])
@pytest.mark.parametrize("gone", ["one", "two"])
def test_when_one_goes_the_name_is_the_others_again(gone: str, how: str) -> None:
    fleet = namesakes()
    fleet.run(30)
    getattr(fleet, how)(gone)
    stays = "two" if gone == "one" else "one"

    def all_see_it() -> bool:
        seen = [fleet.nodes[viewer].core.members.get("a") for viewer in ("x", "y")]
        return all(one == fleet.nodes[stays].core.members.me for one in seen)

    fleet.run_until(all_see_it, 20)
    fleet.run(10)
    assert all_see_it()
    assert all("a" in set(fleet.nodes[viewer].core.peers()) for viewer in ("x", "y"))


def test_an_earlier_life_at_another_address_is_outbid_without_a_word() -> None:
    members = View("b").members
    members.take_events()
    members.merge(elsewhere(500), 1.0)
    assert (members.me.epoch, members.me.address) == (501, "me:1")
    members.merge(elsewhere(500, State.SUSPECT), 2.0)
    members.merge(elsewhere(600, State.DEAD), 3.0)
    assert members.me.epoch == 601
    assert members.take_events() == []


def test_of_two_started_in_the_same_moment_one_is_outbid_too() -> None:
    members = View("b").members
    members.merge(Rumour(Record("me", "z:1", *record("me").order[:3]), ""), 1.0)
    assert members.me.epoch == record("me").epoch + 1


def test_who_goes_on_answering_is_not_outbid_for_ever_but_its_end_is() -> None:
    members = View("b").members
    for address in ("other:1", "third:1", "other:1", "third:1", "other:1"):
        members.merge(elsewhere(members.me.epoch + 1, address=address), 1.0)
    assert members.me.epoch == record("me").epoch + 6  # by two, three times
    for state in (State.DEAD, State.LEFT):
        last = members.me.epoch + 10
        members.merge(elsewhere(last, state), 2.0)
        assert members.me == Record("me", "me:1", last + 1, 0, State.ALIVE)


async def test_the_log_says_which_two_share_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with nodes.instances(tmp_path) as running:
        x = await running.start("x")
        one = await running.start("one", called="a", peers=(x.address,))
        y = await running.start("y", peers=("127.0.0.1:1",))
        two = await running.start("two", called="a", peers=(y.address,))
        await nodes.until(lambda: x.sees("a") == y.sees("a") == State.ALIVE)
        y.node.core.seed((x.address,))
        both = {
            f"a at {here.address} is refused: an instance at {there.address} is called a, too; give each a --name of "
            "its own"
            for here, there in ((one, two), (two, one))
        }
        await nodes.until(lambda: both <= {line.getMessage() for line in caplog.records})
        assert not one.node.ended.done()
        assert not two.node.ended.done()
