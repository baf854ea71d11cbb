"""LoRAServe's figures of what ranks cost on one server, and of single servers in a fleet; simulated."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isfinite

import numpy as np

from caraserve.bench.papers.command import PaperOptions
from caraserve.bench.papers.fleet import (
    LORASERVE,
    LORASERVE_MACHINE,
    MACHINE_NOTE,
    finite,
    load_of,
    loraserve_setting,
    seeded,
    seeds_note,
    simulated,
)
from caraserve.bench.papers.result import FigureData, Panel, Series, Value, mean_value
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.setting import ClusterSetting
from caraserve.bench.simulator.simulation import Simulation
from caraserve.bench.simulator.sweep import FleetResult, SimulationResult
from caraserve.bench.workload.build import WorkloadSpec, build

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
