"""Shared facts: merging in any order, tombstones, whose word counts, and how far a clock may be off."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caraserve.cluster.state import replicated_map as module
from caraserve.cluster.state.replicated_map import (
    BUCKETS,
    MAX_KEY,
    MAX_VALUE,
    SHARED,
    TOMBSTONE_S,
    Adapter,
    Fact,
    Facts,
    HybridClock,
    Load,
    Shelf,
    fact_fits,
)
from caraserve.config import ADAPTER_NAME, DIGEST
from caraserve.errors import InvalidRequest

WALL_MS = 1_700_000_000_000
HLC = WALL_MS << 16
ADAPTER = Adapter("sql", "d" * 64, 16, 1000)

some_facts = st.lists(
    st.builds(
        Fact,
        key=st.sampled_from(["a", "b", "c", "d"]),
        value=st.sampled_from([("x", 1), ("y", 2), ()]),
        hlc=st.integers(HLC, HLC + 3),
        node=st.sampled_from(["n1", "n2"]),
        deleted=st.booleans(),
    ),
    max_size=12,
)


def shelf_of(facts: list[Fact]) -> Shelf:
    shelf = Shelf()
    for fact in facts:
        shelf.merge(fact)
    return shelf


@given(facts=some_facts, seed=st.integers(0, 99))
def test_merging_does_the_same_in_any_order_and_any_number_of_times(facts: list[Fact], seed: int) -> None:
    again = facts + facts[: len(facts) // 2]
    Random(seed).shuffle(again)
    one, other = shelf_of(facts), shelf_of(again)
    assert sorted(one, key=lambda fact: fact.key) == sorted(other, key=lambda fact: fact.key)
    assert (one.root, one.sums, len(one)) == (other.root, other.sums, len(other))
    assert shelf_of(list(one)).root == one.root
    assert not any(one.merge(fact) for fact in again)  # nothing of it is news any more


@given(mine=some_facts, theirs=some_facts, third=some_facts)
def test_joining_copies_is_associative_and_commutative(mine: list[Fact], theirs: list[Fact], third: list[Fact]) -> None:
    left = shelf_of([*shelf_of([*mine, *theirs]), *third])
    right = shelf_of([*shelf_of([*third, *theirs]), *mine])
    assert left.root == right.root


@given(mine=some_facts, theirs=some_facts)
def test_buckets_that_differ_are_just_those_that_hold_differences(mine: list[Fact], theirs: list[Fact]) -> None:
    one, other = shelf_of(mine), shelf_of(theirs)
    differing = set(one.differing(other.sums))
    assert all((one.bucket(i) == other.bucket(i)) or i in differing for i in range(BUCKETS) if len(one.bucket(i)) < 2)
    for index in differing:
        for fact in other.bucket(index):
            one.merge(fact)
        for fact in one.bucket(index):
            other.merge(fact)
    assert one.root == other.root


def test_the_newer_word_wins_and_a_tombstone_stays() -> None:
    one, other = Facts("n1"), Facts("n2")
    first = one.register(ADAPTER, WALL_MS)
    other.merge(SHARED, first, WALL_MS)
    removed = other.remove("sql", WALL_MS - 5000)  # its clock is behind, but it has seen what it removes
    one.merge(SHARED, removed, WALL_MS)
    assert one.adapter("sql") is None
    assert one.merge(SHARED, first, WALL_MS) == ([], [])
    assert one.adapter("sql") is None
    again = one.register(ADAPTER, WALL_MS + 1)
    other.merge(SHARED, again, WALL_MS)
    assert other.adapter("sql") == ADAPTER


def test_saying_the_same_again_says_nothing() -> None:
    facts = Facts("n1")
    assert len(facts.register(ADAPTER, WALL_MS)) == 1
    assert facts.register(ADAPTER, WALL_MS + 5) == []
    assert len(facts.remove("sql", WALL_MS)) == 1
    assert facts.remove("sql", WALL_MS) == []
    assert facts.drop("digest-1", WALL_MS) == []


def test_tombstones_go_after_their_time_and_do_not_come_in_again() -> None:
    facts = Facts("n1")
    facts.register(ADAPTER, WALL_MS)
    removed = facts.remove("sql", WALL_MS)
    later = WALL_MS + int(TOMBSTONE_S * 1000)
    facts.expire(later)
    assert len(facts.shelf(SHARED) or ()) == 1
    facts.expire(later + 1)
    assert facts.roots()[0] == (SHARED, 0)
    assert facts.merge(SHARED, removed, later + 1) == ([], [])


def test_a_fact_from_far_in_the_future_is_refused() -> None:
    facts = Facts("n1")
    ahead = Facts("n2").register(ADAPTER, WALL_MS + 3_700_000)
    assert facts.merge(SHARED, ahead, WALL_MS) == ([], [])
    assert facts.refused == 1
    assert facts.merge(SHARED, ahead, WALL_MS + 200_000)[0] == ahead


@pytest.mark.parametrize("name", ["../../etc/passwd", "a\nb", "\0", "", "-a", "x" * 129, "base"])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_name_that_no_adapter_can_have_is_not_taken_in(name: str, deleted: bool) -> None:
    facts = Facts("n1", "base")
    fact = Fact(name, () if deleted else ("d" * 64, 8, 1), HLC, "n2", deleted)
    assert facts.merge(SHARED, [fact, Fact("good", ("d" * 64, 8, 1), HLC, "n2")], WALL_MS)[0][0].key == "good"
    assert [adapter.name for adapter in facts.adapters()] == ["good"]
    assert (facts.refused, len(facts.shelf(SHARED) or ())) == (1, 1)
    assert facts.objection == f"n2 gave the name {name[:80]!r}, which no adapter can have"


@given(st.text(max_size=130), st.text(max_size=70), st.integers(0, 2**62), st.integers(0, 2**62))
@example("a", "d" * 64, 8, 1)
@example("a", "D" * 64, 8, 1)
@example("a", "d" * 63, 8, 1)
@example("a", "d" * 64, 0, 1)
@example("a", "d" * 64, 8, 0)
def test_whatever_is_listed_has_a_name_a_digest_a_rank_and_a_size(
    name: str, digest: str, rank: int, num_bytes: int
) -> None:
    facts = Facts("n1", "base")
    facts.merge(SHARED, [Fact(name, (digest, rank, num_bytes), HLC, "n2")], WALL_MS)
    for adapter in facts.adapters():
        assert ADAPTER_NAME.fullmatch(adapter.name)
        assert adapter.name != "base"
        assert DIGEST.fullmatch(adapter.digest)
        assert 0 < adapter.rank <= 65_536
        assert 0 < adapter.num_bytes <= 2**50
    assert facts.refused + sum(1 for _ in facts.adapters()) == 1


def test_only_the_holder_says_what_it_holds() -> None:
    facts = Facts("n1")
    facts.know("n2")
    lie = Fact("digest-1", ("host",), HLC, "n3")
    assert facts.merge("n2", [lie], WALL_MS) == ([], [])
    truth = Facts("n2").hold("digest-1", ("host",), WALL_MS)
    assert facts.merge("n2", truth, WALL_MS)[0] == truth
    assert facts.holders("digest-1") == {"n2": ("host",)}
    assert facts.merge("nobody", truth, WALL_MS) == ([], [])
    facts.forget("n2")
    assert facts.holders("digest-1") == {}


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["n1", "n2", "n3"]), st.sampled_from("ab"), st.sampled_from(["hold", "drop", "forget"])
        ),
        max_size=20,
    )
)
def test_the_holders_of_a_digest_are_those_on_whose_shelves_it_is(steps: list[tuple[str, str, str]]) -> None:
    facts = Facts("n1")
    others = {name: Facts(name) for name in ("n2", "n3")}
    for wall_ms, (name, key, step) in enumerate(steps, WALL_MS):
        who = others.get(name, facts)
        facts.know(name)
        if step == "forget":
            facts.forget(name)
        else:
            said = who.hold(key, (wall_ms % 3,), wall_ms) if step == "hold" else who.drop(key, wall_ms)
            facts.merge(name, said, wall_ms)
    for key in "ab":
        found = {name: shelf.get(key) for name in ("n1", "n2", "n3") if (shelf := facts.shelf(name)) is not None}
        assert facts.holders(key) == {name: fact.value for name, fact in found.items() if fact and not fact.deleted}


def test_after_a_restart_what_others_remember_of_us_is_put_right() -> None:
    before = Facts("n1")
    kept, gone = before.hold("kept", ("disk",), WALL_MS), before.hold("gone", ("host",), WALL_MS + 60_000)
    now = Facts("n1")  # its clock is a minute behind the one of its earlier life
    now.hold("kept", ("disk",), WALL_MS)
    _, answers = now.merge("n1", [*kept, *gone], WALL_MS)
    assert [(fact.key, fact.deleted) for fact in answers] == [("gone", True)]
    other = Facts("n2")
    other.know("n1")
    other.merge("n1", answers + kept + gone, WALL_MS)
    assert other.holders("gone") == {}
    assert other.holders("kept") == {"n1": ("disk",)}


def test_who_is_outbid_by_a_namesake_contradicts_it_only_when_that_is_gone() -> None:
    facts, namesake, count = Facts("n1"), Facts("n1"), 450
    facts.hold("ours", ("host",), WALL_MS)
    facts.is_outbid = True
    theirs = [fact for index in range(count) for fact in namesake.hold(f"theirs {index}", ("host",), WALL_MS + 5)]
    assert facts.merge("n1", theirs, WALL_MS) == (theirs, [])
    assert facts.contradict(WALL_MS) == []
    facts.is_outbid = False
    answers = [facts.contradict(WALL_MS) for _ in range(4)]
    assert [len(some) for some in answers] == [200, 200, 50, 0]  # no more at once than one frame has
    other = Facts("n2")
    other.know("n1")
    for some in (theirs, *answers):
        other.merge("n1", some, WALL_MS)
    assert all(other.holders(fact.key) == {} for fact in theirs)
    assert facts.holders("ours") == {"n1": ("host",)}


def test_the_newest_load_counts_and_has_an_age() -> None:
    facts = Facts("n1")
    busy, idle = Load(running=5), Load(running=0)
    assert facts.take_load("n2", 7, 2, busy, 10.0)
    assert not facts.take_load("n2", 7, 1, idle, 11.0)
    assert not facts.take_load("n2", 7, 2, idle, 11.0)
    assert facts.load("n2", 12.5) == (busy, 2.5)
    assert facts.take_load("n2", 8, 0, idle, 13.0)  # a new life counts from the start
    assert facts.load("n2", 13.0) == (idle, 0.0)
    assert facts.load("n3", 13.0) is None


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 2**20)), max_size=30))
def test_the_clock_never_repeats_and_never_lies_behind(steps: list[tuple[bool, int]]) -> None:
    clock, highest = HybridClock(), -1
    for own, number in steps:
        if own:
            time = clock.next(number)
            assert time > highest
            assert time >= number << 16
            highest = time
        else:
            clock.observe(number << 16)
            highest = max(highest, number << 16)


def test_a_full_shelf_takes_no_new_keys_but_new_words_on_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FACTS", 2)
    facts = Facts("n1")
    facts.register(ADAPTER, WALL_MS)
    facts.register(Adapter("b", "d" * 64, 8, 1), WALL_MS)
    with pytest.raises(InvalidRequest, match="at most"):
        facts.register(Adapter("c", "d" * 64, 8, 1), WALL_MS)
    assert len(facts.register(Adapter("b", "e" * 64, 8, 1), WALL_MS)) == 1
    assert len(facts.shelf(SHARED) or ()) == 2


def test_what_was_removed_takes_no_room_from_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FACTS", 2)
    facts = Facts("n1")
    for index in range(5):
        facts.register(Adapter(f"x{index}", "d" * 64, 8, 1), WALL_MS)
        facts.remove(f"x{index}", WALL_MS)
    facts.register(ADAPTER, WALL_MS)
    facts.register(Adapter("x0", "d" * 64, 8, 1), WALL_MS)
    with pytest.raises(InvalidRequest, match="at most"):
        facts.register(Adapter("x1", "d" * 64, 8, 1), WALL_MS)
    assert {adapter.name for adapter in facts.adapters()} == {"sql", "x0"}


def test_of_tombstones_the_newest_are_kept_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 3)
    facts = Facts("n1")
    for index in range(5):
        facts.register(Adapter(f"x{index}", "d" * 64, 8, 1), WALL_MS)
    removed = [fact for index in range(5) for fact in facts.remove(f"x{index}", WALL_MS + index)]
    assert sorted(fact.key for fact in facts.shelf(SHARED) or ()) == ["x2", "x3", "x4"]
    assert facts.dropped == 2
    assert facts.merge(SHARED, removed, WALL_MS) == ([], [])
    assert facts.dropped == 2


def test_a_tombstone_too_old_to_be_kept_still_takes_its_name_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 1)
    shelf = shelf_of([Fact("a", ("d", 8, 1), HLC, "n1"), Fact("b", (), HLC + 9, "n1", deleted=True)])
    assert shelf.merge(Fact("a", (), HLC + 1, "n1", deleted=True))
    assert [fact.key for fact in shelf] == ["b"]


buried = st.builds(
    Fact, key=st.sampled_from("abcdef"), value=st.just(()), hlc=st.integers(HLC, HLC + 9), node=st.just("n1")
).map(lambda fact: Fact(fact.key, (), fact.hlc, fact.node, deleted=True))


@given(facts=st.lists(buried, max_size=20), seed=st.integers(0, 99))
def test_copies_keep_the_same_tombstones_in_whatever_order_they_came(facts: list[Fact], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_TOMBSTONES", 3)
        one, other = shelf_of(facts), shelf_of(Random(seed).sample(facts, len(facts)))
        for fact in list(one):
            other.merge(fact)
        for fact in list(other):
            one.merge(fact)
        assert one.root == other.root
        assert len(one) <= 3


def test_tombstones_expire_some_at_a_time_and_those_given_again_not_at_all() -> None:
    facts = Facts("n1")
    count = 2 * module._MOST_EXPIRED
    for _ in range(3):  # so that some are buried more than once
        for index in range(count):
            facts.register(Adapter(f"x{index}", "d" * 64, 8, 1), WALL_MS)
            facts.remove(f"x{index}", WALL_MS)
    facts.register(Adapter("x0", "d" * 64, 8, 1), WALL_MS)
    later = WALL_MS + int(TOMBSTONE_S * 1000) + 1000
    sizes = []
    for _ in range(3):
        facts.expire(later)
        sizes.append(len(facts.shelf(SHARED) or ()))
    assert sizes == [count - module._MOST_EXPIRED, 1, 1]
    assert [adapter.name for adapter in facts.adapters()] == ["x0"]


def test_a_shelf_may_change_while_its_names_are_read() -> None:
    facts = Facts("n1")
    for index in range(2000):
        facts.register(Adapter(f"x{index}", "d" * 64, 8, 1), WALL_MS)
    for index, _ in enumerate(facts.adapters()):
        facts.register(Adapter(f"y{index}", "d" * 64, 8, 1), WALL_MS)
        if index == 1000:
            break


@pytest.mark.parametrize("name", ["", "x" * (MAX_KEY + 1), "half a \ud800 pair"])
def test_a_name_that_cannot_travel_is_refused_at_home(name: str) -> None:
    with pytest.raises(InvalidRequest, match="names of 1 to"):
        Facts("n1").register(Adapter(name, "d" * 64, 8, 1), WALL_MS)


def test_values_are_bounded_together() -> None:
    assert fact_fits("k", ("x" * MAX_VALUE,))
    assert not fact_fits("k", ("x" * MAX_VALUE, "y"))
    assert not fact_fits("k", (-1,))
    assert not fact_fits("k", tuple(range(9)))


def test_a_value_of_a_later_version_is_no_adapter_yet() -> None:
    facts = Facts("n1")
    facts.merge(SHARED, [Fact("new", ("digest", "rank 8"), HLC, "n2")], WALL_MS)
    assert facts.adapter("new") is None
    facts.merge(SHARED, [Fact("newer", ("d" * 64, 8, 100, "more"), HLC, "n2")], WALL_MS)
    assert facts.adapter("newer") == Adapter("newer", "d" * 64, 8, 100)
    assert [adapter.name for adapter in facts.adapters()] == ["newer"]


@settings(max_examples=20)
@given(count=st.integers(0, 300))
def test_iteration_and_length_agree(count: int) -> None:
    shelf = shelf_of([Fact(f"k{index}", (), HLC, "n1") for index in range(count)])
    assert len(list(shelf)) == len(shelf) == count
    assert sum(shelf.sums) % 2**64 == shelf.root
