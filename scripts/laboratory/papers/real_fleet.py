"""Routing policies on real instances, each confined to a fifth of a core, beside the same fleet simulated."""

from collections.abc import Iterator, Mapping, Sequence

import uvloop

from scripts.laboratory.fleet.compare import Comparison, compare, slo_ms
from scripts.laboratory.fleet.instances import SHARE_CORES
from scripts.laboratory.fleet.measure import (
    ADAPTERS,
    Calibration,
    FleetModel,
    FleetRun,
    calibrate,
    measure_fleet,
    measure_profiles,
)
from scripts.laboratory.papers.command import PaperOptions
from scripts.laboratory.papers.result import FigureData, Panel, Series, Value

INSTANCES = 8
_SEEDS = range(8)  # of simulations: policies draw at random
_BEST = "rank-aware"


def routing_policies(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Measures policies at shares of the fleet's capacity, and simulates the same requests."""
    loads = [float(load) for load in figure["loads"].split(",")]
    return uvloop.run(_measured(figure["routing"].split(","), loads, options.duration_s))


async def _measured(routings: Sequence[str], loads: Sequence[float], seconds: float) -> FigureData:
    model = FleetModel()
    known = await calibrate(model, await measure_profiles(model, INSTANCES))
    limit_ms = slo_ms(known)
    runs: list[FleetRun] = []
    for routing in routings:
        measuring = measure_fleet(model, known, INSTANCES, routing, loads, seconds, limit_ms)
        runs += [run async for run in measuring]
    return figure_data(known, [compare(run, known, _SEEDS) for run in runs])


def figure_data(known: Calibration, found: Sequence[Comparison]) -> FigureData:
    """Returns the figure of these loads, the rank-aware policy's among them."""
    panels = [
        _panel(f"load {load:g}", [one for one in found if one.load == load])
        for load in sorted({one.load for one in found})
    ]
    return FigureData("measured", tuple(_notes(known, found)), tuple(_values(found)), tuple(panels))


def _notes(known: Calibration, found: Sequence[Comparison]) -> Iterator[str]:
    one = found[0]
    capacity = known.capacity_per_s * one.instances
    yield (
        f"{one.instances} instances of a random model of {FleetModel().shape[:-1]} million parameters, each confined "
        f"to {SHARE_CORES:g} of a core, with {ADAPTERS} adapters of ranks 8 to 64 on q, k and v."
    )
    yield (
        f"Together they bear {capacity:.3g} requests/s; loads are shares of that, in place of the paper's rates. "
        f"The SLO is {one.slo_ms:.3g} ms a token: 1.5 times the mean without adapters at a load of 0.6."
    )
    least, most = (pick(one.requests for one in found) for pick in (min, max))
    yield f"{least} to {most} requests of one fleet under each policy and load; the policies were measured in turn."


def _values(found: Sequence[Comparison]) -> Iterator[Value]:
    best = {one.load: one for one in found if one.routing == _BEST}
    for one in sorted(found, key=lambda one: one.load):
        for how, figures in (("", one.measured), (", simulated", one.simulated)):
            yield Value(f"load {one.load:g} {one.routing} attainment{how}", 100 * figures.attainment, "%")
    for one in sorted(found, key=lambda one: one.load):
        if one.routing != _BEST:
            name = f"load {one.load:g} TPT, {_BEST} ÷ {one.routing}"
            yield Value(name, best[one.load].measured.tpt_mean_ms / one.measured.tpt_mean_ms)
            yield Value(f"{name}, simulated", best[one.load].simulated.tpt_mean_ms / one.simulated.tpt_mean_ms)


def _panel(title: str, found: Sequence[Comparison]) -> Panel:
    series = (
        Series("measured", tuple(100 * one.measured.attainment for one in found)),
        Series("simulated", tuple(100 * one.simulated.attainment for one in found)),
    )
    return Panel(title, "SLO attainment, %", series, categories=tuple(one.routing for one in found))
