"""Shared entries: merging in any order, tombstones, which writers are accepted, and how far a clock may be off."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caraserve.cluster.state import lww_map as module
from caraserve.cluster.state.lww_map import (
    BUCKETS,
    MAX_KEY,
    MAX_VALUE,
    TOMBSTONE_S,
    Entry,
    EntryValue,
    LwwMap,
    entry_fits,
    is_setting,
)
from caraserve.cluster.state.replicated_map import (
    REGISTRY,
    InstanceLoad,
    RegisteredAdapter,
    ReplicatedState,
    Tier,
    tier_of,
)
from caraserve.core.adapter_rules import ADAPTER_NAME, DIGEST
from caraserve.errors import InvalidRequest
from caraserve.util.hybrid_clock import HybridClock

WALL_MS = 1_700_000_000_000
HLC = WALL_MS << 16
ADAPTER = RegisteredAdapter("sql", "d" * 64, 16, 1000)

some_entries = st.lists(
    st.builds(
        Entry,
        key=st.sampled_from(["a", "b", "c", "d"]),
        value=st.sampled_from([("x", 1), ("y", 2), ()]),
        hlc=st.integers(HLC, HLC + 3),
        node=st.sampled_from(["n1", "n2"]),
        deleted=st.booleans(),
    ),
    max_size=12,
)


def lww_map_of(entries: list[Entry]) -> LwwMap:
    lww_map = LwwMap()
    for entry in entries:
        lww_map.merge(entry)
    return lww_map


@given(entries=some_entries, seed=st.integers(0, 99))
def test_merging_does_the_same_in_any_order_and_any_number_of_times(entries: list[Entry], seed: int) -> None:
    again = entries + entries[: len(entries) // 2]
    Random(seed).shuffle(again)
    one, other = lww_map_of(entries), lww_map_of(again)
    assert sorted(one, key=lambda entry: entry.key) == sorted(other, key=lambda entry: entry.key)
    assert (one.root, one.sums, len(one)) == (other.root, other.sums, len(other))
    assert lww_map_of(list(one)).root == one.root
    assert not any(one.merge(entry) for entry in again)  # nothing of it is news any more


@given(mine=some_entries, theirs=some_entries)
def test_exactly_the_buckets_with_different_entries_differ(mine: list[Entry], theirs: list[Entry]) -> None:
    one, other = lww_map_of(mine), lww_map_of(theirs)
    differing = set(one.differing(other.sums))
    assert all((one.bucket(i) == other.bucket(i)) or i in differing for i in range(BUCKETS) if len(one.bucket(i)) < 2)
    for index in differing:
        for entry in other.bucket(index):
            one.merge(entry)
        for entry in one.bucket(index):
            other.merge(entry)
    assert one.root == other.root


def test_the_newer_entry_wins_and_a_tombstone_stays() -> None:
    one, other = ReplicatedState("n1"), ReplicatedState("n2")
    first = one.register(ADAPTER, WALL_MS)
    other.merge(REGISTRY, first, WALL_MS)
    removed = other.remove("sql", WALL_MS - 5000)  # its clock is behind, but it has seen what it removes
    one.merge(REGISTRY, removed, WALL_MS)
    assert one.adapter("sql") is None
    assert one.merge(REGISTRY, first, WALL_MS) == ([], [])
    assert one.adapter("sql") is None
    again = one.register(ADAPTER, WALL_MS + 1)
    other.merge(REGISTRY, again, WALL_MS)
    assert other.adapter("sql") == ADAPTER


def test_writing_the_same_value_again_changes_nothing() -> None:
    state = ReplicatedState("n1")
    assert len(state.register(ADAPTER, WALL_MS)) == 1
    assert state.register(ADAPTER, WALL_MS + 5) == []
    assert len(state.remove("sql", WALL_MS)) == 1
    assert state.remove("sql", WALL_MS) == []
    assert state.withdraw("digest-1", WALL_MS) == []


def test_expired_tombstones_are_removed_and_not_merged_again() -> None:
    state = ReplicatedState("n1")
    state.register(ADAPTER, WALL_MS)
    removed = state.remove("sql", WALL_MS)
    later = WALL_MS + int(TOMBSTONE_S * 1000)
    state.expire(later)
    assert len(state.registry) == 1
    state.expire(later + 1)
    assert state.roots()[0] == (REGISTRY, 0)
    assert state.merge(REGISTRY, removed, later + 1) == ([], [])


def test_an_entry_from_far_in_the_future_is_refused() -> None:
    state = ReplicatedState("n1")
    ahead = ReplicatedState("n2").register(ADAPTER, WALL_MS + 3_700_000)
    assert state.merge(REGISTRY, ahead, WALL_MS) == ([], [])
    assert state.refused == 1
    assert state.merge(REGISTRY, ahead, WALL_MS + 200_000)[0] == ahead


@pytest.mark.parametrize("name", ["../../etc/passwd", "a\nb", "\0", "", "-a", "x" * 129, "base"])
@pytest.mark.parametrize("deleted", [False, True])
def test_an_invalid_adapter_name_is_refused(name: str, deleted: bool) -> None:
    state = ReplicatedState("n1", "base")
    entry = Entry(name, () if deleted else ("d" * 64, 8, 1), HLC, "n2", deleted)
    assert state.merge(REGISTRY, [entry, Entry("good", ("d" * 64, 8, 1), HLC, "n2")], WALL_MS)[0][0].key == "good"
    assert [adapter.name for adapter in state.adapters()] == ["good"]
    assert (state.refused, len(state.registry)) == (1, 1)
    assert state.objection == f"n2 gave the name {name[:80]!r}, which no adapter can have"


@given(st.text(max_size=130), st.text(max_size=70), st.integers(0, 2**62), st.integers(0, 2**62))
@example("a", "d" * 64, 8, 1)
@example("a", "D" * 64, 8, 1)
@example("a", "d" * 63, 8, 1)
@example("a", "d" * 64, 0, 1)
@example("a", "d" * 64, 8, 0)
@example("alias/a", "d" * 64, 8, 1)
def test_every_listed_adapter_has_a_valid_name_digest_rank_and_size(
    name: str, digest: str, rank: int, num_bytes: int
) -> None:
    state = ReplicatedState("n1", "base")
    state.merge(REGISTRY, [Entry(name, (digest, rank, num_bytes), HLC, "n2")], WALL_MS)
    for adapter in state.adapters():
        assert ADAPTER_NAME.fullmatch(adapter.name)
        assert adapter.name != "base"
        assert DIGEST.fullmatch(adapter.digest)
        assert 0 < adapter.rank <= 65_536
        assert 0 < adapter.num_bytes <= 2**50
    assert state.refused + sum(1 for _ in state.adapters()) == 1 or is_setting(name)


def test_only_an_instances_own_entries_are_accepted_in_its_map() -> None:
    state = ReplicatedState("n1")
    state.add_owner("n2")
    lie = Entry("digest-1", ("host",), HLC, "n3")
    assert state.merge("n2", [lie], WALL_MS) == ([], [])
    truth = ReplicatedState("n2").advertise("digest-1", ("host",), WALL_MS)
    assert state.merge("n2", truth, WALL_MS)[0] == truth
    assert state.holders("digest-1") == {"n2": ("host",)}
    assert state.merge("nobody", truth, WALL_MS) == ([], [])
    state.forget("n2")
    assert state.holders("digest-1") == {}


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["n1", "n2", "n3"]),
            st.sampled_from("ab"),
            st.sampled_from(["advertise", "withdraw", "forget"]),
        ),
        max_size=20,
    )
)
def test_the_holders_of_a_digest_are_those_that_advertise_it(steps: list[tuple[str, str, str]]) -> None:
    state = ReplicatedState("n1")
    others = {name: ReplicatedState(name) for name in ("n2", "n3")}
    for wall_ms, (name, key, step) in enumerate(steps, WALL_MS):
        who = others.get(name, state)
        state.add_owner(name)
        if step == "forget":
            state.forget(name)
        else:
            said = who.advertise(key, (wall_ms % 3,), wall_ms) if step == "advertise" else who.withdraw(key, wall_ms)
            state.merge(name, said, wall_ms)
    for key in "ab":
        found = {name: lww_map.get(key) for name in ("n1", "n2", "n3") if (lww_map := state.map_of(name)) is not None}
        assert state.holders(key) == {name: entry.value for name, entry in found.items() if entry and not entry.deleted}


def test_after_a_restart_entries_of_the_earlier_run_are_corrected() -> None:
    before = ReplicatedState("n1")
    kept, gone = before.advertise("kept", ("disk",), WALL_MS), before.advertise("gone", ("host",), WALL_MS + 60_000)
    now = ReplicatedState("n1")  # its clock is a minute behind that of its earlier run
    now.advertise("kept", ("disk",), WALL_MS)
    _, answers = now.merge("n1", [*kept, *gone], WALL_MS)
    assert [(entry.key, entry.deleted) for entry in answers] == [("gone", True)]
    other = ReplicatedState("n2")
    other.add_owner("n1")
    other.merge("n1", answers + kept + gone, WALL_MS)
    assert other.holders("gone") == {}
    assert other.holders("kept") == {"n1": ("disk",)}


def test_an_outbid_instance_corrects_entries_only_after_its_namesake_is_gone() -> None:
    state, namesake, count = ReplicatedState("n1"), ReplicatedState("n1"), 450
    state.advertise("ours", ("host",), WALL_MS)
    state.is_outbid = True
    theirs = [
        entry for index in range(count) for entry in namesake.advertise(f"theirs {index}", ("host",), WALL_MS + 5)
    ]
    assert state.merge("n1", theirs, WALL_MS) == (theirs, [])
    assert state.correct_own_entries(WALL_MS) == []
    state.is_outbid = False
    answers = [state.correct_own_entries(WALL_MS) for _ in range(4)]
    assert [len(some) for some in answers] == [200, 200, 50, 0]  # no more at once than one frame has
    other = ReplicatedState("n2")
    other.add_owner("n1")
    for some in (theirs, *answers):
        other.merge("n1", some, WALL_MS)
    assert all(other.holders(entry.key) == {} for entry in theirs)
    assert state.holders("ours") == {"n1": ("host",)}


def test_the_newest_load_counts_and_has_an_age() -> None:
    state = ReplicatedState("n1")
    busy, idle = InstanceLoad(running=5), InstanceLoad(running=0)
    assert state.take_load("n2", 7, 2, busy, 10.0)
    assert not state.take_load("n2", 7, 1, idle, 11.0)
    assert not state.take_load("n2", 7, 2, idle, 11.0)
    assert state.load("n2", 12.5) == (busy, 2.5)
    assert state.take_load("n2", 8, 0, idle, 13.0)  # a new run has a greater epoch
    assert state.load("n2", 13.0) == (idle, 0.0)
    assert state.load("n3", 13.0) is None


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 2**20)), max_size=30))
def test_the_clock_never_repeats_and_never_falls_behind(steps: list[tuple[bool, int]]) -> None:
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


def test_a_full_map_accepts_no_new_keys_but_new_values_of_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    state = ReplicatedState("n1")
    state.register(ADAPTER, WALL_MS)
    state.register(RegisteredAdapter("b", "d" * 64, 8, 1), WALL_MS)
    with pytest.raises(InvalidRequest, match="at most"):
        state.register(RegisteredAdapter("c", "d" * 64, 8, 1), WALL_MS)
    assert len(state.register(RegisteredAdapter("b", "e" * 64, 8, 1), WALL_MS)) == 1
    assert len(state.registry) == 2


@pytest.mark.parametrize(("kind", "other"), [("alias/", "zz/"), ("zz/", "alias/"), ("", "alias/")])
def test_the_values_of_each_kind_have_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch, kind: str, other: str) -> None:
    monkeypatch.setattr(module, "MOST_VALUE_BYTES", (100, 100, 100))
    state = ReplicatedState("n1")

    def takes(name: str, size: int, hlc: int = HLC) -> bool:
        news, _ = state.merge(REGISTRY, [Entry(name, ("x" * size,) if size else (), hlc, "n2", not size)], WALL_MS)
        return bool(news)

    def has() -> list[str]:
        return sorted(entry.key.removeprefix(kind) for entry in state.registry if entry.value)

    assert takes(f"{kind}b", 60)
    assert not takes(f"{kind}a", 50)  # older by its name
    assert takes(f"{other}a", 60)
    assert takes(f"{kind}b", 40, HLC + 1)
    assert takes(f"{kind}a", 60, HLC + 2)
    assert has() == sorted(["a", "b", f"{other}a"])
    assert takes(f"{kind}b", 50, HLC + 3)  # evicts the older one
    assert has() == sorted(["b", f"{other}a"])
    assert state.refused == 1
    assert "was the oldest entry" in state.objection
    assert takes(f"{kind}b", 0, HLC + 4)
    assert takes(f"{kind}a", 100, HLC + 4)


@pytest.mark.parametrize(("name", "limit"), [("c", "100 bytes of adapters"), ("alias/c", "90 bytes of settings")])
def test_an_instance_that_has_no_room_for_its_own_entry_evicts_none(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: str
) -> None:
    monkeypatch.setattr(module, "MOST_VALUE_BYTES", (100, 90, 80))
    state = ReplicatedState("n1")
    state._write(REGISTRY, name[:-1] + "a", ("x" * 60,), WALL_MS)
    with pytest.raises(InvalidRequest, match=limit):
        state._write(REGISTRY, name, ("x" * 60,), WALL_MS)
    assert not state.has_room(Entry(name, ("x" * 60,), HLC, "n1"))
    assert len(state.registry) == 1


def test_a_holder_is_forgotten_when_its_value_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    state = ReplicatedState("n1")
    state.add_owner("n2")
    state.merge("n2", [Entry("old", ("disk",), HLC, "n2"), Entry("new", ("disk",), HLC + 1, "n2")], WALL_MS)
    assert (state.holders("old"), state.holders("new")) == ({}, {"n2": ("disk",)})


@settings(max_examples=40)
@given(mine=some_entries, theirs=some_entries, third=some_entries)
def test_full_copies_that_exchange_their_entries_become_equal(
    mine: list[Entry], theirs: list[Entry], third: list[Entry]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_ENTRIES", 3)
        patch.setattr(module, "MOST_VALUE_BYTES", (20, 20, 20))
        copies = [lww_map_of(entries) for entries in (mine, theirs, third)]
        for _ in range(4):
            for copy in copies:
                for other in copies:
                    for entry in other:
                        copy.merge(entry)
        assert len({copy.root for copy in copies}) == 1
        live = [entry for entry in copies[0] if not entry.deleted]
        assert len(live) <= 3
        assert sum(map(module._value_bytes, live)) <= 20


same_size = st.builds(
    Entry,
    key=st.sampled_from("abcdef"),
    value=st.just(()),
    hlc=st.integers(HLC, HLC + 9),
    node=st.sampled_from(["n1", "n2"]),
).map(lambda entry: Entry(entry.key, (entry.node, "xx"), entry.hlc, entry.node))


@settings(max_examples=40)
@given(mine=st.lists(same_size, max_size=12), theirs=st.lists(same_size, max_size=12), seed=st.integers(0, 99))
def test_a_full_map_keeps_the_newest_entries_in_any_order_of_arrival(
    mine: list[Entry], theirs: list[Entry], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_VALUE_BYTES", (16, 16, 16))  # of four entries
        both = lww_map_of([*mine, *theirs])
        again = [*mine, *theirs, *mine[::2]]
        assert lww_map_of(Random(seed).sample(again, len(again))).root == both.root
        assert lww_map_of([*lww_map_of(mine), *lww_map_of(theirs)]).root == both.root
        assert lww_map_of([*lww_map_of(theirs), *lww_map_of(mine)]).root == both.root
        newest = {entry.key: entry for entry in sorted(again, key=lambda entry: entry.order)}
        assert set(both) == set(sorted(newest.values(), key=lambda entry: (entry.hlc, entry.key))[-4:])


def test_tombstones_do_not_count_against_the_number_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    state = ReplicatedState("n1")
    for index in range(5):
        state.register(RegisteredAdapter(f"x{index}", "d" * 64, 8, 1), WALL_MS)
        state.remove(f"x{index}", WALL_MS)
    state.register(ADAPTER, WALL_MS)
    state.register(RegisteredAdapter("x0", "d" * 64, 8, 1), WALL_MS)
    with pytest.raises(InvalidRequest, match="at most"):
        state.register(RegisteredAdapter("x1", "d" * 64, 8, 1), WALL_MS)
    assert {adapter.name for adapter in state.adapters()} == {"sql", "x0"}


def test_the_newest_tombstones_are_kept_and_dropped_ones_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 3)
    state = ReplicatedState("n1")
    for index in range(5):
        state.register(RegisteredAdapter(f"x{index}", "d" * 64, 8, 1), WALL_MS)
    removed = [entry for index in range(5) for entry in state.remove(f"x{index}", WALL_MS + index)]
    assert sorted(entry.key for entry in state.registry) == ["x2", "x3", "x4"]
    assert state.dropped == 2
    assert state.merge(REGISTRY, removed, WALL_MS) == ([], [])
    assert state.dropped == 2


def test_a_tombstone_too_old_to_be_kept_still_removes_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 1)
    lww_map = lww_map_of([Entry("a", ("d", 8, 1), HLC, "n1"), Entry("b", (), HLC + 9, "n1", deleted=True)])
    assert lww_map.merge(Entry("a", (), HLC + 1, "n1", deleted=True))
    assert [entry.key for entry in lww_map] == ["b"]


buried = st.builds(
    Entry, key=st.sampled_from("abcdef"), value=st.just(()), hlc=st.integers(HLC, HLC + 9), node=st.just("n1")
).map(lambda entry: Entry(entry.key, (), entry.hlc, entry.node, deleted=True))


@given(entries=st.lists(buried, max_size=20), seed=st.integers(0, 99))
def test_copies_keep_the_same_tombstones_in_any_order_of_arrival(entries: list[Entry], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_TOMBSTONES", 3)
        one, other = lww_map_of(entries), lww_map_of(Random(seed).sample(entries, len(entries)))
        for entry in list(one):
            other.merge(entry)
        for entry in list(other):
            one.merge(entry)
        assert one.root == other.root
        assert len(one) <= 3


def test_at_most_200_tombstones_expire_at_a_time_and_replaced_ones_never() -> None:
    state = ReplicatedState("n1")
    count = 2 * module.MOST_EXPIRED
    for _ in range(3):  # so that some are buried more than once
        for index in range(count):
            state.register(RegisteredAdapter(f"x{index}", "d" * 64, 8, 1), WALL_MS)
            state.remove(f"x{index}", WALL_MS)
    state.register(RegisteredAdapter("x0", "d" * 64, 8, 1), WALL_MS)
    later = WALL_MS + int(TOMBSTONE_S * 1000) + 1000
    sizes = []
    for _ in range(3):
        state.expire(later)
        sizes.append(len(state.registry))
    assert sizes == [count - module.MOST_EXPIRED, 1, 1]
    assert [adapter.name for adapter in state.adapters()] == ["x0"]


def test_a_map_may_change_while_it_is_iterated() -> None:
    state = ReplicatedState("n1")
    for index in range(2000):
        state.register(RegisteredAdapter(f"x{index}", "d" * 64, 8, 1), WALL_MS)
    for index, _ in enumerate(state.adapters()):
        state.register(RegisteredAdapter(f"y{index}", "d" * 64, 8, 1), WALL_MS)
        if index == 1000:
            break


@pytest.mark.parametrize("name", ["", "x" * (MAX_KEY + 1), "half a \ud800 pair"])
def test_a_name_that_others_would_refuse_is_refused_when_registered(name: str) -> None:
    with pytest.raises(InvalidRequest, match="names of 1 to"):
        ReplicatedState("n1").register(RegisteredAdapter(name, "d" * 64, 8, 1), WALL_MS)


def test_the_size_of_a_value_is_bounded() -> None:
    assert entry_fits("k", ("x" * MAX_VALUE,))
    assert not entry_fits("k", ("x" * MAX_VALUE, "y"))
    assert not entry_fits("k", (-1,))
    assert not entry_fits("k", tuple(range(9)))


def test_a_value_of_an_unknown_shape_is_no_adapter() -> None:
    state = ReplicatedState("n1")
    state.merge(REGISTRY, [Entry("new", ("digest", "rank 8"), HLC, "n2")], WALL_MS)
    assert state.adapter("new") is None
    state.merge(REGISTRY, [Entry("newer", ("d" * 64, 8, 100, "more"), HLC, "n2")], WALL_MS)
    assert state.adapter("newer") == RegisteredAdapter("newer", "d" * 64, 8, 100)
    assert [adapter.name for adapter in state.adapters()] == ["newer"]


@settings(max_examples=20)
@given(count=st.integers(0, 300))
def test_iteration_and_length_agree(count: int) -> None:
    lww_map = lww_map_of([Entry(f"k{index}", (), HLC, "n1") for index in range(count)])
    assert len(list(lww_map)) == len(lww_map) == count
    assert sum(lww_map.sums) % 2**64 == lww_map.root


@pytest.mark.parametrize(
    ("value", "tier"),
    [((0,), Tier.DEVICE), ((1, "x"), Tier.HOST), ((), Tier.DISK), ((9,), Tier.DISK), (("0",), Tier.DISK)],
)
def test_an_unknown_tier_counts_as_disk(value: EntryValue, tier: Tier) -> None:
    assert tier_of(value) is tier
