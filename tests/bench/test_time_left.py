"""What a benchmark of several runs says of the time that it takes."""

import pytest

from caraserve.bench.client.player import RunProgress
from caraserve.bench.runner import TimeLeft, progress_text, shown_duration


class Clock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def __call__(self) -> float:
        return self.at_s


def test_before_the_first_run_the_time_follows_from_the_loads() -> None:
    left = TimeLeft(variants=7, repeats=3, load_s=140.0, start_s=100.0, now=Clock())
    assert left.outline() == "7 modes, 3 repeats: 21 runs of 2 min each, together about 52 min."
    assert left.position() == "run 1 of 7 in repeat 1 of 3, about 52 min left"


def test_later_it_follows_from_the_runs_before_and_goes_down_during_a_run() -> None:
    clock = Clock()
    left = TimeLeft(variants=2, repeats=2, load_s=10.0, start_s=0.0, now=clock)
    clock.at_s = 20.0
    left.run_ended()
    assert left.position() == "run 2 of 2 in repeat 1 of 2, about 60 s left"
    clock.at_s = 35.0
    assert left.position() == "run 2 of 2 in repeat 1 of 2, about 45 s left"
    left.run_ended()
    assert left.position().startswith("run 1 of 2 in repeat 2 of 2, ")


def test_a_run_that_is_made_again_leaves_the_later_ones_their_time() -> None:
    clock = Clock()
    left = TimeLeft(variants=1, repeats=3, load_s=15.0, start_s=0.0, now=clock)
    clock.at_s = 60.0
    assert left.position().endswith("about 40 s left")


def test_where_answers_decide_how_long_a_run_takes_the_first_one_tells() -> None:
    clock = Clock()
    left = TimeLeft(variants=1, repeats=2, load_s=None, start_s=30.0, now=clock)
    assert "known after the first" in left.outline()
    assert left.position() == "run 1 of 1 in repeat 1 of 2"
    clock.at_s = 30.0
    left.run_ended()
    assert left.position() == "run 1 of 1 in repeat 2 of 2, about 30 s left"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(45, "45 s"), (89.6, "90 s"), (100, "2 min"), (3000, "50 min"), (5400, "1 h 30 min"), (3599.9, "60 min")],
)
def test_durations_are_as_exact_as_a_prediction(seconds: float, shown: str) -> None:
    assert shown_duration(seconds) == shown


@pytest.mark.parametrize(
    ("done", "elapsed_s", "sent_after_s", "left"),
    [
        (40, 10.0, 25.0, "about 15 s left"),  # as the schedule says
        (20, 10.0, 25.0, "about 40 s left"),  # the server falls behind it
        (80, 10.0, 0.0, "about 2 s left"),  # all are sent at once
    ],
)
def test_a_single_run_says_when_it_ends(done: int, elapsed_s: float, sent_after_s: float, left: str) -> None:
    live = RunProgress(total=100, done=done, failed=1, recent_ttft_s=[0.01, 0.02, 0.5])
    shown = progress_text(live, elapsed_s, sent_after_s, None)
    assert shown == f"{done}/100 · {left} · {done / elapsed_s:.1f} requests/s · median TTFT 20 ms · 1 failed"
