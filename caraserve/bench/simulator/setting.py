"""The parameters of a simulated cluster, and the times, memory sizes and limits of its instances.

`profiled_machine` takes all times from a measured profile; `paper_machine` from papers. Decode and prefill are from
Toppings: the two batches of Fig. 6 (24 requests of rank 32 and 16 of rank 64 take 34.8 and 35.8 ms with BGMV, 35.3 and
35.9 ms with MBGMV), and prefills of 256 and 1,000 tokens in 44 and 90 ms. The effect of the rank on a prefill is from
LoRAServe: 2,000 tokens take 2.7 times as long with rank 128 as with rank 8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import Kernel, PerfModel
from caraserve.core.machine_profile import Profile

PaperKernel = Literal["padded", "unpadded"]
_DECODE = {"padded": ((768, 34.8), (1024, 35.8)), "unpadded": ((768, 35.3), (1024, 35.9))}
_PREFILL = ((256, 44.0), (1000, 90.0))
_RANK_8_TO_128 = 2.7
_RANK_BYTES = 100 * 2**20 // 64  # Toppings: an adapter of rank 64 on q, k and v of a 7B model has about 100 MiB


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """The performance model, link speeds and limits of one instance."""

    model: PerfModel
    links: LinkSpeeds
    max_running: int = 256
    max_step_tokens: int = 2048
    max_queue: int = 1024
    kv_tokens: int = 100_000
    device_adapter_bytes: int = 20 * 2**30
    host_adapter_bytes: int = 512 * 2**30
    rank_bytes: int = _RANK_BYTES
    request_ms: float = 0.0  # from a request's arrival until an iteration can take it, loads apart
    beside_prompt_ms: float = 0.0  # that a decoding request takes longer in an iteration with prompts than without
    launches_ahead: int = 1  # iterations launched before the current one has ended; new requests join after them


def paper_machine(kernel: PaperKernel, *, pads_prompts: bool = False) -> SimulatedMachine:
    """Returns an A100 with Llama-2-7B, as the papers measured it. `pads_prompts`: a prompt costs what the largest rank
    among those of its iteration does, as LoRAServe has it (Fig. 1 and 3).

    Loads from the host take no time, as CPU-assisted prefill hides them; downloads from other instances have 25 Gbit/s.
    """
    (x, x_ms), (y, y_ms) = _DECODE[kernel]
    alpha_ms = (y_ms - x_ms) / (y - x)
    (short, short_ms), (long, long_ms) = _PREFILL
    token_ms = (long_ms - short_ms) / (long - short)
    base_ms = short_ms - short * token_ms
    tokens = 2000
    rank_8_ms = base_ms + tokens * token_ms  # assumes that Toppings measured prefill with a small rank
    token_rank_ms = (_RANK_8_TO_128 - 1) * rank_8_ms / (tokens * (128 - 8))
    by_rank_ms = (0.0, token_rank_ms) if pads_prompts else (token_rank_ms, 0.0)
    model = PerfModel(alpha_ms, 0.0, x_ms - alpha_ms * x, kernel == "padded", base_ms, token_ms, *by_rank_ms)
    return SimulatedMachine(model, LinkSpeeds(disk_bytes_per_ms=2e6, fetch_latency_ms=1.0, fetch_bytes_per_ms=3.1e6))


def profiled_machine(profile: Profile, kernel: Kernel, like: SimulatedMachine) -> SimulatedMachine:
    """Returns a machine with the times of a measured profile, and the memory and limits of `like`."""
    links = replace(
        like.links, load_latency_ms=profile.link_latency_ms, load_bytes_per_ms=profile.link_bytes_per_s / 1000
    )
    return replace(like, model=PerfModel.of(profile, kernel), links=links)


def without_adapters(machine: SimulatedMachine) -> SimulatedMachine:
    """Returns the same machine with adapters that cost nothing, for the base run of which an SLO is a multiple."""
    model = replace(machine.model, alpha_ms=0.0, prefill_token_rank_ms=0.0, prefill_token_rank_max_ms=0.0)
    return replace(machine, model=model, links=LinkSpeeds(), device_adapter_bytes=1 << 62, host_adapter_bytes=1 << 62)


Scheduler = Literal["gossip", "central"]
"""`gossip`: instances that clients send to route by what heartbeats and quotes say, as in this project. `central`: one
scheduler, as the papers assume, knows the exact state of every instance, asks none, and sends without delay."""


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """A cluster and its parameters."""

    machines: tuple[SimulatedMachine, ...]
    routing: str
    slo_ms: float  # time per token
    ttft_ms: float = 10_000.0
    scheduler: Scheduler = "gossip"
    routers: int | None = None  # number of instances that clients send requests to; None: all
    copies: int | None = None  # of each adapter at first, under routings without plans; None: 2, all if central
    beat_ms: float = 250.0
    beat_jitter: float = 0.1  # share of the period
    gossip_ms: float = 2.0
    quote_ms: float = 0.5  # round trip of a quote
    hop_ms: float = 0.6
    first_plan_s: float = 10.0
    plan_s: float = 60.0  # LoRAServe's time step
    rebalance_s: float = 1.0
    operating_points: Mapping[int, float] | None = None  # rank → tokens/s, of the first machine; None: by formula
    move_bytes_per_s: float = 500e6  # at which each instance fetches adapters that a plan assigns to it
    seed: int = 0
