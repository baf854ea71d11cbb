"""`caraserve bench cluster`: simulates clusters from command-line options; its tables, figures and JSON."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from caraserve.bench.options import LoadOptions
from caraserve.bench.records import versions
from caraserve.bench.report.files import as_json, make_folder, write_files
from caraserve.bench.report.plots import INK, can_draw, legend, line_style, new_figure, render, style
from caraserve.bench.report.tables import NONE, TextTable, number, open_console, percent, to_rich, write_document
from caraserve.bench.simulator.setting import (
    ClusterSetting,
    Scheduler,
    SimulatedMachine,
    paper_machine,
    profiled_machine,
)
from caraserve.bench.simulator.sweep import FleetResult, FleetSpec, Goal, PolicyResult, simulate
from caraserve.bench.workload.presets import find_preset
from caraserve.cluster.routing.perf_model import Kernel
from caraserve.core import machine_profile as profiles
from caraserve.errors import ConfigError
from caraserve.util.units import human_bytes

_PRESET = "toppings-sim"
NOTES = (
    "Simulated: no figure here was measured on a fleet.",
    "TPT: end to end ÷ tokens, queueing and prefill included. SLO: a multiple of the mean TPT of the same requests "
    "without adapters, dealt in turn to as many instances.",
    "The first fifth of a run's time is warm-up; its requests do not count.",
    "A request waits where the engine would preempt one; prefixes are not reused.",
)
_OF_PAPERS = "The machine's times are put together from what papers print; nothing of it was measured."
_OF_PROFILES = "Measured are the machines' iterations and loads; their memory, disk and network are assumed."
_PADDED = (
    "Every request costs what the largest rank of its batch does, as in Punica's BGMV: no server here has that kernel."
)
_CENTRAL = (
    "One scheduler knows the exact state of every instance and sends without delay, and under routings without plans "
    "every instance has every adapter: the papers' assumptions, which no server here works under."
)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of a simulation besides its load."""

    routing: tuple[str, ...]
    instances: Sequence[int]  # sizes; none: the preset's number
    kernel: Kernel | None  # None: "measured" with a profile, otherwise "unpadded"
    profile: Sequence[Path]
    slo_scale: float
    scheduler: Scheduler
    beat_ms: float | None
    routers: int | None
    copies: int | None
    plan_s: float
    profiled_points: bool
    padded_prompts: bool
    need_attainment: float | None
    need_ttft_p95_ms: float | None
    processes: int | None
    save: Path | None
    json: bool  # also on a terminal


def bench_cluster(options: ClusterOptions, load: LoadOptions, arguments: Mapping[str, object]) -> int:
    """Simulates all policies and prints tables, and one JSON document for programs. Raises ConfigError."""
    if load.max_concurrency is not None or load.auto_rate:
        raise ConfigError("a simulated load sends when requests are due: no --max-concurrency, no --rate-scale auto")
    load = load if load.preset or load.trace else replace(load, preset=_PRESET)
    make_folder(options.save)
    fleet = _fleet(options, load)
    console = open_console()
    processes = options.processes or len(os.sched_getaffinity(0))
    spec = load.sized(load.spec())
    found = []
    for one in simulate(
        fleet,
        spec,
        options.routing,
        rates=load.request_rate or (),
        sizes=options.instances,
        slo_scale=options.slo_scale,
        processes=processes,
    ):
        found.append(one)
        for table in text_tables(one):
            console.print(to_rich(table))
    document = finite(_document(fleet, found, arguments))
    if options.save is not None:
        for path in write_files(options.save, {"cluster.json": as_json(document), **_figures(found)}):
            console.print(f"written: {path}")
    write_document(document, options.json)
    return 0


def _figures(found: Sequence[FleetResult]) -> dict[str, bytes]:
    """Draws every fleet; the names of several have size and rate."""
    if len(found) == 1:
        return plots(found[0].policies)
    return {
        f"{one.instances}-instances-{one.rate:g}-per-s-{name}": image
        for one in found
        for name, image in plots(one.policies).items()
    }


def _document(fleet: FleetSpec, found: Sequence[FleetResult], arguments: Mapping[str, object]) -> dict[str, object]:
    return {
        "bench": "cluster",
        "versions": versions(),
        "arguments": {name: value for name, value in arguments.items() if name not in ("profile", "processes")},
        "notes": [*NOTES, *_assumptions(fleet, arguments), *found[0].notes],
        "machines": [_machine_document(machine) for machine in fleet.machines],
        "fleets": [
            {
                "instances": one.instances,
                "rate": one.rate,
                "requests": one.requests,
                "base": asdict(one.base),
                "slo_ms": one.slo_ms,
                "runs": [_run_document(policy) for policy in one.policies],
            }
            for one in found
        ],
    }


def _run_document(policy: PolicyResult) -> dict[str, object]:
    tried = [
        {"instances": size.instances, "attainment": size.attainment, "ttft_p95_ms": size.ttft_p95_ms}
        for size in policy.tried
    ]
    return asdict(policy.at_size) | {"needed": policy.needed, "tried": tried}


def _assumptions(fleet: FleetSpec, arguments: Mapping[str, object]) -> Iterator[str]:
    yield _OF_PROFILES if arguments["profile"] else _OF_PAPERS
    if any(machine.model.padded for machine in fleet.machines):
        yield _PADDED
    if fleet.setting.scheduler == "central":
        yield _CENTRAL


def _fleet(options: ClusterOptions, load: LoadOptions) -> FleetSpec:
    if options.scheduler == "central" and (options.routers is not None or options.beat_ms is not None):
        raise ConfigError("--scheduler central is one router that needs no heartbeats: no --routers, no --beat-ms")
    instances = find_preset(load.preset).servers if load.preset else 1
    goal = None
    if options.need_attainment is not None or options.need_ttft_p95_ms is not None:
        goal = Goal(options.need_attainment, options.need_ttft_p95_ms)
    setting = ClusterSetting(
        (),
        "auto",
        inf,
        scheduler=options.scheduler,
        routers=options.routers,
        copies=options.copies,
        beat_ms=options.beat_ms or 250.0,
        plan_s=options.plan_s,
        seed=load.seed,
    )
    return FleetSpec(_machines(options), instances, setting, goal, options.profiled_points)


def _machines(options: ClusterOptions) -> tuple[SimulatedMachine, ...]:
    if options.profile and options.padded_prompts:
        raise ConfigError("--padded-prompts is an assumption about the papers' machine: not with --profile")
    if options.profile:
        like = paper_machine("unpadded")
        kernel = options.kernel or "measured"
        return tuple(profiled_machine(profiles.load(file), kernel, like) for file in options.profile)
    if options.kernel == "measured":
        raise ConfigError("--kernel measured needs --profile; the papers' machine has padded and unpadded kernels")
    return (paper_machine(options.kernel or "unpadded", pads_prompts=options.padded_prompts),)


def _machine_document(machine: SimulatedMachine) -> dict[str, object]:
    model = asdict(machine.model)
    sizes = ("max_running", "max_step_tokens", "kv_tokens", "device_adapter_bytes", "host_adapter_bytes", "rank_bytes")
    return model | {name: getattr(machine, name) for name in sizes}


# --- tables, figures and JSON ---


_FIRST_COLUMNS = ("SLO attainment", "TPT", "to the first", "TTFT p95", "TPOT", "busy", "imbalance")
_LAST_COLUMNS = ("held", "at most", "fetches", "refused")
_MOST_LISTED = 16  # instances with rows of their own


def text_tables(fleet: FleetResult) -> Iterator[TextTable]:
    """Yields latencies and, if searched for, the sizes needed; what instances held and moved; and, of a small fleet,
    the tails of each instance."""
    found = fleet.policies
    first = found[0].at_size
    sized = any(one.tried for one in found)
    latencies, moved = [], []
    for policy in found:
        one = policy.at_size
        row = [one.routing, percent(one.attainment), number(one.tpt_mean_ms)]
        row += [f"{one.tpt_mean_ms / first.tpt_mean_ms - 1:+.0%}", number(one.ttft_p95_ms), number(one.tpot_mean_ms)]
        row += [percent(one.utilisation), f"{one.imbalance:.2f}"]
        latencies.append(row + ([NONE if policy.needed is None else str(policy.needed)] if sized else []))
        row = [one.routing, f"{one.adapters_held_mean:,.0f}"]
        row += [f"{one.adapters_held_max:,} in {human_bytes(one.bytes_held_max)}", f"{one.fetches:,}"]
        moved.append(
            [*row, f"{one.refusals:,}", human_bytes(one.fetched_bytes), f"{one.hops:,}", f"{one.migrations:,}"]
        )
    heads = ("routing", *_FIRST_COLUMNS, *(["instances needed"] if sized else []))
    note = "TPT: end to end ÷ tokens, mean, ms. Imbalance: tokens of the busiest instance over the mean."
    title = f"{first.instances} instances at {fleet.rate:g}/s: latencies in ms, SLO {first.slo_ms:.1f} ms a token"
    yield TextTable(title, heads, latencies, note=note)
    heads = ("routing", *_LAST_COLUMNS, "fetched", "hops", "moved")
    yield TextTable(f"{first.instances} instances at {fleet.rate:g}/s: adapters and requests", heads, moved)
    if first.instances <= _MOST_LISTED:
        yield _by_instance(fleet)


def _by_instance(fleet: FleetResult) -> TextTable:
    rows = [
        [
            policy.at_size.routing,
            str(place),
            f"{one.requests:,}",
            *map(number, (one.ttft_p95_ms, one.queued_p95_ms, one.prefill_p95_ms)),
            percent(one.utilisation),
            f"{one.adapters_held:,}",
            f"{one.adapters_most:,}",
        ]
        for policy in fleet.policies
        for place, one in enumerate(policy.at_size.by_instance)
    ]
    heads = ("routing", "instance", "requests", "TTFT p95", "queued p95", "prefill p95", "busy", "held", "at most")
    return TextTable(f"each instance at {fleet.rate:g}/s: latencies in ms, adapters", heads, rows)


def finite(value: Any) -> Any:
    """Replaces infinite numbers and NaN, such as latencies of lost requests, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def plots(found: Sequence[PolicyResult]) -> dict[str, bytes]:
    """Draws the results: returns PNG images by file name, or none if matplotlib is not installed."""
    if not can_draw():
        return {}
    drawn = {"latencies.png": _latencies(found)}
    if any(len(one.tried) > 1 for one in found):
        drawn["sizes.png"] = _sizes(found)
    return drawn


def _latencies(found: Sequence[PolicyResult]) -> bytes:
    """Draws time per token of every policy as a CDF, and SLO attainment as bars."""
    figure = new_figure(10.5, 4.4)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    levels = [2 * index for index in range(51)]
    slo_ms = found[0].at_size.slo_ms
    for place, one in enumerate(found):
        curves.plot(one.at_size.tpt_curve_ms, levels, label=one.at_size.routing, **line_style(place))
    curves.axvline(slo_ms, color=INK, lw=0.9, ls=(0, (1, 2)))
    curves.annotate("SLO", (slo_ms, 3), (3, 0), textcoords="offset points", fontsize=8, color=INK)
    style(curves, xlabel="time per token, ms", ylabel="requests, %", xlim=(0, 2.5 * slo_ms), ylim=(0, 101))
    names = [one.at_size.routing for one in found]
    colours = [line_style(place)["color"] for place in range(len(found))]
    shown = bars.barh(range(len(found)), [100 * one.at_size.attainment for one in found], color=colours)
    bars.bar_label(shown, fmt="%.1f", fontsize=8, padding=2)
    style(bars, xlabel="SLO attainment, %", xlim=(0, 112))
    bars.set_yticks(range(len(found)), names)
    bars.invert_yaxis()
    bars.grid(False, axis="y")
    legend(figure, curves)
    return render(figure)


def _sizes(found: Sequence[PolicyResult]) -> bytes:
    """Draws SLO attainment over the number of instances."""
    figure = new_figure(8.5, 4.2)
    (axes,) = figure.subplots(1, 1, squeeze=False)[0]
    for place, one in enumerate(found):
        sizes = [size.instances for size in one.tried]
        shares = [100 * size.attainment for size in one.tried]
        axes.plot(sizes, shares, marker="o", ms=3, label=one.at_size.routing, **line_style(place))
    style(axes, xlabel="instances", ylabel="SLO attainment, %", ylim=(0, 103))
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend(figure, axes)
    return render(figure)
