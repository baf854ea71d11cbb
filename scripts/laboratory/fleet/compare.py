"""Simulates a measured load, request for request, and sets the simulator's figures beside the measured ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.setting import ClusterSetting, SimulatedMachine, paper_machine, profiled_machine
from caraserve.bench.simulator.simulation import Simulation
from caraserve.bench.simulator.sweep import WARM_UP, FleetSpec, base
from caraserve.bench.workload.build import build
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.core.machine_profile import fit_times
from scripts.laboratory.fleet.instances import MAX_RUNNING
from scripts.laboratory.fleet.measure import (
    ADAPTERS,
    FIXED,
    RANKS,
    Calibration,
    FleetRun,
    Probe,
    ServedRequest,
    load_spec,
)

_STEP_TOKENS = 256  # of an iteration, the server's default on a CPU
_KV_TOKENS = 8738  # of 512 MiB
_RANKS = tuple(RANKS[number % len(RANKS)] for number in range(ADAPTERS))
_BASE_LOAD, _BASE_S, _SLO_SCALE = 0.6, 600.0, 1.5


@dataclass(frozen=True, slots=True)
class Figures:
    """What a load's users saw, without the first fifth of the time. TPT is end to end ÷ output tokens."""

    tpt_mean_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    attainment: float  # share of requests with a TPT within the SLO


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load, measured and simulated."""

    instances: int
    routing: str
    load: float
    rate: float
    requests: int  # that count
    cores_used: float
    slo_ms: float
    measured: Figures
    simulated: Figures
    by_profile: Figures  # simulated by the profiles alone, without what a server does beside its model


def machines(known: Calibration, instances: int, probes: Sequence[Probe]) -> list[SimulatedMachine]:
    """Returns the simulated machines of a fleet's instances by their profiles: all adapters are on their devices, and
    loads take no time. With `probes` each machine takes the time of its own server, whose event loop shares its core
    with the model; profiles are measured without one."""
    like = replace(
        paper_machine("unpadded"), max_running=MAX_RUNNING, max_step_tokens=_STEP_TOKENS, kv_tokens=_KV_TOKENS
    )
    each = [replace(profiled_machine(one, "measured", like), links=LinkSpeeds()) for one in known.profiles[:instances]]
    if not probes:
        return each
    alpha_ms = fmean(machine.model.alpha_ms for machine in each)
    return [_as_served(machine, alpha_ms, _of(number, probes)) for number, machine in enumerate(each)]


def _as_served(machine: SimulatedMachine, alpha_ms: float, probes: Sequence[Probe]) -> SimulatedMachine:
    """Returns a machine with the times of the server whose requests the probes have: decode times, with `alpha_ms` for
    each unit of rank, and prefill times in proportion to the profile's. What an idle server's TTFT has beyond the
    prefill is the time of the request.

    A few decoding requests cost little, because their products with the weights end before the weights are read. In an
    iteration with prompts they are like further tokens of the prompts, each of which takes its time."""
    model = machine.model
    gamma_ms, beta_ms = _served_decode(probes, alpha_ms)
    token_ms, first_ms = _served_prefill(probes)
    prefill_scale = token_ms / _prompt_token_ms(model)
    served = replace(
        model,
        alpha_ms=alpha_ms,
        gamma_ms=gamma_ms,
        beta_ms=beta_ms,
        prefill_base_ms=model.prefill_base_ms * prefill_scale,
        prefill_token_ms=model.prefill_token_ms * prefill_scale,
        prefill_token_rank_ms=model.prefill_token_rank_ms * prefill_scale,
    )
    request_ms = max(0.0, first_ms - served.prefill_base_ms)
    return replace(machine, model=served, request_ms=request_ms, beside_prompt_ms=served.prefill_token_ms)


def _of(instance: int, probes: Sequence[Probe]) -> list[Probe]:
    """Returns what one instance served of the probes."""
    return [Probe(1, tuple(one for one in batch.requests if one.instance == instance)) for batch in probes]


def _served_decode(probes: Sequence[Probe], alpha_ms: float) -> tuple[float, float]:
    """Returns `gamma_ms` and `beta_ms` of decoding in a server."""
    times_ms = [
        fmean(1000 * (one.done_s - one.first_s) / (one.output_tokens - 1) for one in batch.requests) for batch in probes
    ]
    ranks_ms = [alpha_ms * sum(map(rank_of, batch.requests)) for batch in probes]
    return _fit(_sizes(probes), times_ms, ranks_ms)


def _served_prefill(probes: Sequence[Probe]) -> tuple[float, float]:
    """Returns the time of a prompt token in a server, and what TTFT has beyond that on an idle one."""
    times_ms = [fmean(1000 * (one.first_s - one.sent_s) for one in batch.requests) for batch in probes]
    tokens = [size * batch.requests[0].prompt_tokens for size, batch in zip(_sizes(probes), probes, strict=True)]
    return _fit(tokens, times_ms, [0.0] * len(probes))


def _fit(sizes: Sequence[float], times_ms: Sequence[float], known_ms: Sequence[float]) -> tuple[float, float]:
    """Returns the slope and the constant of times over sizes, beside parts that are known. Errors are relative to the
    time, so that small batches, which are most of a load's, count as much as large ones."""
    ones = [1.0] * len(times_ms)
    columns = [[each / ms for each, ms in zip(column, times_ms, strict=True)] for column in (sizes, ones)]
    rest = [(ms - known) / ms for ms, known in zip(times_ms, known_ms, strict=True)]
    (slope, constant), _ = fit_times(columns, rest)
    return slope, constant


def _sizes(probes: Sequence[Probe]) -> list[float]:
    """Returns the requests of each batch."""
    return [float(len(batch.requests)) for batch in probes]


def _prompt_token_ms(model: PerfModel) -> float:
    """Returns the time of a prompt token by a profile, with the mean rank."""
    return model.prefill_token_ms + model.prefill_token_rank_ms * fmean(RANKS)


def rank_of(request: ServedRequest) -> int:
    """Returns the rank of a request's adapter."""
    return RANKS[request.adapter % len(RANKS)]


def slo_ms(known: Calibration) -> float:
    """Returns 1.5 times the mean time per token of such a load without adapters, simulated by the profile at 0.6 of the
    capacity."""
    rate = _BASE_LOAD * known.capacity_per_s
    fleet = FleetSpec(tuple(machines(known, 1, ())), 1, ClusterSetting((), "round-robin", inf))
    return base(fleet, build(load_spec(rate, seconds=_BASE_S)), _SLO_SCALE).slo_ms


def compare(run: FleetRun, known: Calibration, seeds: Sequence[int] = (0,)) -> Comparison:
    """Simulates the requests of a load at the times at which they were sent.

    A routing that draws at random is simulated once for each seed; figures are then means over all of them.
    """
    limit_ms = slo_ms(known)
    arrived_s = np.array([one.sent_s for one in run.requests])
    measured = _figures(
        arrived_s,
        np.array([one.first_s for one in run.requests]),
        np.array([one.done_s for one in run.requests]),
        np.array([one.output_tokens for one in run.requests]),
        limit_ms,
    )
    simulated, by_profile = (
        _mean([_simulated(run, machines(known, run.instances, probes), limit_ms, seed) for seed in seeds])
        for probes in (run.probes, ())
    )
    return Comparison(
        instances=run.instances,
        routing=run.routing,
        load=run.load,
        rate=run.rate,
        requests=int(_judged(arrived_s).sum()),
        cores_used=run.cores_used,
        slo_ms=limit_ms,
        measured=measured,
        simulated=simulated,
        by_profile=by_profile,
    )


def _mean(found: Sequence[Figures]) -> Figures:
    return Figures(*(fmean(getattr(one, name) for one in found) for name in Figures.__slots__))


def _simulated(run: FleetRun, every: Sequence[SimulatedMachine], limit_ms: float, seed: int) -> Figures:
    if run.routing == FIXED:  # each instance by itself
        parts = [
            _simulate([one for one in run.requests if one.instance == number], (machine,), "round-robin", inf, seed)
            for number, machine in enumerate(every)
        ]
        requests = np.concatenate(parts)
    else:
        requests = _simulate(run.requests, tuple(every), run.routing, limit_ms, seed)
    arrived_s, first_s, done_s = (requests[name] / (1000 * MS) for name in ("arrived", "first", "done"))
    return _figures(arrived_s, first_s, done_s, requests["output"], limit_ms)


def _simulate(
    served: Sequence[ServedRequest], every: tuple[SimulatedMachine, ...], routing: str, limit_ms: float, seed: int
) -> NDArray[np.void]:
    planned = tuple(
        PlannedRequest(index, one.sent_s, one.adapter, one.prompt_tokens, one.output_tokens)
        for index, one in enumerate(served)
    )
    setting = ClusterSetting(every, routing, limit_ms, copies=len(every), seed=seed)
    simulation = Simulation(setting, Workload(planned, _RANKS))
    simulation.run()
    return simulation.requests


def _judged(arrived_s: NDArray[np.float64]) -> NDArray[np.bool_]:
    return arrived_s >= WARM_UP * float(arrived_s.max())


def _figures(
    arrived_s: NDArray[np.float64],
    first_s: NDArray[np.float64],
    done_s: NDArray[np.float64],
    output: NDArray[np.int64],
    limit_ms: float,
) -> Figures:
    counts = _judged(arrived_s)
    tpt_ms = 1000 * ((done_s - arrived_s) / output)[counts]
    ttft_ms = 1000 * (first_s - arrived_s)[counts]
    return Figures(
        float(tpt_ms.mean()),
        float(np.median(ttft_ms)),
        float(np.percentile(ttft_ms, 95)),
        float((tpt_ms <= limit_ms).mean()),
    )
