"""The rules of membership for one instance, with updates and a clock that the tests set."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.cluster.membership.swim import (
    MAX_KNOWN,
    MAX_LIVE,
    MAX_UPDATES,
    DetectorTiming,
    MemberChanged,
    MemberRecord,
    MemberState,
    MemberTable,
    MemberUpdate,
    PeerProbe,
)

TIMING = DetectorTiming()
ALIVE, SUSPECT, DEAD, LEFT = MemberState

any_records = st.builds(
    MemberRecord,
    name=st.sampled_from(["me", "b", "c", "d"]),
    address=st.sampled_from(["x:1", "y:1"]),
    epoch=st.integers(99, 102),
    incarnation=st.integers(0, 3),
    state=st.sampled_from(MemberState),
)


def record(name: str, state: MemberState = ALIVE, incarnation: int = 0, epoch: int = 100) -> MemberRecord:
    return MemberRecord(name, f"{name}:1", epoch, incarnation, state)


def told(name: str, state: MemberState = ALIVE, incarnation: int = 0, epoch: int = 100, by: str = "") -> MemberUpdate:
    return MemberUpdate(record(name, state, incarnation, epoch), by)


class View:
    """A member table with a clock that ticks as a server's does."""

    def __init__(self, *others: str) -> None:
        self.now = 0.0
        self.members = MemberTable(record("me"), TIMING, Random(1), 0.0)
        for name in others:
            self.members.merge(told(name), 0.0)
        self.members.take_events()

    def wait(self, seconds: float, hear: tuple[str, ...] = (), nacks: tuple[str, ...] = ()) -> list[PeerProbe]:
        """Ticks for some seconds. Frames arrive from the instances in `hear`, and nacks for each probe from `nacks`."""
        probes: list[PeerProbe] = []
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for name in hear:
                self.members.heard(name, f"{name}:1", self.now)
            new = self.members.tick(self.now)
            probes += new
            for probe in new:
                for by in nacks:
                    self.members.nacked(probe.number, by)
        return probes

    def state(self, name: str) -> MemberState | None:
        known = self.members.get(name)
        return known.state if known else None

    def events(self) -> list[tuple[str, MemberState]]:
        return [(e.record.name, e.record.state) for e in self.members.take_events() if isinstance(e, MemberChanged)]


# ---- merging


@given(records=st.lists(any_records, max_size=12), seed=st.integers(0, 99))
def test_updates_in_any_order_give_one_view(records: list[MemberRecord], seed: int) -> None:
    """Merges updates of known instances; unknown ones that are dead would not be added."""
    views = []
    for shuffled in (records, Random(seed).sample(records, len(records)) + records[:3]):
        members = MemberTable(record("me", epoch=200), TIMING, Random(1), 0.0)
        for name in ("b", "c", "d"):
            members.merge(told(name, epoch=98), 0.0)
        for index, one in enumerate(shuffled):  # a second between them, without frames of other instances
            members.merge(MemberUpdate(one, "x" if one.state == SUSPECT else ""), 10.0 + index)
        views.append({one.name: one for one in members.records()[1:]})
    assert views[0] == views[1]


@settings(max_examples=100)
@given(steps=st.lists(st.tuples(any_records, st.booleans(), st.floats(0, 1)), max_size=30))
def test_records_about_this_instance_are_refuted_and_no_record_goes_back(
    steps: list[tuple[MemberRecord, bool, float]],
) -> None:
    members = MemberTable(record("me"), TIMING, Random(1), 0.0)
    now = 0.0
    before: dict[str, MemberRecord] = {}
    for one, by_sync, passed in steps:
        now += passed
        members.merge(MemberUpdate(one, "x" if one.state == SUSPECT else ""), now, by_sync=by_sync)
        members.tick(now)
        assert members.me.state == ALIVE
        assert one.name != "me" or one.order[:3] <= members.me.order[:3]
        for known in members.records():
            assert before.get(known.name, known).order <= known.order
            before[known.name] = known


def test_a_restart_replaces_the_record_of_the_earlier_run_at_once() -> None:
    view = View("b")
    view.members.merge(told("b", DEAD, 7), 5.0)
    view.members.merge(told("b", ALIVE, 0, epoch=101), 5.0)
    assert view.events() == [("b", DEAD), ("b", ALIVE)]
    for old in (told("b", DEAD, 9), told("b", LEFT, 9), told("b", SUSPECT, 9, by="c"), told("b", ALIVE, 9)):
        view.members.merge(old, 6.0)
    assert view.state("b") == ALIVE
    assert view.events() == []


def test_a_restart_is_reported_even_if_the_earlier_run_was_still_alive() -> None:
    view = View("b")
    view.members.merge(told("b", epoch=101), 1.0)
    assert view.members.take_events() == [MemberChanged(record("b", epoch=101), ALIVE)]


def test_this_instance_refutes_suspicion_and_death_until_it_leaves() -> None:
    members = View("b").members
    members.merge(told("me", SUSPECT, 0, by="b"), 1.0)
    assert (members.me.incarnation, members.me.state) == (1, ALIVE)
    members.merge(told("me", SUSPECT, 0, by="b"), 1.0)  # an old one again: answered already
    assert members.me.incarnation == 1
    members.merge(told("me", DEAD, 4), 1.0)
    assert members.me.incarnation == 5
    members.merge(told("me", DEAD, 0, epoch=777), 1.0)  # of an earlier run whose clock was ahead
    assert (members.me.epoch, members.me.incarnation) == (778, 0)
    assert any(update.record == members.me for update in members.updates("b"))
    members.leave()
    left = members.me
    members.merge(told("me", DEAD, 50, epoch=778), 1.0)
    assert members.me == left == record("me", LEFT, 0, epoch=778)


def test_a_refuted_suspicion_does_not_come_back() -> None:
    view = View("b", "c")
    view.members.merge(told("b", SUSPECT, 0, by="c"), 0.5)
    view.members.merge(told("b", ALIVE, 1), 0.6)
    view.members.merge(told("b", SUSPECT, 0, by="d"), 0.7)
    view.members.merge(told("b", DEAD, 0), 0.7, by_sync=True)
    view.members.merge(told("b", DEAD, 0), 0.7)
    assert view.state("b") == ALIVE
    assert not view.wait(20, hear=("b", "c"))
    assert view.events() == [("b", SUSPECT), ("b", ALIVE)]


def test_a_death_received_by_sync_counts_as_a_suspicion() -> None:
    view = View("b", "c")
    view.wait(2, hear=("c",), nacks=("c",))
    view.members.merge(told("b", DEAD), view.now, by_sync=True)
    assert view.state("b") == SUSPECT
    view.wait(7, hear=("c",), nacks=("c",))
    assert view.state("b") == DEAD


def test_an_instance_whose_frames_arrive_is_not_declared_dead() -> None:
    view = View("b", "c")
    view.wait(1, hear=("b", "c"))
    view.members.merge(told("b", DEAD), view.now)
    assert view.state("b") == SUSPECT
    assert MemberUpdate(record("b", SUSPECT), "me") in view.members.updates("b")
    view.wait(20, hear=("b", "c"))
    assert view.state("b") == SUSPECT  # every frame to it has the suspicion, and only it can refute it
    view.members.merge(told("b", ALIVE, 1), view.now)
    assert view.state("b") == ALIVE


def test_a_death_of_a_silent_instance_is_accepted_at_once() -> None:
    view = View("b", "c")
    view.wait(1, hear=("c",))
    view.members.merge(told("b", DEAD), view.now)
    assert view.state("b") == DEAD


def test_dead_or_left_instances_that_were_unknown_are_not_added() -> None:
    view = View()
    view.members.merge(told("b", DEAD), 0.0)
    view.members.merge(told("b", DEAD), 0.0, by_sync=True)
    view.members.merge(told("b", LEFT), 0.0)
    assert view.state("b") is None
    assert view.events() == []


# ---- the detector


def test_a_silent_instance_is_probed_then_suspect_then_dead() -> None:
    view = View("b", "c", "d")
    assert view.wait(0.7, hear=("c", "d")) == []
    (probe,) = view.wait(0.1, hear=("c", "d"), nacks=("c", "d"))
    assert (probe.target, set(probe.via)) == ("b", {"c", "d"})
    view.wait(0.7, hear=("c", "d"), nacks=("c", "d"))
    assert view.events() == [("b", SUSPECT)]
    for accuser in ("c", "d"):
        view.members.merge(told("b", SUSPECT, by=accuser), view.now)
    view.wait(TIMING.suspect_s - 0.4, hear=("c", "d"), nacks=("c", "d"))
    assert view.events() == []
    view.wait(0.5, hear=("c", "d"), nacks=("c", "d"))
    assert view.events() == [("b", DEAD)]


def test_an_answer_through_a_relay_counts_as_an_answer() -> None:
    view = View("b", "c")
    for _ in range(20):
        for probe in view.wait(0.1, hear=("c",)):
            view.members.acked(probe.number, record("b"), view.now)
    assert view.events() == []


def test_an_answer_to_an_old_probe_does_not_end_the_present_one() -> None:
    view = View("b", "c")
    (old,) = view.wait(0.8, hear=("c",))
    view.wait(1.5, hear=("c",))
    health = view.members.health
    assert health > 0
    view.members.acked(old.number, record("b"), view.now)
    assert view.members.health == health
    view.wait(10, hear=("c",))
    assert view.state("b") == DEAD


def test_a_broken_connection_makes_suspect_at_once_and_dead_only_after_the_timeout() -> None:
    view = View("b", "c")
    view.wait(1, hear=("b", "c"))
    view.members.lost("b", view.now)
    assert view.events() == [("b", SUSPECT)]
    view.members.merge(told("b", SUSPECT, by="c"), view.now)
    view.wait(TIMING.suspect_s - 0.1, hear=("c",))
    assert view.state("b") == SUSPECT
    view.wait(0.3, hear=("c",))
    assert view.state("b") == DEAD


@pytest.mark.parametrize("size", [2, 3, 5, 8, 20, 64])
def test_suspicions_by_several_instances_last_shorter(size: int) -> None:
    view = View(*(f"n{index}" for index in range(size - 1)))
    low = TIMING.suspect_s * max(1.0, math.log10(size))
    times = [view.members.suspicion_s(accusers) for accusers in range(1, 6)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(low)
    assert times[0] == pytest.approx(low if size == 2 else TIMING.stretch * low)


def test_confirmations_count_once_each() -> None:
    view = View("b", *"cdefgh")
    hear = tuple("cdefgh")
    view.members.lost("b", 0.0)
    for _ in range(9):
        view.members.merge(told("b", SUSPECT, by="c"), 0.0)
    view.wait(3, hear=hear)
    assert view.state("b") == SUSPECT
    for accuser in "def":
        view.members.merge(told("b", SUSPECT, by=accuser), view.now)
    view.wait(0.1, hear=hear)
    assert view.state("b") == DEAD


@pytest.mark.parametrize("seconds", [0.6, 2, 10, 1000])
def test_a_standstill_of_the_own_loop_makes_no_instance_suspect(seconds: float) -> None:
    view = View("b", "c")
    view.wait(1, hear=("b", "c"))
    view.now += seconds
    assert view.members.tick(view.now) == []
    view.wait(0.5)
    assert view.events() == []
    assert view.members.health > 0


def test_a_standstill_stops_the_clock_of_a_suspicion() -> None:
    view = View("b", "c")
    view.members.lost("b", 0.0)
    view.members.merge(told("b", SUSPECT, by="c"), 0.0)
    view.wait(1.0, hear=("c",))
    view.now += 50
    view.wait(0.8, hear=("c",))
    assert view.state("b") == SUSPECT
    view.wait(0.5, hear=("c",))
    assert view.state("b") == DEAD


def test_a_slow_instance_waits_longer_for_probes() -> None:
    calm, doubtful = View("b", "c"), View("b", "c")
    doubtful.wait(3)  # no instance answers, not even with a nack
    assert doubtful.members.health >= 2
    calm.wait(30, hear=("c",), nacks=("c",))
    assert calm.members.health == 0
    doubtful.wait(60, hear=("b", "c"))
    assert doubtful.members.health == 0


def test_the_answer_to_a_probe_brings_the_targets_own_record() -> None:
    view = View("b", "c")
    (probe,) = view.wait(0.8, hear=("c",))
    view.members.acked(probe.number, record("b", ALIVE, 3), view.now)
    assert view.state("b") == ALIVE
    assert view.members.get("b") == record("b", ALIVE, 3)


def test_dead_and_left_instances_are_forgotten_after_forget_s() -> None:
    view = View("b", "c")
    view.members.merge(told("b", LEFT, 1), 0.0)
    view.now = TIMING.forget_s - 1  # one long gap means that the own loop did not run, and does not count
    view.members.tick(view.now)
    view.wait(1)
    assert view.state("b") == LEFT
    view.wait(TIMING.forget_s)
    assert view.state("b") is None


# ---- updates


@pytest.mark.parametrize("size", [2, 5, 20, 63])
def test_an_update_is_sent_a_bounded_number_of_times(size: int) -> None:
    names = [f"n{index}" for index in range(size)]
    members = View(*names).members
    for _ in range(500):
        members.updates("n0")
    members.merge(told("n1", ALIVE, 1), 0.0)
    sent = Counter(update for _ in range(500) for update in members.updates("n0"))
    assert sent == {told("n1", ALIVE, 1): math.ceil(TIMING.spread * math.log2(size + 2))}


def test_a_newer_update_replaces_a_waiting_one_and_each_accuser_is_sent() -> None:
    members = View("b", "c", "d").members
    while members.updates("d"):
        pass
    members.merge(told("b", SUSPECT, by="c"), 0.0)
    members.merge(told("b", SUSPECT, by="d"), 0.0)
    assert {update.suspected_by for update in members.updates("d")} == {"c", "d"}
    members.merge(told("b", ALIVE, 1), 0.1)
    assert members.updates("d") == (told("b", ALIVE, 1),)


def test_the_updates_sent_least_go_first_and_their_number_in_a_frame_is_bounded() -> None:
    names = [f"n{index}" for index in range(40)]
    members = View(*names).members
    seen: set[str] = set()
    for _ in range(3):
        updates = members.updates("nobody")
        assert len(updates) <= MAX_UPDATES
        seen |= {update.record.name for update in updates}
    assert seen == {"me", *names}


def test_every_frame_to_a_suspect_carries_the_suspicion() -> None:
    members = View("b", "c").members
    members.lost("b", 0.0)
    for _ in range(100):
        assert MemberUpdate(record("b", SUSPECT), "me") in members.updates("b")


# ---- bounds


def test_the_65th_instance_is_not_admitted_until_another_leaves() -> None:
    names = [f"n{index}" for index in range(MAX_LIVE - 1)]
    members = View(*names).members
    assert not members.admits("late")
    assert members.admits("n0")
    members.merge(told("late"), 0.0)
    assert members.get("late") is None
    assert members.refused_names == 1
    members.merge(told("n0", LEFT, 1), 0.0)
    members.merge(told("late"), 0.0)
    assert members.get("late") is not None
    members.merge(told("n0", ALIVE, 2), 0.0)  # its place is taken
    assert len(members.live()) == MAX_LIVE - 1
    assert members.refused_names == 2


def test_invented_names_take_bounded_memory() -> None:
    members = View().members
    for index in range(2000):
        members.merge(told(f"n{index}"), index * 0.01)
        members.merge(told(f"n{index}", LEFT, 1), index * 0.01)
        members.updates("n0")
    assert len(members.records()) <= MAX_KNOWN
    assert len(members._queue) <= 2 * MAX_KNOWN
    assert members.get("n1999") is not None
