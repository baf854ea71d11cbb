"""The deadline of a transfer moves with its bytes, and never further away than its grace."""

from caraserve.util.least_rate import LeastRate

RATE = LeastRate(grace_s=5.0, bytes_per_s=10.0)


def test_nothing_need_come_within_the_grace() -> None:
    assert RATE.deadline_s(100.0) == 105.0


def test_bytes_move_the_deadline_by_the_time_that_they_may_take() -> None:
    assert RATE.deadline_s(104.0, 20, 105.0) == 107.0


def test_a_fast_beginning_does_not_allow_a_long_silence() -> None:
    assert RATE.deadline_s(101.0, 1_000_000, 105.0) == 106.0
