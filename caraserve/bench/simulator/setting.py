"""The parameters of a simulated cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from caraserve.bench.simulator.machines import SimulatedMachine

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
