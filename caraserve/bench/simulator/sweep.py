"""Simulates routing policies on fleets of several sizes under several rates, and finds the least fleet each needs.

`simulate` yields a `FleetResult` for each rate and size; figures and the command line call it. Policies are spread
over processes, which inherit the workload by fork. A run's result has the papers' measures, and how much was
simulated: `events` counts what a simulator that goes token by token would process (arrivals, deliveries, quotes,
heartbeats, loads, iterations of every instance, and every token), `steps` what this simulator processed, in which a
run of equal iterations is one step. So events per second measure the speed of a simulation, but not the code that it
executed.
"""

import hashlib
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.options import with_rate
from caraserve.bench.records import Workload
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.setting import ClusterSetting, SimulatedMachine, without_adapters
from caraserve.bench.simulator.simulation import Simulation
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.errors import ConfigError

WARM_UP = 0.2  # share of a run's time whose requests do not count
_CURVE = tuple(range(0, 101, 2))  # percentiles kept for drawing


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """What one instance did in a run. Percentiles are of the requests that it answered, without the warm-up's; NaN
    without any."""

    requests: int
    ttft_p95_ms: float
    queued_p95_ms: float  # from arrival to the start of the prefill, loading included
    prefill_p95_ms: float
    utilisation: float
    adapters_held: int  # in the host tier, at the end
    adapters_most: int  # at any time


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
    by_instance: tuple[InstanceResult, ...]
    digest: str  # of every request's times and instance: equal for equal runs


def summarize(simulation: Simulation, routing: str, slo_ms: float) -> SimulationResult:
    """Computes the result of a finished run."""
    counts, nodes = simulation.fleet.counts[0], simulation.fleet.batches.instances
    requests = simulation.requests
    judged = requests[requests["arrived"] >= WARM_UP * requests["arrived"].max(initial=0)]
    lost, output = judged["done"] < 0, judged["output"]
    ttft_ms = np.where(lost, np.inf, (judged["first"] - judged["arrived"]) / MS)
    tpt_ms = np.where(lost, np.inf, (judged["done"] - judged["arrived"]) / MS / output)
    several = ~lost & (output > 1)
    tpot_ms = (judged["done"] - judged["first"])[several] / MS / (output[several] - 1)
    tokens, end = nodes["tokens"], requests["done"].max(initial=0)
    answered = judged[~lost]
    answered = answered[np.argsort(answered["place"], kind="stable")]
    by_place = np.split(answered, np.searchsorted(answered["place"], np.arange(1, len(nodes))))
    looks = int(counts["arrivals"] + counts["deliveries"] + counts["quotes"] + counts["beats"] + nodes["loads"].sum())
    return SimulationResult(
        routing=routing,
        instances=len(nodes),
        requests=len(judged),
        lost=int(lost.sum()),
        slo_ms=slo_ms,
        attainment=float((tpt_ms <= slo_ms).mean()) if len(judged) else 0.0,
        tpt_mean_ms=_mean(tpt_ms),
        tpt_p99_ms=_percentile(tpt_ms, 99),
        tpt_curve_ms=_percentiles(tpt_ms, _CURVE),
        ttft_p50_ms=_percentile(ttft_ms, 50),
        ttft_p95_ms=_percentile(ttft_ms, 95),
        ttft_p99_ms=_percentile(ttft_ms, 99),
        tpot_mean_ms=_mean(tpot_ms),
        utilisation=float(nodes["busy_ns"].sum() / (len(nodes) * end)) if end else 0.0,
        imbalance=float(tokens.max() * len(nodes) / tokens.sum()) if tokens.any() else 1.0,
        adapters_held_mean=float(nodes["host_adapters"].mean()),
        adapters_held_max=int(nodes["host_adapters"].max()),
        bytes_held_max=int(nodes["host_bytes"].max()),
        fetches=int(nodes["fetches"].sum()),
        fetched_bytes=int(nodes["fetched_bytes"].sum()),
        hops=int(counts["hops"]),
        quotes=int(counts["quotes"]),
        refusals=int(counts["refusals"]),
        migrations=int(counts["migrations"]),
        events=looks + int(nodes["iterations"].sum() + tokens.sum()),
        steps=looks + int(nodes["steps"].sum()),
        by_instance=tuple(_instance_result(mine, one, int(end)) for mine, one in zip(by_place, nodes, strict=True)),
        digest=digest(simulation),
    )


def _instance_result(answered: NDArray[np.void], one: np.void, end: int) -> InstanceResult:
    return InstanceResult(
        requests=len(answered),
        ttft_p95_ms=_percentile((answered["first"] - answered["arrived"]) / MS, 95),
        queued_p95_ms=_percentile((answered["admitted"] - answered["arrived"]) / MS, 95),
        prefill_p95_ms=_percentile((answered["first"] - answered["admitted"]) / MS, 95),
        utilisation=float(one["busy_ns"] / end) if end else 0.0,
        adapters_held=int(one["host_adapters"]),
        adapters_most=int(one["most_host_adapters"]),
    )


def digest(simulation: Simulation) -> str:
    """Returns a SHA-256 of the times and the instance of every request."""
    content = hashlib.sha256()
    for name in ("arrived", "first", "done", "place"):
        content.update(np.ascontiguousarray(simulation.requests[name]).astype("<i8").tobytes())
    return content.hexdigest()


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else math.nan


def _percentile(values: NDArray[np.float64], level: float) -> float:
    return _percentiles(values, (level,))[0]


def _percentiles(values: NDArray[np.float64], levels: Sequence[float]) -> tuple[float, ...]:
    # The next higher request's value: between a finite and an infinite one nothing can be interpolated.
    if not values.size:
        return (math.nan,) * len(levels)
    return tuple(np.percentile(values, levels, method="higher").tolist())


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
class FleetSpec:
    """A fleet to simulate, and what it has to meet."""

    machines: tuple[SimulatedMachine, ...]  # instance i is machines[i % len(machines)]
    instances: int
    setting: ClusterSetting  # its machines, routing and SLO are replaced in each run
    goal: Goal | None = None
    profiles_points: bool = False  # plans use profiled operating points, not those of the formula
    most_instances: int = 128  # limit of the search for the least number


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The results of one policy at the fleet's size, and at every size tried for the goal."""

    at_size: SimulationResult
    tried: tuple[SimulationResult, ...] = ()
    needed: int | None = None  # instances; None: no goal, or not met


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The results of all policies on a fleet of one size under one rate."""

    rate: float  # requests/s
    instances: int
    requests: int
    slo_ms: float  # time per token
    base: SimulationResult  # the same requests without adapters
    policies: tuple[PolicyResult, ...]
    notes: tuple[str, ...]  # the load's assumptions and changes


def simulate(
    fleet: FleetSpec,
    load: WorkloadSpec,
    routings: Sequence[str],
    *,
    rates: Sequence[float] = (),
    sizes: Sequence[int] = (),
    slo_scale: float = 1.5,
    processes: int = 1,
) -> Iterator[FleetResult]:
    """Simulates every routing at every rate and size, one result for each rate and size in this order.

    No rates: the load's own. No sizes: the fleet's. The SLO is `slo_scale` times the mean time per token of the same
    requests without adapters.
    """
    for rate in rates or (None,):
        asked = load if rate is None else with_rate(load, rate)
        workload = build(asked)
        for instances in sizes or (fleet.instances,):
            sized = replace(fleet, instances=instances)
            bare = base(sized, workload, slo_scale)
            points = fleet.setting.operating_points
            if fleet.profiles_points:
                points = profiled_points(fleet.machines[0], workload, fleet.setting.ttft_ms)
            setting = replace(sized.setting, slo_ms=bare.slo_ms, operating_points=points)
            sized = replace(sized, setting=setting)
            found = find_all(sized, workload, routings, min(processes, len(routings)))
            yield FleetResult(
                rate=asked.arrivals.rate(asked.rate) * asked.scale.rate,
                instances=instances,
                requests=len(workload.requests),
                slo_ms=bare.slo_ms,
                base=bare,
                policies=tuple(found),
                notes=workload.notes,
            )


def base(fleet: FleetSpec, workload: Workload, slo_scale: float) -> SimulationResult:
    """Simulates the same requests without adapters, round-robin over all instances.

    The result's SLO, which all policies have, is `slo_scale` times the mean time per token of this run.
    """
    bare = Workload(tuple(replace(request, adapter=None) for request in workload.requests), ())
    sized = _sized(fleet, "round-robin", fleet.instances)
    machines = tuple(map(without_adapters, sized.machines))
    simulation = Simulation(replace(sized, machines=machines, routers=1), bare)
    simulation.run()
    mean_ms = summarize(simulation, "round-robin", inf).tpt_mean_ms
    return summarize(simulation, "round-robin", slo_scale * mean_ms)


def find(fleet: FleetSpec, workload: Workload, routing: str) -> PolicyResult:
    """Simulates one policy at the fleet's size, and at other sizes until the least that meets the goal is found."""
    at_size = _run(_sized(fleet, routing, fleet.instances), workload)
    if fleet.goal is None:
        return PolicyResult(at_size)
    tried = {fleet.instances: at_size}

    def enough(count: int) -> bool:
        if count not in tried:
            tried[count] = _run(_sized(fleet, routing, count), workload)
        assert fleet.goal is not None
        return fleet.goal.met(tried[count])

    needed = _least(enough, fleet.instances, fleet.most_instances)
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


def _sized(fleet: FleetSpec, routing: str, instances: int) -> ClusterSetting:
    machines = tuple(fleet.machines[number % len(fleet.machines)] for number in range(instances))
    return replace(fleet.setting, machines=machines, routing=routing)


def _run(setting: ClusterSetting, workload: Workload) -> SimulationResult:
    simulation = Simulation(setting, workload)
    simulation.run()
    return summarize(simulation, setting.routing, setting.slo_ms)


_of_this_process: list[tuple[FleetSpec, Workload]] = []


def _begin(fleet: FleetSpec, workload: Workload) -> None:
    _of_this_process[:] = [(fleet, workload)]


def _find_here(routing: str) -> PolicyResult:
    return find(*_of_this_process[0], routing)


def find_all(fleet: FleetSpec, workload: Workload, routings: Sequence[str], processes: int) -> Iterator[PolicyResult]:
    """Yields the result of every policy, in the order given, whatever the number of processes."""
    if processes == 1:
        yield from (find(fleet, workload, routing) for routing in routings)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, _begin, (fleet, workload)) as pool:
        yield from pool.map(_find_here, routings)


# --- operating points ---

# Profiled as LoRAServe does (§IV-A): the load of one rank that one instance serves within the SLO.


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
