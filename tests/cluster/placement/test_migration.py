"""Queued requests move where the gain exceeds the cost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.cluster.placement.migration import QueuedRequest, QueueMove, rebalanced


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
    st.dictionaries(st.sampled_from("uvwxyz"), st.lists(st.integers(1, 500), max_size=8), min_size=1), st.floats(0, 200)
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
