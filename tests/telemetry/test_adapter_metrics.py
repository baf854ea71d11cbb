"""Tests of the metrics by adapter: which adapters have series of their own, and that counts stay where they are."""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from caraserve.core.request import Finish, FinishReason, Phases
from caraserve.telemetry.adapter_metrics import AdapterMetrics

LABELS = 'model_name="base",engine="0"'


def finish(reason: FinishReason = "stop", tokens: int = 5) -> Finish:
    return Finish(reason, 3, tokens, 0, Phases(1.0, 0.0, 2.0, 400.0))


def observed(metrics: AdapterMetrics, names: Iterable[str | None]) -> dict[str, float]:
    """Observes a request for each name. Returns the requests of each series that has any."""
    for name in names:
        metrics.observe(name, finish(), 0.2)
    return values(metrics, "caraserve:adapter_requests_total")


def values(metrics: AdapterMetrics, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in text_string_to_metric_families("".join(metrics.families(LABELS))):
        for sample in one.samples:
            if sample.name == name:
                assert sample.labels["model_name"] == "base"
                key = sample.labels["adapter_name"]
                found[key] = found.get(key, 0) + sample.value
    return found


def test_first_come_adapters_have_series_and_the_rest_is_other() -> None:
    metrics = AdapterMetrics("base", LABELS, most=2)
    assert observed(metrics, ["a", None, "c", "d", "a"]) == {"a": 2, "base": 1, "other": 2}


def test_times_of_the_first_and_the_later_tokens() -> None:
    metrics = AdapterMetrics("base", LABELS)
    metrics.observe("a", finish(), 0.2)
    metrics.observe("a", finish("error"), None)
    metrics.observe("a", finish(tokens=1), 0.4)
    first, each = "caraserve:adapter_time_to_first_token_seconds", "caraserve:adapter_time_per_output_token_seconds"
    assert (values(metrics, f"{first}_count")["a"], values(metrics, f"{first}_sum")["a"]) == (2, 0.2 + 0.4)
    assert (values(metrics, f"{each}_count")["a"], values(metrics, f"{each}_sum")["a"]) == (1, 0.1)


def test_an_adapter_named_other_has_no_series_of_its_own() -> None:
    assert observed(AdapterMetrics("base", LABELS), ["other", "a"]) == {"a": 1, "other": 1}


def test_a_much_busier_adapter_takes_the_place_of_an_idle_one_and_starts_at_zero() -> None:
    metrics = AdapterMetrics("base", LABELS, most=2, window=10)
    assert observed(metrics, ["a", "b", "b", "b", "c", "c", "c", "d", "d"]) == {"a": 1, "b": 3, "other": 5}
    assert observed(metrics, ["d"]) == {"b": 3, "other": 6}  # c had over twice the requests of a; d, as b, had 3
    assert observed(metrics, ["a", "b", "c"]) == {"b": 4, "c": 1, "other": 7}


def test_counts_never_fall_and_adapters_of_like_load_do_not_take_turns() -> None:
    metrics = AdapterMetrics("base", LABELS, most=2, window=6)
    before: dict[str, float] = {}
    for _ in range(20):
        now = observed(metrics, ["c", "a", "d", "b", "c", "d"] if before else ["a", "b", "a", "b", "c", "d"])
        assert now.keys() == {"a", "b", "other"}
        assert all(now[name] >= before.get(name, 0) for name in now)
        before = now


def test_the_page_is_bounded_however_many_adapters_there_are() -> None:
    metrics = AdapterMetrics("base", LABELS)
    shown = observed(metrics, (f"adapter-{index}" for index in range(25_000)))
    assert len(shown) == 101
    assert sum(shown.values()) == 25_000
