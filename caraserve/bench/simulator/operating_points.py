"""Profiles operating points as LoRAServe does (§IV-A): the load of one rank that one instance serves within the SLO."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from caraserve.bench.records import Workload
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.machines import SimulatedMachine
from caraserve.bench.simulator.setting import ClusterSetting
from caraserve.bench.simulator.simulation import Simulation
from caraserve.errors import ConfigError

_REQUESTS = 1000
_STEP = 1.25  # from one rate to the next, until the limit is between two
_HALVINGS = 5  # of the distance between them


def profiled_points(machine: SimulatedMachine, workload: Workload, ttft_ms: float) -> dict[int, float]:
    """Returns rank → tokens/s of answers of one instance whose 95th percentile of TTFT just meets `ttft_ms`.

    It serves the workload's first 1,000 requests, all for one adapter, in shorter or longer time. Raises ConfigError if
    they arrive all at once.
    """
    requests = workload.requests[:_REQUESTS]
    span_s = requests[-1].at_s if requests else 0.0
    if span_s <= 0:
        raise ConfigError("operating points are profiled at rising rates: the requests must not arrive all at once")
    tokens_per_s = sum(one.output_tokens for one in requests) / span_s

    def meets(rank: int, speed: float) -> bool:
        played = tuple(replace(one, at_s=one.at_s / speed, adapter=0) for one in requests)
        simulation = Simulation(ClusterSetting((machine,), "round-robin", inf), Workload(played, (rank,)))
        simulation.run()
        served = simulation.requests
        waited_ms = np.where(served["first"] < 0, inf, (served["first"] - served["arrived"]) / MS)
        return bool(np.percentile(waited_ms, 95, method="higher") <= ttft_ms)

    return {rank: tokens_per_s * _highest(partial(meets, rank)) for rank in sorted(set(workload.ranks))}


def _highest(meets: Callable[[float], bool]) -> float:
    """Returns the highest speed that meets the limit; between 1/1000 and 1000 times that of the workload."""
    low = high = 1.0
    while meets(high) and high < 1000:
        low, high = high, high * _STEP
    while not meets(low) and low > 1 / 1000:
        low, high = low / _STEP, low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
