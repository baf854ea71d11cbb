"""Tests of the summary of a run, with figures computed by hand."""

import io

import pytest
from rich.console import Console

from caraserve.bench.records import RequestRecord, Run
from caraserve.bench.report.ratios import PairedRatio, paired_ratios, ratios_to_first
from caraserve.bench.report.summary import SloLimits, Summary, parse_slo, summarize
from caraserve.bench.report.tables import in_words, paired_table, ratio_table, report_tables
from caraserve.errors import ConfigError


def answered(index: int, sent_s: float, token_s: tuple[float, ...], **changes: object) -> RequestRecord:
    """Returns a request that was due and sent at `sent_s` and ended with its last token; `changes` replace fields."""
    fields: dict[str, object] = {
        "index": index,
        "model": "poet",
        "rank": 8,
        "due_s": sent_s,
        "sent_s": sent_s,
        "done_s": token_s[-1] if token_s else sent_s,
        "prompt_tokens": 10,
        "output_tokens": len(token_s),
        "token_s": token_s,
    }
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


def two_answers() -> Summary:
    """TTFT 100 and 300 ms; TPOT 50 and 100 ms; four and three tokens; E2E 250 and 500 ms."""
    records = (answered(0, 0.0, (0.1, 0.15, 0.2, 0.25)), answered(1, 1.0, (1.3, 1.4, 1.5)))
    return summarize(Run("two", records, 2.0))


@pytest.mark.parametrize(
    ("metric", "mean_ms"),
    [("ttft", 200.0), ("tpot", 75.0), ("tpt", (62.5 + 500 / 3) / 2), ("itl", (3 * 50 + 2 * 100) / 5), ("e2e", 375.0)],
)
def test_latencies(metric: str, mean_ms: float) -> None:
    assert getattr(two_answers().latency, metric).mean_ms == pytest.approx(mean_ms)


def test_percentiles_lie_between_the_two_nearest_requests_and_rates_count_complete_answers() -> None:
    summary = two_answers()
    assert summary.latency.ttft is not None
    percentiles = {"p50": 200.0, "p90": 280.0, "p95": 290.0, "p99": 298.0}
    assert summary.latency.ttft.percentiles_ms == pytest.approx(percentiles)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (1.0, 3.5, 13.5)


def test_failures_are_counted_by_kind_and_left_out_of_latencies() -> None:
    records = (
        answered(0, 0.0, (0.1, 0.2)),
        answered(1, 0.1, (), error="HTTP 429: busy"),
        answered(2, 0.2, (9.0,), error="HTTP 429: busy"),
    )
    summary = summarize(Run("some", records, 1.0))
    assert (summary.sent, summary.completed, summary.failed) == (3, 1, 2)
    assert summary.errors == {"HTTP 429: busy": 2}
    assert summary.latency.ttft is not None
    assert summary.latency.ttft.mean_ms == pytest.approx(100)


@pytest.mark.parametrize(("late_s", "valid"), [(0.0099, True), (0.0101, False)])
def test_a_run_sent_later_than_a_hundredth_of_its_gaps_is_not_valid(late_s: float, valid: bool) -> None:
    records = tuple(answered(i, i + late_s, (i + 0.5,), due_s=float(i)) for i in range(5))
    summary = summarize(Run("late", records, 5.0))
    assert summary.valid is valid
    assert bool(summary.invalid_because) is not valid
    assert summary.lateness is not None
    assert summary.lateness.share_of_gap == pytest.approx(late_s)


def test_the_cold_start_share_is_computed_from_the_servers_phases_and_shown_beside_ratios() -> None:
    cold = (("load", 50.0), ("stalled", 25.0), ("interrupted", 0.0))
    warm = (("load", 0.0), ("stalled", 0.0), ("interrupted", 60.0))
    records = answered(0, 0.0, (0.1, 0.3), phases=cold), answered(1, 0.0, (0.1, 0.6), phases=warm)
    summary = summarize(Run("cold", records, 1.0))
    assert summary.cold_start_share == pytest.approx((50 + 25 + 60) / 900)
    assert summary.interrupted_share == pytest.approx(60 / 900)
    assert two_answers().cold_start_share is two_answers().interrupted_share is None
    repeats = [summarize(Run("cold", records[:1], 1.0)), summarize(Run("cold", records[1:], 1.0))]
    table = ratio_table([two_answers(), *repeats])
    assert table.heads[-2:] == ("lost to cold starts", "to others' loads")
    assert [row[-2:] for row in table.rows] == [("–", "–"), ("17.5%", "5.0%")]


def test_an_interruption_is_a_gap_above_one_and_a_half_medians() -> None:
    steady = tuple(0.1 + 0.01 * i for i in range(10))
    broken = (*steady, 0.19 + 0.05)
    summary = summarize(Run("broken", (answered(0, 0.0, steady), answered(1, 0.0, broken)), 1.0))
    assert summary.interruptions is not None
    assert summary.interruptions.median_gap_ms == pytest.approx(10)
    assert summary.interruptions.mean_per_request == 0.5
    assert summary.interruptions.lost_share_of_decode == pytest.approx(40 / (90 + 140))


def test_attainment_counts_requests_that_meet_every_limit() -> None:
    records = (
        answered(0, 0.0, (0.1, 0.2)),
        answered(1, 0.0, (0.1, 0.9)),
        answered(2, 0.0, (0.5, 0.6)),
        answered(3, 0.0, (), error="gone"),
    )
    summary = summarize(Run("judged", records, 2.0), SloLimits(ttft_ms=200, tpot_ms=200))
    assert summary.attainment is not None
    assert summary.attainment.share == 0.25
    assert summary.attainment.goodput_per_s == 0.5
    assert summary.attainment.by_limit == {"ttft": 0.5, "tpot": 0.5}


def test_a_run_is_told_in_one_sentence() -> None:
    records = answered(0, 0.0, (0.1, 0.2)), answered(1, 0.0, (0.3, 0.4)), answered(2, 0.0, (), error="gone")
    assert in_words(summarize(Run("some", records, 2.0))) == (
        "2 of 3 requests were answered, with the first token after 200 ms on average (95 % within 290 ms) and each "
        "later one 100 ms after the one before: 1 requests and 2 tokens a second."
    )


def test_groups_by_rank_and_adapter() -> None:
    records = (
        answered(0, 0.0, (0.1,), model="a", rank=64),
        answered(1, 0.0, (0.3,), model="a", rank=64),
        answered(2, 0.0, (0.2,), model="base", rank=0),
    )
    summary = summarize(Run("groups", records, 1.0))
    assert [(group.rank, group.requests) for group in summary.ranks] == [(0, 1), (64, 2)]
    assert [group.name for group in summary.adapters] == ["a", "base"]
    assert [group.ttft_mean_ms for group in summary.adapters] == pytest.approx([200, 200])
    unknown = summarize(Run("unknown", (answered(0, 0.0, (0.1,), rank=None),), 1.0))
    assert [group.name for group in unknown.ranks] == ["unknown"], "and not the base model"


def test_token_counts_are_reported_beside_the_requested_ones() -> None:
    record = answered(0, 0.0, (0.1, 0.2), asked_prompt_tokens=20, asked_output_tokens=4)
    lengths = summarize(Run("short", (record,), 1.0)).lengths
    assert lengths is not None
    assert (lengths.prompt, lengths.prompt_asked, lengths.output, lengths.output_asked) == (10, 20, 2, 4)


def test_a_run_without_an_answer_has_no_latencies() -> None:
    summary = summarize(Run("none", (), 0.0, interrupted=True))
    assert summary.latency.ttft is None
    assert summary.interrupted


def test_repeats_are_compared_with_the_same_repeat_of_the_first_mode() -> None:
    def run(label: str, ttft_s: float) -> Summary:
        return summarize(Run(label, (answered(0, 0.0, (ttft_s, ttft_s + 0.1)),), 1.0))

    lines = ratios_to_first([run("cached", 0.1), run("cached", 0.2), run("auto", 0.2), run("auto", 0.2)])
    assert [line.label for line in lines] == ["cached", "auto"]
    assert lines[0].ratios["ttft"].median == 1.0
    assert lines[1].ratios["ttft"].median == pytest.approx((2 + 1) / 2)
    assert lines[1].ratios["ttft"].spread == pytest.approx(0.5**0.5)


def test_the_time_of_cpu_workers_is_the_mean_of_the_requests_that_they_helped() -> None:
    records = [answered(0, 0.0, (0.1, 0.3), phases=(("cpu_lora", ms),)) for ms in (27.0, 0.0, 9.0)]
    records.append(answered(0, 0.0, (0.1,), phases=(("cpu_lora", 99.0),), error="HTTP 500"))
    assert summarize(Run("helped", tuple(records), 1.0)).cpu_lora_ms == 18.0
    assert summarize(Run("loaded", (records[1],), 1.0)).cpu_lora_ms is two_answers().cpu_lora_ms is None


def test_limits_are_read() -> None:
    assert parse_slo("ttft:200, tpot:30.5,e2e:5000") == SloLimits(ttft_ms=200, tpot_ms=30.5, e2e_ms=5000)


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:-1", "ttft:nan", "speed:3", "ttft:1,ttft:2"])
def test_invalid_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


def test_limits_can_be_multiples_of_a_run_without_adapters() -> None:
    slo = SloLimits.scaled(two_answers(), 1.5)
    assert slo.tpt_ms == pytest.approx(1.5 * (62.5 + 500 / 3) / 2)
    assert slo.ttft_ms is None


# --- request by request ---


def paired_run(label: str, *ttfts_s: float, rate: float = 1.0, failed: int | None = None) -> Run:
    """Returns a run whose request i is due at i / rate and has this TTFT."""
    records = (
        answered(index, index / rate, (index / rate + ttft_s,), error="HTTP 500" if index == failed else None)
        for index, ttft_s in enumerate(ttfts_s)
    )
    return Run(label, tuple(records), 10.0)


def test_a_request_is_compared_with_itself_in_the_same_repeat() -> None:
    runs = [
        paired_run("cached", 0.1, 0.2),
        paired_run("cached", 0.4),
        paired_run("auto", 0.2, 0.2),
        paired_run("auto", 0.2),
    ]
    assert paired_ratios(runs)["auto"]["ttft"] == PairedRatio(pytest.approx(1.0), *map(pytest.approx, (0.5, 2.0)), 3)


def test_one_stall_does_not_change_the_median_whose_interval_is_between_requests() -> None:
    base = [0.1 + 0.001 * index for index in range(100)]
    ratios = [1.0 + 0.01 * index for index in range(100)]
    for others, expected in (
        ([1.05 * ttft_s for ttft_s in base[:-1]] + [9.0], (1.05, 1.05, 1.05)),
        ([ttft_s * ratio for ttft_s, ratio in zip(base, ratios, strict=True)], (1.495, ratios[40], ratios[59])),
    ):
        found = paired_ratios([paired_run("cached", *base), paired_run("auto", *others)])["auto"]["ttft"]
        assert (found.median, found.low, found.high) == pytest.approx(expected)


def test_requests_that_one_of_the_two_did_not_answer_are_left_out() -> None:
    found = paired_ratios([paired_run("cached", 0.1, 0.1, failed=0), paired_run("auto", 0.9, 0.2)])["auto"]["ttft"]
    assert (found.median, found.requests) == (pytest.approx(2.0), 1)


def test_runs_of_other_requests_have_no_ratios() -> None:
    assert paired_ratios([paired_run("1/s", 0.1, 0.1), paired_run("2/s", 0.1, 0.1, rate=2.0)]) == {}
    assert paired_ratios([]) == {}


def test_the_table_has_a_line_for_each_further_mode() -> None:
    table = paired_table(
        paired_ratios([paired_run("cached", 0.1), paired_run("assisted", 0.1), paired_run("auto", 0.2)])
    )
    assert [row[:3] for row in table.rows] == [
        ("assisted", "1", "1.000 (1.000 to 1.000)"),
        ("auto", "1", "2.000 (2.000 to 2.000)"),
    ]


def test_names_of_adapters_are_readable_on_a_terminal_of_80_columns() -> None:
    names = ("customer-0001", "customer-0002")
    records = [answered(index, index, (index + 9.1, index + 9.2), model=name) for index, name in enumerate(names)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*report_tables([summarize(Run("two", tuple(records), 20.0))]))
    assert all(f"│ {name} │" in console.export_text(clear=False) for name in names)
