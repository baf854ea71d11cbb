"""The metrics that dashboards read exist on the page of /metrics: those of our dashboard, and of vLLM's."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from caraserve.core.request import Finish, GenerateRequest, Phases, SamplingParams
from tests.http.fake_engine import FakeSnapshot
from tests.http.serving import new_metrics

DASHBOARD = Path(__file__).parents[2] / "scripts" / "k8s" / "components" / "monitoring" / "grafana-dashboard.json"

# What the dashboards in vLLM's repository (examples/online_serving) query, older versions of them included.
VLLM = [
    *(f"vllm:e2e_request_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:time_to_first_token_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:time_per_output_token_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:inter_token_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"),
    *("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:iteration_tokens_total_bucket"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:request_prompt_tokens_sum", "vllm:request_generation_tokens_sum", "vllm:request_params_n_bucket"),
    *("vllm:request_queue_time_seconds_sum", "vllm:request_inference_time_seconds_sum"),
    *("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    *("vllm:request_max_num_generation_tokens_sum", "vllm:request_params_max_tokens_bucket"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("http_requests_total", "http_request_duration_seconds_bucket", "http_request_duration_highr_seconds_bucket"),
    *(f"http_{what}_size_bytes_{part}" for what in ("request", "response") for part in ("sum", "count")),
    *("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds", "python_info"),
]


def served_names() -> set[str]:
    """Returns the names of all samples that the page can have."""
    page = new_metrics().render(FakeSnapshot(), lambda name: 8).decode()
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, flags=re.MULTILINE):
        parts = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}.get(kind, ("",))
        names |= {f"{name}{part}" for part in parts}
    return names


def queried_names() -> set[str]:
    """Returns the names that our dashboard queries."""
    queries = re.findall(r'"(?:expr|query)": "((?:[^"\\]|\\.)*)"', DASHBOARD.read_text(encoding="utf-8"))
    return {name for query in queries for name in re.findall(r"\b(?:vllm:|caraserve:|process_|python_)\w+", query)}


def test_every_metric_of_our_dashboard_is_served() -> None:
    assert len(queried_names()) > 20
    assert queried_names() - served_names() == set()


def test_every_metric_of_vllms_dashboards_is_served() -> None:
    assert set(VLLM) - served_names() == set()


def test_panels_have_places_and_titles_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


# --- queries ---

# A query is made of these; anything else is a mistake.
TOKEN = re.compile(r"""\s+|"[^"]*"|\[[^\]]*\]|\$?[A-Za-z_:][\w:]*|[0-9.]+|[(){},=/*+-]""")
RANGE = re.compile(r"\[(\$__rate_interval|[0-9]+[smh])\]")
SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)="([^"]*)"')
GROUPED = re.compile(r"\b(?:sum|avg|max|min) by \(([^)]*)\)")
OF_PROMETHEUS = {"job", "instance"}  # labels that the scraper adds


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def targets() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns each query of the dashboard with its panel."""
    return [(panel, target) for panel in dashboard()["panels"] for target in panel["targets"]]


def served_labels() -> dict[str, set[str]]:
    """Returns the labels of every sample of the page, after one of everything has been counted."""
    metrics = new_metrics()
    finish = Finish("stop", 1, 2, 0, Phases())
    metrics.observe_finish(finish)
    metrics.observe_request(GenerateRequest("r", (1,), "a", SamplingParams(), 0.0), finish, 0.1)
    metrics.observe_load("auto", 0.1)
    metrics.observe_response("/v1/completions", 200)
    text = metrics.render(FakeSnapshot(), lambda name: 8).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) | OF_PROMETHEUS for sample in samples}


def test_every_query_is_whole_and_every_range_is_a_duration() -> None:
    for _, target in targets():
        query = target["expr"]
        assert TOKEN.sub("", query) == "", query
        depth = 0
        for bracket in re.findall(r"[()]", re.sub(r'"[^"]*"', "", query)):
            depth += 1 if bracket == "(" else -1
            assert depth >= 0, query
        assert depth == 0, query
        assert len(RANGE.findall(query)) == query.count("[") == query.count("rate("), query


def test_every_query_selects_groups_and_names_labels_that_its_metrics_have() -> None:
    served = served_labels()
    for _, target in targets():
        query = target["expr"]
        selectors = SELECTOR.findall(query)
        assert len(selectors) == query.count("{") > 0, query
        labels = set.union(*(served[name] for name, _ in selectors))
        for name, matchers in selectors:
            assert MATCHER.sub("", matchers).strip(", ") == "", query
            assert {label for label, _ in MATCHER.findall(matchers)} <= served[name], query
        grouped = {label.strip() for text in GROUPED.findall(query) for label in text.split(",")}
        assert grouped <= labels, query
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped, query


def test_every_variable_is_defined_and_every_query_is_for_the_chosen_data_source() -> None:
    variables = {one["name"]: one for one in dashboard()["templating"]["list"]}
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    assert variables["DS_PROMETHEUS"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text(encoding="utf-8")))
    assert used - variables.keys() == {"__rate_interval"}  # Grafana's own
    assert all(panel["datasource"] == target["datasource"] == source for panel, target in targets())
    served = served_labels()
    for one in variables.values():
        if one["type"] == "query":
            assert one["datasource"] == source
            metric, label = re.fullmatch(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", one["query"]).groups()  # type: ignore[union-attr]
            assert label in served[metric]
