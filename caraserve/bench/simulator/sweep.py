"""Many simulated runs: every policy at one size of fleet, and the smallest fleet that each needs.

Runs are spread over processes; each process has the workload from the one that forked it.
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
    """When a fleet is large enough."""

    attainment: float | None = None  # of time per token
    ttft_p95_ms: float | None = None

    def met(self, found: SimulationResult) -> bool:
        """Whether a run holds all that is set."""
        if self.attainment is not None and found.attainment < self.attainment:
            return False
        return self.ttft_p95_ms is None or found.ttft_p95_ms <= self.ttft_p95_ms


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """What is simulated: a workload on fleets of any size."""

    machines: tuple[Machine, ...]  # of its instances in turn
    instances: int
    setting: Setting  # its machines and routing are put in for each run
    goal: Goal | None = None
    most_instances: int = 128  # a goal not met by so many is not met


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy: at the study's size, and at every size tried for the goal."""

    at_size: SimulationResult
    tried: tuple[SimulationResult, ...] = ()
    needed: int | None = None  # instances; None: no goal, or not met


def base(study: SweepSpec, workload: Workload, slo_scale: float) -> SimulationResult:
    """The same requests without adapters, in turn to every instance. Its SLO is the study's: so many times its own mean
    time per token."""
    bare = Workload(tuple(replace(request, adapter=None) for request in workload.requests), ())
    sized = _sized(study, "round-robin", study.instances)
    machines = tuple(map(without_adapters, sized.machines))
    simulation = Simulation(replace(sized, machines=machines, routers=1), bare)
    simulation.run()
    mean_ms = summarize(simulation, "round-robin", inf).tpt_mean_ms
    return summarize(simulation, "round-robin", slo_scale * mean_ms)


def find(study: SweepSpec, workload: Workload, routing: str) -> PolicyResult:
    """One policy's runs, one after another."""
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
    """The least size that is enough, if more never are too few."""
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
    """Every policy, in the order given. The results do not depend on the number of processes."""
    if processes == 1:
        yield from (find(study, workload, routing) for routing in routings)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, _begin, (study, workload)) as pool:
        yield from pool.map(_find_here, routings)
