"""Simulates every routing policy at one cluster size, and finds the smallest cluster that each policy needs.

Policies are spread over processes, which inherit the workload by fork. A run's result has the papers' measures, and how
much was simulated: `events` counts what a simulator that goes token by token would process (arrivals, deliveries,
quotes, heartbeats, loads, iterations of every instance, and every token), `steps` what this simulator processed, in
which a run of equal iterations is one step. So events per second measure the speed of a simulation, but not the code
that it executed.
"""

import hashlib
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.records import Workload
from caraserve.bench.simulator.instance import MS
from caraserve.bench.simulator.machines import Machine, without_adapters
from caraserve.bench.simulator.simulation import Setting, Simulation

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


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else math.nan


def _percentile(values: NDArray[np.float64], level: float) -> float:
    # The next higher request's value: between a finite and an infinite one nothing can be interpolated.
    return float(np.percentile(values, level, method="higher")) if values.size else math.nan


@dataclass(frozen=True, slots=True)
class Goal:
    """The condition under which a cluster is large enough; None: no limit."""

    attainment: float | None = None  # least share of requests with a time per token within the SLO
    ttft_p95_ms: float | None = None

    def met(self, found: SimulationResult) -> bool:
        """Returns True if the run satisfies all limits that are set."""
        if self.attainment is not None and found.attainment < self.attainment:
            return False
        return self.ttft_p95_ms is None or found.ttft_p95_ms <= self.ttft_p95_ms


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """The parameters of a sweep."""

    machines: tuple[Machine, ...]  # instance i is machines[i % len(machines)]
    instances: int
    setting: Setting  # its machines and routing are replaced in each run
    goal: Goal | None = None
    most_instances: int = 128  # limit of the search for the least number


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The results of one policy at the sweep's size, and at every size tried for the goal."""

    at_size: SimulationResult
    tried: tuple[SimulationResult, ...] = ()
    needed: int | None = None  # instances; None: no goal, or not met


def base(study: SweepSpec, workload: Workload, slo_scale: float) -> SimulationResult:
    """Simulates the same requests without adapters, round-robin over all instances.

    The result's SLO, which the sweep uses, is `slo_scale` times the mean time per token of this run.
    """
    bare = Workload(tuple(replace(request, adapter=None) for request in workload.requests), ())
    sized = _sized(study, "round-robin", study.instances)
    machines = tuple(map(without_adapters, sized.machines))
    simulation = Simulation(replace(sized, machines=machines, routers=1), bare)
    simulation.run()
    mean_ms = summarize(simulation, "round-robin", inf).tpt_mean_ms
    return summarize(simulation, "round-robin", slo_scale * mean_ms)


def find(study: SweepSpec, workload: Workload, routing: str) -> PolicyResult:
    """Simulates one policy at the sweep's size, and at other sizes until the least that meets the goal is found."""
    at_size = _run(_sized(study, routing, study.instances), workload)
    if study.goal is None:
        return PolicyResult(at_size)
    tried = {study.instances: at_size}

    def enough(count: int) -> bool:
        if count not in tried:
            tried[count] = _run(_sized(study, routing, count), workload)
        assert study.goal is not None
        return study.goal.met(tried[count])

    needed = _least(enough, study.instances, study.most_instances)
    return PolicyResult(at_size, tuple(tried[count] for count in sorted(tried)), needed)


def _least(enough: Callable[[int], bool], start: int, most: int) -> int | None:
    """Returns the least size that is enough, or None if `most` is not; assumes that larger sizes are enough too."""
    low, high = 0, start  # `low` is not enough
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(most, high + max(1, high // 2))
    while high - low > 1:
        middle = max(low + 1, high * 3 // 4) if low == 0 else (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _sized(study: SweepSpec, routing: str, instances: int) -> Setting:
    machines = tuple(study.machines[number % len(study.machines)] for number in range(instances))
    return replace(study.setting, machines=machines, routing=routing)


def _run(setting: Setting, workload: Workload) -> SimulationResult:
    simulation = Simulation(setting, workload)
    simulation.run()
    return summarize(simulation, setting.routing, setting.slo_ms)


_of_this_process: list[tuple[SweepSpec, Workload]] = []


def _begin(study: SweepSpec, workload: Workload) -> None:
    _of_this_process[:] = [(study, workload)]


def _find_here(routing: str) -> PolicyResult:
    return find(*_of_this_process[0], routing)


def find_all(study: SweepSpec, workload: Workload, routings: Sequence[str], processes: int) -> Iterator[PolicyResult]:
    """Yields the result of every policy, in the order given, whatever the number of processes."""
    if processes == 1:
        yield from (find(study, workload, routing) for routing in routings)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, _begin, (study, workload)) as pool:
        yield from pool.map(_find_here, routings)
