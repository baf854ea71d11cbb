"""Frozen settings, one class for each part of the server; each class declares its own command-line arguments.

Flags have vLLM's names where the meaning is the same. The part that owns an "auto" setting resolves it into a new
object; a config is never changed.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from caraserve.util.option_values import (
    LoraModule,
    at_least,
    key,
    lora_module,
    origin,
    parse_address,
    parse_cpus,
    parse_peers,
    parse_port,
    share,
    size,
    size_of_at_least,
    tokens,
    url,
)

# The policies of `cluster/routing/policies.py`; --routing takes `local` too, which needs none.
ROUTINGS = (
    *("auto", "rank-aware", "loraserve", "random", "round-robin", "first-fit", "most-idle", "dlora"),
    *("s-lora-random", "s-lora-contiguous"),
)
LORA_KERNELS = ("bgmv", "bgmv-padded")
_PADDED_RANK = 64  # rows that every module is stored with on a GPU with bgmv-padded
_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
_LOAD_FORMATS = {"safetensors": "auto", "hf": "auto"}
_FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_SIZE: dict[str, Any] = {"type": size, "metavar": "SIZE"}
_COUNT: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
_TOKENS: dict[str, Any] = {"type": tokens, "metavar": "TOKENS"}
_LIST: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
_KEYS = _LIST | {"type": key, "metavar": "KEY"}
_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction}


@dataclass(frozen=True, slots=True)
class LoadingMode:
    """What happens when a request's adapter is not on the device.

    A mode is a row of `LOADING_MODES`, and rules in `lora/start_policy.py` if none of the others' hold. All other parts
    ask what they need to know here, never for a mode's name.
    """

    name: str
    preloads: bool = False  # all adapters are on the device from the start, and stay there: none comes or goes later
    merges: bool = False  # adapters are merged into the base weights by turns
    stops_others: bool = False  # no iteration runs while an adapter is loading
    is_layerwise: bool = False  # a prefill may start before all layers of its adapter have arrived
    uses_workers: bool = False  # CPU workers compute layers that have not arrived
    chooses: bool = False  # for each request, by predicted times, whether to wait or to use CPU workers
    without_profile: str = ""  # the mode in its place where this machine is not profiled; empty: needs no profile

    @property
    def needs_profile(self) -> bool:
        """Whether it is predicted when a layer will be needed, by a profile of this machine."""
        return self.without_profile != ""


LOADING_MODES = {
    mode.name: mode
    for mode in (
        LoadingMode("cached", preloads=True),
        LoadingMode("merged", preloads=True, merges=True),
        LoadingMode("ondemand", stops_others=True),
        LoadingMode("overlapped"),
        LoadingMode("pipelined", is_layerwise=True, without_profile="overlapped"),
        LoadingMode("assisted", is_layerwise=True, uses_workers=True, without_profile="overlapped"),
        LoadingMode("auto", is_layerwise=True, uses_workers=True, chooses=True, without_profile="overlapped"),
    )
}
PRELOADED_MODES = tuple(name for name, mode in LOADING_MODES.items() if mode.preloads)
LAYERWISE_MODES = tuple(name for name, mode in LOADING_MODES.items() if mode.is_layerwise)


class _FromArgs:
    """Builds a config from parsed arguments."""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Returns a config with the arguments that have the names of its fields."""
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names})


@dataclass(frozen=True, slots=True)
class ModelConfig(_FromArgs):
    """The base model and the dtype of its weights."""

    model: Path | None
    served_model_name: Sequence[str]  # the first is shown; empty: the folder's name
    dtype: str
    load_format: str
    max_model_len: int | None
    chat_template: Path | None
    tool_call_parser: str | None
    exclude_tools_when_tool_choice_none: bool = False

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("model").add_argument
        add(
            "--model",
            type=Path,
            metavar="MODEL",
            help="Hugging Face model folder; may also come before all options, without --model (default: the demo)",
        )
        names = _LIST | {"metavar": "NAME"}
        add("--served-model-name", **names, help="names of the base model in the API; the first is listed")
        add(
            "--dtype",
            type=lambda text: _DTYPES.get(text, text),
            choices=("auto", "float32", "bfloat16", "float16"),
            default="auto",
            help="dtype of the base weights; auto: the checkpoint's",
        )
        add(
            "--load-format",
            type=lambda text: _LOAD_FORMATS.get(text, text),
            choices=("auto", "dummy"),
            default="auto",
            help="dummy: random weights; only config.json is read",
        )
        add(
            "--max-model-len", **_TOKENS, help="limit of prompt plus output, as 4k (default: the model's, at most 8192)"
        )
        add("--chat-template", **_FILE, help="Jinja template to use instead of the model's")
        add(
            "--tool-call-parser",
            choices=("hermes", "llama3_json", "llama4_json", "mistral", "qwen", "qwen25", "llama3"),
            help="how the model writes calls of tools (default: as its template); a template without tools gets text",
        )
        add("--exclude-tools-when-tool-choice-none", action="store_true", help="leave out tools if none may be called")


@dataclass(frozen=True, slots=True)
class LoraConfig(_FromArgs):
    """The adapters, where they may come from, and the memory of their caches (bytes)."""

    lora_modules: list[LoraModule]
    adapters_dir: Path | None
    registry: Path | None
    loading_mode: str
    lora_kernel: str
    lora_pool_bytes: int | None
    max_host_adapters_bytes: int
    lora_cpus: tuple[int, ...] | None
    emulate_link_mb_per_s: float | None
    profile: Path | None
    allow_runtime_lora_updating: bool
    allow_adapter_path: list[Path]
    max_lora_rank: int | None = None
    max_loras: int | None = None
    pipeline_groups: int | None = None
    tokens_per_cpu: int | None = None

    @property
    def mode(self) -> LoadingMode:
        """The loading mode of that name."""
        return LOADING_MODES[self.loading_mode]

    @property
    def takes_uploads(self) -> bool:
        """Whether clients may add and remove adapters over HTTP."""
        return self.allow_runtime_lora_updating and not self.mode.preloads

    @property
    def padded_rank(self) -> int | None:
        """Returns the rank at which a GPU stores every adapter, or None for each adapter's own rank."""
        return _PADDED_RANK if self.lora_kernel == "bgmv-padded" else None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("adapters").add_argument
        add(
            "--lora-modules",
            **_LIST | {"type": lora_module, "metavar": "NAME=PATH"},
            help="adapters to serve: PEFT folders by name, or vLLM's JSON form",
        )
        add(
            "--adapters-dir",
            **_FILE | {"metavar": "DIR"},
            help="serve each folder in DIR as an adapter of the same name, also those that come or change later",
        )
        add("--registry", **_FILE, help="SQLite file that stores the adapter registry")
        add(
            "--loading-mode",
            choices=tuple(LOADING_MODES),
            default="auto",
            help="how to load an adapter that a request needs and that is not on the device",
        )
        add(
            "--lora-kernel",
            choices=LORA_KERNELS,
            default="bgmv",
            help="bgmv-padded: compute adapters at the largest rank in a batch, as the papers' baseline does; a "
            f"GPU then takes ranks up to {_PADDED_RANK}",
        )
        add(
            "--lora-pool-bytes",
            **_SIZE,
            help="limit of device memory for adapters (default: 1GiB on a CPU; all that KV blocks leave free on a GPU)",
        )
        add("--max-host-adapters-bytes", **_SIZE, default=4 << 30, help="host memory for adapters (default: 4GiB)")
        add(
            "--lora-cpus",
            type=parse_cpus,
            metavar="LIST",
            help="cores for CPU LoRA workers, such as 1-3,6 (default: all but the first)",
        )
        add(
            "--tokens-per-cpu",
            **_TOKENS,
            help="most tokens of a prompt that one CPU LoRA worker computes (default: at the knee of its profile)",
        )
        add(
            "--emulate-link-mb-per-s",
            type=at_least(0.001, float),
            metavar="MB",
            help="limit loading to this bandwidth in MB/s, to compare loading modes on a CPU (default: no limit)",
        )
        add(
            "--pipeline-groups",
            **_COUNT,
            help="copy an adapter in N groups of layers, in layer-wise loading modes (default: by predicted times)",
        )
        add(
            "--profile",
            **_FILE,
            help="profile made by `caraserve profile` (default: measure a quick one at the first start)",
        )
        add(
            "--allow-runtime-lora-updating",
            **_SWITCH,
            default=False,
            help="let adapters be loaded, uploaded and unloaded over HTTP",
        )
        add(
            "--allow-adapter-path",
            **_FILE | {"metavar": "ROOT", "action": "append", "default": []},
            help="allow loading adapters from ROOT at run time, besides --adapters-dir; may be repeated",
        )
        add(
            "--max-lora-rank",
            **_COUNT | {"metavar": "RANK"},
            help="reject adapters of higher rank; reserves no memory (default: no limit)",
        )
        add(
            "--max-loras",
            **_COUNT,
            help="number of adapter slots to report to routers; a batch may mix more adapters (default: 1024)",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig(_FromArgs):
    """Batching and memory; None: the backend chooses."""

    device: str
    gpu_memory_utilization: float
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_queue: int
    kv_cache_bytes: int | None
    enable_prefix_caching: bool
    cpu_threads: int | None
    seed: int
    trace: Path | None
    enforce_eager: bool = False
    max_unread_bytes: int | None = None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("scheduling and memory").add_argument
        add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: use a GPU if there is one")
        add("--gpu-memory-utilization", type=share, default=0.9, metavar="SHARE", help="share of the GPU's memory")
        add("--max-num-seqs", **_COUNT, help="maximum requests in one iteration (default: 64, on a GPU 256)")
        add("--max-num-batched-tokens", **_TOKENS, help="maximum tokens in one iteration (default: 256, on a GPU 2048)")
        add("--max-queue", **_COUNT, default=4096, help="maximum waiting requests; above it, answer 429")
        add(
            "--kv-cache-bytes",
            **_SIZE,
            help="memory for the KV cache; on a GPU it holds adapters too (default: 30 %% of the free memory, at most "
            "8GiB; on a GPU what --gpu-memory-utilization leaves beside the weights)",
        )
        add("--enable-prefix-caching", **_SWITCH, default=True, help="reuse KV blocks of equal prompt prefixes")
        add("--cpu-threads", **_COUNT, help="compute threads (default: one less than the cores, but both of two)")
        add("--seed", type=int, default=0, help="seed of requests without one, and of dummy weights")
        add("--enforce-eager", **_SWITCH, default=False, help="on a GPU: launch kernels one by one, without graphs")
        add(
            "--max-unread-bytes",
            **_SIZE | {"type": size_of_at_least(16 << 20)},  # a whole answer of 8192 tokens with 20 alternatives: 13 MB
            help="memory for answers that clients have not read yet, at least 16MiB; beyond it, slow readers' requests "
            "pause (default: 1/32 of the memory, 64MiB to 4GiB)",
        )
        add("--trace", **_FILE, help="write a Chrome trace, which Perfetto opens")


KEEP_ALIVE_S, LEAST_KEEP_ALIVE_S = 620.0, 20  # Google's load balancers keep connections for 600 s, instances for 15


@dataclass(frozen=True, slots=True)
class HttpConfig(_FromArgs):
    """Address, access, limits and log of the HTTP server."""

    host: str
    port: int
    api_key: Sequence[str]
    admin_key: Sequence[str]
    allowed_origins: Sequence[str]
    max_body_bytes: int
    max_connections: int
    drain_timeout_s: float
    log_format: str
    log_level: str
    keep_alive_timeout_s: float = KEEP_ALIVE_S
    log_requests: bool = True
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None
    api_key_file: Path | None = None
    otlp_traces_endpoint: str | None = None

    @property
    def needs_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_key or self.admin_key or self.api_key_file)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("HTTP").add_argument
        add("--host", default="127.0.0.1", help="address to listen on")
        add("--port", type=parse_port, default=8000, help="port to listen on; 0 picks a free one")
        add(
            "--api-key",
            **_KEYS,
            help="client keys; if any is set, all routes need a key but /health, /ready, /ping and the files of the "
            "web page, which hold no data",
        )
        add("--admin-key", **_KEYS, help="keys that may also load and unload adapters; if any is set, no other key may")
        add(
            "--api-key-file",
            **_FILE,
            help="more keys, by their SHA-256, each with its adapters, weight and rates (TOML or JSON); read again "
            "when the file changes and on SIGHUP",
        )
        add(
            "--allowed-origins",
            **_LIST | {"type": origin, "metavar": "ORIGIN"},
            help="web origins to allow (CORS), such as https://chat.example; * for all. Without keys, a server on a "
            "loopback address is also reached by the host names of these",
        )
        add(
            "--ssl-certfile",
            **_FILE,
            help="certificate, PEM; serve over TLS. Read again, as are key and CA, when it changes and on SIGHUP",
        )
        add("--ssl-keyfile", **_FILE, help="private key, PEM (default: in --ssl-certfile)")
        add("--ssl-ca-certs", **_FILE, help="CA, PEM; require a client certificate signed by it")
        add("--max-body-bytes", **_SIZE, default=16 << 20, help="answer 413 to larger request bodies (default: 16MiB)")
        add(
            "--max-connections",
            **_COUNT,
            default=4096,
            help="maximum open connections, 15/16 of them of one address; above, answer 503",
        )
        add(
            "--drain-timeout",
            dest="drain_timeout_s",
            type=at_least(0, float),
            default=30.0,
            metavar="SECONDS",
            help="time for running requests to end after SIGTERM",
        )
        add(
            "--keep-alive-timeout",
            dest="keep_alive_timeout_s",
            type=at_least(LEAST_KEEP_ALIVE_S, float),
            default=KEEP_ALIVE_S,
            metavar="SECONDS",
            help="time between two requests after which a connection is closed; make it longer than that of clients, "
            "proxies and load balancers, at least 20",
        )
        add("--log-format", choices=("human", "json"), default="human", help="format of log lines")
        add(
            "--log-level",
            type=str.lower,
            choices=("debug", "info", "warning", "error"),
            default="info",
            help="lowest level to log",
        )
        add(
            "--otlp-traces-endpoint",
            type=url,
            metavar="URL",
            help="send traces of requests to this OpenTelemetry collector, by OTLP over HTTP (default: no traces)",
        )
        add("--log-requests", **_SWITCH, default=True, help="log a line for each request but GETs, without its text")


@dataclass(frozen=True, slots=True)
class ClusterConfig(_FromArgs):
    """The other instances of the cluster, and how to route among them. No peers: this instance serves alone."""

    peers: tuple[str, ...]
    name: str | None
    advertise: str | None
    peer_host: str | None
    peer_port: int | None
    cluster_name: str
    cluster_secret_file: Path | None
    cluster_tls_cert: Path | None
    cluster_tls_key: Path | None
    cluster_tls_ca: Path | None
    routing: str | None
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    adapter_disk_bytes: int

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("cluster").add_argument
        add(
            "--peers",
            type=parse_peers,
            default=(),
            metavar="HOST:PORT,…",
            help="addresses of some other instances, or a DNS name of all; may include this one",
        )
        add("--name", help="unique name of this instance (default: its advertised address)")
        add(
            "--advertise",
            type=parse_address,
            metavar="HOST:PORT",
            help="address at which other instances reach this one, if it differs from the listening one",
        )
        add("--peer-port", type=parse_port, metavar="PORT", help="separate port for other instances")
        add("--peer-host", metavar="HOST", help="address of --peer-port (default: --host)")
        add("--cluster-name", default="caraserve", metavar="NAME", help="reject instances with another cluster name")
        add(
            "--cluster-secret-file",
            **_FILE,
            help="shared secrets, one per line: sign with the first, accept any; read again when the file changes. "
            "Required if other machines can connect, and with --api-key",
        )
        add("--cluster-tls-cert", **_FILE, help="certificate of --peer-port, PEM")
        add("--cluster-tls-key", **_FILE, help="private key of --peer-port, PEM")
        add("--cluster-tls-ca", **_FILE, help="CA, PEM; accept only instances with a certificate signed by it")
        add(
            "--routing",
            choices=(*ROUTINGS, "local"),
            help="policy that chooses the instance for a request (default: auto); local: the instance that gets it, "
            "for use behind a router",
        )
        add(
            "--adapter-disk-bytes",
            **_SIZE,
            default=64 << 30,
            help="disk space beside --registry for adapters downloaded from other instances (default: 64GiB); "
            "without --registry, at most 1GiB in the temporary folder",
        )
        add(
            "--slo-ttft-ms",
            type=at_least(1, float),
            metavar="MS",
            help="objective for the time to first token; limits how long a request may be routed (default: none)",
        )
        add(
            "--slo-tpot-ms",
            type=at_least(0.001, float),
            metavar="MS",
            help="objective for the time per output token; avoid instances that would miss it (default: none)",
        )
