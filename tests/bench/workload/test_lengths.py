"""Tests of length distributions: measured means, other benchmarks' generators, rows of files, and scaling."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.workload.forms import distributions
from caraserve.bench.workload.lengths import Pair, parse_lengths, shorten
from caraserve.bench.workload.traces import RateTrace, RequestTrace
from caraserve.errors import ConfigError

MEASURED = sorted(distributions()["lengths"])


def sample(text: str, count: int = 20_000, seed: int = 1) -> Pair:
    return parse_lengths(text).sample(np.random.default_rng(seed), count)


def rank_correlation(pair: Pair) -> float:
    prompts, outputs = (np.argsort(np.argsort(tokens)) for tokens in pair)
    return float(np.corrcoef(prompts, outputs)[0, 1])


def test_every_measured_distribution_has_a_name() -> None:
    assert " ".join(MEASURED) == (
        "alpaca arxiv azure-code azure-conv bwb lmsys mooncake-conversation mooncake-synthetic qmsum sharegpt"
    )


@pytest.mark.parametrize("name", MEASURED)
def test_a_fit_says_where_it_comes_from_and_its_quantiles_give_the_measured_means(name: str) -> None:
    entry, levels = distributions()["lengths"][name], distributions()["levels"]
    assert all(entry[field] for field in ("source", "licence", "attribution", "derived"))
    assert (levels[0], levels[-1], len(levels)) == (0, 100, 41)
    assert levels == sorted(set(levels))
    for tokens, column in zip(sample(name, 200_000), ("prompt_tokens", "output_tokens"), strict=True):
        knots = entry[column]["knots"]
        assert (knots, len(knots)) == (sorted(knots), len(levels))
        assert tokens.mean() == pytest.approx(entry[column]["mean"], rel=0.03)
        assert 1 <= tokens.min() <= tokens.max() <= knots[-1]
        assert tokens.dtype == np.int64


def test_medians_and_correlations_are_those_measured() -> None:
    assert [float(np.median(tokens)) for tokens in sample("azure-conv")] == pytest.approx([1020, 129], rel=0.04)
    expected = {"bwb": 0.8, "mooncake-synthetic": -0.5, "qmsum": 0.0}  # a longer passage has a longer translation
    assert {name: rank_correlation(sample(name)) for name in expected} == pytest.approx(expected, abs=0.05)


def test_uniform_lengths_include_the_low_end_and_not_the_high() -> None:
    prompts, outputs = sample("uniform:8-512/1-4")
    assert (prompts.min(), prompts.max()) == (8, 511)
    assert prompts.mean() == pytest.approx(259.5, rel=0.02)
    assert set(outputs.tolist()) == {1, 2, 3}


def test_punica_draws_prompts_log_normal_and_totals_uniform() -> None:
    prompts, outputs = sample("punica", 100_000)
    assert np.median(prompts) == pytest.approx(17, abs=1)
    assert np.quantile(prompts, 0.8413) == pytest.approx(18 * np.exp(0.8) - 1, abs=1.5)  # one sigma up
    assert prompts.min() == 1
    assert outputs.min() == 2
    assert (prompts + outputs).mean() == pytest.approx(1024, rel=0.01)


def test_rows_of_a_file_keep_their_pairs(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("prompt_tokens,output_tokens,remark\n10,1,a\n20,2,b\n30,0,c\n")
    prompts, outputs = sample(f"file:{file}", 300)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(10, 1), (20, 2), (30, 1)}  # at least 1 token


def test_rows_of_a_trace_are_used_in_order_and_repeated() -> None:
    trace = RequestTrace("t.csv", np.array([5, 6, 7]), np.array([1, 0, 3]))
    prompts, outputs = parse_lengths("trace", trace).sample(np.random.default_rng(0), 5)
    assert prompts.tolist() == [5, 6, 7, 5, 6]
    assert outputs.tolist() == [1, 1, 3, 1, 1]


def test_fixed_lengths_may_be_multiplied_and_limited() -> None:
    def sampled(text: str) -> list[int]:
        return [int(tokens[0]) for tokens in parse_lengths(text).sample(np.random.default_rng(0), 1)]

    assert sampled("fixed:512/128") == [512, 128]
    assert sampled("fixed:1000/300@0.1/0.5") == [100, 150]
    assert sampled("fixed:1000/300@0.05/0.5/40") == [10, 30]
    assert sampled("fixed:3/3@0.01/0.01") == [1, 1]


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(2, 10**6))
def test_a_request_that_is_too_long_is_cut_in_proportion(prompt: int, output: int, most: int) -> None:
    (short_prompt,), (short_output,) = (part.tolist() for part in shorten(np.array([prompt]), np.array([output]), most))
    assert 1 <= short_prompt <= prompt
    assert 1 <= short_output <= output
    assert short_prompt + short_output <= most or prompt + output <= most
    if prompt + output <= most:
        assert (short_prompt, short_output) == (prompt, output)
    else:
        assert short_prompt + short_output >= most - 1
        assert abs(short_prompt - prompt * most / (prompt + output)) <= 1


def test_a_shorter_sample_is_the_start_of_a_longer_one() -> None:
    for shorter, longer in zip(sample("lmsys", 100), sample("lmsys", 200), strict=True):
        assert shorter.tolist() == longer[:100].tolist()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sharegpt4", r"lengths 'sharegpt4' is not known.*lmsys.*fixed:PROMPT/OUTPUT.*file:PATH"),
        ("fixed:0/5", "at least 1 token"),
        ("fixed:512", "not known"),
        ("uniform:9-9/1-2", "to more than that"),
        ("uniform:1-2/1-999999999", "to at most"),
        ("lmsys@0/1", "above 0"),
        ("lmsys@1/1.2.3", "PROMPT_SHARE"),
        ("lmsys@1/1/1", "at least 2 tokens"),
        ("file:", "not known"),
        ("file:/nowhere/at/all.csv", "/nowhere/at/all.csv: there is no such file"),
        ("trace", "need a trace: azure-llm:PATH"),
    ],
)
def test_invalid_texts_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_lengths(text)


def test_a_trace_of_rates_has_no_lengths() -> None:
    with pytest.raises(ConfigError, match=r"m\.csv has no lengths"):
        parse_lengths("trace", RateTrace("m.csv", np.ones((2, 3), np.int32)))
