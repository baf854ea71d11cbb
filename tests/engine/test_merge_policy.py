"""The merge policy: which adapter is merged when, which requests wait meanwhile, and which credits those get."""

import math

import pytest

from caraserve.core.batch import BASE_ADAPTER_SLOT as BASE
from caraserve.engine.merge_policy import CREDITS, FACTOR, SPEED, STEP, MergeDecision, MergePolicy

SEQS = 8
COST = 1 / (SPEED * SEQS)  # of displacing a request by a merged batch; half of it is paid for each


def served(rule: MergePolicy, adapters: list[int]) -> list[int]:
    """Returns the adapters of the served requests, in order."""
    return [adapters[index] for index in rule.choose(adapters).serve]


def leave(rule: MergePolicy) -> None:
    """Ends a merged phase."""
    assert rule.choose([BASE]).merged is None


def test_without_requests_nothing_is_merged_or_served() -> None:
    assert MergePolicy(SEQS).choose([]) == MergeDecision(None, ())


def test_one_adapter_alone_is_merged_at_once() -> None:
    assert MergePolicy(SEQS).choose([3] * 5) == MergeDecision(3, (0, 1, 2, 3, 4))


def test_a_mix_runs_unmerged_and_by_arrival() -> None:
    assert MergePolicy(SEQS).choose([3, 3, 3, 3, 3, 3, 5, 3]) == MergeDecision(None, tuple(range(8)))


def test_a_merged_adapter_stays_merged_down_to_its_share_and_serves_only_its_own_requests() -> None:
    rule = MergePolicy(SEQS)
    rule.choose([3] * 8)
    assert rule.choose([5, 3, 3, 5, 3, 3, 3, 5]) == MergeDecision(3, (1, 2, 4, 5, 6))  # 5 of 8 are more than 15 / 27
    assert rule.choose([5, 3, 3, 5, 3, 3, 5, 5]) == MergeDecision(None, tuple(range(8)))
    assert rule.choose([5, 3, 3, 5, 3, 3, 3, 5]).merged is None  # merging it again needs all requests


def test_one_merged_adapter_follows_another() -> None:
    rule = MergePolicy(SEQS)
    assert [rule.choose([adapter] * 4).merged for adapter in (3, 3, 5, 3)] == [3, 3, 5, 3]


def test_an_idle_turn_does_not_unmerge() -> None:
    rule = MergePolicy(SEQS)
    rule.choose([3])
    rule.choose([])
    assert rule.choose([3, 3, 5]) == MergeDecision(3, (0, 1))


def test_a_batch_holds_at_most_max_num_seqs_requests() -> None:
    rule = MergePolicy(SEQS)
    assert rule.choose([3] * 20) == MergeDecision(3, tuple(range(SEQS)))
    assert MergePolicy(SEQS).choose([3, 5, 7] * 7) == MergeDecision(None, tuple(range(SEQS)))


def test_requests_beyond_the_batch_count_for_their_adapter() -> None:
    """Most requests are for adapter 3, enough for a whole batch of it."""
    assert MergePolicy(SEQS).choose([5, 5, *[3] * 8]) == MergeDecision(3, tuple(range(2, 10)))


def test_the_base_model_is_never_merged() -> None:
    rule = MergePolicy(SEQS)
    assert rule.choose([BASE] * 8) == MergeDecision(None, tuple(range(8)))
    assert rule.choose([BASE] * 7 + [3]) == MergeDecision(None, tuple(range(8)))


def test_requests_for_the_base_model_wait_like_any_others() -> None:
    rule = MergePolicy(SEQS)
    rule.choose([3] * 8)
    assert served(rule, [BASE, 3, 3, 3]) == [3, 3, 3]
    assert rule.credits_of(BASE) == CREDITS + COST / 2


def test_accounts_start_equal_and_a_new_adapter_does_not_change_the_others_distance_from_the_bar() -> None:
    rule = MergePolicy(SEQS)
    rule.choose([3] * 8)
    assert rule.credits_of(3) == 0
    rule.choose([3, 3, 3, 3, 3, 3, 5, 5])
    assert (rule.credits_of(3), rule.credits_of(5)) == pytest.approx((CREDITS - COST, CREDITS + COST))
    rule.choose([3, 5, 7])
    assert (rule.credits_of(3), rule.credits_of(5)) == pytest.approx((2 * CREDITS - COST, 2 * CREDITS + COST))
    assert rule.credits_of(7) == 2 * CREDITS


def test_only_displaced_requests_of_the_batch_are_paid() -> None:
    """Two of the requests that are passed over would have been in a mixed batch; the others would not."""
    rule = MergePolicy(SEQS)
    rule.choose([5, 3, 3, 3, 3, 3, 3, 5, 5, 5, 3, 3])
    assert rule.credits_of(5) - CREDITS == pytest.approx(COST)
    assert rule.credits_of(3) + rule.credits_of(5) == pytest.approx(2 * CREDITS)


def poor_rule() -> MergePolicy:
    """Returns a policy with so few credits that they are soon used up."""
    return MergePolicy(SEQS, credits_each=1.0)


def iterations_passed_over(rule: MergePolicy, adapters: list[int], other: int) -> int:
    """Returns the number of iterations until a request for `other` is served."""
    for iteration in range(1000):
        if other in served(rule, adapters):
            return iteration
    raise AssertionError("it is never served")


@pytest.mark.parametrize("other", [BASE, 5])
@pytest.mark.parametrize("waiting", [1, 3])
def test_a_passed_over_adapter_is_served_first_when_it_has_enough_credits(other: int, waiting: int) -> None:
    rule, adapters = poor_rule(), [3] * (SEQS - waiting) + [other] * waiting
    rule.choose([3] * SEQS)
    assert iterations_passed_over(rule, adapters, other) == math.ceil(1 / (waiting * COST / 2))
    assert served(rule, adapters) == [other] * waiting + [3] * (SEQS - waiting)


def test_an_adapter_in_debt_is_not_merged() -> None:
    rule = poor_rule()
    rule.choose([3] * SEQS)
    iterations_passed_over(rule, [3] * 7 + [5], 5)
    assert rule.credits_of(3) < 0
    assert rule.choose([3] * SEQS) == MergeDecision(None, tuple(range(SEQS)))


def test_serving_a_favoured_adapter_ends_the_merging() -> None:
    """Afterwards an adapter needs all requests to be merged again."""
    rule = poor_rule()
    rule.choose([3] * SEQS)
    rule.choose([3] * 6 + [5, 7])
    iterations_passed_over(rule, [3] * 6 + [5] * 2, 5)
    assert rule.credits_of(3) > 0
    assert rule.choose([3] * 6 + [7] * 2).merged is None
    assert rule.choose([3] * SEQS).merged == 3


def test_a_favoured_adapter_pays_for_displaced_requests_and_stays_favoured_until_half_a_unit_is_spent() -> None:
    rule, adapters = poor_rule(), [3] * SEQS + [5] * 2
    rule.choose([3] * SEQS)
    iterations_passed_over(rule, [3] * 6 + [5] * 2, 5)
    rich, bar = rule.credits_of(5), 2.0
    assert rule.choose(adapters) == MergeDecision(None, (8, 9, 0, 1, 2, 3, 4, 5))
    assert rule.credits_of(5) == pytest.approx(rich - 2 / SEQS)
    more = iterations_until_not_first(rule, adapters)
    assert more == math.floor((rich - 2 / SEQS - (bar - 0.5)) / (2 / SEQS)) + 1
    assert rule.credits_of(5) < bar - 0.5
    assert rule.choose(adapters).serve == tuple(range(SEQS))


def iterations_until_not_first(rule: MergePolicy, adapters: list[int]) -> int:
    """Returns in how many iterations the requests of adapter 5 are served first, before its credits fall below 1.5."""
    count = 0
    while rule.credits_of(5) >= 1.5:
        assert rule.choose(adapters).serve[:2] == (8, 9)
        count += 1
    return count


def test_a_merged_phase_with_a_gain_lowers_the_merge_threshold() -> None:
    rule = MergePolicy(100)
    for _ in range(10):
        rule.choose([3] * 100)
    leave(rule)
    assert rule.merge_threshold == pytest.approx(1.0 - STEP)
    assert rule.choose([3] * 94 + [5] * 6).merged is None
    assert rule.choose([3] * 96 + [5] * 4).merged == 3


def test_a_merged_phase_with_a_loss_raises_the_merge_threshold_to_at_most_one() -> None:
    """A merged phase of one iteration does not make up for its switch."""
    rule = MergePolicy(SEQS)
    for _ in range(2):
        for _ in range(10):
            rule.choose([3] * 8)
        leave(rule)
    rule.choose([3] * 8)
    leave(rule)
    assert rule.merge_threshold == pytest.approx((1.0 - 2 * STEP) * FACTOR)
    rule.choose([3] * 8)
    leave(rule)
    assert rule.merge_threshold == 1.0


def test_after_a_mixed_phase_that_was_better_than_merging_merging_ends_sooner() -> None:
    rule = MergePolicy(SEQS)
    for _ in range(10):
        rule.choose([3, 5, 7, 9])
    rule.choose([3] * 4)
    assert rule.stay_threshold == pytest.approx(SPEED + STEP)


def test_after_a_mixed_phase_that_was_worse_than_merging_merging_lasts_longer() -> None:
    rule = MergePolicy(SEQS)
    for _ in range(10):
        rule.choose([3] * 7 + [5])
    rule.choose([3] * 4)
    assert rule.stay_threshold == pytest.approx(SPEED / FACTOR)


def test_a_favourite_that_changes_in_each_iteration_counts_against_merging() -> None:
    """Each change of the favourite would have been a switch."""
    rule = MergePolicy(SEQS)
    for _ in range(10):
        rule.choose([3] * 7 + [5])
        rule.choose([5] * 7 + [3])
    rule.choose([3] * 4)
    assert rule.stay_threshold == pytest.approx(SPEED + STEP)


def test_the_thresholds_never_cross() -> None:
    rule = MergePolicy(SEQS)
    for _ in range(40):
        for _ in range(10):
            rule.choose([3, 5, 7, 9])
        for _ in range(10):
            rule.choose([3] * 8)
        assert 0 < rule.stay_threshold < rule.merge_threshold <= 1
