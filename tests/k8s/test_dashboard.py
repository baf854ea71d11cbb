"""The metrics that dashboards read exist on the page of /metrics: those of our dashboard, and of vLLM's."""

import json
import re
from pathlib import Path

from tests.http.fake_engine import FakeSnapshot
from tests.http.serving import new_metrics

DASHBOARD = Path(__file__).parents[2] / "scripts" / "k8s" / "monitoring" / "grafana-dashboard.json"

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
    *("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds", "python_info"),
]


def served_names() -> set[str]:
    """Returns the names of all samples that the page can have."""
    page = new_metrics().render(FakeSnapshot(), lambda name: 8).decode()
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, flags=re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
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
