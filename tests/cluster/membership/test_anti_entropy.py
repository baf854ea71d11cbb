"""Replication between two instances: when copies are compared, how often, and what a lost frame costs."""

from collections.abc import Callable, Iterable, Iterator
from random import Random

import pytest

from caraserve.cluster.membership import anti_entropy as module
from caraserve.cluster.membership.anti_entropy import AntiEntropy
from caraserve.cluster.membership.messages import MAX_BATCH, Compare, entry_batches
from caraserve.cluster.membership.messages import Entries as EntriesMessage
from caraserve.cluster.state.lww_map import Entry
from caraserve.cluster.state.replicated_map import REGISTRY, RegisteredAdapter, ReplicatedState

WALL_MS = 1_700_000_000_000


class Side:
    """One instance's state and its replication."""

    def __init__(self, name: str, adapters: int = 0) -> None:
        self.state = ReplicatedState(name)
        self.anti_entropy = AntiEntropy(self.state, Random(name))
        for index in range(adapters):
            self.state.register(RegisteredAdapter(f"adapter-{index}", "d" * 64, 8, 1), WALL_MS)

    def copy(self, other: "Side", most: int = 10**6) -> None:
        """Merges all entries of the other side's registry, or the first `most`."""
        self.state.merge(REGISTRY, list(other.state.registry)[:most], WALL_MS)

    @property
    def root(self) -> int:
        return self.state.registry.root


def fetch(mine: Side, theirs: Side, question: Compare | None, now: float = 0.0) -> int:
    """Compares until there is nothing left to request. Returns the number of `Compare`s."""
    asked = 0
    while question is not None:
        asked += 1
        following = [
            mine.anti_entropy.on_entries("b", part, now, WALL_MS)[1] for part in theirs.anti_entropy.answer(question)
        ]
        assert following[:-1] == [None] * (len(following) - 1)
        question = following[-1]
    return asked


def test_a_joining_instance_receives_all_entries_in_parts_and_each_once() -> None:
    mine, theirs = Side("a"), Side("b", 10_000)
    question = mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0)
    assert 9 <= fetch(mine, theirs, question) <= 11  # 6 frames of 200 entries an answer
    assert mine.root == theirs.root


def test_two_agree_when_one_has_all_names_of_the_other() -> None:
    mine, theirs = Side("a"), Side("b", 500)
    assert mine.anti_entropy.on_root("a", "a", 0, 0.0) is None  # what one holds oneself says nothing of names
    question = mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0)
    assert not mine.state.agreed
    fetch(mine, theirs, question)
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0) is None
    assert mine.state.agreed


def test_a_copy_with_more_entries_compares_once() -> None:
    mine, theirs = Side("a", 5), Side("b")
    theirs.copy(mine, 3)
    assert fetch(mine, theirs, mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0)) == 1
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 9.0) is None
    theirs.state.register(RegisteredAdapter("new", "d" * 64, 8, 1), WALL_MS)
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 9.0) is not None


def test_refused_entries_are_requested_again_after_30_s() -> None:
    mine, theirs = Side("a"), Side("b")
    theirs.state.register(RegisteredAdapter("ahead", "d" * 64, 8, 1), WALL_MS + 7_200_000)
    assert fetch(mine, theirs, mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0)) == 1
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 29.0) is None
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 31.0) is not None


def test_after_a_lost_connection_the_copies_are_compared_again() -> None:
    mine, theirs = Side("a", 5), Side("b")
    theirs.copy(mine, 3)
    fetch(mine, theirs, mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0))
    mine.anti_entropy.lost("b")
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0) is not None


def test_one_comparison_is_pending_at_a_time_and_times_out() -> None:
    mine, theirs = Side("a"), Side("b", 3)
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0) is not None
    assert mine.anti_entropy.on_root("c", REGISTRY, theirs.root, 1.0) is None
    assert mine.anti_entropy.on_root("c", REGISTRY, theirs.root, 2.1) is not None
    mine.anti_entropy.lost("c")
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 2.2) is not None


def test_entries_of_a_lost_frame_are_requested_again() -> None:
    mine, theirs = Side("a"), Side("b", 1000)
    question = mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0)
    assert question is not None
    parts = theirs.anti_entropy.answer(question)
    for part in parts[:2] + parts[3:]:
        assert mine.anti_entropy.on_entries("b", part, 0.1, WALL_MS)[1] is None
    question = mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 3.0)
    assert fetch(mine, theirs, question, 3.0) >= 1
    assert mine.root == theirs.root
    quiet = mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 9.0)
    assert quiet is None


def test_an_incomplete_answer_of_old_entries_does_not_count_as_complete() -> None:
    mine, theirs = Side("a", 1000), Side("b")
    theirs.copy(mine)
    theirs.state.register(RegisteredAdapter("new", "d" * 64, 8, 1), WALL_MS)
    mine.state.register(RegisteredAdapter("adapter-0", "e" * 64, 8, 1), WALL_MS + 1)
    question = mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 0.0)
    assert question is not None
    (answer,) = theirs.anti_entropy.answer(question)
    old = tuple(entry for entry in answer.entries if entry.key != "new")
    mine.anti_entropy.on_entries("b", EntriesMessage(answer.number, REGISTRY, old, answer.total, True), 0.1, WALL_MS)
    assert mine.anti_entropy.on_root("b", REGISTRY, theirs.root, 3.0) is not None


def test_a_compare_with_an_empty_or_unknown_map_is_answered() -> None:
    mine, theirs = Side("a", 3), Side("b")
    question = mine.anti_entropy.on_root("b", REGISTRY, 1, 0.0)
    assert fetch(mine, theirs, question) == 1
    assert theirs.anti_entropy.answer(Compare(7, "stranger", (0,) * 256)) == [
        EntriesMessage(7, "stranger", (), 0, True)
    ]
    assert mine.anti_entropy.on_root("b", "stranger", 5, 0.0) is None


def test_new_entries_are_pushed_once_in_bounded_frames() -> None:
    side = Side("a")
    for index in range(1500):
        side.anti_entropy.push(REGISTRY, side.state.register(RegisteredAdapter(f"x{index}", "d" * 64, 8, 1), WALL_MS))
    side.anti_entropy.push("a", side.state.advertise("d", ("host",), WALL_MS))
    told: list[str] = []
    while frames := side.anti_entropy.next_frames(WALL_MS):
        assert len(frames) <= 4
        assert all(0 < len(frame.entries) <= MAX_BATCH for frame in frames)
        told += [entry.key for frame in frames for entry in frame.entries]
    assert sorted(told) == sorted([*(f"x{index}" for index in range(1500)), "d"])


def test_answers_and_pushes_read_few_more_entries_than_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def counted(entries: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
        def each() -> Iterator[Entry]:
            nonlocal read
            for entry in entries:
                read += 1
                yield entry

        return entry_batches(each())

    monkeypatch.setattr(module, "entry_batches", counted)
    side = Side("a", 10_000)
    side.anti_entropy.push(REGISTRY, list(side.state.registry))
    question = Compare(1, REGISTRY, (0,) * 256)
    sends: list[Callable[[], list[EntriesMessage]]] = [
        lambda: side.anti_entropy.answer(question),
        lambda: side.anti_entropy.next_frames(WALL_MS),
    ]
    for send in sends:
        read = 0
        sent = len([entry for frame in send() for entry in frame.entries])
        assert 600 <= sent <= read <= sent + 2 * MAX_BATCH


def test_corrections_of_wrong_entries_are_pushed_to_all() -> None:
    before, now = Side("a"), Side("a")
    old = before.state.advertise("gone", ("host",), WALL_MS)
    now.anti_entropy.on_entries("b", EntriesMessage(0, "a", tuple(old), 0, False), 0.0, WALL_MS)
    (frame,) = now.anti_entropy.next_frames(WALL_MS)
    assert [(entry.key, entry.deleted) for entry in frame.entries] == [("gone", True)]
