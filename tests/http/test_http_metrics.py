"""The families `http_…` of /metrics: names and labels of prometheus-fastapi-instrumentator, and few series."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from caraserve.telemetry.http_metrics import HttpMetrics
from tests.http.fake_engine import FakeEngine
from tests.http.fleet import FULL, fleet
from tests.http.serving import Client, exchange, serving

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
