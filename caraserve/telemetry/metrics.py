"""What GET /metrics shows, under vLLM's names so that its dashboards and gateways work; our own under `caraserve:`.

Call points, all on the event loop's thread and all below a microsecond or two, so the engine may call them per token:

    observe_iteration     after each iteration, with the tokens it computed
    observe_first_token   when a request's first token is retired, with the time since its arrival
    observe_token_gap     for each later token, with the time since the one before
    observe_finish        once for each request that ends, however it ends
    observe_load          when an adapter has reached the device
    observe_preemption    when a running request gives up its KV blocks
    observe_response      by the HTTP layer, for each response

Counts are plain numbers without locks; `render` writes them as text when somebody scrapes. No label holds a client's
text but adapter names, whose number is bounded. What llm-d's router, vLLM's production-stack and AIBrix read, and how,
is in `tests/http/test_fleet_routers.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from caraserve.core.request import Finish
from caraserve.telemetry.prometheus import Histogram, family, histograms, label_set

MAX_HOST_SERIES = 512  # adapters of the host tier that are shown one by one, the most recently used
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


@dataclass(frozen=True, slots=True)
class Latencies:
    """Median and 95th percentile of recent values, in milliseconds; None while there are none."""

    p50_ms: float | None
    p95_ms: float | None


class Metrics:
    """All counts of one server. `block_tokens`: tokens in a KV block; `max_loras`: adapters that fit on the device."""

    def __init__(
        self,
        model_name: str,
        *,
        max_loras: int,
        block_tokens: int,
        workers: Callable[[], WorkerCounts] = WorkerCounts,
        merges: Callable[[], int] = int,
    ) -> None:
        self._labels = label_set({"model_name": model_name, "engine": "0"})
        self._max_loras = max_loras
        self._block_tokens = block_tokens
        self._workers, self._merges = workers, merges
        self._more: list[Callable[[str], Iterable[str]]] = []
        self.computed_tokens = 0  # prompt and output tokens over all iterations
        self._iteration_tokens = Histogram(_ITERATION_TOKENS)
        self._iteration_s = Histogram(_SHORT_S)
        self._first_token_s = Histogram(_SHORT_S)
        self._token_gap_s = Histogram(_SHORT_S)
        self._per_output_token_s = Histogram(_SHORT_S)
        self._e2e_s = Histogram(_LONG_S)
        self._inference_s = Histogram(_LONG_S)
        self._phase_s = {phase: Histogram(_LONG_S) for phase in ("queued", "load", "prefill", "decode")}
        self._prompt_sizes = Histogram(_TOKENS)
        self._output_sizes = Histogram(_TOKENS)
        self._load_s = Histogram(_SHORT_S)
        self._stalled_s = Histogram(_SHORT_S)
        self._interrupted_s = Histogram(_SHORT_S)
        self._cpu_layers = 0
        self._prompt_tokens = self._output_tokens = self._cached_tokens = self._preemptions = 0
        self._finished = dict.fromkeys(_REASONS, 0)
        self._loads: dict[tuple[str, str], int] = {}
        self._choices: dict[str, tuple[int, float, float]] = {}  # count, predicted and observed seconds
        self._responses: dict[tuple[str, int], int] = {}
        self._recent_first_s: deque[float] = deque(maxlen=_RECENT)
        self._recent_gap_s: deque[float] = deque(maxlen=_RECENT)

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
        self._interrupted_s.observe(phases.interrupted_ms / 1000)
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

    def answers(self) -> tuple[int, int]:
        """Requests that have ended so far, and the tokens of their answers."""
        return sum(self._finished.values()), self._output_tokens

    def observe_load(self, mode: str, seconds: float, *, outcome: str = "ok") -> None:
        """`mode`: a loading mode's name; `outcome`: `ok`, or a word for what went wrong."""
        self._loads[mode, outcome] = self._loads.get((mode, outcome), 0) + 1
        if outcome == "ok":
            self._load_s.observe(seconds)

    def observe_choice(self, choice: str, predicted_ms: float, observed_ms: float) -> None:
        """`choice`: how `auto` had a request begin; times from then to the end of its first chunk."""
        count, predicted_s, observed_s = self._choices.get(choice, (0, 0.0, 0.0))
        self._choices[choice] = count + 1, predicted_s + predicted_ms / 1000, observed_s + observed_ms / 1000

    def observe_preemption(self) -> None:
        self._preemptions += 1

    def observe_response(self, route: str, status: int) -> None:
        """`route` is the route's pattern, never the URL that a client sent."""
        self._responses[route, status] = self._responses.get((route, status), 0) + 1

    def first_token(self) -> Latencies:
        return _latencies(self._recent_first_s)

    def token_gap(self) -> Latencies:
        return _latencies(self._recent_gap_s)

    def show(self, more: Callable[[str], Iterable[str]]) -> None:
        """Adds what another part knows: `more` is given the labels of every sample and writes whole families, whenever
        somebody scrapes."""
        self._more.append(more)

    def render(self, snapshot: SnapshotView, rank_of: Callable[[str], int]) -> bytes:
        """The text that Prometheus reads, 0.0.4. `rank_of`: an adapter's rank by its name."""
        parts = [
            *self._state(snapshot),
            *self._adapter_places(snapshot, rank_of),
            *self._counters(),
            *self._histograms(),
        ]
        for more in self._more:
            parts += more(self._labels)
        return "".join(parts).encode()

    def _state(self, snapshot: SnapshotView) -> Iterator[str]:
        total = snapshot.kv_total_blocks
        used = snapshot.kv_used_blocks / total if total else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", snapshot.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", snapshot.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 for all.", used)
        yield self._gauge("vllm:gpu_cache_usage_perc", "The same by its older name, which some routers read.", used)
        yield self._gauge("vllm:cpu_cache_usage_perc", "KV blocks swapped out: there are none.", 0)
        sizes = label_set({"block_size": str(self._block_tokens), "num_gpu_blocks": str(total), "engine": "0"})
        yield family("vllm:cache_config_info", "gauge", "The KV cache's sizes.", [(sizes, 1)])
        yield family("vllm:lora_requests_info", "gauge", "Adapters here.", [(self._adapters(snapshot), time.time())])
        yield self._gauge("caraserve:draining", "1 while the server is stopping.", int(snapshot.draining))

    def _adapters(self, snapshot: SnapshotView) -> str:
        """Routers take the sample with the newest time, and prefer an instance whose `running_lora_adapters` has the
        adapter: there, then, stands what is on the device, in use or not, and under waiting what is on its way."""
        device, active = set(snapshot.device_adapters), {*snapshot.running_adapters, *snapshot.waiting_adapters}
        there = sorted(device, key=lambda name: (name not in active, name))
        return label_set(
            {
                "max_lora": str(self._max_loras),
                "running_lora_adapters": ",".join(there[: self._max_loras]),
                "waiting_lora_adapters": ",".join(sorted(active - device)[: self._max_loras]),
            }
        )

    def _adapter_places(self, snapshot: SnapshotView, rank_of: Callable[[str], int]) -> Iterator[str]:
        device, host = snapshot.device_adapters, snapshot.host_adapters
        yield self._gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters in the device tier.", len(device))
        yield self._gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters in the host tier.", len(host))
        yield self._gauge("vllm:max_gpu_lora_adapters", "Adapters that fit on the device.", self._max_loras)
        shown = [*(("gpu", name) for name in device[: self._max_loras])]
        shown += [("cpu", name) for name in host[:MAX_HOST_SERIES]]
        # Names are of letters, digits and . _ : - alone, so they need no escapes.
        loaded: list[tuple[str, float]] = [
            (f'adapter_name="{name}",level="{level}",pinned="false",rank="{rank_of(name)}",{self._labels}', 1)
            for level, name in shown
        ]
        yield family("vllm:lora_adapter_loaded", "gauge", "1 for an adapter in a tier.", loaded)

    def _counters(self) -> Iterator[str]:
        queries, hits = self._prompt_tokens, self._cached_tokens
        yield self._counter("vllm:prompt_tokens_total", "Prompt tokens of ended requests.", queries)
        yield self._counter("vllm:generation_tokens_total", "Output tokens of ended requests.", self._output_tokens)
        yield self._counter("vllm:num_preemptions_total", "Requests that gave up their KV blocks.", self._preemptions)
        for old in ("", "gpu_"):  # vLLM's name now, and the one that production-stack reads
            yield self._counter(f"vllm:{old}prefix_cache_queries_total", "Prompt tokens looked up.", queries)
            yield self._counter(f"vllm:{old}prefix_cache_hits_total", "Prompt tokens found.", hits)
        yield self._counters_by(
            "vllm:request_success_total",
            "Ended requests.",
            ("finished_reason",),
            [([_REASONS[reason]], count) for reason, count in self._finished.items()],
        )
        yield self._counter(
            "caraserve:cpu_lora_layers_total",
            "Layers of ended requests whose LoRA came from CPU workers.",
            self._cpu_layers,
        )
        yield from self._worker_counts(self._workers())
        yield self._counter(
            "caraserve:adapter_merges_total", "Adapters merged into the base weights (mode merged).", self._merges()
        )
        yield self._counters_by(
            "caraserve:adapter_loads_total", "Adapters brought to the device.", ("mode", "outcome"), self._loads.items()
        )
        yield from self._loading_choices()
        responses = [((route, str(status)), count) for (route, status), count in self._responses.items()]
        yield self._counters_by("caraserve:http_responses_total", "HTTP responses.", ("route", "status"), responses)

    def _loading_choices(self) -> Iterator[str]:
        texts = (
            ("caraserve:loading_choice_total", "Requests by how mode auto had them begin."),
            (
                "caraserve:loading_choice_predicted_seconds_total",
                "From then to the end of their first chunks, expected.",
            ),
            ("caraserve:loading_choice_observed_seconds_total", "The same as it came."),
        )
        for index, (name, text) in enumerate(texts):
            counts = [((choice,), values[index]) for choice, values in self._choices.items()]
            yield self._counters_by(name, text, ("choice",), counts)

    def _worker_counts(self, counts: WorkerCounts) -> Iterator[str]:
        yield self._gauge("caraserve:lora_workers", "CPU LoRA workers that are there.", counts.alive)
        yield self._counter("caraserve:lora_worker_deaths_total", "CPU LoRA workers replaced.", counts.deaths)
        yield self._counter("caraserve:lora_worker_slices_total", "Slices of layers handed over.", counts.slices)
        yield self._counter(
            "caraserve:lora_worker_redone_total", "Modules of slices that the device had to compute.", counts.redone
        )

    def _histograms(self) -> Iterator[str]:
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
        yield self._histogram(
            "vllm:lora_adapter_load_seconds", "Asked for to on the device.", self._load_s, 'transition="activate",'
        )
        yield self._histogram("caraserve:iteration_seconds", "An iteration on the device.", self._iteration_s)
        yield self._histogram(
            "caraserve:adapter_stall_seconds", "A request's iterations waiting for its weights.", self._stalled_s
        )
        yield self._histogram(
            "caraserve:adapter_interruption_seconds",
            "A request standing still for loads of other adapters.",
            self._interrupted_s,
        )
        yield histograms(
            "caraserve:request_phase_seconds",
            "Where requests' time goes.",
            [(f'phase="{phase}",{self._labels}', histogram) for phase, histogram in self._phase_s.items()],
        )

    def _gauge(self, name: str, text: str, value: float) -> str:
        return family(name, "gauge", text, [(self._labels, value)])

    def _counter(self, name: str, text: str, value: float) -> str:
        return family(name, "counter", text, [(self._labels, value)])

    def _counters_by(
        self, name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[Sequence[str], float]]
    ) -> str:
        samples = [
            (f"{label_set(dict(zip(labels, values, strict=True)))},{self._labels}", count) for values, count in counts
        ]
        return family(name, "counter", text, samples)

    def _histogram(self, name: str, text: str, histogram: Histogram, labels: str = "") -> str:
        return histograms(name, text, [(labels + self._labels, histogram)])


def _latencies(recent_s: Sequence[float]) -> Latencies:
    if not recent_s:
        return Latencies(None, None)
    ordered = sorted(recent_s)
    last = len(ordered) - 1
    return Latencies(1000 * ordered[last // 2], 1000 * ordered[round(0.95 * last)])
