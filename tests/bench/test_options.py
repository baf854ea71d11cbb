"""Tests that command-line options give the right load, and that contradicting options are refused."""

import argparse

import pytest

from caraserve.bench.capacity import CONCURRENCY, PROBE_REQUESTS, capacity_per_s, objective, share_of_capacity
from caraserve.bench.cli import bench_parser
from caraserve.bench.options import LoadOptions
from caraserve.bench.records import RequestRecord, Run
from caraserve.bench.report.summary import SloLimits
from caraserve.bench.workload.build import build
from caraserve.bench.workload.presets import find_preset
from caraserve.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    return bench_parser().parse_args(["serve", *words])


def load(*words: str) -> LoadOptions:
    return LoadOptions.from_args(parsed(*words))


def test_the_default_load_is_sent_in_half_a_minute() -> None:
    requests = build(load().spec()).requests
    assert [(each.prompt_tokens, each.output_tokens) for each in requests] == [(128, 32)] * 50
    assert 15 < requests[-1].at_s < 35


def test_options_with_vllms_names_have_vllms_meaning() -> None:
    spec = load("--random-input-len", "9", "--burstiness", "0.5", "--lora-assignment", "random").spec()
    assert (spec.lengths.name, spec.arrivals.text, spec.popularity.text) == ("fixed:9/32", "gamma:0.5", "uniform")


def test_options_replace_values_of_the_preset() -> None:
    spec = load("--preset", "toppings-s1", "--request-rate", "2", "--num-prompts", "7").spec()
    assert (spec.rate, spec.num_requests, spec.popularity.text) == (2.0, 7, "distinct")


def test_a_scaled_preset_has_at_least_100_requests_and_a_smaller_model_with_a_note_about_it() -> None:
    options = load("--preset", "toppings-s3", "--scale", "0.02", "--rate-scale", "0.5")
    assert len(build(options.sized(options.spec())).requests) == 100
    model, note = options.model(None)
    assert model == "100M"
    assert note is not None
    assert "in place of llama2-7b" in note


def test_at_an_infinite_rate_all_requests_arrive_at_once() -> None:
    options = load("--request-rate", "inf", "--num-prompts", "3")
    assert [each.at_s for each in build(options.spec()).requests] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "words",
    [
        ("--rate-scale", "auto", "--request-rate", "2"),
        ("--burstiness", "1", "--arrivals", "uniform"),
        ("--num-prompts", "1", "--duration-s", "1"),
        ("--lengths", "lmsys", "--random-input-len", "3"),
        ("--preset", "toppings-s1", "--random-output-len", "3"),
    ],
    ids=lambda words: " ".join(words),
)
def test_contradicting_options_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--"):
        load(*words)


def ended(*done_s: float) -> Run:
    records = (RequestRecord(index, "m", 8, 0.0, 0.0, at_s, 1, 1) for index, at_s in enumerate(done_s))
    return Run("capacity", tuple(records), max(done_s))


def test_capacity_counts_whole_generations_of_answered_requests() -> None:
    together = [0.5 * (1 + index // CONCURRENCY) for index in range(PROBE_REQUESTS)]
    assert capacity_per_s(ended(*together)) == pytest.approx(CONCURRENCY / 0.5)
    assert capacity_per_s(ended(*(0.1 * index for index in range(PROBE_REQUESTS)))) == pytest.approx(10), "one by one"
    with pytest.raises(ValueError, match="failed"):
        capacity_per_s(ended(1.0))


@pytest.mark.parametrize(
    ("preset", "share"), [("toppings-s1", 0.65), ("toppings-s2", 0.65 * 6 / 9), ("dlora-maf1-7b", 0.325)]
)
def test_the_highest_rate_of_a_setting_counts_as_65_percent_of_capacity(preset: str, share: float) -> None:
    assert share_of_capacity(find_preset(preset)) == pytest.approx(share)


def test_a_preset_brings_its_papers_objective() -> None:
    assert objective(None, None, "slora-a10g-s1").slo == SloLimits(ttft_ms=6000)
    assert objective(None, None, "toppings-testbed-30").scale == 1.5
    assert objective("ttft:5", None, "slora-a10g-s1").slo == SloLimits(ttft_ms=5)


@pytest.mark.parametrize("adapters", [64, 256])
def test_another_number_of_adapters_takes_as_many_functions_of_the_trace(adapters: int) -> None:
    made = build(load("--preset", "toppings-maf-128", "--adapters", str(adapters), "--num-prompts", "400").spec())
    assert len(made.ranks) == adapters
    assert adapters // 8 < max(request.adapter for request in made.requests if request.adapter is not None) < adapters
