"""Adapters move to their planned instances within limits, and queued requests move where the gain exceeds the cost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.cluster.placement.migration import MigrationLimits, MoveScheduler, QueuedRequest, QueueMove, rebalanced
from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan
from caraserve.cluster.placement.shares import Share


def wanting(count: int, num_bytes: int = 100) -> tuple[PlacementPlan, dict[str, AdapterDemand]]:
    adapters = {f"a{index}": AdapterDemand(f"a{index}", 8, num_bytes, float(index)) for index in range(count)}
    return PlacementPlan.made(1, {name: (Share("me", 1.0),) for name in adapters}, {"me": 8, "you": 8}), adapters


def test_hot_adapters_are_downloaded_first_and_two_at_once() -> None:
    plan, adapters = wanting(5)
    mover = MoveScheduler("me", MigrationLimits(1e9, 1e9, concurrent=2))
    assert mover.fetches(plan, {"a4"}, adapters, 0.0) == ["a3", "a2"]
    assert mover.fetches(plan, {"a4"}, adapters, 1.0) == []
    mover.done("a3")
    mover.done("a2")  # this one failed: it is still wanted
    assert mover.fetches(plan, {"a4", "a3"}, adapters, 2.0) == ["a2", "a1"]
    assert MoveScheduler("you", MigrationLimits()).fetches(plan, set(), adapters, 0.0) == []


def test_background_moves_keep_to_their_rate() -> None:
    plan, adapters = wanting(50)
    mover = MoveScheduler("me", MigrationLimits(bytes_per_s=100.0, burst_bytes=200.0, concurrent=99))
    held: set[str] = set()
    for tenth in range(101):
        for name in mover.fetches(plan, held, adapters, tenth / 10):
            mover.done(name)
            held.add(name)
    assert 11 <= len(held) <= 13  # 200 bytes at once, 100 a second after that, the last on credit


def test_an_idle_hour_adds_no_more_credit_than_the_burst() -> None:
    plan, adapters = wanting(50)
    mover = MoveScheduler("me", MigrationLimits(bytes_per_s=100.0, burst_bytes=200.0, concurrent=99))
    assert len(mover.fetches(plan, set(), adapters, 3600.0)) == 2


def test_an_adapter_larger_than_the_burst_still_moves() -> None:
    plan, adapters = wanting(2, num_bytes=1000)
    mover = MoveScheduler("me", MigrationLimits(bytes_per_s=100.0, burst_bytes=10.0, concurrent=9))
    assert mover.fetches(plan, set(), adapters, 0.0) == ["a1"]
    assert mover.fetches(plan, set(), adapters, 9.0) == []
    assert mover.fetches(plan, set(), adapters, 10.0) == ["a0"]


def test_an_adapter_is_dropped_only_when_all_its_instances_have_it() -> None:
    plan = PlacementPlan.made(1, {"a": (Share("x", 0.5), Share("y", 0.5)), "mine": (Share("me", 1.0),)}, {})
    mover = MoveScheduler("me", MigrationLimits())
    held = {"a", "mine", "newer than the plan"}
    assert mover.drops(plan, held, {"a": {"x", "me"}}) == []
    assert mover.drops(plan, held, {}) == []
    assert mover.drops(plan, held, {"a": {"x", "y", "me"}, "mine": {"me", "x"}, "newer than the plan": {"x"}}) == ["a"]


# --- dLoRA ---


def test_queued_requests_go_from_the_most_loaded_to_the_least_by_hand() -> None:
    queues = {"x": [QueuedRequest(f"r{index}", "a", 100) for index in range(5)], "y": [], "z": []}
    moves = rebalanced(queues, {"x": 500.0, "y": 100.0, "z": 0.0}, {}, cost_tokens=20.0)
    # x 500 y 100 z 0 → z 100 → y 200 (a tie goes by name) → z 200: the gap of 0 ends it
    assert moves == [QueueMove("r4", "x", "z"), QueueMove("r3", "x", "y"), QueueMove("r2", "x", "z")]


def test_a_move_must_be_worth_its_cost_and_have_a_holder_to_go_to() -> None:
    queues = {"x": [QueuedRequest("r", "a", 100)], "y": []}
    assert rebalanced(queues, {"x": 200.0, "y": 50.0}, {}, 60.0) == []
    assert rebalanced(queues, {"x": 200.0, "y": 50.0}, {"a": ["x"]}, 0.0) == []
    assert rebalanced(queues, {"x": 200.0, "y": 50.0}, {"a": ["x", "y"]}, 0.0) == [QueueMove("r", "x", "y")]


@settings(max_examples=50)
@given(
    st.dictionaries(st.sampled_from("uvwxyz"), st.lists(st.integers(1, 500), max_size=8), min_size=1),
    st.floats(0, 200),
)
def test_rebalancing_ends_and_never_raises_the_largest_load(queues: dict[str, list[int]], cost_tokens: float) -> None:
    waiting = {
        name: [QueuedRequest(f"{name}{i}", None, tokens) for i, tokens in enumerate(q)] for name, q in queues.items()
    }
    load = {name: float(sum(tokens)) for name, tokens in queues.items()}
    sizes = {queued.request_id: queued.tokens for queue in waiting.values() for queued in queue}
    moves = rebalanced(waiting, load, {}, cost_tokens)
    assert len({move.request_id for move in moves}) == len(moves)
    after = dict(load)
    for move in moves:
        after[move.source] -= sizes[move.request_id]
        after[move.target] += sizes[move.request_id]
    assert max(after.values()) <= max(load.values())
