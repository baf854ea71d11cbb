"""Predictions are eq. 2 of Toppings for both kernels, and follow the machine when it changes."""

import dataclasses
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.cluster.routing.perf_model import DriftWatch, Kernel, PerfModel, operating_point
from caraserve.core import machine_profile as profiles
from caraserve.core.machine_profile import Decode, DecodePoint, LineFit, Prefill, PrefillCurve, PrefillPoint, Profile

RANKS = st.lists(st.sampled_from([0, 8, 16, 32, 64, 128]), max_size=40)
BATCHES = (1, 2, 4, 8, 16, 32)


def profile(alpha_ms: float = 0.002, gamma_ms: float = 0.05, beta_ms: float = 20.0) -> Profile:
    """Returns a profile whose points are on its fits."""
    kinds = [(batch, rank) for batch in BATCHES for rank in (0, 8, 64)]
    points = tuple(
        DecodePoint(batch, batch * rank, rank, alpha_ms * batch * rank + gamma_ms * batch + beta_ms)
        for batch, rank in kinds
    )
    prefill = tuple(
        PrefillPoint(tokens, rank, 5.0 + 0.1 * tokens + 0.001 * tokens * rank)
        for tokens in (16, 256, 1024)
        for rank in (0, 8, 64)
    )
    stored = profiles.load(Path(__file__).parents[2] / "profile.json")
    decode = Decode(points, LineFit(0.004, 19.0, 1.0), LineFit(0.003, 21.0, 1.0), alpha_ms, gamma_ms, beta_ms, 1.0)
    return Profile(
        schema=profiles.SCHEMA,
        machine="machine",
        model="model",
        made_unix_s=0.0,
        quick=True,
        link_bytes_per_s=1e9,
        link_latency_ms=0.1,
        handoff_ms=None,
        lora=stored.lora,
        prefill=Prefill(prefill, PrefillCurve.fitted(prefill), 5.0, 0.1, 0.001, 1.0),
        decode=decode,
    )


def sums(ranks: list[int]) -> tuple[int, int, int]:
    return len(ranks), sum(ranks), max(ranks, default=0)


# --- equation 2 ---


@pytest.mark.parametrize(
    ("kernel", "expected_ms"),
    [
        ("padded", 0.004 * 3 * 64 + 19.0),  # α · |S| · max rank + β
        ("unpadded", 0.003 * (8 + 16 + 64) + 21.0),  # α · Σ rank + β
        ("measured", 0.002 * (8 + 16 + 64) + 0.05 * 3 + 20.0),
    ],
)
def test_a_batch_of_ranks_8_16_and_64_by_hand(kernel: Kernel, expected_ms: float) -> None:
    assert PerfModel.of(profile(), kernel).decode_ms(*sums([8, 16, 64])) == pytest.approx(expected_ms, abs=1e-12)


@given(RANKS)
def test_the_measured_fit_is_the_profiles_own_prediction(ranks: list[int]) -> None:
    assert PerfModel.of(profile()).decode_ms(*sums(ranks)) == pytest.approx(profile().decode_ms(ranks))


@given(st.integers(1, 4096), st.sampled_from([0, 8, 64]))
def test_one_prompt_takes_what_the_profile_says(tokens: int, rank: int) -> None:
    assert PerfModel.of(profile()).prefill_ms(tokens, tokens * rank) == pytest.approx(
        profile().prefill_ms(tokens, rank)
    )


@pytest.mark.parametrize("kernel", ["measured", "unpadded", "padded"])
def test_an_empty_batch_takes_no_time_and_base_model_requests_take_some(kernel: Kernel) -> None:
    model = PerfModel.of(profile(), kernel)
    assert model.decode_ms(0, 0, 0) == 0
    assert model.prefill_ms(0, 0) == 0
    gamma_ms = 0.05 if kernel == "measured" else 0.0
    assert model.decode_ms(3, 0, 0) == pytest.approx(model.beta_ms + 3 * gamma_ms)


@given(RANKS, st.sampled_from([0, 8, 64, 128]), st.sampled_from(["measured", "unpadded", "padded"]))
def test_one_more_request_never_takes_less_time(ranks: list[int], rank: int, kernel: Kernel) -> None:
    model = PerfModel.of(profile(), kernel)
    assert model.decode_ms(*sums([*ranks, rank])) >= model.decode_ms(*sums(ranks))


@given(st.lists(st.sampled_from([8, 16, 64]), min_size=1, max_size=20))
def test_with_a_padded_rank_of_64_every_adapter_costs_as_rank_64(ranks: list[int]) -> None:
    padded, own = PerfModel.of(profile(), padded_rank=64), PerfModel.of(profile())
    count = len(ranks)
    for model in (padded, DriftWatch(profile(), padded_rank=64).model):
        assert model.decode_ms(*sums(ranks)) == pytest.approx(own.decode_ms(count, 64 * count, 64))
        assert model.prefill_ms(100, 100 * max(ranks)) == pytest.approx(own.prefill_ms(100, 6400))


def test_a_measured_profile_of_padded_kernels_prices_a_batch_by_its_largest_rank() -> None:
    made = profile()
    padded = dataclasses.replace(made, decode=dataclasses.replace(made.decode, is_padded=True))
    for model in (PerfModel.of(padded), PerfModel.of(padded, padded_rank=64), DriftWatch(padded).model):
        assert model.padded
        assert model.decode_ms(*sums([8, 16])) == pytest.approx(padded.decode_ms([8, 16]))
        assert model.decode_ms(*sums([8, 16])) == model.decode_ms(*sums([16, 16]))
        # Prompts of 50 tokens each: one of rank 8 beside one of rank 16 costs as much as two of rank 16.
        assert model.prefill_ms(100, 50 * 8 + 50 * 16, 16) == pytest.approx(padded.prefill_ms(100, 16))
    assert not PerfModel.of(padded, "unpadded").padded


def test_padded_prefills_are_refitted_by_their_largest_rank() -> None:
    made = profile()
    padded = dataclasses.replace(made, decode=dataclasses.replace(made.decode, is_padded=True))
    watch = DriftWatch(padded)
    chance = random.Random(2)
    for _ in range(300):
        tokens, largest = chance.randrange(16, 1024), chance.choice([8, 64])
        watch.observe_prefill(tokens, tokens * 8, largest, 2 * padded.prefill_ms(tokens, largest))
    assert watch.prefill_error < 0.02
    assert watch.model.prefill_ms(500, 500 * 8, 64) == pytest.approx(2 * padded.prefill_ms(500, 64), rel=0.02)
    assert watch.model.prefill_token_rank_ms == 0


@given(st.lists(st.sampled_from([8, 16]), min_size=1, max_size=20))
def test_padding_costs_only_where_ranks_differ(ranks: list[int]) -> None:
    padded = PerfModel(0.01, 0.0, 5.0, True, 1.0, 0.0, 0.0)
    unpadded = PerfModel(0.01, 0.0, 5.0, False, 1.0, 0.0, 0.0)
    difference_ms = padded.decode_ms(*sums(ranks)) - unpadded.decode_ms(*sums(ranks))
    assert difference_ms == pytest.approx(0.01 * sum(max(ranks) - rank for rank in ranks))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e10])
def test_a_model_with_impossible_coefficients_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="beta_ms"):
        PerfModel(0.0, 0.0, value, False, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("coefficients", "what"),
    [
        ((0, 0, 0, False, 0, 0, 0), "decoding"),
        ((1.0, 0, 0, False, 1.0, 1.0, 1.0), "decoding"),
        ((1.0, 0, 5e-324, False, 1.0, 1.0, 1.0), "decoding"),
        ((1.0, 1.0, 1.0, False, 0, 0, 1.0), "prefilling"),
    ],
)
def test_a_model_in_which_work_takes_no_time_is_refused(coefficients: tuple[float, ...], what: str) -> None:
    with pytest.raises(ValueError, match=f"{what} takes no time"):
        PerfModel(*coefficients)  # type: ignore[arg-type]


# --- operating points ---


def test_an_operating_point_by_hand() -> None:
    # 20 + n · (0.002 · 64 + 0.05 + (5 + 100 · 0.164) ÷ 50) ≤ 40 → n = 33; 33 tokens each 20 + 33 · 0.606 ms
    model = PerfModel.of(profile())
    expected = 33 * 1000 / (20 + 33 * 0.606)
    assert model.operating_point(64, 40.0, 100, 50, 256) == pytest.approx(expected)


@given(st.sampled_from([(8, 16), (8, 64), (64, 128)]), st.floats(25, 200), st.integers(1, 300))
def test_larger_ranks_never_have_a_higher_operating_point(ranks: tuple[int, int], slo_ms: float, most: int) -> None:
    model = PerfModel.of(profile())
    low, high = (model.operating_point(rank, slo_ms, 200, 100, most) for rank in ranks)
    assert 0 < high <= low


@given(
    *[st.floats(0, 1e9)] * 3,
    st.sampled_from([0.0, 1e-6, 1.0, 1e9]),
    st.integers(0, 512),
    st.floats(0, 1e9) | st.just(math.inf),
)
def test_an_operating_point_is_positive_and_finite_for_any_model(
    alpha_ms: float, gamma_ms: float, token_ms: float, least_ms: float, rank: int, slo_ms: float
) -> None:
    model = PerfModel(alpha_ms, gamma_ms, max(1e-6, least_ms), False, 1e-6, token_ms, 0.0)
    assert 0 < model.operating_point(rank, slo_ms, 512, 200, 64) < math.inf
    assert 0 < operating_point(0.0, least_ms, 0.0, slo_ms, 64) < math.inf


def test_an_operating_point_exists_even_where_no_request_meets_the_slo() -> None:
    assert PerfModel.of(profile()).operating_point(8, 1.0, 10, 10, 256) > 0


# --- drift ---


def observe(watch: DriftWatch, slower: float, count: int, batches: tuple[int, ...], noise: float = 0.02) -> int:
    """Observes iterations of a machine that is `slower` times as slow as its profile. Returns how often the model
    changed."""
    chance, changes = random.Random(1), 0
    truth = PerfModel.of(profile())
    for _ in range(count):
        ranks = [chance.choice([8, 16, 64]) for _ in range(chance.choice(batches))]
        ms = slower * truth.decode_ms(*sums(ranks)) * chance.uniform(1 - noise, 1 + noise)
        changes += watch.observe_decode(*sums(ranks), ms)
    return changes


def test_a_correct_profile_is_not_refitted() -> None:
    watch = DriftWatch(profile())
    assert observe(watch, 1.0, 500, BATCHES) == 0
    assert watch.model == PerfModel.of(profile())
    assert watch.decode_error < 0.02
    assert watch.refits == 0


def test_noise_without_drift_causes_at_most_two_refits() -> None:
    watch = DriftWatch(profile())
    assert observe(watch, 1.0, 2000, BATCHES, noise=0.5) <= 2


@pytest.mark.parametrize("kernel", ["measured", "unpadded", "padded"])
@pytest.mark.parametrize("slower", [0.7, 1.5, 3.0])
def test_the_model_follows_a_machine_that_changed(kernel: Kernel, slower: float) -> None:
    watch = DriftWatch(profile(), kernel)
    assert observe(watch, slower, 500, BATCHES) >= 1
    assert watch.decode_error < 0.05
    for ranks in ([8], [64] * 16, [8, 64] * 8):
        truth_ms = slower * PerfModel.of(profile()).decode_ms(*sums(ranks))
        assert watch.model.decode_ms(*sums(ranks)) == pytest.approx(truth_ms, rel=0.2)


def test_equal_batches_scale_the_profile_and_keep_its_slope() -> None:
    watch = DriftWatch(profile())
    for _ in range(300):
        watch.observe_decode(4, 32, 8, 1.5 * PerfModel.of(profile()).decode_ms(4, 32, 8))
    for ranks in ([8], [64] * 32):
        truth_ms = 1.5 * PerfModel.of(profile()).decode_ms(*sums(ranks))
        assert watch.model.decode_ms(*sums(ranks)) == pytest.approx(truth_ms, rel=0.05)


def test_a_few_pauses_of_the_machine_do_not_move_the_model() -> None:
    watch = DriftWatch(profile())
    for index in range(600):
        ranks = [8] * (1 + index % 16)
        slower = 20.0 if index % 20 == 0 else 1.3
        watch.observe_decode(*sums(ranks), slower * PerfModel.of(profile()).decode_ms(*sums(ranks)))
    truth_ms = 1.3 * PerfModel.of(profile()).decode_ms(8, 64, 8)
    assert watch.model.decode_ms(8, 64, 8) == pytest.approx(truth_ms, rel=0.05)


def test_prefill_is_refitted_without_decode() -> None:
    watch = DriftWatch(profile())
    chance = random.Random(2)
    for _ in range(300):
        tokens, rank = chance.randrange(16, 1024), chance.choice([0, 8, 64])
        watch.observe_prefill(tokens, tokens * rank, rank, 2 * profile().prefill_ms(tokens, rank))
    assert watch.prefill_error < 0.02
    assert watch.model.prefill_ms(500, 4000) == pytest.approx(2 * profile().prefill_ms(500, 8), rel=0.02)
    assert watch.model.decode_ms(8, 64, 8) == PerfModel.of(profile()).decode_ms(8, 64, 8)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(ms: float) -> None:
    watch = DriftWatch(profile())
    assert not any(watch.observe_decode(4, 32, 8, ms) or watch.observe_prefill(10, 80, 8, ms) for _ in range(300))
    assert watch.decode_error == watch.prefill_error == 0


def test_times_on_a_line_through_zero_do_not_replace_the_model() -> None:
    watch = DriftWatch(profile())
    for index in range(600):
        tokens = 1 + index % 7
        watch.observe_prefill(tokens, tokens * 64, 64, 1e-9 * tokens)
        watch.observe_decode(1, 64, 64, 1e-9)
    assert watch.refits == 0
    assert watch.model.prefill_ms(1, 0) > 0
    assert watch.model.decode_ms(1, 0, 0) > 0


@settings(max_examples=20)
@given(st.lists(st.tuples(RANKS, st.floats(1e-3, 1e4)), min_size=64, max_size=200), st.sampled_from([True, False]))
def test_the_model_stays_valid_whatever_times_are_observed(seen: list[tuple[list[int], float]], padded: bool) -> None:
    watch = DriftWatch(profile(), "padded" if padded else "measured")
    for ranks, ms in seen:
        watch.observe_decode(*sums(ranks), ms)
    assert watch.model.decode_ms(*sums([8, 64])) >= watch.model.decode_ms(*sums([8])) >= 0
