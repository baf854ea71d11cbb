"""Measures a machine's capacity, chooses a rate that compares with a paper's, and finds a run's latency limits.

The same rate loads different machines differently. Toppings' A100 was busy for 46 to 81 % of the time at the highest
rate of its settings (9 requests per second, section 7.2). So a setting's highest rate is assumed to be 0.65 of its
machine's capacity, and lower rates in proportion. The capacity of this machine is measured: requests per second in a
closed loop with all adapters on the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from caraserve.bench.client.endpoint import Endpoint
from caraserve.bench.records import Run, Workload
from caraserve.bench.report.summary import SloLimits, parse_slo
from caraserve.bench.runner import BenchmarkRunner
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import WorkloadSpec
from caraserve.bench.workload.presets import Preset, find_preset, load_presets
from caraserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Objective:
    """The latency limits of a run: fixed ones (`slo`), or `scale` times the latencies of a run without adapters."""

    slo: SloLimits | None = None
    scale: float | None = None
    note: str | None = None


def objective(slo: str | None, slo_scale: float | None, preset: str | None) -> Objective:
    """Returns the limits of --slo or --slo-scale, else the preset's, else none. Raises ConfigError for invalid ones."""
    if slo is not None:
        return Objective(slo=parse_slo(slo))
    if slo_scale is not None:
        return Objective(scale=slo_scale)
    theirs = find_preset(preset).slo if preset is not None else None
    if theirs is None:
        return Objective()
    metric, _, limit = theirs.partition(":")
    if limit.endswith("x"):
        return Objective(
            scale=float(limit[:-1]), note=f"The setting's objective: {metric.upper()} at most {limit} of a base run's."
        )
    share, dash, name = metric.rpartition("-")
    limit_s = float(limit.removesuffix("s"))
    met_by = f"{share.removeprefix('p')} % of requests with" if dash else "every request with"
    return Objective(
        slo=parse_slo(f"{name}:{1000 * limit_s:g}"),
        note=f"The setting's objective: {met_by} {name.upper()} at most {limit_s:g} s.",
    )


SHARE_OF_HIGHEST_RATE = 0.65
CONCURRENCY = 32
PROBE_REQUESTS = 4 * CONCURRENCY  # four generations, of which the first and the last do not count


def share_of_capacity(preset: Preset | None) -> float:
    """Returns the share of its machine's capacity at which the paper ran the setting, as estimated above."""
    if preset is None or preset.rates is None:
        return SHARE_OF_HIGHEST_RATE
    same_machine = [
        max(other.rates.values)
        for other in load_presets().values()
        if other.rates is not None
        and (other.source.split(",")[0], other.base_model.default, other.hardware, other.lengths.default)
        == (preset.source.split(",")[0], preset.base_model.default, preset.hardware, preset.lengths.default)
    ]
    return SHARE_OF_HIGHEST_RATE * preset.rates.default / max(same_machine)


def capacity_per_s(run: Run) -> float:
    """Returns the requests per second while the closed loop was full.

    That is from the end of its first generation of requests to the end of the last but one: equal requests end
    together, so only whole generations count. Raises ValueError if a request failed.
    """
    done_s = sorted(record.done_s for record in run.records if record.error is None)
    if len(done_s) < PROBE_REQUESTS:
        raise ValueError(f"{PROBE_REQUESTS - len(done_s)} of {PROBE_REQUESTS} requests failed")
    first, last = CONCURRENCY - 1, len(done_s) - CONCURRENCY - 1
    return (last - first) / (done_s[last] - done_s[first])


def probe_spec(spec: WorkloadSpec) -> WorkloadSpec:
    """Returns the load that measures the capacity for requests like those of `spec`."""
    return replace(spec, arrivals=parse_arrivals("burst"), rate=None, num_requests=PROBE_REQUESTS, duration_s=None)


async def measure_capacity(
    runner: BenchmarkRunner, endpoint: Endpoint, workload: Workload, names: Sequence[str]
) -> float:
    """Sends the load of `probe_spec`; returns the requests per second, NaN if interrupted. Raises ConfigError when
    requests fail."""
    run = await runner.play(endpoint, workload, names, "capacity", CONCURRENCY)
    if runner.stopped.is_set():
        return math.nan
    try:
        return capacity_per_s(run)
    except ValueError as error:
        raise ConfigError(f"the capacity cannot be measured: {error}") from None


def rate_here(capacity: float, preset_name: str | None, notes: list[str]) -> float:
    """Returns the rate that compares with the setting's on its machine, for a measured capacity, and notes both."""
    preset = None if preset_name is None else find_preset(preset_name)
    share = share_of_capacity(preset)
    asked = f"The setting's {preset.rates.default:g} requests/s are" if preset and preset.rates else "The load is"
    notes.append(
        f"This machine serves {capacity:.3g} requests/s with {CONCURRENCY} under way. {asked} taken for {share:.0%} of "
        f"its machine's capacity, which is {share * capacity:.3g} requests/s here."
    )
    return share * capacity
