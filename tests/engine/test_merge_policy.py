"""Which adapter is merged when, who waits meanwhile, and what those who wait are given for it."""

import math

import pytest

from caraserve.core.batch import BASE_ADAPTER_SLOT as BASE
from caraserve.engine.merge_policy import CREDITS, FACTOR, SPEED, STEP, MergeDecision, MergePolicy

SEQS = 8
COST = 1 / (SPEED * SEQS)  # of a merged batch to those whom it passes over; half of it is paid for each


def served(rule: MergePolicy, adapters: list[int]) -> list[int]:
    """What the requests that are served ask for, in order."""
    return [adapters[index] for index in rule.choose(adapters).serve]


def leave(rule: MergePolicy) -> None:
    """Ends a merged phase."""
    assert rule.choose([BASE]).merged is None


def test_nobody_asks_for_anything() -> None:
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
    assert rule.choose([5, 3, 3, 5, 3, 3, 3, 5]).merged is None  # it takes all to be merged again


def test_one_merged_adapter_follows_another() -> None:
    rule = MergePolicy(SEQS)
    assert [rule.choose([adapter] * 4).merged for adapter in (3, 3, 5, 3)] == [3, 3, 5, 3]


def test_an_idle_turn_does_not_unmerge() -> None:
    rule = MergePolicy(SEQS)
    rule.choose([3])
    rule.choose([])
    assert rule.choose([3, 3, 5]) == MergeDecision(3, (0, 1))


def test_a_batch_has_room_for_so_many() -> None:
    rule = MergePolicy(SEQS)
    assert rule.choose([3] * 20) == MergeDecision(3, tuple(range(SEQS)))
    assert MergePolicy(SEQS).choose([3, 5, 7] * 7) == MergeDecision(None, tuple(range(SEQS)))


def test_requests_beyond_the_batch_count_for_their_adapter() -> None:
    """Most of all requests want 3: enough for a whole batch of it."""
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


def test_accounts_begin_alike_and_a_newcomer_leaves_the_others_as_far_from_the_bar_as_they_were() -> None:
    rule = MergePolicy(SEQS)
    rule.choose([3] * 8)
    assert rule.credits_of(3) == 0
    rule.choose([3, 3, 3, 3, 3, 3, 5, 5])
    assert (rule.credits_of(3), rule.credits_of(5)) == pytest.approx((CREDITS - COST, CREDITS + COST))
    rule.choose([3, 5, 7])
    assert (rule.credits_of(3), rule.credits_of(5)) == pytest.approx((2 * CREDITS - COST, 2 * CREDITS + COST))
    assert rule.credits_of(7) == 2 * CREDITS


def test_only_those_whose_turn_it_was_are_paid() -> None:
    """Two of the requests that are passed over would have been in the batch; the others were too late for any."""
    rule = MergePolicy(SEQS)
    rule.choose([5, 3, 3, 3, 3, 3, 3, 5, 5, 5, 3, 3])
    assert rule.credits_of(5) - CREDITS == pytest.approx(COST)
    assert rule.credits_of(3) + rule.credits_of(5) == pytest.approx(2 * CREDITS)


def poor_rule() -> MergePolicy:
    """Accounts so small that they are soon used up."""
    return MergePolicy(SEQS, credits_each=1.0)


def iterations_passed_over(rule: MergePolicy, adapters: list[int], other: int) -> int:
    """Iterations until a request for `other` is served."""
    for iteration in range(1000):
        if other in served(rule, adapters):
            return iteration
    raise AssertionError("it is never served")


@pytest.mark.parametrize("other", [BASE, 5])
@pytest.mark.parametrize("waiting", [1, 3])
def test_who_is_passed_over_comes_first_once_it_has_been_paid_enough(other: int, waiting: int) -> None:
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
    """When it has been served, it takes all requests again to merge one."""
    rule = poor_rule()
    rule.choose([3] * SEQS)
    rule.choose([3] * 6 + [5, 7])
    iterations_passed_over(rule, [3] * 6 + [5] * 2, 5)
    assert rule.credits_of(3) > 0
    assert rule.choose([3] * 6 + [7] * 2).merged is None
    assert rule.choose([3] * SEQS).merged == 3


def test_a_favoured_adapter_pays_those_whom_it_displaces_and_is_favoured_until_half_of_it_is_spent() -> None:
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
    """Iterations in which the first request of all had to give way, and still others did; then it had not."""
    count = 0
    while rule.credits_of(5) >= 1.5:
        assert rule.choose(adapters).serve[:2] == (8, 9)
        count += 1
    return count


def test_merging_that_paid_comes_sooner_next_time() -> None:
    rule = MergePolicy(100)
    for _ in range(10):
        rule.choose([3] * 100)
    leave(rule)
    assert rule.merge_threshold == pytest.approx(1.0 - STEP)
    assert rule.choose([3] * 94 + [5] * 6).merged is None
    assert rule.choose([3] * 96 + [5] * 4).merged == 3


def test_merging_that_did_not_pay_comes_later_but_not_never() -> None:
    """One iteration does not make up for a switch."""
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


def test_after_a_mixed_phase_that_paid_merging_ends_sooner() -> None:
    rule = MergePolicy(SEQS)
    for _ in range(10):
        rule.choose([3, 5, 7, 9])
    rule.choose([3] * 4)
    assert rule.stay_threshold == pytest.approx(SPEED + STEP)


def test_after_a_mixed_phase_in_which_merging_would_have_paid_it_lasts_longer() -> None:
    rule = MergePolicy(SEQS)
    for _ in range(10):
        rule.choose([3] * 7 + [5])
    rule.choose([3] * 4)
    assert rule.stay_threshold == pytest.approx(SPEED / FACTOR)


def test_a_favourite_that_changes_all_the_time_would_not_have_paid() -> None:
    """Each change would have been a switch."""
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
