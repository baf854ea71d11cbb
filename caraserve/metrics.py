"""What GET /metrics shows, under vLLM's names so that its dashboards and gateways work; our own under `caraserve:`.

Call points, all on the event loop's thread and all below a microsecond or two, so the engine may call them per token:

    observe_iteration     after each iteration, with the tokens it computed
    observe_first_token   when a request's first token is retired, with the time since its arrival
    observe_token_gap     for each later token, with the time since the one before
    observe_finish        once for each request that ends, however it ends
    observe_load          when an adapter has reached the device
    observe_preemption    when a running request gives up its KV blocks
    observe_response      by the HTTP layer, for each response

Counts are plain numbers without locks; `collect` turns them into Prometheus' families when somebody scrapes. No label
holds a client's text but adapter names, of which at most `MAX_ADAPTER_LABELS` are shown. Level 2.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from caraserve.request import Finish

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_ADAPTER_LABELS = 128  # names shown for each tier, and in each list of `vllm:lora_requests_info`
_RECENT = 512  # values that the live page's percentiles are taken from

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SHORT_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
_LONG_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}  # ours → vLLM's


class SnapshotView(Protocol):
    """The engine's state at one moment; adapters are given by name."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def kv_used_blocks(self) -> int: ...

    @property
    def kv_total_blocks(self) -> int: ...

    @property
    def running_adapters(self) -> tuple[str, ...]: ...

    @property
    def waiting_adapters(self) -> tuple[str, ...]: ...

    @property
    def device_adapters(self) -> tuple[str, ...]: ...

    @property
    def host_adapters(self) -> tuple[str, ...]: ...

    @property
    def draining(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The CPU LoRA workers at one moment."""

    alive: int = 0
    deaths: int = 0
    slices: int = 0
    redone: int = 0


class _Histogram:
    """Counts by bucket. A tenth of prometheus-client's time for an observation, as it takes no locks."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1  # bucket i holds values in (bound[i-1], bound[i]]
        self._sum += value

    def export(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets as (upper bound, count), and the sum of all values."""
        names = [f"{float(bound)}" for bound in self._bounds] + ["+Inf"]
        total, buckets = 0, []
        for name, count in zip(names, self._counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        return buckets, self._sum


@dataclass(frozen=True, slots=True)
class Latencies:
    """Median and 95th percentile of recent values, in milliseconds; None while there are none."""

    p50_ms: float | None
    p95_ms: float | None


class Metrics(Collector):
    """All counts of one server, in a registry of its own. `block_tokens`: tokens in a KV block."""

    def __init__(
        self,
        model_name: str,
        *,
        max_loras: int,
        block_tokens: int,
        workers: Callable[[], WorkerCounts] = WorkerCounts,
        merges: Callable[[], int] = int,
    ) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._max_loras = max_loras
        self._block_tokens = block_tokens
        self._workers, self._merges = workers, merges
        self._snapshot: SnapshotView | None = None
        self._ranks: Mapping[str, int] = {}
        self.computed_tokens = 0  # prompt and output tokens over all iterations
        self._iteration_tokens = _Histogram(_ITERATION_TOKENS)
        self._iteration_s = _Histogram(_SHORT_S)
        self._first_token_s = _Histogram(_SHORT_S)
        self._token_gap_s = _Histogram(_SHORT_S)
        self._per_output_token_s = _Histogram(_SHORT_S)
        self._e2e_s = _Histogram(_LONG_S)
        self._inference_s = _Histogram(_LONG_S)
        self._phase_s = {phase: _Histogram(_LONG_S) for phase in ("queued", "load", "prefill", "decode")}
        self._prompt_sizes = _Histogram(_TOKENS)
        self._output_sizes = _Histogram(_TOKENS)
        self._load_s = _Histogram(_SHORT_S)
        self._stalled_s = _Histogram(_SHORT_S)
        self._cpu_layers = 0
        self._prompt_tokens = self._output_tokens = self._cached_tokens = self._preemptions = 0
        self._finished = dict.fromkeys(_REASONS, 0)
        self._loads: dict[tuple[str, str], int] = {}
        self._responses: dict[tuple[str, int], int] = {}
        self._recent_first_s: deque[float] = deque(maxlen=_RECENT)
        self._recent_gap_s: deque[float] = deque(maxlen=_RECENT)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe_iteration(self, num_tokens: int, ms: float) -> None:
        self.computed_tokens += num_tokens
        self._iteration_tokens.observe(num_tokens)
        self._iteration_s.observe(ms / 1000)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token_s.observe(seconds)
        self._recent_first_s.append(seconds)

    def observe_token_gap(self, seconds: float) -> None:
        self._token_gap_s.observe(seconds)
        self._recent_gap_s.append(seconds)

    def observe_finish(self, finish: Finish) -> None:
        """Counts an ended request. Latencies are those of complete answers only."""
        self._finished[finish.reason] += 1
        self._prompt_tokens += finish.prompt_tokens
        self._output_tokens += finish.completion_tokens
        self._cached_tokens += finish.cached_tokens
        if finish.reason in ("cancelled", "error"):
            return
        phases = finish.phases
        self._cpu_layers += phases.cpu_layers
        self._stalled_s.observe(phases.stalled_ms / 1000)
        self._prompt_sizes.observe(finish.prompt_tokens)
        self._output_sizes.observe(finish.completion_tokens)
        self._e2e_s.observe(phases.e2e_ms / 1000)
        self._inference_s.observe((phases.prefill_ms + phases.decode_ms) / 1000)
        self._phase_s["queued"].observe(phases.queued_ms / 1000)
        self._phase_s["load"].observe(phases.load_ms / 1000)
        self._phase_s["prefill"].observe(phases.prefill_ms / 1000)
        self._phase_s["decode"].observe(phases.decode_ms / 1000)
        if finish.completion_tokens > 1:
            self._per_output_token_s.observe(phases.decode_ms / 1000 / (finish.completion_tokens - 1))

    def observe_load(self, mode: str, seconds: float, *, outcome: str = "ok") -> None:
        """`mode`: a loading mode's name; `outcome`: `ok`, or a word for what went wrong."""
        self._loads[mode, outcome] = self._loads.get((mode, outcome), 0) + 1
        self._load_s.observe(seconds)

    def observe_preemption(self) -> None:
        self._preemptions += 1

    def observe_response(self, route: str, status: int) -> None:
        """`route` is the route's pattern, never the URL that a client sent."""
        self._responses[route, status] = self._responses.get((route, status), 0) + 1

    def first_token(self) -> Latencies:
        return _latencies(self._recent_first_s)

    def token_gap(self) -> Latencies:
        return _latencies(self._recent_gap_s)

    def render(self, snapshot: SnapshotView, ranks: Mapping[str, int]) -> bytes:
        """The text that Prometheus reads, 0.0.4. `ranks`: of adapters by name."""
        self._snapshot, self._ranks = snapshot, ranks
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry within `render`."""
        if self._snapshot is not None:
            yield from self._state(self._snapshot)
            yield from self._residency(self._snapshot)
        yield from self._counters()
        yield from self._histograms()

    def _state(self, snapshot: SnapshotView) -> Iterator[Metric]:
        total = snapshot.kv_total_blocks
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", snapshot.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", snapshot.waiting)
        used = snapshot.kv_used_blocks / total if total else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 for all.", used)
        info = {"block_size": str(self._block_tokens), "num_gpu_blocks": str(total), "engine": "0"}
        yield _one(GaugeMetricFamily, "vllm:cache_config_info", "The KV cache's sizes.", info, 1)
        # Gateways take the sample with the newest time; both lists describe this moment, also when they are empty.
        loras = {
            "max_lora": str(self._max_loras),
            "running_lora_adapters": ",".join(_shown(snapshot.running_adapters)),
            "waiting_lora_adapters": ",".join(_shown(snapshot.waiting_adapters)),
        }
        yield _one(GaugeMetricFamily, "vllm:lora_requests_info", "Adapters of open requests.", loras, time.time())
        yield self._gauge("caraserve:draining", "1 while the server is stopping.", float(snapshot.draining))

    def _residency(self, snapshot: SnapshotView) -> Iterator[Metric]:
        tiers = {"gpu": snapshot.device_adapters, "cpu": snapshot.host_adapters}
        for level, names in tiers.items():
            text = f"Adapters in the {'device' if level == 'gpu' else 'host'} tier."
            yield self._gauge(f"vllm:num_{level}_loaded_lora_adapters", text, len(names))
        yield self._gauge("vllm:max_gpu_lora_adapters", "Adapters that the device may hold.", self._max_loras)
        labels = ("adapter_name", "level", "pinned", "rank", *self._labels)
        loaded = GaugeMetricFamily("vllm:lora_adapter_loaded", "1 for an adapter in a tier.", labels=labels)
        for level, names in tiers.items():
            for name in _shown(names):
                rank = str(self._ranks.get(name, 0))
                loaded.add_metric([name, level, "false", rank, *self._labels.values()], 1)
        yield loaded

    def _counters(self) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests.", self._prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Output tokens of ended requests.", self._output_tokens)
        yield self._counter("vllm:num_preemptions", "Requests that gave up their KV blocks.", self._preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", self._prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", self._cached_tokens)
        yield self._counters_by(
            "vllm:request_success",
            "Ended requests.",
            ("finished_reason",),
            [([_REASONS[reason]], count) for reason, count in self._finished.items()],
        )
        yield self._counter(
            "caraserve:cpu_lora_layers", "Layers of ended requests whose LoRA came from CPU workers.", self._cpu_layers
        )
        yield from self._worker_counts(self._workers())
        yield self._counter(
            "caraserve:adapter_merges", "Adapters merged into the base weights (mode merged).", self._merges()
        )
        yield self._counters_by(
            "caraserve:adapter_loads", "Adapters brought to the device.", ("mode", "outcome"), self._loads.items()
        )
        responses = [((route, str(status)), count) for (route, status), count in self._responses.items()]
        yield self._counters_by("caraserve:http_responses", "HTTP responses.", ("route", "status"), responses)

    def _worker_counts(self, counts: WorkerCounts) -> Iterator[Metric]:
        yield self._gauge("caraserve:lora_workers", "CPU LoRA workers that are there.", counts.alive)
        yield self._counter("caraserve:lora_worker_deaths", "CPU LoRA workers replaced.", counts.deaths)
        yield self._counter("caraserve:lora_worker_slices", "Slices of layers handed over.", counts.slices)
        yield self._counter(
            "caraserve:lora_worker_redone", "Modules of slices that the device had to compute itself.", counts.redone
        )

    def _histograms(self) -> Iterator[Metric]:
        yield self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", self._first_token_s)
        yield self._histogram("vllm:inter_token_latency_seconds", "Between two tokens.", self._token_gap_s)
        yield self._histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean after the first.", self._per_output_token_s
        )
        yield self._histogram("vllm:e2e_request_latency_seconds", "Whole requests.", self._e2e_s)
        yield self._histogram("vllm:request_queue_time_seconds", "Waiting.", self._phase_s["queued"])
        yield self._histogram("vllm:request_prefill_time_seconds", "Prefill.", self._phase_s["prefill"])
        yield self._histogram("vllm:request_decode_time_seconds", "Decode.", self._phase_s["decode"])
        yield self._histogram("vllm:request_inference_time_seconds", "Prefill and decode.", self._inference_s)
        yield self._histogram("vllm:iteration_tokens_total", "Tokens in an iteration.", self._iteration_tokens)
        yield self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", self._prompt_sizes)
        yield self._histogram("vllm:request_generation_tokens", "Output tokens of a request.", self._output_sizes)
        yield self._histogram("vllm:lora_adapter_load_seconds", "Bringing an adapter to the device.", self._load_s)
        yield self._histogram("caraserve:iteration_seconds", "An iteration on the device.", self._iteration_s)
        yield self._histogram(
            "caraserve:adapter_stall_seconds", "A request's iterations waiting for its weights.", self._stalled_s
        )
        labels = ("phase", *self._labels)
        phases = HistogramMetricFamily("caraserve:request_phase_seconds", "Where requests' time goes.", labels=labels)
        for phase, histogram in self._phase_s.items():
            phases.add_metric([phase, *self._labels.values()], *histogram.export())
        yield phases

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return _one(GaugeMetricFamily, name, text, self._labels, value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return _one(CounterMetricFamily, name, text, self._labels, value)

    def _counters_by(
        self, name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[Sequence[str], int]]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*labels, *self._labels))
        for values, count in counts:
            family.add_metric([*values, *self._labels.values()], count)
        return family

    def _histogram(self, name: str, text: str, histogram: _Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(list(self._labels.values()), *histogram.export())
        return family


def _one(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: Mapping[str, str],
    value: float,
) -> Metric:
    family = kind(name, text, labels=tuple(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _shown(names: Sequence[str]) -> list[str]:
    """Names in an order that stays, so that the same adapters remain shown from scrape to scrape."""
    return sorted(set(names))[:MAX_ADAPTER_LABELS]


def _latencies(recent_s: Sequence[float]) -> Latencies:
    if not recent_s:
        return Latencies(None, None)
    ordered = sorted(recent_s)
    last = len(ordered) - 1
    return Latencies(1000 * ordered[last // 2], 1000 * ordered[round(0.95 * last)])
