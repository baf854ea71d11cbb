"""`caraserve bench cluster`: simulates clusters from command-line options and reports the results."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from caraserve.bench.options import LoadOptions
from caraserve.bench.records import versions
from caraserve.bench.report.files import as_json as json_bytes
from caraserve.bench.report.files import make_folder, write_files
from caraserve.bench.report.tables import open_console, to_rich, write_document
from caraserve.bench.simulator.machines import SimulatedMachine, paper_machine, profiled_machine
from caraserve.bench.simulator.report import as_json, finite, plots, text_tables
from caraserve.bench.simulator.setting import ClusterSetting, Scheduler
from caraserve.bench.simulator.sweep import FleetResult, FleetSpec, Goal, simulate
from caraserve.bench.workload.presets import find_preset
from caraserve.cluster.routing.perf_model import Kernel
from caraserve.core import machine_profile as profiles
from caraserve.errors import ConfigError

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
    instances: tuple[int, ...]  # sizes; none: the preset's number
    kernel: Kernel | None  # None: "measured" with a profile, otherwise "unpadded"
    profile: tuple[Path, ...]
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
        for path in write_files(options.save, {"cluster.json": json_bytes(document), **_figures(found)}):
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
                "runs": [as_json(policy) for policy in one.policies],
            }
            for one in found
        ],
    }


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
