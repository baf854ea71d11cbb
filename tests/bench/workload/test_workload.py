"""Tests of workloads: equal seeds give equal requests, each part can be changed alone, and scaling leaves notes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import Scale, WorkloadSpec, build, spec_from_preset
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import parse_popularity
from caraserve.bench.workload.presets import find_preset, load_presets
from caraserve.bench.workload.traces import RateTrace, RequestTrace, included_trace
from caraserve.errors import ConfigError


def spec(**changes: Any) -> WorkloadSpec:
    plain = WorkloadSpec(
        lengths=parse_lengths("lmsys"),
        arrivals=parse_arrivals("poisson"),
        rate=5.0,
        popularity=parse_popularity("uniform"),
        adapters=7,
        ranks=(8, 16, 64),
        num_requests=200,
        seed=1,
    )
    return replace(plain, **changes)


def column(workload: Workload, name: str) -> list[Any]:
    return [getattr(request, name) for request in workload.requests]


def test_requests_are_numbered_by_arrival_and_ranks_repeat_in_order() -> None:
    workload = build(spec())
    assert column(workload, "index") == list(range(200))
    assert column(workload, "at_s") == sorted(column(workload, "at_s"))
    assert workload.ranks == (8, 16, 64, 8, 16, 64, 8)
    assert set(column(workload, "adapter")) == set(range(7))
    first = workload.requests[0]
    assert [type(getattr(first, name)) for name in PlannedRequest.__slots__] == [int, float, int, int, int]
    assert workload.notes == ()


def test_the_same_seed_gives_the_same_workload() -> None:
    assert build(spec()) == build(spec())
    assert build(spec(seed=2)) != build(spec())


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"lengths": parse_lengths("alpaca")}, {"prompt_tokens", "output_tokens"}),
        ({"arrivals": parse_arrivals("gamma:0.5")}, {"at_s"}),
        ({"rate": 9.0}, {"at_s"}),
        ({"popularity": parse_popularity("zipf:1")}, {"adapter"}),
        ({"adapters": 3}, {"adapter"}),
    ],
)
def test_changing_one_part_does_not_change_the_others(changes: dict[str, Any], changed: set[str]) -> None:
    before, after = build(spec()), build(spec(**changes))
    names = ("at_s", "adapter", "prompt_tokens", "output_tokens")
    assert {name for name in names if column(before, name) != column(after, name)} == changed


def test_a_duration_is_a_number_of_requests_at_the_rate() -> None:
    assert len(build(spec(num_requests=None, duration_s=30.0)).requests) == 150
    assert len(build(spec(num_requests=None, duration_s=30.0, rate=0.1)).requests) == 3
    assert len(build(spec(num_requests=None, duration_s=0.01)).requests) == 1


def test_without_adapters_all_requests_use_the_base_model() -> None:
    workload = build(spec(adapters=0))
    assert set(column(workload, "adapter")) == {None}
    assert workload.ranks == ()


def test_popularity_that_shifts_follows_the_time_of_the_run() -> None:
    shifting = parse_popularity("shifting-skew")
    for arrivals in ("poisson", "burst"):  # all at once: the place in the list is the time
        made = build(spec(popularity=shifting, arrivals=parse_arrivals(arrivals), num_requests=20_000, adapters=3))
        small = np.array([made.ranks[adapter] == 8 for adapter in column(made, "adapter")])
        assert small[:1000].mean() == pytest.approx(0.25, abs=0.05)
        assert small[-1000:].mean() == pytest.approx(0.5, abs=0.05)


def test_requests_longer_than_the_context_are_shortened_with_a_note() -> None:
    workload = build(spec(lengths=parse_lengths("fixed:900/100"), max_context=100))
    assert {(request.prompt_tokens, request.output_tokens) for request in workload.requests} == {(90, 10)}
    assert workload.notes == (
        "200 of 200 requests were longer than 100 tokens and were cut to that, prompt and answer in proportion.",
    )
    assert build(spec(max_context=100_000)).notes == ()


def test_scaled_quantities_have_notes() -> None:
    scale = Scale(rate=0.5, requests=0.1, adapters=0.5)
    workload = build(spec(scale=scale, lengths=parse_lengths("fixed:100/40"), arrivals=parse_arrivals("uniform")))
    assert len(workload.requests) == 20
    assert len(workload.ranks) == 4
    last = workload.requests[-1]
    assert (last.at_s, last.prompt_tokens, last.output_tokens) == (19 / 2.5, 100, 40)
    assert workload.notes == (
        "The rate is 0.5 times the setting's: 2.5 requests/s.",
        "The run is 0.1 times as long as the setting's: 20 requests.",
        "There are 0.5 times the setting's adapters: 4.",
    )


def test_every_preset_makes_a_workload() -> None:
    for preset in load_presets().values():
        whole = spec_from_preset(preset, seed=3)
        made = build(replace(whole, num_requests=60, duration_s=None))
        assert len(made.requests) == 60
        assert len(made.ranks) == preset.adapters.default
        assert made.notes == preset.notes
        assert (whole.num_requests, whole.duration_s) == (preset.requests, preset.duration_s)


def test_toppings_settings_have_the_load_of_their_paper() -> None:
    workload = build(spec_from_preset(find_preset("toppings-s1")))
    assert len(workload.requests) == 2700
    assert set(workload.ranks) == {32}
    at_s = column(workload, "at_s")
    assert len(at_s) / at_s[-1] == pytest.approx(9, rel=0.06)
    assert sum(column(workload, "prompt_tokens")) / 300 == pytest.approx(555, rel=0.1)
    assert sum(column(workload, "output_tokens")) / 300 == pytest.approx(1459, rel=0.06)
    adapters = column(workload, "adapter")
    assert all(len(set(adapters[start : start + 200])) == 200 for start in range(0, 2400, 200))
    meetings = build(spec_from_preset(find_preset("toppings-s4")))  # compressed, for some 500 positions of the model
    means = [np.mean(column(meetings, name)) for name in ("prompt_tokens", "output_tokens")]
    assert means == pytest.approx([512, 88], rel=0.05)


def test_a_preset_replays_a_trace_of_functions() -> None:
    calls = np.zeros((300, 4), np.int32)
    calls[:150, 0] = 3  # half of the functions are called in the first minute, the others in the last
    calls[150:, 3] = 1
    made = build(spec_from_preset(find_preset("toppings-maf-128"), trace=RateTrace("day.csv", calls), seed=4))
    assert len(made.requests) == 450  # 1.5 a second for 300 s
    early = {request.adapter for request in made.requests if request.at_s < 75}
    late = {request.adapter for request in made.requests if request.at_s >= 225}
    assert len(made.ranks) == 128
    assert 30 < len(early) < 98
    assert 30 < len(late) < 98
    assert not early & late
    assert not [request for request in made.requests if 75 <= request.at_s < 225]
    assert made.notes[-1] == "Arrivals and adapters are those of day.csv."


def test_a_production_preset_replays_a_group_of_the_included_functions() -> None:
    preset = find_preset("toppings-maf-512")
    made = build(spec_from_preset(preset, seed=4))
    group = included_trace().group(np.random.Generator(np.random.PCG64(np.random.SeedSequence(4))), 512)
    calls = group.calls.sum(axis=1, dtype=np.int64)
    asked = np.bincount(np.array(column(made, "adapter")), minlength=512)
    assert len(made.requests) == 2310  # 7.7 a second for 300 s
    # Requests are as skewed as the group's calls: minute by minute, so a function's share of both is about the same.
    assert np.corrcoef(asked, calls)[0, 1] > 0.95
    per_minute = group.calls.sum(axis=0, dtype=np.int64)
    at_minute = np.histogram([request.at_s for request in made.requests], bins=24, range=(0, 300))[0]
    expected = per_minute.reshape(24, 60).sum(axis=1) * 2310 / per_minute.sum()
    assert np.abs(at_minute - expected).max() < 5 * np.sqrt(expected.max())
    assert not [note for note in made.notes if "log-normal" in note]


def test_a_trace_by_the_minute_also_serves_fewer_adapters_than_it_has_functions() -> None:
    trace = RateTrace("day.csv", np.arange(1, 81, dtype=np.int32).reshape(20, 4))
    by_trace = parse_popularity("trace", trace), parse_arrivals("trace", trace)
    made = build(spec(popularity=by_trace[0], arrivals=by_trace[1], adapters=5))
    assert {request.adapter for request in made.requests} == set(range(5))


def test_a_trace_of_requests_replaces_what_it_has() -> None:
    at_s, tokens = np.array([0.0, 1.0, 3.0]), np.array([10, 20, 30])
    preset = find_preset("toppings-maf-128")
    made, plain = (
        build(spec_from_preset(preset, trace=trace)) for trace in (RequestTrace("t.csv", tokens, tokens), None)
    )
    assert column(made, "prompt_tokens")[:4] == [10, 20, 30, 10]
    assert column(made, "adapter") == column(plain, "adapter"), "of the included functions"
    assert column(made, "at_s") == column(plain, "at_s")
    timed = spec_from_preset(find_preset("loraserve-uniform"), trace=RequestTrace("t.csv", tokens, tokens, at_s))
    made = build(replace(timed, rate=None))
    assert column(made, "at_s")[:4] == pytest.approx([0, 1, 3, 4.5])
    assert len(set(column(made, "adapter"))) == 25  # the trace names none


@given(
    st.sampled_from(["poisson", "gamma:0.2", "uniform", "burst"]),
    st.sampled_from(["uniform", "distinct", "maf", "sticky:0.5", "shifting-skew", "geometric:1.5"]),
    st.sampled_from(["lmsys", "punica", "bwb"]),
    st.integers(1, 40),
    st.integers(0, 9),
    st.integers(2, 3000),
    st.integers(0, 2**64),
)
def test_any_specification_gives_valid_requests(
    arrivals: str, popularity: str, lengths: str, count: int, adapters: int, context: int, seed: int
) -> None:
    workload = build(
        spec(
            arrivals=parse_arrivals(arrivals),
            popularity=parse_popularity(popularity),
            lengths=parse_lengths(lengths),
            num_requests=count,
            adapters=adapters,
            max_context=context,
            seed=seed,
        )
    )
    assert len(workload.requests) == count
    for request in workload.requests:
        assert request.at_s >= 0
        assert (request.adapter is None) == (adapters == 0)
        assert request.adapter is None or 0 <= request.adapter < adapters
        assert request.prompt_tokens >= 1
        assert request.output_tokens >= 1
        assert request.prompt_tokens + request.output_tokens <= context


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"duration_s": 3.0}, "either a number of requests or a duration"),
        ({"num_requests": None}, "either a number of requests or a duration"),
        ({"num_requests": 0}, "at least one request, not 0"),
        ({"num_requests": None, "duration_s": float("nan")}, "duration must be above 0 s, not nan"),
        ({"adapters": -1}, "a number of adapters"),
        ({"ranks": ()}, "ranks of at least 1"),
        ({"ranks": (8, 0)}, "ranks of at least 1"),
        ({"seed": -1}, "a seed is at least 0"),
        ({"max_context": 1}, "holds no prompt and answer"),
        ({"scale": Scale(rate=0)}, "the scale of rate must be above 0, not 0"),
    ],
)
def test_invalid_specifications_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        spec(**changes)


def test_a_burst_with_a_duration_and_too_many_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="'burst' have no rate: give a number of requests"):
        build(spec(arrivals=parse_arrivals("burst"), rate=None, num_requests=None, duration_s=5.0))
    with pytest.raises(ConfigError, match="more than the 10000000"):
        build(spec(num_requests=10_000_001))
