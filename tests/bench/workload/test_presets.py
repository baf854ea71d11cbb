"""Tests of presets: all 65 settings can be run, and list their assumptions where a source is incomplete."""

import re
from typing import Any

import pytest

from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import parse_popularity
from caraserve.bench.workload.presets import Preset, SweptValue, find_preset, load_presets
from caraserve.bench.workload.traces import included_trace
from caraserve.errors import ConfigError

PRESETS = {preset.name: preset for preset in load_presets().values()}


def test_there_are_65_settings_of_six_sources() -> None:
    assert len(PRESETS) == 65
    sources = [preset.source.split(",")[0] for preset in PRESETS.values()]
    assert {source: sources.count(source) for source in sources} == {
        "Toppings": 16,
        "CaraServe": 13,
        "LoRAServe": 17,
        "S-LoRA's code": 10,
        "Punica's code": 4,
        "dLoRA's code": 5,
    }


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("caraserve-rps9-r64", "caraserve-syn-9-r64"),
        ("caraserve-rps9-r32", "caraserve-syn-9-r32"),
        ("caraserve-rps6-r64", "caraserve-syn-6-r64"),
        ("loraserve-uniform", "loraserve-uniform-poisson"),
        ("loraserve-shifting", "loraserve-shifting-poisson"),
        ("loraserve-exponential", "loraserve-exponential-poisson"),
        ("toppings-s1", "toppings-s1"),
    ],
)
def test_a_preset_has_its_name_and_its_aliases(alias: str, name: str) -> None:
    assert find_preset(alias).name == name
    assert load_presets()[alias] is load_presets()[name]


def test_an_unknown_preset_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"preset 'toppings-s7' is not known; there are toppings-s1, .*dlora-adapters"
    ):
        find_preset("toppings-s7")


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_is_complete_and_can_be_parsed(preset: Preset) -> None:
    for lengths in preset.lengths.values:
        parse_lengths(lengths)
    for arrivals in preset.arrivals.values:
        parse_arrivals(arrivals, included_trace())
    for popularity in preset.popularity.values:
        parse_popularity(popularity, included_trace())
    assert preset.slo is None or re.fullmatch(r"(p95-)?(ttft|tpt):[\d.]+[sx]", preset.slo)
    assert preset.hardware
    assert preset.servers >= 1
    assert (preset.duration_s is None) != (preset.requests is None)
    assert (preset.arrivals.default == "burst") if preset.rates is None else min(preset.rates.values) > 0
    assert all(ranks and min(ranks) >= 1 for ranks in preset.ranks.values)
    assert min(preset.adapters.values) >= 0
    choices: list[SweptValue[Any]] = [preset.adapters, preset.popularity, preset.arrivals, preset.ranks, preset.lengths]
    choices += [preset.base_model, *filter(None, [preset.rates])]
    for choice in choices:
        assert choice.default in choice.values
        assert len(set(choice.values)) == len(choice.values)
    assert preset.assumptions
    assert all(re.fullmatch(r"\S.*\.", note) for note in preset.notes)
    assert sum("sweeps" in note for note in preset.notes) >= sum(len(choice.values) > 1 for choice in choices[:4])


def test_settings_are_those_of_the_papers() -> None:
    s3 = find_preset("toppings-s3")
    assert (s3.base_model.default, s3.lengths.default, s3.popularity.default) == ("llama2-7b", "lmsys", "distinct")
    assert s3.rates is not None
    assert (s3.rates.default, s3.adapters.default, s3.ranks.default) == (9, 200, (64,))
    table = find_preset("slora-table")
    assert table.adapters.values == (2, 5, 100, 1000, 2000)
    assert table.ranks.values == ((8,), (64, 32, 16, 8), (16,), (64, 32, 16))
    assert table.duration_s == 120
    assert find_preset("punica-skewed").concurrency == 32
    assert find_preset("loraserve-skew-3").popularity.default == "rank-skew:3"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("toppings-s1", "no duration"),
        ("toppings-testbed-40", "does not name its four ranks"),
        ("toppings-sim", "the peak or the mean"),
        ("caraserve-syn-9-r64", "no number of adapters"),
        ("loraserve-production-100", "is not public"),
        ("loraserve-exponential", "constant is not given"),
        ("slora-a10g-s1", "The source sweeps adapters over 1, 20, 50, 100, 200; 200 is the default."),
        ("slora-a10g-rate", "The source sweeps requests/s over 1, 1.5, 2, 2.5; 2 is the default."),
    ],
)
def test_notes_name_doubts_about_the_papers(name: str, said: str) -> None:
    assert any(said in note for note in find_preset(name).notes)
