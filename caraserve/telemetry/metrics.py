"""The metrics of GET /metrics. Those that vLLM has too carry its names, so its dashboards and gateways work.

Call points, all on the event loop's thread; those of an iteration or a token take under 1 µs, those of a request 10:

    observe_iteration     after each iteration, with the tokens it computed
    observe_begin         after each iteration, with the error of its predicted begin and the delay by its launch
    observe_first_token   when a request's first token is there, with the time since its arrival
    observe_token_gaps    for later tokens of an iteration, with the time since the one before of each
    observe_drafts        for each row with drafts, with their number and that of the right ones
    observe_finish        once for each request that ends, however it ends
    observe_request       after it, with the request
    observe_prompt        by the HTTP layer, when all answers to a prompt have ended
    observe_load          when an adapter has reached the device
    observe_preemption    when a running request loses its KV blocks
    observe_response      by the HTTP layer, for each response
    http.observe          by the HTTP layer, for each request that is neither a probe nor another instance's

Counts are plain numbers without locks; `render` writes them as text at each scrape. Of all texts that clients choose,
only adapter names become labels, and their number is bounded. `tests/http/test_fleet_routers.py` lists what llm-d's
router, vLLM's production-stack and AIBrix read.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from caraserve.core.request import Finish, GenerateRequest
from caraserve.telemetry.adapter_metrics import AdapterMetrics
from caraserve.telemetry.http_metrics import HttpMetrics
from caraserve.telemetry.process_metrics import ProcessMetrics
from caraserve.telemetry.prometheus import FamilyTable, Histogram, Sample, counter, gauge, histogram, label_set
from caraserve.telemetry.usage import UsageCounters

MAX_HOST_SERIES = 512  # adapters of the host cache shown one by one, the most recently used
_GUESSED_TOKENS = 200.0  # of an answer, before there are any
_RECENT = 512  # values behind the live page's percentiles

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_ANSWERS = (1, 2, 5, 10, 20)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SHORT_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 2.5, 5, 10, 20, 40, 80),
)
_ERRORS_S = (0.0002, 0.0005, 0.001, 0.005, 0.02, 0.1)
_LONG_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}  # ours → vLLM's


# Every family of this module in the order of the page. Others come through `Metrics.show`.
_FAMILIES = (
    gauge("vllm:num_requests_running", "Requests in the running batch."),
    gauge("vllm:num_requests_waiting", "Requests in the queue."),
    gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1."),
    gauge("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc."),
    gauge("vllm:cpu_cache_usage_perc", "Share of swapped-out KV blocks; always 0."),
    gauge("vllm:cache_config_info", "Sizes of the KV cache, as labels."),
    gauge("vllm:lora_requests_info", "Adapters on the device and waiting, as labels; the value is the time."),
    gauge("caraserve:draining", "1 while the server is stopping."),
    gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters in the device cache."),
    gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters in the host cache."),
    gauge("vllm:max_gpu_lora_adapters", "Most adapters in the device cache."),
    gauge("vllm:lora_adapter_loaded", "1 for each adapter in a cache."),
    counter("vllm:prompt_tokens_total", "Prompt tokens of ended requests."),
    counter("vllm:generation_tokens_total", "Output tokens of ended requests."),
    counter("vllm:num_preemptions_total", "Preemptions of running requests."),
    counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    counter("vllm:gpu_prefix_cache_queries_total", "Older name of vllm:prefix_cache_queries_total."),
    counter("vllm:gpu_prefix_cache_hits_total", "Older name of vllm:prefix_cache_hits_total."),
    counter("vllm:spec_decode_num_drafts_total", "Rows in which guessed tokens were verified."),
    counter("vllm:spec_decode_num_draft_tokens_total", "Guessed tokens that were verified."),
    counter("vllm:spec_decode_num_accepted_tokens_total", "Guessed tokens that were right."),
    counter("vllm:request_success_total", "Ended requests by reason.", "finished_reason"),
    counter("caraserve:cpu_lora_layers_total", "Layers of ended requests whose LoRA CPU workers computed."),
    gauge("caraserve:lora_workers", "CPU LoRA workers that are running."),
    counter("caraserve:lora_worker_deaths_total", "CPU LoRA workers that died and were replaced."),
    counter("caraserve:lora_worker_slices_total", "Slices of layers handed off to CPU LoRA workers."),
    counter("caraserve:lora_worker_redone_total", "Modules of slices that the device computed after a worker failed."),
    counter("caraserve:adapter_merges_total", "Adapters merged into the base weights (mode merged)."),
    counter("caraserve:late_launches_total", "Iterations launched after the end of the one before them."),
    counter("caraserve:late_launch_seconds_total", "Time in which the device waited for these launches."),
    counter("caraserve:late_kernels_total", "Kernels compiled or loaded after the start, which delays all requests."),
    counter("caraserve:adapter_loads_total", "Loads of adapters to the device.", "mode", "outcome"),
    gauge("caraserve:adapter_loads_under_way", "Reads of adapters to host memory and copies to the device."),
    counter("caraserve:loading_choice_total", "Requests by the way in which mode auto started them.", "choice"),
    counter(
        "caraserve:loading_choice_predicted_seconds_total", "Predicted time to the end of the first chunk.", "choice"
    ),
    counter(
        "caraserve:loading_choice_observed_seconds_total", "Observed time to the end of the first chunk.", "choice"
    ),
    counter("caraserve:http_responses_total", "HTTP responses.", "route", "status"),
    histogram("vllm:time_to_first_token_seconds", _SHORT_S, "Time from a request's arrival to its first token."),
    histogram("vllm:inter_token_latency_seconds", _SHORT_S, "Time between two tokens of a request."),
    histogram("vllm:time_per_output_token_seconds", _SHORT_S, "Older name of vllm:inter_token_latency_seconds."),
    histogram(
        "vllm:request_time_per_output_token_seconds", _SHORT_S, "A request's mean time per token after the first."
    ),
    histogram("vllm:e2e_request_latency_seconds", _LONG_S, "Time from a request's arrival to its end."),
    histogram("vllm:request_queue_time_seconds", _LONG_S, "Time of a request in the queue."),
    histogram("vllm:request_prefill_time_seconds", _LONG_S, "Time of a request in prefill."),
    histogram("vllm:request_decode_time_seconds", _LONG_S, "Time of a request in decode."),
    histogram("vllm:request_inference_time_seconds", _LONG_S, "Time of a request in prefill and decode."),
    histogram("vllm:iteration_tokens_total", _ITERATION_TOKENS, "Tokens of an iteration."),
    histogram("vllm:request_prompt_tokens", _TOKENS, "Prompt tokens of a request."),
    histogram("vllm:request_generation_tokens", _TOKENS, "Output tokens of a request."),
    histogram("vllm:request_params_n", _ANSWERS, "Answers asked for to a prompt."),
    histogram("vllm:request_params_max_tokens", _TOKENS, "Most output tokens that a request may have."),
    histogram("vllm:request_max_num_generation_tokens", _TOKENS, "Output tokens of the longest answer to a prompt."),
    histogram(
        "vllm:lora_adapter_load_seconds",
        _SHORT_S,
        "Time from the request for an adapter to its arrival on the device.",
        "transition",
    ),
    histogram("caraserve:iteration_seconds", _SHORT_S, "Time of an iteration on the device."),
    histogram(
        "caraserve:iteration_begin_error_seconds",
        _ERRORS_S,
        "Time between the predicted and the real begin of an iteration.",
    ),
    histogram(
        "caraserve:adapter_stall_seconds", _SHORT_S, "Time in which a request's iterations waited for its weights."
    ),
    histogram(
        "caraserve:adapter_interruption_seconds", _SHORT_S, "Time in which a request waited for other adapters' loads."
    ),
    histogram(
        "caraserve:request_cpu_lora_seconds",
        _SHORT_S,
        "Time that CPU LoRA workers spent on a request which they helped, added over workers.",
    ),
    histogram("caraserve:request_phase_seconds", _LONG_S, "Time of a request by phase.", "phase"),
)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at one moment. Adapters are given by name; one may have several."""

    running: int
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    num_on_device: int  # adapters
    num_in_host: int
    loads_under_way: int  # reads to host memory and copies to the device
    device_adapters: frozenset[str]
    host_adapters: tuple[str, ...]  # the first `MAX_HOST_SERIES` of them, the most recently used first
    draining: bool


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
    """All metrics of one server. `block_tokens`: tokens in a KV block; `max_loras`: adapters that fit on the device."""

    def __init__(
        self,
        model_name: str,
        *,
        max_loras: int,
        block_tokens: int,
        workers: Callable[[], WorkerCounts] = WorkerCounts,
        merges: Callable[[], int] = int,
        late_kernels: Callable[[], int] = int,
    ) -> None:
        self._labels = label_set({"model_name": model_name, "engine": "0"})
        self._max_loras = max_loras
        self._block_tokens = block_tokens
        self._workers, self._merges, self._late_kernels = workers, merges, late_kernels
        self.usage = UsageCounters()
        self._by_adapter = AdapterMetrics(model_name, self._labels)
        self.http = HttpMetrics()
        self._more: list[Callable[[str], Iterable[str]]] = [
            *(self._by_adapter.families, self.http.families, ProcessMetrics().families)
        ]
        self.computed_tokens = 0  # prompt and output tokens over all iterations
        self._table = table = FamilyTable(_FAMILIES, self._labels)
        self._first_token_s = table.histogram("vllm:time_to_first_token_seconds")
        self._token_gap_s = table.histogram("vllm:inter_token_latency_seconds")
        table.put("vllm:time_per_output_token_seconds", self._token_gap_s)
        self._iteration_tokens = table.histogram("vllm:iteration_tokens_total")
        self._iteration_s = table.histogram("caraserve:iteration_seconds")
        self._begin_errors_s = table.histogram("caraserve:iteration_begin_error_seconds")
        self._load_s = table.histogram("vllm:lora_adapter_load_seconds", "activate")
        self._waits_s = Histogram(_LONG_S)  # of requests for their adapters
        queued, prefill, decode = (
            table.histogram(f"vllm:request_{phase}_time_seconds") for phase in ("queue", "prefill", "decode")
        )
        for phase, times in {"queued": queued, "load": self._waits_s, "prefill": prefill, "decode": decode}.items():
            table.put("caraserve:request_phase_seconds", times, phase)
        for reason in _REASONS.values():
            table.put("vllm:request_success_total", 0, reason)
        self._ended = self._output_tokens = 0
        self._recent_first_s: deque[float] = deque(maxlen=_RECENT)
        self._recent_gap_s: deque[float] = deque(maxlen=_RECENT)

    def observe_iteration(self, num_tokens: int, ms: float) -> None:
        self.computed_tokens += num_tokens
        self._iteration_tokens.observe(num_tokens)
        self._iteration_s.observe(ms / 1000)

    def observe_begin(self, error_s: float, late_s: float) -> None:
        """Counts the error of an iteration's predicted begin. `error_s`: real minus predicted; `late_s`: for how long
        the device waited for its launch."""
        self._begin_errors_s.observe(abs(error_s))
        if late_s > 0:
            self._table.add("caraserve:late_launches_total", 1)
            self._table.add("caraserve:late_launch_seconds_total", late_s)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token_s.observe(seconds)
        self._recent_first_s.append(seconds)

    def observe_token_gaps(self, seconds: float, count: int) -> None:
        self._token_gap_s.observe(seconds, count)
        self._recent_gap_s.extend(repeat(seconds, count))

    def observe_drafts(self, drafts: int, accepted: int) -> None:
        self._table.add("vllm:spec_decode_num_drafts_total", 1)
        self._table.add("vllm:spec_decode_num_draft_tokens_total", drafts)
        self._table.add("vllm:spec_decode_num_accepted_tokens_total", accepted)

    def observe_finish(self, finish: Finish) -> None:
        """Counts an ended request. Only complete answers count in latencies."""
        self._ended += 1
        self._output_tokens += finish.completion_tokens
        add = self._table.add
        add("vllm:request_success_total", 1, _REASONS[finish.reason])
        add("vllm:prompt_tokens_total", finish.prompt_tokens)
        add("vllm:generation_tokens_total", finish.completion_tokens)
        for prefix in ("vllm:", "vllm:gpu_"):
            add(f"{prefix}prefix_cache_queries_total", finish.prompt_tokens)
            add(f"{prefix}prefix_cache_hits_total", finish.cached_tokens)
        if finish.reason in ("cancelled", "error"):
            return
        phases = finish.phases
        add("caraserve:cpu_lora_layers_total", phases.cpu_layers)
        self._waits_s.observe(phases.load_ms / 1000)
        observed = {
            "vllm:e2e_request_latency_seconds": phases.e2e_ms / 1000,
            "vllm:request_queue_time_seconds": phases.queued_ms / 1000,
            "vllm:request_prefill_time_seconds": phases.prefill_ms / 1000,
            "vllm:request_decode_time_seconds": phases.decode_ms / 1000,
            "vllm:request_inference_time_seconds": (phases.prefill_ms + phases.decode_ms) / 1000,
            "vllm:request_prompt_tokens": finish.prompt_tokens,
            "vllm:request_generation_tokens": finish.completion_tokens,
            "caraserve:adapter_stall_seconds": phases.stalled_ms / 1000,
            "caraserve:adapter_interruption_seconds": phases.interrupted_ms / 1000,
        }
        if phases.cpu_layers:
            observed["caraserve:request_cpu_lora_seconds"] = phases.cpu_lora_ms / 1000
        if (later := finish.completion_tokens - 1) > 0:
            observed["vllm:request_time_per_output_token_seconds"] = phases.decode_ms / 1000 / later
        for name, value in observed.items():
            self._table.histogram(name).observe(value)

    def observe_request(self, request: GenerateRequest, finish: Finish, first_token_s: float | None) -> None:
        """Counts an ended request by its client and its adapter. `first_token_s`: from its arrival, if it had one."""
        self.usage.observe(request, finish)
        self._by_adapter.observe(request.adapter, finish, first_token_s)
        self._table.histogram("vllm:request_params_max_tokens").observe(request.params.max_tokens)

    def observe_prompt(self, n: int, longest_tokens: int) -> None:
        """Counts a prompt whose `n` answers have ended. `longest_tokens`: of the longest."""
        self._table.histogram("vllm:request_params_n").observe(n)
        self._table.histogram("vllm:request_max_num_generation_tokens").observe(longest_tokens)

    def answers(self) -> tuple[int, int]:
        """Returns how many requests have ended, and the tokens of their answers."""
        return self._ended, self._output_tokens

    def mean_answer_tokens(self) -> float:
        """Returns the mean length of answers, or a guess before there are any."""
        count, tokens = self.answers()
        return tokens / count if tokens else _GUESSED_TOKENS

    def observe_load(self, mode: str, seconds: float, *, outcome: str = "ok") -> None:
        """Counts a load. `mode`: a loading mode's name; `outcome`: `ok`, or a word for the failure."""
        self._table.add("caraserve:adapter_loads_total", 1, mode, outcome)
        if outcome == "ok":
            self._load_s.observe(seconds)

    def observe_choice(self, choice: str, predicted_ms: float, observed_ms: float) -> None:
        """`choice`: how mode `auto` started a request; times from that start to the end of its first chunk."""
        self._table.add("caraserve:loading_choice_total", 1, choice)
        self._table.add("caraserve:loading_choice_predicted_seconds_total", predicted_ms / 1000, choice)
        self._table.add("caraserve:loading_choice_observed_seconds_total", observed_ms / 1000, choice)

    def observe_preemption(self) -> None:
        self._table.add("vllm:num_preemptions_total", 1)

    def observe_response(self, route: str, status: int) -> None:
        """Counts a response. `route`: the route's pattern, never the URL that a client sent."""
        self._table.add("caraserve:http_responses_total", 1, route, str(status))

    def first_token(self) -> Latencies:
        return _latencies(self._recent_first_s)

    def token_gap(self) -> Latencies:
        return _latencies(self._recent_gap_s)

    def show(self, more: Callable[[str], Iterable[str]]) -> None:
        """Adds families of another part. `more` gets the server's labels and returns whole families at each scrape."""
        self._more.append(more)

    def render(self, snapshot: EngineSnapshot, rank_of: Callable[[str], int]) -> bytes:
        """Returns the page of GET /metrics in Prometheus' text format. `rank_of`: an adapter's rank by its name."""
        parts = [*self._table.render(self._state(snapshot, rank_of))]
        for more in self._more:
            parts += more(self._labels)
        return "".join(parts).encode()

    def _state(self, snapshot: EngineSnapshot, rank_of: Callable[[str], int]) -> dict[str, list[Sample]]:
        blocks = snapshot.kv_total_blocks
        used = snapshot.kv_used_blocks / blocks if blocks else 0.0
        sizes = label_set({"block_size": str(self._block_tokens), "num_gpu_blocks": str(blocks)}) + f",{self._labels}"
        active = {*snapshot.running_adapters, *snapshot.waiting_adapters}
        device = self._used_first(snapshot.device_adapters, active)
        awaited = sorted(active - snapshot.device_adapters)
        shown = [*(("gpu", name) for name in device), *(("cpu", name) for name in snapshot.host_adapters)]
        workers = self._workers()
        single = {
            "vllm:num_requests_running": snapshot.running,
            "vllm:num_requests_waiting": snapshot.waiting,
            "vllm:kv_cache_usage_perc": used,
            "vllm:gpu_cache_usage_perc": used,
            "vllm:cpu_cache_usage_perc": 0,
            "caraserve:draining": int(snapshot.draining),
            "vllm:num_gpu_loaded_lora_adapters": snapshot.num_on_device,
            "vllm:num_cpu_loaded_lora_adapters": snapshot.num_in_host,
            "vllm:max_gpu_lora_adapters": self._max_loras,
            "caraserve:adapter_loads_under_way": snapshot.loads_under_way,
            "caraserve:lora_workers": workers.alive,
            "caraserve:lora_worker_deaths_total": workers.deaths,
            "caraserve:lora_worker_slices_total": workers.slices,
            "caraserve:lora_worker_redone_total": workers.redone,
            "caraserve:adapter_merges_total": self._merges(),
            "caraserve:late_kernels_total": self._late_kernels(),
        }
        return {
            "vllm:cache_config_info": [(sizes, 1)],
            "vllm:lora_requests_info": [(self._adapters(device, awaited), time.time())],
            # Adapter names hold letters, digits and . _ : - only, so they need no escapes.
            "vllm:lora_adapter_loaded": [
                (f'adapter_name="{name}",level="{level}",pinned="false",rank="{rank_of(name)}",{self._labels}', 1)
                for level, name in shown
            ],
            **{name: [(self._labels, value)] for name, value in single.items()},
        }

    def _used_first(self, device: frozenset[str], active: set[str]) -> list[str]:
        """Returns as many names of adapters on the device as it can hold adapters, those with requests first. Sorts
        these names alone: 20,000 names may be of one adapter."""
        used, idle = device & active, device - active
        return [*sorted(used), *heapq.nsmallest(self._max_loras, idle)][: self._max_loras]

    def _adapters(self, device: Sequence[str], awaited: Sequence[str]) -> str:
        """Returns the labels of `vllm:lora_requests_info`.

        Routers read the sample with the newest time and prefer an instance whose `running_lora_adapters` has the
        adapter. So `running` lists all adapters on the device, and `waiting` those still to be loaded.
        """
        return label_set(
            {
                "max_lora": str(self._max_loras),
                "running_lora_adapters": ",".join(device),
                "waiting_lora_adapters": ",".join(awaited[: self._max_loras]),
            }
        )


def _latencies(recent_s: Sequence[float]) -> Latencies:
    if not recent_s:
        return Latencies(None, None)
    ordered = sorted(recent_s)
    last = len(ordered) - 1
    return Latencies(1000 * ordered[last // 2], 1000 * ordered[round(0.95 * last)])
