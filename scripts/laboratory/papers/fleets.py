"""Figures of fleets, simulated with the functions that route and place in a real one.

Every load is simulated under two assumptions: the papers' own, one scheduler that knows every instance's state at once
and every adapter on every host, and ours, each instance a router whose views are as old as gossip makes them and two
copies of each adapter. Values without a note are of the paper's assumptions and its padded kernel.

LoRAServe's figures of what ranks cost on one server are simulated, too. One fleet is real, each instance confined to a
fifth of a core, beside its simulation.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite

import numpy as np
import uvloop

from caraserve.bench.report.plots import Panel, Series
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.setting import ClusterSetting, PaperKernel, SimulatedMachine, paper_machine
from caraserve.bench.simulator.simulation import Simulation
from caraserve.bench.simulator.sweep import FleetResult, FleetSpec, SimulationResult, profiled_points, simulate
from caraserve.bench.workload.build import WorkloadSpec, build, spec_from_preset
from caraserve.bench.workload.presets import find_preset
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
from scripts.laboratory.papers.figures import FigureData, PaperOptions, Value, mean_value

_TOPPINGS = ("rank-aware", "dlora", "random", "first-fit", "auto")
LORASERVE = ("loraserve", "rank-aware", "s-lora-random", "s-lora-contiguous", "auto")
# The kernel of the machine, and whether one scheduler knows everything.
_ASSUMPTIONS: tuple[tuple[PaperKernel, bool], ...] = tuple(
    (kernel, central) for central in (True, False) for kernel in ("padded", "unpadded")
)
# Its servers' prompts cost what the largest rank of their batch does (figures 1 and 3).
LORASERVE_MACHINE = paper_machine("padded", pads_prompts=True)
_TTFT_SLO_MS = 10_000.0  # LoRAServe's, for the 95th percentile
# Of LoRAServe's rates, whose servers have four A100s in tensor parallelism where the simulated machine has one.
_RATE_STEPS = tuple(step / 32 for step in range(4, 25))
MACHINE_NOTE = "Toppings' A100 with Llama-2-7B, put together from the latencies that the papers print."
_RATES_NOTE = (
    "An instance has one A100 instead of the paper's four, so rates are an eighth to three quarters of the paper's."
)


def routing_policies(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Simulates policies on Toppings' fleets: SLO attainment and time per token."""
    routings = tuple(figure["routing"].split(",")) if "routing" in figure else _TOPPINGS
    notes: dict[str, None] = {MACHINE_NOTE: None}
    values: list[Value] = []
    panels: list[Panel] = []
    for preset in figure["presets"].split(","):
        for kernel, central in _ASSUMPTIONS:
            runs, bare = [], []
            for one in seeded(options):
                setting = ClusterSetting((), "auto", inf, scheduler="central" if central else "gossip", seed=one.seed)
                (found,) = simulated(preset, routings, paper_machine(kernel), setting, one)
                notes |= dict.fromkeys(found.notes)
                runs.append([policy.at_size for policy in found.policies])
                bare.append(100 * found.base.attainment)
            name = preset if kernel == "padded" and central else f"{preset}, {kernel}{'' if central else ', gossip'}"
            values += _policy_values(name, runs)
            values.append(mean_value(f"{name} without adapters: attainment", bare, "%"))
            panels += _policy_panels(name, runs[0])
    notes[seeds_note(options)] = None
    return FigureData("simulated", tuple(notes), tuple(values), tuple(panels))


def rate_sweep(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Simulates LoRAServe's policies over rates, with several seeds: latency tails, and the highest rate within the
    SLO. Lines are the first seed's."""
    metric = figure.get("metric", "ttft")
    notes: dict[str, None] = {MACHINE_NOTE: None, _RATES_NOTE: None}
    values: list[Value] = []
    panels: list[Panel] = []
    longest: dict[str, float] = {}  # ratio of a policy's latency to LoRAServe's, by policy
    for preset in figure["presets"].split(","):
        seeds = [_over_rates(preset, LORASERVE, one) for one in seeded(options)]
        notes |= dict.fromkeys(seeds[0][0].notes)
        panels.append(_rate_panel(preset, metric, seeds[0]))
        highest = [_highest_rates(found) for found in seeds]
        for name in LORASERVE:
            rates = [one[name] for one in highest]
            values.append(mean_value(f"{preset} {name}: highest rate within the SLO", rates, "/s"))
        for other in ("rank-aware", "s-lora-random"):
            if all(one[other] for one in highest):
                ratios = [one["loraserve"] / one[other] for one in highest]
                values.append(mean_value(f"{preset}: highest rate, loraserve ÷ {other}", ratios))
        for found, rates_of in zip(seeds, highest, strict=True):
            kept = [one for one in found if one.rate <= rates_of["loraserve"]]
            for other, ratio in _times_of_loraserve(kept, metric).items():
                longest[other] = max(ratio, longest.get(other, 0.0))
    what = "TTFT p95" if metric == "ttft" else "TBT"
    values += [Value(f"{what} of {other} ÷ loraserve, largest", ratio) for other, ratio in longest.items()]
    notes[seeds_note(options)] = None
    return FigureData("simulated", tuple(notes), tuple(values), tuple(panels))


def seeded(options: PaperOptions) -> list[PaperOptions]:
    """Returns the options of each repeat, which has a seed of its own."""
    return [replace(options, seed=options.seed + index) for index in range(options.repeats)]


def seeds_note(options: PaperOptions) -> str:
    """Returns a sentence about the repeats."""
    return f"{options.repeats} seeds, {options.duration_s:g} s of simulated time each."


def _times_of_loraserve(found: Sequence[FleetResult], metric: str) -> dict[str, float]:
    """Returns each other policy's largest ratio to LoRAServe's latency at the same rate."""
    name = "ttft_p95_ms" if metric == "ttft" else "tpot_mean_ms"
    largest: dict[str, float] = {}
    for one in found:
        times_ms = {policy.at_size.routing: getattr(policy.at_size, name) for policy in one.policies}
        for other, ms in times_ms.items():
            if other != "loraserve" and isfinite(ms / times_ms["loraserve"]):
                largest[other] = max(ms / times_ms["loraserve"], largest.get(other, 0.0))
    return largest


def scaling(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Simulates LoRAServe on 4, 8 and 12 servers, with adapters in proportion, over rates, with several seeds. Lines
    are the first seed's."""
    notes: dict[str, None] = {MACHINE_NOTE: None, _RATES_NOTE: None}
    highest: dict[int, list[float]] = {}
    series = []
    for preset in figure["presets"].split(","):
        servers = find_preset(preset).servers
        seeds = [_over_rates(preset, ("loraserve",), one) for one in seeded(options)]
        notes |= dict.fromkeys(seeds[0][0].notes)
        highest[servers] = [_highest_rates(found)["loraserve"] for found in seeds]
        tails = tuple(finite(one.policies[0].at_size.ttft_p95_ms, 1e-3) for one in seeds[0])
        series.append(Series(f"{servers} servers", tails, tuple(one.rate for one in seeds[0])))
    values = [
        mean_value(f"{servers} servers: highest rate within the SLO", rates, "/s") for servers, rates in highest.items()
    ]
    least = min(highest)
    for servers, rates in highest.items():
        if servers != least and all(highest[least]):
            ratios = [rate / fewest for rate, fewest in zip(rates, highest[least], strict=True)]
            values.append(mean_value(f"highest rate, {servers} servers ÷ {least}", ratios))
    notes[seeds_note(options)] = None
    panel = Panel("LoRAServe", "TTFT p95, s", tuple(series), "requests/s")
    return FigureData("simulated", tuple(notes), tuple(values), (panel,))


def simulated(
    preset: str,
    routings: Sequence[str],
    machine: SimulatedMachine,
    setting: ClusterSetting,
    options: PaperOptions,
    *rates: float,
) -> Iterator[FleetResult]:
    """Simulates a preset's load on its number of instances, once for each rate; without rates, at its own."""
    fleet = FleetSpec((machine,), find_preset(preset).servers, setting)
    processes = len(os.sched_getaffinity(0))
    return simulate(fleet, load_of(preset, options), routings, rates=rates, processes=processes)


def _over_rates(preset: str, routings: Sequence[str], options: PaperOptions) -> list[FleetResult]:
    """Simulates a preset under LoRAServe's assumptions, once for each step of its rate."""
    rates = find_preset(preset).rates
    assert rates is not None
    swept = [step * rates.default for step in _RATE_STEPS]
    assumed = loraserve_setting(preset, options)
    return list(simulated(preset, routings, LORASERVE_MACHINE, assumed, options, *swept))


def loraserve_setting(preset: str, options: PaperOptions) -> ClusterSetting:
    """Returns LoRAServe's assumptions: one scheduler, and operating points that are profiled under its SLO."""
    points = profiled_points(LORASERVE_MACHINE, build(load_of(preset, options)), _TTFT_SLO_MS)
    return ClusterSetting((), "auto", inf, scheduler="central", operating_points=points, seed=options.seed)


def load_of(preset: str, options: PaperOptions) -> WorkloadSpec:
    """Returns the preset's load for the duration of the options."""
    spec = spec_from_preset(find_preset(preset), seed=options.seed)
    return replace(spec, num_requests=None, duration_s=options.duration_s)


def _policy_values(name: str, runs: Sequence[Sequence[SimulationResult]]) -> Iterator[Value]:
    """Yields attainments and mean times per token over the rank-aware policy's; `runs`: for each seed, every policy."""
    policies = {each[0].routing: each for each in zip(*runs, strict=True)}
    for routing, seeds in policies.items():
        shares = [100 * one.attainment for one in seeds]
        yield mean_value(f"{name} {routing} attainment", shares, "%")
    for what, measure in (("attainment", "attainment"), ("TPT", "tpt_mean_ms")):
        for routing, seeds in policies.items():
            if routing != "rank-aware" and "rank-aware" in policies:
                pairs = zip(policies["rank-aware"], seeds, strict=True)
                ratios = [getattr(best, measure) / getattr(one, measure) for best, one in pairs]
                yield mean_value(f"{name} {what}, rank-aware ÷ {routing}", ratios)


def _policy_panels(name: str, policies: Sequence[SimulationResult]) -> Iterator[Panel]:
    levels = tuple(float(2 * index) for index in range(51))
    curves = []
    for one in policies:
        known = [(ms, level) for ms, level in zip(one.tpt_curve_ms, levels, strict=True) if ms < inf]
        curves.append(Series(one.routing, tuple(level for _, level in known), tuple(ms for ms, _ in known)))
    yield Panel(name, "requests, %", tuple(curves), "time per token, ms")
    shares = tuple(Series(one.routing, (100 * one.attainment,)) for one in policies)
    yield Panel(name, "SLO attainment, %", shares, categories=("",))


def _rate_panel(preset: str, metric: str, found: Sequence[FleetResult]) -> Panel:
    rates = tuple(one.rate for one in found)
    series = []
    for place, policy in enumerate(found[0].policies):
        runs = [one.policies[place].at_size for one in found]
        if metric == "ttft":
            y = tuple(finite(run.ttft_p95_ms, 1e-3) for run in runs)
        else:
            y = tuple(finite(run.tpot_mean_ms, 1.0) for run in runs)
        series.append(Series(policy.at_size.routing, y, rates))
    return Panel(preset, "TTFT p95, s" if metric == "ttft" else "TBT mean, ms", tuple(series), "requests/s")


def _highest_rates(found: Sequence[FleetResult]) -> dict[str, float]:
    """Returns each policy's highest rate up to which the 95th percentile of TTFT keeps the SLO; 0: not at the least."""
    highest: dict[str, float] = {}
    for place, policy in enumerate(found[0].policies):
        rate = 0.0
        for one in found:
            if one.policies[place].at_size.ttft_p95_ms > _TTFT_SLO_MS:
                break
            rate = one.rate
        highest[policy.at_size.routing] = rate
    return highest


def finite(value: float, factor: float) -> float | None:
    """Returns a time in another unit; None for that of lost requests, or of none."""
    return value * factor if isfinite(value) else None


_RANKS = (8, 16, 32, 64, 128)
_PROMPTS = (250, 500, 1000, 2000)
_SIMULATED_RATE = 0.5  # of loraserve-production-100's 30/s in figure 18: its servers have four GPUs each
_NOTE = "Prompts cost what the largest rank of their iteration does, by the ratio that the paper's figure 3 has."


def prefill_by_rank(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Computes TTFT and TBT of one request alone, by rank and prompt length, with the simulated machine's model."""
    model = LORASERVE_MACHINE.model
    prefills = [
        Series(f"rank {rank}", tuple(model.prefill_ms(tokens, tokens * rank, rank) for tokens in _PROMPTS), _PROMPTS)
        for rank in _RANKS
    ]
    decodes = [Series(f"rank {rank}", (model.decode_ms(1, rank, rank),) * len(_PROMPTS), _PROMPTS) for rank in _RANKS]
    ratio = (prefills[-1].y[-1] or 0.0) / (prefills[0].y[-1] or inf)
    panels = (
        Panel("TTFT", "ms", tuple(prefills), "prompt tokens"),
        Panel("TBT", "ms", tuple(decodes), "prompt tokens"),
    )
    return FigureData(
        "simulated", (MACHINE_NOTE, _NOTE), (Value("2,000 tokens: rank 128 ÷ rank 8, TTFT", ratio),), panels
    )


def coserve(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Simulates one server with two adapters, of rank 8 and of every rank, and compares the TTFT of rank 8."""
    spec = replace(load_of(figure["presets"], options), rate=float(figure["rate"]))
    tails = {rank: _tail_of_first(replace(spec, ranks=(8, rank))) for rank in _RANKS}
    values = [
        Value(f"rank 8 beside rank {rank} ÷ alone, TTFT p95", tails[rank] / tails[8]) for rank in _RANKS if rank != 8
    ]
    panel = Panel(
        "Rank 8 beside another adapter", "TTFT p95, ms", (Series("rank 8", tuple(tails.values()), _RANKS),), "its rank"
    )
    load = f"Two adapters asked for alike, {spec.rate:g} requests/s, lengths of Azure's conversations of 2023."
    return FigureData("simulated", (MACHINE_NOTE, _NOTE, load), tuple(values), (panel,))


def rank_limits(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Simulates one server with one adapter of each rank in turn: the tail of TTFT over time."""
    spec = load_of(figure["presets"], options)
    values, tails = [], []
    for rank in _RANKS:
        ttft_ms, _ = _served(replace(spec, ranks=(rank,)))
        tails.append(float(np.percentile(ttft_ms, 95, method="higher")) / 1000)
        values.append(Value(f"rank {rank}: TTFT p95", tails[-1], "s"))
    bars = Panel("One adapter", "TTFT p95, s", (Series("here", tuple(tails)),), "rank", tuple(map(str, _RANKS)))
    load = f"{spec.rate:g} requests/s of 512 prompt and 128 output tokens."
    return FigureData("simulated", (MACHINE_NOTE, _NOTE, load), tuple(values), (bars,))


def servers(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Simulates a fleet under each policy, with several seeds, and shows every server's tails and the adapters that it
    held. Bars are the first seed's."""
    preset = figure["presets"]
    rate = _SIMULATED_RATE * float(figure["share"]) * (load_of(preset, options).rate or 0.0)
    seeds: list[FleetResult] = []
    for one in seeded(options):
        seeds += simulated(preset, LORASERVE, LORASERVE_MACHINE, loraserve_setting(preset, one), one, rate)
    runs = [{policy.at_size.routing: policy.at_size for policy in found.policies} for found in seeds]
    names = tuple(f"server {number + 1}" for number in range(seeds[0].instances))
    tails, held, values = [], [], []
    for name, run in runs[0].items():
        tails.append(Series(name, tuple(finite(one.ttft_p95_ms, 1e-3) for one in run.by_instance)))
        held.append(Series(name, tuple(float(one.adapters_most) for one in run.by_instance)))
        values.append(mean_value(f"{name}: TTFT p95", [one[name].ttft_p95_ms / 1000 for one in runs], "s"))
        counts = [one[name].adapters_held_mean for one in runs]
        values.append(mean_value(f"{name}: adapters held by a server", counts, ""))
    largest = [_largest_ratio(one["rank-aware"], one["loraserve"]) for one in runs]
    values.append(mean_value("most adapters of a server, rank-aware ÷ loraserve, largest", largest))
    stored = [one["rank-aware"].adapters_held_mean / one["loraserve"].adapters_held_mean for one in runs]
    values.append(mean_value("adapters stored, rank-aware ÷ loraserve, mean", stored))
    panels = (
        Panel("Tails", "TTFT p95, s", tuple(tails), categories=names),
        Panel("Adapters", "most held at a time", tuple(held), categories=names),
    )
    kept = [value for value in values if isfinite(value.value)]
    notes = (MACHINE_NOTE, _NOTE, f"{rate:.3g} requests/s.", *seeds[0].notes, seeds_note(options))
    return FigureData("simulated", notes, tuple(kept), panels)


def _largest_ratio(theirs: SimulationResult, ours: SimulationResult) -> float:
    """Returns the largest ratio of the most adapters that one server held at a time."""
    pairs = zip(theirs.by_instance, ours.by_instance, strict=True)
    return max(one.adapters_most / max(1, other.adapters_most) for one, other in pairs)


def _tail_of_first(spec: WorkloadSpec) -> float:
    """Returns the 95th percentile of TTFT in ms of requests for the first adapter, on one instance."""
    ttft_ms, adapters = _served(spec)
    return float(np.percentile(ttft_ms[adapters == 0], 95, method="higher"))


def _served(spec: WorkloadSpec) -> tuple[np.ndarray, np.ndarray]:
    """Simulates one instance. Returns TTFT in ms and the adapter's index, [requests] each."""
    workload = build(spec)
    simulation = Simulation(ClusterSetting((LORASERVE_MACHINE,), "round-robin", inf), workload)
    simulation.run()
    requests = simulation.requests
    ttft_ms = np.where(requests["first"] < 0, inf, (requests["first"] - requests["arrived"]) / MS)
    adapters = np.array([one.adapter for one in workload.requests])
    return ttft_ms, adapters


INSTANCES = 8
_SEEDS = range(8)  # of simulations: policies draw at random
_BEST = "rank-aware"


def real_routing_policies(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Measures policies at shares of the fleet's capacity, and simulates the same requests."""
    loads = [float(load) for load in figure["loads"].split(",")]
    return uvloop.run(_real_runs(figure["routing"].split(","), loads, options.duration_s))


async def _real_runs(routings: Sequence[str], loads: Sequence[float], seconds: float) -> FigureData:
    model = FleetModel()
    known = await calibrate(model, await measure_profiles(model, INSTANCES))
    limit_ms = slo_ms(known)
    runs: list[FleetRun] = []
    for routing in routings:
        measuring = measure_fleet(model, known, INSTANCES, routing, loads, seconds, limit_ms)
        runs += [run async for run in measuring]
    return real_fleet_figure(known, [compare(run, known, _SEEDS) for run in runs])


def real_fleet_figure(known: Calibration, found: Sequence[Comparison]) -> FigureData:
    """Returns the figure of these loads, the rank-aware policy's among them."""
    panels = [
        _real_panel(f"load {load:g}", [one for one in found if one.load == load])
        for load in sorted({one.load for one in found})
    ]
    return FigureData("measured", tuple(_real_notes(known, found)), tuple(_real_values(found)), tuple(panels))


def _real_notes(known: Calibration, found: Sequence[Comparison]) -> Iterator[str]:
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


def _real_values(found: Sequence[Comparison]) -> Iterator[Value]:
    best = {one.load: one for one in found if one.routing == _BEST}
    for one in sorted(found, key=lambda one: one.load):
        for how, figures in (("", one.measured), (", simulated", one.simulated)):
            yield Value(f"load {one.load:g} {one.routing} attainment{how}", 100 * figures.attainment, "%")
    for one in sorted(found, key=lambda one: one.load):
        if one.routing != _BEST:
            name = f"load {one.load:g} TPT, {_BEST} ÷ {one.routing}"
            yield Value(name, best[one.load].measured.tpt_mean_ms / one.measured.tpt_mean_ms)
            yield Value(f"{name}, simulated", best[one.load].simulated.tpt_mean_ms / one.simulated.tpt_mean_ms)


def _real_panel(title: str, found: Sequence[Comparison]) -> Panel:
    series = (
        Series("measured", tuple(100 * one.measured.attainment for one in found)),
        Series("simulated", tuple(100 * one.simulated.attainment for one in found)),
    )
    return Panel(title, "SLO attainment, %", series, categories=tuple(one.routing for one in found))
