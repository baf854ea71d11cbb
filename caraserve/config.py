"""Frozen settings, one class per owner; each declares its own command-line arguments once.

Flags are named as vLLM's where the meaning is the same. "auto" is resolved by the owner into a new object; nothing
ever writes a result back into a config.
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from caraserve.errors import ConfigError
from caraserve.util.endpoints import parse_address, parse_peers, parse_port
from caraserve.util.option_values import ADAPTER_NAME as ADAPTER_NAME
from caraserve.util.option_values import LoraModule, at_least, key, lora_module, origin, parse_cpus, share, size, tokens

LOADING_MODES = ("cached", "merged", "ondemand", "overlapped", "pipelined", "assisted", "auto")
ROUTINGS = (
    *("auto", "rank-aware", "loraserve", "random", "round-robin", "first-fit", "most-idle", "dlora"),
    *("s-lora-random", "s-lora-contiguous", "local"),
)
LORA_KERNELS = ("bgmv", "bgmv-padded")
_PADDED_RANK = 64  # rows that every module takes with bgmv-padded
_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
_LOAD_FORMATS = {"safetensors": "auto", "hf": "auto"}
DIGEST = re.compile(r"[0-9a-f]{64}")  # an adapter's identity: sha256 of its contents
PRELOADED_MODES = ("cached", "merged")  # all adapters are on the device from the start


class _FromArgs:
    """Builds a config from the parsed arguments of the same names."""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names})


@dataclass(frozen=True, slots=True)
class ModelConfig(_FromArgs):
    """Which base model, and how its weights are kept."""

    model: Path | None
    served_model_name: Sequence[str]  # the first is the one that is shown; none: the folder's name
    dtype: str
    load_format: str
    max_model_len: int | None
    chat_template: Path | None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("model")
        group.add_argument(
            "--model",
            type=Path,
            metavar="MODEL",
            help="Hugging Face model folder; may be written before all options, without --model (default: the demo)",
        )
        group.add_argument(
            "--served-model-name",
            nargs="+",
            action="extend",
            default=[],
            metavar="NAME",
            help="the base model's names in the API; the first is the one it is listed by",
        )
        group.add_argument(
            "--dtype",
            type=lambda text: _DTYPES.get(text, text),
            choices=("auto", "float32", "bfloat16", "float16"),
            default="auto",
            help="storage of the base weights; auto keeps the checkpoint's",
        )
        group.add_argument(
            "--load-format",
            type=lambda text: _LOAD_FORMATS.get(text, text),
            choices=("auto", "dummy"),
            default="auto",
            help="dummy: random weights from config.json alone",
        )
        group.add_argument(
            "--max-model-len", type=tokens, metavar="TOKENS", help="cap on prompt + output, as 4096 or 4k"
        )
        group.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja file used instead of the model's")


@dataclass(frozen=True, slots=True)
class LoraConfig(_FromArgs):
    """Which adapters, where they may come from, and how much memory their tiers get (bytes)."""

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

    @property
    def padded_rank(self) -> int | None:
        """The rank that the kernels compute for every adapter; None: each adapter's own."""
        return _PADDED_RANK if self.lora_kernel == "bgmv-padded" else None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("adapters")
        group.add_argument(
            "--lora-modules",
            nargs="+",
            action="extend",
            type=lora_module,
            default=[],
            metavar="NAME=PATH",
            help="PEFT folders to serve, or vLLM's JSON, one or a list",
        )
        group.add_argument(
            "--adapters-dir", type=Path, metavar="DIR", help="every folder in DIR is an adapter named after it"
        )
        group.add_argument("--registry", type=Path, metavar="FILE", help="SQLite file that remembers adapters")
        group.add_argument(
            "--loading-mode",
            choices=LOADING_MODES,
            default="auto",
            help="what happens when a request's adapter is not on the device",
        )
        group.add_argument(
            "--lora-kernel",
            choices=LORA_KERNELS,
            default="bgmv",
            help="bgmv-padded: every adapter costs as much as the largest, as in the literature's baseline; GPU only",
        )
        group.add_argument(
            "--lora-pool-bytes",
            type=size,
            metavar="SIZE",
            help="most device memory for adapters (default: 1GiB on the CPU; what KV blocks leave free on a GPU)",
        )
        group.add_argument(
            "--max-host-adapters-bytes",
            type=size,
            default=4 << 30,
            metavar="SIZE",
            help="host memory for adapters (default 4GiB)",
        )
        group.add_argument(
            "--lora-cpus",
            type=parse_cpus,
            metavar="LIST",
            help="cores of the CPU LoRA workers, such as 1-3,6 (default: all but the first)",
        )
        group.add_argument(
            "--emulate-link-mb-per-s",
            type=at_least(0.001, float),
            metavar="MB",
            help="slow loading down to this bandwidth, to compare loading modes on the CPU",
        )
        group.add_argument(
            "--profile", type=Path, metavar="FILE", help="made by `caraserve profile`; a quick one is made without it"
        )
        group.add_argument(
            "--allow-runtime-lora-updating",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter",
        )
        group.add_argument(
            "--allow-adapter-path",
            type=Path,
            action="append",
            default=[],
            metavar="ROOT",
            help="adapters may be loaded from ROOT at run time, besides --adapters-dir; may be given several times",
        )
        group.add_argument(
            "--max-lora-rank",
            type=at_least(1),
            metavar="RANK",
            help="refuse adapters of higher rank; nothing is reserved for it (default: none is refused)",
        )
        group.add_argument(
            "--max-loras",
            type=at_least(1),
            metavar="N",
            help="adapters that routers are told there is room for; a batch may mix more (default: 1024)",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig(_FromArgs):
    """Batching and memory; None means that the backend chooses."""

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

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("scheduling and memory")
        group.add_argument(
            "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if there is one"
        )
        group.add_argument(
            "--gpu-memory-utilization",
            type=share,
            default=0.9,
            metavar="SHARE",
            help="of the GPU's memory, that may be used",
        )
        group.add_argument(
            "--max-num-seqs", type=at_least(1), help="requests in one iteration (default 64, on a GPU 256)"
        )
        group.add_argument("--max-num-batched-tokens", type=at_least(1), help="tokens in one iteration")
        group.add_argument("--max-queue", type=at_least(1), default=4096, help="waiting requests before 429")
        group.add_argument(
            "--kv-cache-bytes",
            type=size,
            metavar="SIZE",
            help="memory for the KV cache; on a GPU, for adapters as well",
        )
        group.add_argument(
            "--enable-prefix-caching",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="reuse KV of equal prompt beginnings",
        )
        group.add_argument("--cpu-threads", type=at_least(1), help="compute threads (default: every core but one)")
        group.add_argument("--seed", type=int, default=0, help="for requests that give none, and for dummy weights")
        group.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, to be opened in Perfetto")


@dataclass(frozen=True, slots=True)
class HttpConfig(_FromArgs):
    """Where to listen and what to accept."""

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
    log_requests: bool = True
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that lets a client in; none: the server needs no key."""
        return (*self.api_key, *self.admin_key)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("HTTP")
        group.add_argument("--host", default="127.0.0.1", help="address to listen on")
        group.add_argument("--port", type=parse_port, default=8000, help="port to listen on; 0 picks a free one")
        group.add_argument(
            "--api-key",
            nargs="+",
            action="extend",
            type=key,
            default=[],
            metavar="KEY",
            help="keys of clients; with any key, all but /health, /ready and /ping needs one",
        )
        group.add_argument(
            "--admin-key",
            nargs="+",
            action="extend",
            type=key,
            default=[],
            metavar="KEY",
            help="keys that may load and unload adapters besides; with any key, no other may",
        )
        group.add_argument(
            "--allowed-origins",
            nargs="+",
            action="extend",
            type=origin,
            default=[],
            metavar="ORIGIN",
            help="web pages that may use this server (CORS), such as https://chat.example; * for all",
        )
        group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="PEM; clients then speak TLS")
        group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="PEM (default: in --ssl-certfile)")
        group.add_argument("--ssl-ca-certs", type=Path, metavar="FILE", help="PEM; clients must show what it signed")
        group.add_argument("--max-body-bytes", type=size, default=16 << 20, metavar="SIZE", help="larger bodies: 413")
        group.add_argument(
            "--max-connections", type=at_least(1), default=4096, metavar="N", help="open connections before 503"
        )
        group.add_argument(
            "--drain-timeout",
            dest="drain_timeout_s",
            type=at_least(0, float),
            default=30.0,
            metavar="SECONDS",
            help="time that running requests get after SIGTERM",
        )
        group.add_argument("--log-format", choices=("human", "json"), default="human", help="log lines")
        group.add_argument(
            "--log-level",
            type=str.lower,
            choices=("debug", "info", "warning", "error"),
            default="info",
            help="the least severe log lines",
        )
        group.add_argument(
            "--log-requests",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="a line in the log for each request when it ends, without its text",
        )


@dataclass(frozen=True, slots=True)
class ClusterConfig(_FromArgs):
    """Which other instances this one serves with. No peers: it serves alone."""

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
        group = parser.add_argument_group("cluster")
        group.add_argument(
            "--peers",
            type=parse_peers,
            default=(),
            metavar="HOST:PORT,…",
            help="some of the other instances, or a DNS name of all; this one may be among them",
        )
        group.add_argument("--name", help="this instance's name, one of its own (default: where others reach it)")
        group.add_argument(
            "--advertise",
            type=parse_address,
            metavar="HOST:PORT",
            help="where others reach this one, if not where it listens",
        )
        group.add_argument("--peer-port", type=parse_port, metavar="PORT", help="a port of its own for other instances")
        group.add_argument("--peer-host", metavar="HOST", help="address of --peer-port (default: --host)")
        group.add_argument(
            "--cluster-name", default="caraserve", metavar="NAME", help="instances with another one are refused"
        )
        group.add_argument(
            "--cluster-secret-file",
            type=Path,
            metavar="FILE",
            help="secrets that instances know each other by, one to a line: the first signs, all verify; read again "
            "when it changes. Needed where others than this machine's processes can connect, and with --api-key",
        )
        group.add_argument("--cluster-tls-cert", type=Path, metavar="FILE", help="PEM, for --peer-port")
        group.add_argument("--cluster-tls-key", type=Path, metavar="FILE", help="PEM")
        group.add_argument("--cluster-tls-ca", type=Path, metavar="FILE", help="PEM; what it signs may connect")
        group.add_argument(
            "--routing",
            choices=ROUTINGS,
            help="which instance answers a request, by whose rule (default: auto); local: the one that gets it, for "
            "instances behind a router that chooses among them",
        )
        group.add_argument(
            "--adapter-disk-bytes",
            type=size,
            default=64 << 30,
            metavar="SIZE",
            help="disk, beside --registry, for adapters fetched from other instances (default 64GiB); without "
            "--registry at most 1GiB, where temporary files are",
        )
        group.add_argument(
            "--slo-ttft-ms",
            type=at_least(1, float),
            metavar="MS",
            help="time to the first token to promise: how long a request may look for an instance (default: none)",
        )
        group.add_argument(
            "--slo-tpot-ms",
            type=at_least(0.001, float),
            metavar="MS",
            help="time per token to promise: where it would be missed, requests go elsewhere (default: none)",
        )


def check_adapter_name(name: str, base: str) -> None:
    """Raises ConfigError when `name` cannot name an adapter beside the base model `base`."""
    if not ADAPTER_NAME.fullmatch(name):
        raise ConfigError(f"adapter name {name[:80]!r}: use letters, digits and . _ : - (128 at most)")
    if name == base:
        raise ConfigError(f"adapter name {name!r} is the base model's own name")
