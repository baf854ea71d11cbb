"""Tests of an instance behind other projects' routers: each test names the router that would fail, and what it reads.

llm-d's router (its endpoint picker) v0.10, vLLM's production-stack 0.1.12 with its operator, AIBrix 0.7.
"""

import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.fake_engine import FakeEngine, FakeSnapshot
from tests.http.serving import Client, OneOff, new_metrics


def page(snapshot: FakeSnapshot | None = None) -> str:
    return new_metrics().render(snapshot or FakeSnapshot(), lambda name: 8).decode()


def go_families(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yields (name, type, sample lines) as the Go parser of Prometheus groups them.

    It refuses a second TYPE line for a name, and gives samples without a TYPE line the type `untyped`.
    """
    name, kind, lines, seen = "", "untyped", list[str](), set[str]()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            if name:
                yield name, kind, lines
            _, _, name, kind = line.split(" ")
            assert name not in seen, f"a second TYPE line for {name}"
            seen.add(name)
            lines = []
        elif not line.startswith("#"):
            own = line.split("{")[0]
            series = {name, f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
            assert own in series, f"{own} has no TYPE line of its own"
            lines.append(line)
    yield name, kind, lines


FAMILIES = {
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:lora_requests_info": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:lora_adapter_loaded": "gauge",
    "vllm:num_gpu_loaded_lora_adapters": "gauge",
    "vllm:max_gpu_lora_adapters": "gauge",
}


@pytest.mark.parametrize("name", FAMILIES)
async def test_llmd_reads_only_samples_with_a_type_line(name: str) -> None:
    """The router takes the values of gauges and counters; an untyped sample counts as 0."""
    assert FAMILIES[name] in [kind for found, kind, _ in go_families(page()) if found == name]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "vllm:lora_adapter_loaded"])
async def test_llmd_takes_the_first_of_several_series_so_there_is_one(name: str) -> None:
    assert [len(lines) for found, _, lines in go_families(page()) if found == name] == [1]


async def test_llmd_discards_families_by_name_so_none_begins_under_anothers_headers() -> None:
    found = [name for name, _, _ in go_families(page())]
    assert len(found) == len(set(found)) > 40


async def test_llmd_takes_the_lora_series_with_the_largest_value() -> None:
    """The value is the time of the scrape, and older label sets are removed."""
    metrics, before_s = new_metrics(), time.time()
    pages = [metrics.render(FakeSnapshot(device_adapters=frozenset({name})), lambda name: 8).decode() for name in "ab"]
    (first,), (second,) = (series("vllm:lora_requests_info", text) for text in pages)
    assert before_s <= first[1] <= second[1] <= time.time()
    assert second[0]["running_lora_adapters"] == "b"


async def test_llmd_prefers_instances_with_the_adapter_so_idle_ones_count_as_running() -> None:
    """Its affinity scorer gives 1.0 for `running_lora_adapters`, by the protocol's text those in device memory."""
    idle = FakeSnapshot(running_adapters=(), waiting_adapters=(), device_adapters=frozenset("ba"))
    ((labels, _),) = series("vllm:lora_requests_info", page(idle))
    assert (labels["running_lora_adapters"], labels["waiting_lora_adapters"]) == ("a,b", "")


async def test_llmd_scores_an_adapter_that_is_being_loaded_lower_than_a_loaded_one() -> None:
    """0.6 for `waiting_lora_adapters`: a request runs by CPU assistance (c) or waits (d), and neither is resident."""
    busy = FakeSnapshot(running_adapters=("a", "c"), waiting_adapters=("a", "d"), device_adapters=frozenset("a"))
    ((labels, _),) = series("vllm:lora_requests_info", page(busy))
    assert (labels["running_lora_adapters"], labels["waiting_lora_adapters"]) == ("a", "c,d")


async def test_llmd_parses_max_lora_and_the_block_sizes_as_decimal_integers() -> None:
    ((lora, _),) = series("vllm:lora_requests_info", page())
    ((cache, _),) = series("vllm:cache_config_info", page())
    assert (int(lora["max_lora"]), int(cache["block_size"]), int(cache["num_gpu_blocks"])) == (64, 16, 100)


async def test_llmd_compares_the_lists_length_with_max_lora() -> None:
    """A list of that length means a full instance; with a longer one, it would stay full when adapters have gone."""
    names = tuple(f"a{index}" for index in range(100))
    ((labels, _),) = series("vllm:lora_requests_info", page(FakeSnapshot(device_adapters=frozenset(names))))
    assert len(labels["running_lora_adapters"].split(",")) == 64


async def test_a_list_that_is_cut_keeps_the_adapters_in_use() -> None:
    names = tuple(f"a{index}" for index in range(100))
    ((labels, _),) = series(
        "vllm:lora_requests_info", page(FakeSnapshot(running_adapters=("a99",), device_adapters=frozenset(names)))
    )
    assert labels["running_lora_adapters"].startswith("a99,")


async def test_llmd_scrapes_every_50_ms_so_a_page_is_short() -> None:
    """The page is written on the event loop's thread, which also sends tokens, at about 0.2 µs per line."""
    text = page(FakeSnapshot(device_adapters=frozenset(f"adapter-{index}" for index in range(64))))
    assert len(text.splitlines()) < 890


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:gpu_cache_usage_perc", 0.25),
        ("vllm:gpu_prefix_cache_hits_total", 0.0),
        ("vllm:gpu_prefix_cache_queries_total", 0.0),
    ],
)
async def test_production_stack_reads_older_names(name: str, value: float) -> None:
    """The router uses prometheus-client's parser and full sample names; a missing name counts as 0."""
    assert [found for _, found in series(name, page())] == [value]


async def test_production_stacks_operator_loads_an_adapter_repeatedly(client: Client) -> None:
    """The operator posts at every reconciliation, and accepts no status but 200 as success."""
    body = {"lora_name": "new", "lora_path": "x"}
    assert [(await client.post("/v1/load_lora_adapter", body)).status for _ in range(2)] == [200, 200]
    assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "new"})).status == 200


@pytest.mark.parametrize(
    "name",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:cpu_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
    ],
)
async def test_aibrix_stores_a_metric_under_its_model_name(name: str) -> None:
    """Without that label the value is dropped; its least-kv-cache router passes over an instance that lacks one of
    `kv_cache_usage_perc` and `cpu_cache_usage_perc`."""
    assert [labels["model_name"] for labels, _ in series(name, page())] == ["org/base"]


@pytest.mark.parametrize("label", ["max_lora", "running_lora_adapters", "waiting_lora_adapters"])
async def test_aibrix_reads_labels_of_the_first_lora_series(label: str) -> None:
    """The series must exist even without adapters: an instance without it is no candidate for affinity."""
    nothing = FakeSnapshot(running_adapters=(), device_adapters=frozenset(), host_adapters=())
    assert label in series("vllm:lora_requests_info", page(nothing))[0][0]


async def test_server_load_is_what_vllm_calls_it() -> None:
    fake = FakeEngine(shown=FakeSnapshot(running=3, waiting=4))
    assert (await OneOff(fake).get("/load")).json == {"server_load": 7}


def series(name: str, text: str) -> list[tuple[dict[str, str], float]]:
    """Returns all samples of that name, as prometheus-client reads them."""
    families = text_string_to_metric_families(text)
    return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]
