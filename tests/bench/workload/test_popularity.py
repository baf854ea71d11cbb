"""Tests of popularity: shares of adapters and ranks as in papers and their generators, and the order of requests."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.workload.popularity import FORMS, Indices, parse_popularity
from caraserve.bench.workload.traces import RateTrace, RequestTrace, Trace
from caraserve.errors import ConfigError

FIVE_RANKS = (8, 16, 32, 64, 128)
COUNT = 40_000


def deal(
    text: str,
    adapters: int = 0,
    *,
    count: int = COUNT,
    ranks: Sequence[int] = (),
    at_share: object = None,
    trace: Trace | None = None,
    seed: int = 5,
) -> Indices:
    ranks = ranks or [8] * adapters
    when = np.arange(count) / count if at_share is None else np.asarray(at_share, dtype=float)
    return parse_popularity(text, trace).deal(np.random.default_rng(seed), count, when, ranks)


def shares(dealt: Indices, adapters: int) -> list[float]:
    """Returns the share of each adapter, by index."""
    return [int(count) / len(dealt) for count in np.bincount(dealt, minlength=adapters)]


def of_ranks(dealt: Indices, ranks: Sequence[int]) -> dict[int, float]:
    asked = np.array(ranks)[dealt]
    return {rank: float((asked == rank).mean()) for rank in sorted(set(ranks))}


@pytest.mark.parametrize("text", ["uniform", "top5"])
def test_with_few_adapters_shares_are_equal(text: str) -> None:
    assert shares(deal(text, 4), 4) == pytest.approx([0.25] * 4, abs=0.01)


def test_distinct_repeats_one_random_permutation() -> None:
    dealt = deal("distinct", 20, count=50).tolist()
    assert sorted(dealt[:20]) == list(range(20))
    assert dealt[:20] != list(range(20))
    assert all(len(set(dealt[start : start + 20])) == 20 for start in range(31))
    assert parse_popularity("distinct").drops_after_use
    assert not parse_popularity("uniform").drops_after_use


def test_round_robin_and_identical() -> None:
    assert deal("round-robin", 3, count=7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert deal("identical", 3, count=3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "adapters", "first", "top5", "top10"),
    [
        ("slora:0.1", 200, 0.5887, 0.6915, 0.7411),
        ("slora:0.3", 200, 0.204, 0.3307, 0.4071),
        ("slora:1", 200, 0.005, 0.025, 0.05),
        ("zipf:1.557", 1000, 0.4216, 0.724, 0.8122),  # the company of LoRAServe: five adapters have 72.4 %
        ("mandelbrot:1.16,4.3", 874, 0.0526, 0.1905, 0.2912),  # a service of LoRA adapters for images
        ("zipf:0", 100, 0.01, 0.05, 0.1),
        ("top5", 100, 0.14, 0.7, 0.7158),
        ("geometric:1.5", 16, 0.2842, 0.8369, 0.9814),
    ],
)
def test_the_first_adapters_have_their_known_shares(
    text: str, adapters: int, first: float, top5: float, top10: float
) -> None:
    share = np.cumsum(shares(deal(text, adapters, count=1024 if "geometric" in text else COUNT), adapters))
    assert (share[0], share[4], share[9]) == pytest.approx((first, top5, top10), abs=0.012)


def test_slora_above_1_favours_the_last_adapters() -> None:
    assert sum(shares(deal("slora:8", 200), 200)[-5:]) == pytest.approx(0.1833, abs=0.01)


def test_geometric_shuffles_exact_counts() -> None:
    dealt = deal("geometric:1.5", 99, count=1024)
    assert np.bincount(dealt).tolist() == [291, 194, 157, 129, 86, 57, 38, 25, 17, 11, 7, 5, 3, 2, 1, 1]
    assert (np.diff(dealt) < 0).any()
    assert set(deal("geometric:1.5", 2, count=10).tolist()) == {0, 1}  # no more than there are


@pytest.mark.parametrize(
    ("adapters", "top1", "top5", "top10"),
    [(128, 0.40, 0.81, 0.90), (256, 0.28, 0.70, 0.81), (512, 0.18, 0.59, 0.72)],
)
def test_maf_is_as_skewed_as_random_groups_of_the_traces_functions(
    adapters: int, top1: float, top5: float, top10: float
) -> None:
    groups = [
        np.cumsum(sorted(shares(deal("maf", adapters, count=4000, seed=seed), adapters), reverse=True))
        for seed in range(300)
    ]
    medians = np.median(groups, axis=0)
    assert (medians[0], medians[4], medians[9]) == pytest.approx((top1, top5, top10), abs=0.04)


def test_sticky_repeats_one_of_the_last_adapters() -> None:
    def hits(dealt: Indices, window: int) -> float:
        recent: list[int] = []
        found = 0
        for adapter in dealt.tolist():
            found += adapter in recent
            recent = [*(other for other in recent if other != adapter), adapter][-window:]
        return found / len(dealt)

    assert hits(deal("sticky:0.83,8", 1000, count=10_000), 8) == pytest.approx(0.83 + 0.17 * 8 / 1000, abs=0.015)
    assert hits(deal("uniform", 1000, count=10_000), 8) < 0.02
    assert len(set(deal("sticky:1,3", 50, count=100).tolist())) == 1
    once = deal("sticky:0.9,1", 1000, count=10_000)
    assert (np.diff(once) == 0).mean() == pytest.approx(0.9, abs=0.01)
    any_of_four = deal("sticky:0.9,4", 1000, count=10_000)
    assert (np.diff(any_of_four) == 0).mean() == pytest.approx(0.9 / 4, abs=0.02)
    assert deal("sticky:0.5", 9).tolist() == deal("sticky:0.5,8", 9).tolist()


def test_shifting_skew_moves_half_of_the_requests_from_the_largest_rank_to_the_smallest() -> None:
    ranks = FIVE_RANKS * 5
    for at_share, expected in (
        (0.0, (0.125, 0.125, 0.125, 0.125, 0.5)),
        (0.5, (0.3125, 0.125, 0.125, 0.125, 0.3125)),
        (1.0, (0.5, 0.125, 0.125, 0.125, 0.125)),
    ):
        dealt = deal("shifting-skew", ranks=ranks, at_share=at_share)
        assert tuple(of_ranks(dealt, ranks).values()) == pytest.approx(expected, abs=0.012)
        assert len(set(dealt.tolist())) == 25  # alike inside a rank
    assert of_ranks(deal("shifting-skew", 3), [8] * 3) == {8: 1.0}


def test_exponential_favours_small_ranks() -> None:
    shown = of_ranks(deal("exponential", ranks=FIVE_RANKS * 5), FIVE_RANKS * 5)
    assert list(shown.values()) == pytest.approx([0.6364, 0.2341, 0.0861, 0.0317, 0.0117], abs=0.01)
    flat = of_ranks(deal("exponential:0", ranks=FIVE_RANKS * 5), FIVE_RANKS * 5)
    assert list(flat.values()) == pytest.approx([0.2] * 5, abs=0.01)


@pytest.mark.parametrize(("exponent", "first"), [("0.333333", 0.2701), ("1", 0.438), ("3", 0.8434)])
def test_rank_skew_is_a_power_law_over_ranks(exponent: str, first: float) -> None:
    ranks = tuple(reversed(FIVE_RANKS)) * 20  # the order in which ranks are given does not matter
    shown = of_ranks(deal(f"rank-skew:{exponent}", ranks=ranks), ranks)
    assert shown[8] == pytest.approx(first, abs=0.01)
    assert shown[128] == min(shown.values())


def test_production_is_a_power_law_inside_each_rank() -> None:
    ranks = FIVE_RANKS * 10
    dealt = deal("production", ranks=ranks)
    assert list(of_ranks(dealt, ranks).values()) == pytest.approx([0.2] * 5, abs=0.01)
    of_rank_8 = np.bincount(dealt, minlength=50)[::5]
    assert of_rank_8[0] / of_rank_8.sum() == pytest.approx(0.3414, abs=0.015)
    assert of_rank_8[:5].sum() / of_rank_8.sum() == pytest.approx(0.7796, abs=0.015)


def test_a_trace_names_the_adapter_of_each_request() -> None:
    some = np.ones(3, np.int64)
    trace = RequestTrace("t.csv", some, some, np.arange(3.0), adapters=np.array([0, 1, 0]))
    assert deal("trace", 2, count=5, trace=trace).tolist() == [0, 1, 0, 0, 1]
    with pytest.raises(ConfigError, match=r"t\.csv names 2 adapters; the run has 1"):
        deal("trace", 1, trace=trace)


def test_a_trace_of_calls_per_minute_changes_shares_with_time() -> None:
    trace = RateTrace("m.csv", np.array([[3, 0, 0], [1, 5, 0]], np.int32))
    first, second, idle = (
        shares(deal("trace", 2, at_share=at_share, trace=trace, count=10_000), 2) for at_share in (0.1, 0.5, 1.0)
    )
    assert first == pytest.approx([0.75, 0.25], abs=0.02)
    assert second == [0, 1]
    assert idle == pytest.approx([1 / 3, 2 / 3], abs=0.02)  # no call then: those of all time


@given(
    st.sampled_from(
        [
            *(name for name, form in FORMS.items() if not form.parameters and name != "trace"),
            *("zipf:1", "zipf:-3", "zipf:100", "mandelbrot:1,-0.5", "slora:0.01", "slora:900", "geometric:1.001"),
            *("sticky:0.5", "exponential:50", "rank-skew:-2", "production:2"),
        ]
    ),
    st.lists(st.sampled_from(FIVE_RANKS), min_size=1, max_size=30),
    st.integers(0, 60),
    st.integers(0, 2**32),
)
def test_any_distribution_gives_valid_adapters_and_the_same_for_the_same_seed(
    text: str, ranks: list[int], count: int, seed: int
) -> None:
    dealt = deal(text, ranks=ranks, count=count, at_share=np.linspace(0, 1, count), seed=seed)
    assert dealt.dtype == np.int64
    assert dealt.shape == (count,)
    assert all(0 <= adapter < len(ranks) for adapter in dealt.tolist())
    assert dealt.tolist() == deal(text, ranks=ranks, count=count, at_share=np.linspace(0, 1, count), seed=seed).tolist()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("popular", r"popularity 'popular' is not known; there are uniform, distinct.*zipf:S, .*sticky:P\[,W\]"),
        ("zipf", "write zipf:S"),
        ("zipf:1,2", "write zipf:S"),
        ("zipf:inf", "S must be at least -100 and at most 100"),
        ("mandelbrot:1", "write mandelbrot:S,Q"),
        ("mandelbrot:1,-1", "Q must be above -1"),
        ("slora:0", "ALPHA must be above 0"),
        ("sticky:1.1", "P must be at least 0 and at most 1"),
        ("sticky:0.5,0", "W must be at least 1"),
        ("sticky:0.5,1.5", "W must be a whole number"),
        ("exponential:a", r"'a' is not a number; write exponential\[:C\]"),
        ("trace", "need a trace"),
    ],
)
def test_invalid_texts_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_popularity(text)


def test_without_adapters_or_with_a_trace_that_does_not_name_them_a_popularity_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one adapter"):
        deal("uniform", 0)
    with pytest.raises(ConfigError, match=r"m\.csv has 1 functions with calls; it cannot name 2"):
        deal("trace", 2, trace=RateTrace("m.csv", np.ones((1, 2), np.int32)))
    some = np.ones(1, np.int64)
    with pytest.raises(ConfigError, match=r"t\.csv does not name adapters"):
        parse_popularity("trace", RequestTrace("t.csv", some, some))
