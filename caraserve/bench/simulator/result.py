"""The result of a simulated run: the papers' measures, and how much was simulated.

`events` counts what a simulator that goes token by token would process: arrivals, deliveries, quotes, heartbeats,
loads, iterations of every instance, and every token. `steps` counts what this simulator processed: a run of equal
iterations is one step. So events per second measure the speed of a simulation, but not the code that it executed.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from caraserve.bench.simulator.instance import MS
from caraserve.bench.simulator.simulation import Simulation

WARM_UP = 0.2  # share of a run's time whose requests do not count
_CURVE = tuple(range(0, 101, 2))  # percentiles kept for drawing


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one run. Latencies in ms leave out the warm-up's requests; those of lost requests are infinite."""

    routing: str
    instances: int
    requests: int
    lost: int
    slo_ms: float
    attainment: float  # share of requests with a time per token within the SLO
    tpt_mean_ms: float  # end to end ÷ output tokens, as in the papers
    tpt_p99_ms: float
    tpt_curve_ms: tuple[float, ...]  # percentiles 0, 2, … 100
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    utilisation: float  # share of time that instances computed
    imbalance: float  # the busiest instance's tokens over the mean
    adapters_held_mean: float  # in the host tier, at the end
    adapters_held_max: int
    bytes_held_max: int
    fetches: int
    fetched_bytes: int
    hops: int
    quotes: int
    refusals: int
    migrations: int
    events: int
    steps: int
    digest: str  # of every request's times and instance: equal for equal runs


def summarize(simulation: Simulation, routing: str, slo_ms: float) -> SimulationResult:
    """Computes the result of a finished run."""
    nodes, counts = simulation.nodes, simulation.counts
    warm = WARM_UP * (simulation.requests[-1].arrived if simulation.requests else 0)
    judged = [one for one in simulation.requests if one.arrived >= warm]
    lost = np.array([one.done < 0 for one in judged], np.bool_)
    times = np.array([(one.arrived, one.first, one.done, one.output) for one in judged], np.float64)
    times = times.reshape(-1, 4)
    ttft_ms = np.where(lost, np.inf, (times[:, 1] - times[:, 0]) / MS)
    tpt_ms = np.where(lost, np.inf, (times[:, 2] - times[:, 0]) / MS / times[:, 3])
    several = ~lost & (times[:, 3] > 1)
    tpot_ms = (times[several, 2] - times[several, 1]) / MS / (times[several, 3] - 1)
    tokens = [node.batches.tokens for node in nodes]
    end = max((one.done for one in simulation.requests), default=0)
    iterations, loads = sum(node.batches.iterations for node in nodes), sum(node.cache.loads for node in nodes)
    looks = counts.arrivals + counts.deliveries + counts.quotes + counts.beats + loads
    return SimulationResult(
        routing=routing,
        instances=len(nodes),
        requests=len(judged),
        lost=int(lost.sum()),
        slo_ms=slo_ms,
        attainment=float((tpt_ms <= slo_ms).mean()) if judged else 0.0,
        tpt_mean_ms=_mean(tpt_ms),
        tpt_p99_ms=_percentile(tpt_ms, 99),
        tpt_curve_ms=tuple(_percentile(tpt_ms, level) for level in _CURVE),
        ttft_p50_ms=_percentile(ttft_ms, 50),
        ttft_p95_ms=_percentile(ttft_ms, 95),
        ttft_p99_ms=_percentile(ttft_ms, 99),
        tpot_mean_ms=_mean(tpot_ms),
        utilisation=sum(node.batches.busy_ns for node in nodes) / (len(nodes) * end) if end else 0.0,
        imbalance=max(tokens) * len(nodes) / sum(tokens) if sum(tokens) else 1.0,
        adapters_held_mean=sum(len(node.cache.host) for node in nodes) / len(nodes),
        adapters_held_max=max(len(node.cache.host) for node in nodes),
        bytes_held_max=max(node.cache.host_bytes for node in nodes),
        fetches=sum(node.cache.fetches for node in nodes),
        fetched_bytes=sum(node.cache.fetched_bytes for node in nodes),
        hops=counts.hops,
        quotes=counts.quotes,
        refusals=counts.refusals,
        migrations=counts.migrations,
        events=looks + iterations + sum(tokens),
        steps=looks + sum(node.batches.steps for node in nodes),
        digest=digest(simulation),
    )


def digest(simulation: Simulation) -> str:
    """Returns a SHA-256 of the times and the instance of every request."""
    content = hashlib.sha256()
    for request, place in zip(simulation.requests, simulation.served_by, strict=True):
        content.update(f"{request.index},{request.arrived},{request.first},{request.done},{place};".encode())
    return content.hexdigest()


def _mean(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> float:
    return float(values.mean()) if values.size else math.nan


def _percentile(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", level: float) -> float:
    # The next higher request's value: between a finite and an infinite one nothing can be interpolated.
    return float(np.percentile(values, level, method="higher")) if values.size else math.nan
