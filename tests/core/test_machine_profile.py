"""A machine's profile: fits that find what made the points, predictions, files that come back digit for digit."""

import dataclasses
import json
import os
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from caraserve.core.machine_profile import (
    SCHEMA,
    Decode,
    DecodePoint,
    LineFit,
    LoraRate,
    Prefill,
    PrefillCurve,
    PrefillPoint,
    Profile,
    default_path,
    load,
    machine_key,
)
from caraserve.errors import ConfigError

RATES = {8: (1_000_000.0, 200_000.0), 16: (500_000.0, 100_000.0), 64: (100_000.0, 20_000.0)}  # rank: (qkv, all)
MIXES = [(8,), (8, 8), (8, 64), (64, 64), (8, 8, 8, 64), (0, 0, 0), (0, 64), (16, 16, 32, 32)]


def profile(**changes: Any) -> Profile:
    """A profile with round figures."""
    made = Profile(
        schema=SCHEMA,
        machine="a machine",
        model="a model",
        made_unix_s=1.7e9 + 1 / 3,
        quick=False,
        link_bytes_per_s=2e9,
        link_latency_ms=0.5,
        handoff_ms=0.1 + 0.2,
        lora=tuple(
            LoraRate(rank, targets, pair[index], fixed_ms=rank / 1000)
            for index, targets in enumerate(("qkv", "all"))
            for rank, pair in RATES.items()
        ),
        prefill=Prefill(
            (PrefillPoint(16, 8, 5.5),),
            PrefillCurve(8.0, base_ms=4.0, per_token_ms=0.25, lora_ms=0.5, per_token_rank_ms=0.5**9, r2=0.99),
            base_ms=5.0,
            per_token_ms=0.125,
            per_token_rank_ms=0.5**8,
            r2=0.75,
        ),
        decode=Decode(
            (DecodePoint(2, 16, 8, 1e-300),),
            padded=LineFit(0.5, 3.0, 0.5),
            unpadded=LineFit(0.25, 2.0, 0.75),
            alpha_ms=0.125,
            gamma_ms=0.5,
            beta_ms=6.0,
            r2=1.0,
        ),
    )
    return dataclasses.replace(made, **changes)


# --- fits ---


def test_the_prefill_fit_finds_the_coefficients_of_the_points() -> None:
    points = [
        PrefillPoint(tokens, rank, 3.0 + tokens * (0.25 + rank * 0.002))
        for tokens in (8, 32, 256)
        for rank in (0, 8, 64)
    ]
    fit = Prefill.fitted(points)
    assert (fit.base_ms, fit.per_token_ms, fit.per_token_rank_ms) == pytest.approx((3.0, 0.25, 0.002))
    assert fit.r2 == pytest.approx(1.0)
    assert fit.points == tuple(points)


def curve_points(curve: PrefillCurve, sizes: Sequence[int]) -> list[PrefillPoint]:
    """A millisecond of noise in a hundred, the same for every law."""
    noise = cycle((1.01, 0.99, 0.995, 1.0, 1.005))
    return [PrefillPoint(tokens, rank, curve.ms(tokens, rank) * next(noise)) for tokens in sizes for rank in (0, 8, 32)]


@pytest.mark.parametrize(
    "law",
    [
        PrefillCurve(0.0, 3.0, 0.25, 0.0, 0.002, 1.0),
        PrefillCurve(5.4, 1.5, 0.021, 0.9, 5e-5, 1.0),
        PrefillCurve(20.0, 0.0, 0.1, 2.0, 5e-4, 1.0),
    ],
    ids=["a line", "an H200 with 7B", "a knee at 200 tokens"],
)
def test_the_prefill_curve_finds_the_times_of_few_and_of_many_tokens(law: PrefillCurve) -> None:
    fit = Prefill.fitted(curve_points(law, (4, 16, 64, 128, 512))).curve
    for tokens, rank in product((1, 16, 100, 128, 512, 1024), (0, 8, 64)):
        assert fit.ms(tokens, rank) == pytest.approx(law.ms(tokens, rank), rel=0.08)
    assert (fit.least_ms > 0) == (law.least_ms > 0)


def decode_points(law: Any) -> list[DecodePoint]:
    return [DecodePoint(len(mix), sum(mix), max(mix), law(mix)) for mix in MIXES]


def test_the_decode_fit_finds_the_coefficients_of_the_points() -> None:
    fit = Decode.fitted(decode_points(lambda mix: 0.01 * sum(mix) + 0.3 * len(mix) + 7.0))
    assert (fit.alpha_ms, fit.gamma_ms, fit.beta_ms) == pytest.approx((0.01, 0.3, 7.0))
    assert fit.r2 == pytest.approx(1.0)
    assert fit.unpadded.r2 < 0.99


def test_the_fits_distinguish_padded_from_unpadded_kernels() -> None:
    padding = Decode.fitted(decode_points(lambda mix: 0.02 * len(mix) * max(mix) + 5.0))
    assert (padding.padded.alpha_ms, padding.padded.beta_ms) == pytest.approx((0.02, 5.0))
    assert padding.padded.r2 == pytest.approx(1.0)
    assert padding.unpadded.r2 < 0.99
    summing = Decode.fitted(decode_points(lambda mix: 0.02 * sum(mix) + 5.0))
    assert (summing.unpadded.alpha_ms, summing.unpadded.beta_ms) == pytest.approx((0.02, 5.0))
    assert summing.unpadded.r2 == pytest.approx(1.0)
    assert summing.padded.r2 < 0.99


def test_a_kernel_that_pads_is_predicted_by_its_largest_rank() -> None:
    mixes = [mix for mix in MIXES if 0 not in mix]
    points = [
        DecodePoint(len(mix), sum(mix), max(mix), 0.02 * len(mix) * max(mix) + 0.3 * len(mix) + 5) for mix in mixes
    ]
    fit = Decode.fitted(points, is_padded=True)
    assert (fit.alpha_ms, fit.gamma_ms, fit.beta_ms, fit.r2) == pytest.approx((0.02, 0.3, 5.0, 1.0))
    assert profile(decode=fit).decode_ms([8, 64, 16]) == pytest.approx(0.02 * 3 * 64 + 0.3 * 3 + 5.0)
    assert Decode.fitted(points).r2 < 0.99


def test_times_too_short_to_be_measured_still_give_a_prefill_curve() -> None:
    curve = PrefillCurve.fitted([PrefillPoint(tokens, 0, 0.0) for tokens in (16, 64, 256)])
    assert curve.ms(64, 0) == pytest.approx(0.0, abs=1e-3)


def test_r_squared_is_the_share_of_the_variance_explained() -> None:
    fit = LineFit.fitted([0.0, 1.0, 2.0], [0.0, 1.0, 1.0])
    assert (fit.alpha_ms, fit.beta_ms, fit.r2) == pytest.approx((1 / 2, 1 / 6, 3 / 4))


def test_more_work_never_takes_less_time() -> None:
    noise = iter((0.3, -0.2, 0.1, -0.3, 0.25, -0.1))
    points = [
        PrefillPoint(tokens, rank, 0.1 * tokens - 0.001 * tokens * rank + next(noise))
        for tokens in (8, 16, 32)
        for rank in (0, 64)
    ]
    fit = Prefill.fitted(points)
    assert fit.per_token_rank_ms == 0.0
    assert fit.base_ms >= 0.0
    assert fit.per_token_ms > 0.0
    assert fit.r2 < 0.9


@pytest.mark.parametrize("batch", [1, 3, 7, 11])
def test_one_batch_size_alone_still_gives_a_fit(batch: int) -> None:
    noisy_ms = {8: 4.6, 16: 6.7, 24: 9.5, 56: 18.7, 64: 21.4}  # 2.1 + 0.3 · rank, about
    fit = Decode.fitted([DecodePoint(batch, batch * rank, rank, ms) for rank, ms in noisy_ms.items()])
    assert profile(decode=fit).decode_ms([32] * batch) == pytest.approx(11.7, rel=0.02)
    assert fit.r2 > 0.99
    assert 0.0 in (fit.gamma_ms, fit.beta_ms)  # nothing tells a request's share from the base's: one has it all


def test_the_base_model_alone_still_gives_a_fit() -> None:
    fit = Decode.fitted([DecodePoint(batch, 0, 0, 3.0 + 0.5 * batch) for batch in (1, 2, 8)])
    assert (fit.alpha_ms, fit.gamma_ms, fit.beta_ms) == pytest.approx((0.0, 0.5, 3.0))


def test_equal_times_are_explained_by_the_base_alone() -> None:
    fit = LineFit.fitted([1.0, 2.0, 3.0], [4.0, 4.0, 4.0])
    assert (fit.alpha_ms, fit.beta_ms, fit.r2) == pytest.approx((0.0, 4.0, 1.0))


# --- predictions ---


def test_predictions_match_a_calculation_by_hand() -> None:
    made = profile()
    assert made.prefill_ms(64, 8) == 4.0 + 64 * 0.25 + 0.5 + 64 * 8 * 0.5**9
    assert made.prefill_ms(64, 0) == 4.0 + 64 * 0.25
    assert made.prefill_ms(15, 0) == 8.0
    assert made.decode_ms([8, 64, 0]) == 0.125 * 72 + 3 * 0.5 + 6.0
    assert made.decode_ms(()) == 0.0
    assert made.load_ms(4_000_000) == 0.5 + 2.0


@pytest.mark.parametrize(
    ("rank", "us_per_token", "fixed_us"),
    [(8, 1.0, 8.0), (64, 10.0, 64.0), (40, 6.0, 40.0), (12, 1.5, 12.0), (4, 1.0, 8.0), (128, 20.0, 128.0)],
    ids=["measured", "last measured", "half-way", "between", "below: padded up", "beyond"],
)
def test_cpu_lora_between_and_beyond_the_measured_ranks(rank: int, us_per_token: float, fixed_us: float) -> None:
    assert profile().cpu_lora_ms(500, rank, "qkv") == pytest.approx((fixed_us + 500 * us_per_token) / 1000)
    assert profile().cpu_lora_ms(500, rank, "all") == pytest.approx((fixed_us + 500 * 5 * us_per_token) / 1000)


def test_a_slice_has_the_tokens_that_take_four_times_the_fixed_time_and_the_hand_off() -> None:
    made = profile()
    assert [made.tokens_per_worker(rank) for rank in (8, 64, 128)] == [4 * 308, 146, 86]
    assert made.tokens_per_worker(16, "all") == 126
    assert profile(handoff_ms=0.002).tokens_per_worker(8) == 4 * 10
    assert profile(handoff_ms=None).tokens_per_worker(8) == 4 * 58  # 0.05 ms are assumed


def test_lora_rates_are_fitted_to_times_by_tokens() -> None:
    fitted = LoraRate.fitted(8, "qkv", {tokens: 0.5 + 0.25 * tokens for tokens in (8, 32, 64)})
    assert (fitted.rank, fitted.targets) == (8, "qkv")
    assert fitted.tokens_per_s == pytest.approx(4000)
    assert fitted.fixed_ms == pytest.approx(0.5)


def test_lora_times_that_fall_with_the_tokens_give_the_best_rate_measured() -> None:
    assert LoraRate.fitted(8, "qkv", {8: 2.0, 64: 1.0}) == LoraRate(8, "qkv", 64_000.0, 0.0)


# --- files ---


@pytest.mark.parametrize("made", [profile(), profile(handoff_ms=None, quick=True)])
def test_a_saved_profile_is_read_back_exactly(tmp_path: Path, made: Profile) -> None:
    path = tmp_path / "new" / "folder" / "p.json"
    made.save(path)
    assert load(path) == made
    assert [entry.name for entry in path.parent.iterdir()] == ["p.json"]


def test_a_saved_profile_is_readable(tmp_path: Path) -> None:
    profile().save(tmp_path / "p.json")
    lines = (tmp_path / "p.json").read_text(encoding="utf-8").splitlines()
    assert ' "link_bytes_per_s": 2000000000.0,' in lines
    names = [line.split('"')[1] for line in lines if line.startswith(' "')]
    assert names == sorted(field.name for field in dataclasses.fields(Profile))


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, path = profile(), tmp_path / "p.json"
    old.save(path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="No space left"):
        profile(machine="another").save(path)
    assert load(path) == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/p"):
        profile().save(tmp_path / "file" / "p.json")


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(json.dumps(dataclasses.asdict(profile()))) | changes)


def rated(*rates: tuple[int, Any, float]) -> str:
    """A file with these (rank, targets, tokens/s)."""
    return edited(lora=[{"rank": rank, "targets": t, "tokens_per_s": rate} for rank, t, rate in rates])


DAMAGED = {
    "empty": "",
    "cut": edited()[:-40],
    "no object": "[]",
    "deep": "[" * 100_000,
    "field missing": json.dumps({"schema": SCHEMA}),
    "field too many": edited(colour="red"),
    "text for a number": edited(link_bytes_per_s="fast"),
    "truth for a number": edited(made_unix_s=True),
    "number for a truth": edited(quick=1),
    "not a number": edited(link_latency_ms=float("nan")),
    "infinite": edited(link_latency_ms=float("inf")),
    "huge": edited(link_latency_ms=10**400),
    "no rates": edited(lora=[]),
    "rates of one target set": rated((8, "qkv", 1.0)),
    "unknown targets": rated((8, "qkv", 1.0), (8, "mlp", 1.0)),
    "a list for targets": rated((8, "qkv", 1.0), (8, "all", 1.0), (8, ["all"], 1.0)),
    "a rate of zero": rated((8, "qkv", 1.0), (8, "all", 1.0), (16, "all", 0.0)),
    "a rank of zero": rated((8, "qkv", 1.0), (8, "all", 1.0), (0, "qkv", 1.0)),
    "ranks that fall": rated((16, "qkv", 1.0), (8, "qkv", 1.0), (8, "all", 1.0)),
    "a link of zero": edited(link_bytes_per_s=0.0),
    "a hand-off faster than any": edited(handoff_ms=0.00095),
    "a fit missing": edited(prefill={"points": []}),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load(tmp_path / "p.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "p.json")


def test_another_schema_is_named_even_if_other_fields_differ(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"schema": SCHEMA + 1, "unheard": "of"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"schema {SCHEMA + 1}, this version reads {SCHEMA}; run `caraserve profile`"):
        load(tmp_path / "p.json")


# --- names ---


def test_default_paths_differ_by_machine_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pairs = [("cpu a", "model"), ("cpu a", "other"), ("cpu b", "model"), ("cpu/a", "model"), ("x" * 500, "y" * 500)]
    paths = [default_path(*pair) for pair in pairs]
    assert len(set(paths)) == len(pairs)
    assert {path.parent for path in paths} == {tmp_path / "caraserve" / "profiles"}
    assert all(len(path.name) < 200 and path.suffix == ".json" for path in paths)
    assert default_path("cpu a", "model") == paths[0]


def test_without_a_cache_variable_the_home_folder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path("a", "b").parent == Path.home() / ".cache" / "caraserve" / "profiles"


def test_the_machine_is_its_cpu_and_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    three = machine_key()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4})
    assert three.endswith("-3-cores")
    assert machine_key() == three.removesuffix("3-cores") + "1-core"
