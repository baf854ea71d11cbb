"""Latencies of requests relative to the same requests under the first mode."""

import pytest

from caraserve.bench.records import Run
from caraserve.bench.report.ratios import PairedRatio, paired_ratios
from caraserve.bench.report.tables import paired_table
from tests.bench.report.test_summary import answered


def run(label: str, *ttfts_s: float, rate: float = 1.0, failed: int | None = None) -> Run:
    """Returns a run whose request i is due at i / rate and has this TTFT."""
    records = (
        answered(index, index / rate, (index / rate + ttft_s,), error="HTTP 500" if index == failed else None)
        for index, ttft_s in enumerate(ttfts_s)
    )
    return Run(label, tuple(records), 10.0)


def test_a_request_is_compared_with_itself_in_the_same_repeat() -> None:
    runs = [run("cached", 0.1, 0.2), run("cached", 0.4), run("auto", 0.2, 0.2), run("auto", 0.2)]
    assert paired_ratios(runs)["auto"]["ttft"] == PairedRatio(pytest.approx(1.0), *map(pytest.approx, (0.5, 2.0)), 3)


def test_one_stall_does_not_change_the_median() -> None:
    base = [0.1 + 0.001 * index for index in range(100)]
    stalled = [1.05 * ttft_s for ttft_s in base[:-1]] + [9.0]
    found = paired_ratios([run("cached", *base), run("auto", *stalled)])["auto"]["ttft"]
    assert (found.median, found.low, found.high) == pytest.approx((1.05, 1.05, 1.05))


def test_the_interval_of_100_requests_lies_between_the_41st_and_the_60th() -> None:
    ratios = [1.0 + 0.01 * index for index in range(100)]
    found = paired_ratios([run("cached", *[0.1] * 100), run("auto", *(0.1 * ratio for ratio in ratios))])["auto"][
        "ttft"
    ]
    assert (found.low, found.high) == pytest.approx((ratios[40], ratios[59]))


def test_requests_that_one_of_the_two_did_not_answer_are_left_out() -> None:
    found = paired_ratios([run("cached", 0.1, 0.1, failed=0), run("auto", 0.9, 0.2)])["auto"]["ttft"]
    assert (found.median, found.requests) == (pytest.approx(2.0), 1)


def test_runs_of_other_requests_have_no_ratios() -> None:
    assert paired_ratios([run("1/s", 0.1, 0.1), run("2/s", 0.1, 0.1, rate=2.0)]) == {}
    assert paired_ratios([]) == {}


def test_the_table_has_a_line_for_each_further_mode() -> None:
    table = paired_table(paired_ratios([run("cached", 0.1), run("assisted", 0.1), run("auto", 0.2)]))
    assert [row[:3] for row in table.rows] == [
        ("assisted", "1", "1.000 (1.000 to 1.000)"),
        ("auto", "1", "2.000 (2.000 to 2.000)"),
    ]
