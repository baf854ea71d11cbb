"""Simulates every routing policy at one cluster size, and finds the smallest cluster that each policy needs.

Policies are spread over processes, which inherit the workload by fork.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import inf

from caraserve.bench.records import Workload
from caraserve.bench.simulator.machines import Machine, without_adapters
from caraserve.bench.simulator.result import SimulationResult, summarize
from caraserve.bench.simulator.simulation import Setting, Simulation


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
