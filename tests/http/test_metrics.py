"""Tests of the names, labels and values of /metrics, and of the time that counting takes."""

import asyncio
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from caraserve.core.request import Finish, FinishReason, Phases
from caraserve.telemetry.http_metrics import HttpMetrics
from caraserve.telemetry.metrics import MAX_HOST_SERIES, Metrics
from caraserve.telemetry.prometheus import family
from tests.http.fake_engine import FakeEngine, FakeSnapshot
from tests.http.fleet import FULL, fleet
from tests.http.serving import Client, exchange, new_metrics, serving

LABELS = {"model_name": "org/base", "engine": "0"}


def samples(metrics: Metrics, snapshot: FakeSnapshot | None = None) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Returns the values that a scraper reads, by sample name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    text = metrics.render(snapshot or FakeSnapshot(), {"a": 8, "b": 64}.__getitem__).decode()
    for found_family in text_string_to_metric_families(text):
        for sample in found_family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def ended(reason: FinishReason = "stop", **changes: Any) -> Finish:
    fields: dict[str, Any] = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cached_tokens": 4,
        "phases": Phases(100, 20, 30, 400, stalled_ms=3, interrupted_ms=50, cpu_layers=2, cpu_lora_ms=27),
    }
    return Finish(reason, **fields | changes)


async def test_gauges_have_the_values_of_the_engines_snapshot() -> None:
    found = samples(new_metrics())
    assert found["vllm:num_requests_running"] == [(LABELS, 2.0)]
    assert found["vllm:num_requests_waiting"] == [(LABELS, 1.0)]
    assert found["vllm:kv_cache_usage_perc"] == [(LABELS, 0.25)]
    assert found["vllm:cache_config_info"] == [(LABELS | {"block_size": "16", "num_gpu_blocks": "100"}, 1.0)]


async def test_residency_by_tier() -> None:
    found = samples(new_metrics())
    assert found["vllm:num_gpu_loaded_lora_adapters"] == [(LABELS, 2.0)]
    assert found["vllm:num_cpu_loaded_lora_adapters"] == [(LABELS, 1.0)]
    loaded = [
        (labels["adapter_name"], labels["level"], labels["rank"]) for labels, _ in found["vllm:lora_adapter_loaded"]
    ]
    assert loaded == [("a", "gpu", "8"), ("b", "gpu", "64"), ("a", "cpu", "8")]


@pytest.mark.parametrize("what", ["merges", "late_kernels"])
async def test_counts_of_the_backend_are_shown(what: str) -> None:
    name = {"merges": "caraserve:adapter_merges_total", "late_kernels": "caraserve:late_kernels_total"}[what]
    counts: dict[str, Any] = {what: lambda: 7}
    assert samples(Metrics("org/base", max_loras=64, block_tokens=16, **counts))[name] == [(LABELS, 7.0)]
    assert samples(new_metrics())[name] == [(LABELS, 0.0)]


async def test_ten_thousand_adapters_leave_the_metrics_page_short() -> None:
    names = tuple(f"adapter-{index}-{'x' * 100}" for index in range(10_000))
    known = {"running_adapters": names, "waiting_adapters": names, "device_adapters": frozenset(names)}
    snapshot = FakeSnapshot(**known, host_adapters=names[:MAX_HOST_SERIES])
    text = new_metrics().render(snapshot, lambda name: 8)
    assert text.count(b"vllm:lora_adapter_loaded{") == 64 + MAX_HOST_SERIES  # a device holds 64 here
    assert len(text) < 250_000


async def test_an_ended_request_is_counted_everywhere() -> None:
    metrics = new_metrics()
    metrics.observe_finish(ended())
    found = samples(metrics)
    assert found["vllm:prompt_tokens_total"] == [(LABELS, 10.0)]
    assert found["vllm:generation_tokens_total"] == [(LABELS, 5.0)]
    assert found["vllm:prefix_cache_hits_total"] == [(LABELS, 4.0)]
    sums = {name.removesuffix("_sum"): values[0][1] for name, values in found.items() if name.endswith("_sum")}
    assert sums["vllm:e2e_request_latency_seconds"] == pytest.approx(0.55)
    assert sums["vllm:request_queue_time_seconds"] == pytest.approx(0.1)
    assert sums["vllm:request_prefill_time_seconds"] == pytest.approx(0.03)
    assert sums["vllm:request_decode_time_seconds"] == pytest.approx(0.4)
    assert sums["vllm:request_inference_time_seconds"] == pytest.approx(0.43)
    assert sums["vllm:request_time_per_output_token_seconds"] == pytest.approx(0.1)
    phases = {labels["phase"]: value for labels, value in found["caraserve:request_phase_seconds_sum"]}
    assert phases == pytest.approx({"queued": 0.1, "load": 0.02, "prefill": 0.03, "decode": 0.4})
    assert sums["caraserve:adapter_stall_seconds"] == pytest.approx(0.003)
    assert sums["caraserve:adapter_interruption_seconds"] == pytest.approx(0.05)
    assert sums["caraserve:request_cpu_lora_seconds"] == pytest.approx(0.027)


async def test_requests_without_cpu_workers_are_left_out_of_their_times() -> None:
    metrics = new_metrics()
    metrics.observe_finish(ended(phases=Phases(100, 20, 30, 400)))
    assert samples(metrics)["caraserve:request_cpu_lora_seconds_count"] == [(LABELS, 0.0)]


@pytest.mark.parametrize(
    ("reason", "name"), [("stop", "stop"), ("length", "length"), ("cancelled", "abort"), ("error", "error")]
)
async def test_reasons_have_vllms_names(reason: FinishReason, name: str) -> None:
    metrics = new_metrics()
    metrics.observe_finish(ended(reason))
    counts = {labels["finished_reason"]: value for labels, value in samples(metrics)["vllm:request_success_total"]}
    assert counts == {"stop": 0, "length": 0, "abort": 0, "error": 0} | {name: 1}


async def test_an_abandoned_request_is_not_in_the_latencies() -> None:
    metrics = new_metrics()
    metrics.observe_finish(ended("cancelled"))
    assert samples(metrics)["vllm:e2e_request_latency_seconds_count"] == [(LABELS, 0.0)]


async def test_a_single_token_has_no_time_per_later_token() -> None:
    metrics = new_metrics()
    metrics.observe_finish(ended(completion_tokens=1))
    assert samples(metrics)["vllm:request_time_per_output_token_seconds_count"] == [(LABELS, 0.0)]


async def test_buckets_are_cumulative_and_hold_their_upper_bound() -> None:
    metrics = new_metrics()
    for num_tokens in (1, 8, 9, 10**6):
        metrics.observe_iteration(num_tokens, ms=2.0)
    buckets = {labels["le"]: value for labels, value in samples(metrics)["vllm:iteration_tokens_total_bucket"]}
    assert (buckets["1.0"], buckets["8.0"], buckets["16.0"], buckets["16384.0"], buckets["+Inf"]) == (1, 2, 3, 3, 4)
    assert metrics.computed_tokens == 1_000_018


async def test_a_name_may_hold_any_character() -> None:
    metrics = Metrics('a"b\\c\nd', max_loras=64, block_tokens=16)
    ((labels, _),) = samples(metrics)["vllm:num_requests_running"]
    assert labels == {"model_name": 'a"b\\c\nd', "engine": "0"}


async def test_only_loads_that_succeeded_are_timed() -> None:
    metrics = new_metrics()
    metrics.observe_load("auto", 9.0, outcome="failed")
    found = samples(metrics)
    assert [value for _, value in found["vllm:lora_adapter_load_seconds_count"]] == [0.0]
    assert found["caraserve:adapter_loads_total"] == [(LABELS | {"mode": "auto", "outcome": "failed"}, 1.0)]


async def test_tokens_and_loads() -> None:
    metrics = new_metrics()
    metrics.observe_first_token(0.2)
    metrics.observe_token_gaps(0.01, 1)
    metrics.observe_token_gaps(0.03, 1)
    metrics.observe_load("overlapped", 0.5)
    metrics.observe_preemption()
    metrics.observe_drafts(4, 3)
    metrics.observe_drafts(2, 0)
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_sum"] == [(LABELS, 0.2)]
    assert found["vllm:inter_token_latency_seconds_count"] == [(LABELS, 2.0)]
    assert found["vllm:lora_adapter_load_seconds_sum"] == [(LABELS | {"transition": "activate"}, 0.5)]
    assert found["caraserve:adapter_loads_total"] == [(LABELS | {"mode": "overlapped", "outcome": "ok"}, 1.0)]
    assert found["vllm:num_preemptions_total"] == [(LABELS, 1.0)]
    assert found["vllm:spec_decode_num_drafts_total"] == [(LABELS, 2.0)]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == [(LABELS, 6.0)]
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == [(LABELS, 3.0)]


async def test_recent_latencies() -> None:
    metrics = new_metrics()
    assert (metrics.first_token().p50_ms, metrics.first_token().p95_ms) == (None, None)
    for ms in range(1, 102):
        metrics.observe_token_gaps(ms / 1000, 1)
    assert metrics.token_gap().p50_ms == pytest.approx(51)
    assert metrics.token_gap().p95_ms == pytest.approx(96)


async def test_counting_costs_microseconds() -> None:
    metrics, finish = new_metrics(), ended()
    best_s = min(_timed(metrics, finish) for _ in range(20))
    assert best_s / 100 < 20e-6  # 3 µs on an idle machine; the bound leaves room for a busy one


def _timed(metrics: Metrics, finish: Finish) -> float:
    started_s = time.thread_time()
    for _ in range(100):
        metrics.observe_finish(finish)
        metrics.observe_token_gaps(0.01, 1)
    return time.thread_time() - started_s


async def test_other_parts_add_families_of_their_own() -> None:
    metrics = new_metrics()
    metrics.show(lambda labels: [family("caraserve:extra", "gauge", "More.", [(labels, 7)])])
    assert samples(metrics)["caraserve:extra"] == [(LABELS, 7.0)]


# --- the families http_…: names and labels of prometheus-fastapi-instrumentator ---


Samples = dict[str, dict[tuple[str, ...], float]]  # by name, then by the values of the sorted labels


def read(text: str) -> Samples:
    found: Samples = {}
    for one in text_string_to_metric_families(text):
        for sample in one.samples:
            if sample.name.startswith("http_"):
                values = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[values] = sample.value
    return found


async def scrape(client: Client) -> Samples:
    return read((await client.get("/metrics")).body.decode())


def test_families_have_the_kinds_labels_and_buckets_that_dashboards_read() -> None:
    metrics = HttpMetrics()
    metrics.observe("/v1/completions", "POST", 200, 0.3, 50, 1000)
    metrics.observe("/v1/completions", "POST", 429, 0.01, 70, 100)
    text = "".join(metrics.families('model_name="m"'))
    families = {one.name: one for one in text_string_to_metric_families(text)}
    labels = {name: {key for sample in one.samples for key in sample.labels} for name, one in families.items()}
    assert {name: (one.type, labels[name]) for name, one in families.items()} == {
        "http_requests": ("counter", {"handler", "method", "status"}),
        "http_request_size_bytes": ("summary", {"handler"}),
        "http_response_size_bytes": ("summary", {"handler"}),
        "http_request_duration_highr_seconds": ("histogram", {"le"}),
        "http_request_duration_seconds": ("histogram", {"handler", "method", "le"}),
    }
    found, handler = read(text), "/v1/completions"
    assert found["http_requests_total"] == {(handler, "POST", "2xx"): 1, (handler, "POST", "4xx"): 1}
    assert found["http_request_size_bytes_sum"] == {(handler,): 120}
    assert found["http_response_size_bytes_sum"] == {(handler,): 1100}
    buckets = found["http_request_duration_seconds_bucket"]
    assert {key[1]: value for key, value in buckets.items()} == {"0.1": 1, "0.5": 2, "1.0": 2, "+Inf": 2}
    assert found["http_request_duration_highr_seconds_bucket"]["0.01",] == 1
    assert found["http_request_duration_highr_seconds_count"] == {(): 2}


async def test_requests_count_by_the_pattern_of_their_route_and_unknown_paths_are_one_series(client: Client) -> None:
    sent = await client.complete()
    await client.complete(stream=True)
    for path in ("/v1/models/a", "/v1/models/absent", "/secret-1", "/secret-2"):
        await client.get(path)
    await exchange(client.port, b"BREW /secret-3 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    found = await scrape(client)
    counts = found["http_requests_total"]
    assert counts.pop(("none", "other", "4xx"), 0) <= 1  # aiohttp's parser in C refuses methods that it does not know
    assert counts == {
        ("/v1/completions", "POST", "2xx"): 2,
        ("/v1/models/{model}", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 2,
    }
    assert found["http_response_size_bytes_sum"]["/v1/completions",] == len(sent.body)  # a stream has no length
    assert found["http_request_size_bytes_count"]["/v1/completions",] == 2
    assert found["http_request_size_bytes_sum"]["/v1/completions",] > 0


async def test_probes_and_scrapes_are_left_out(client: Client) -> None:
    for path in ("/health", "/ready", "/ping", "/version", "/load", "/metrics"):
        await client.get(path)
    assert "http_requests_total" not in await scrape(client)


async def test_a_request_whose_client_left_counts_as_4xx() -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        asking = asyncio.create_task(client.complete())
        (stream,) = await fake.submitted()
        asking.cancel()
        await stream.cancelled.wait()
        found = await scrape(client)
    assert found["http_requests_total"] == {("/v1/completions", "POST", "4xx"): 1}


async def test_a_forwarded_request_counts_where_its_client_sent_it() -> None:
    async with fleet("a", "b") as running:
        running.world.loads["a"] = FULL
        assert (await running["a"].client.complete()).status == 200
        here, there = await scrape(running["a"].client), await scrape(running["b"].client)
        assert len(running["b"].engine.requests) == 1
    assert here["http_requests_total"] == {("/v1/completions", "POST", "2xx"): 1}
    assert "http_requests_total" not in there
