"""The latency limits of a run: those asked for, else those of the preset's paper. Pure."""

from dataclasses import dataclass

from caraserve.bench.report.summary import SloLimits, parse_slo
from caraserve.bench.workload.presets import find_preset


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits; or `scale`: those are to be so many times what a run without adapters has."""

    slo: SloLimits | None = None
    scale: float | None = None
    note: str | None = None


def objective(slo: str | None, slo_scale: float | None, preset: str | None) -> Objective:
    """Raises ConfigError for limits that are none."""
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
