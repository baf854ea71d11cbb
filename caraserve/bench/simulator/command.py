"""`caraserve bench cluster`: simulates clusters from command-line options and reports the results."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from rich.console import Console

from caraserve.bench.options import LoadOptions
from caraserve.bench.records import Workload, versions
from caraserve.bench.report.files import as_json as json_bytes
from caraserve.bench.report.files import make_folder, write_files
from caraserve.bench.report.tables import to_rich
from caraserve.bench.simulator.machines import Machine, paper_machine, profiled_machine
from caraserve.bench.simulator.report import as_json, finite, plots, text_tables
from caraserve.bench.simulator.simulation import Setting
from caraserve.bench.simulator.sweep import Goal, PolicyResult, SimulationResult, SweepSpec, base, find_all
from caraserve.bench.workload.build import build
from caraserve.bench.workload.presets import find_preset
from caraserve.cluster.routing.perf_model import Kernel
from caraserve.core import machine_profile as profiles
from caraserve.errors import ConfigError

_PRESET = "toppings-sim"
_WIDTH = 160
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


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of a simulation besides its load."""

    routing: tuple[str, ...]
    instances: int | None  # None: the preset's number
    kernel: Kernel | None  # None: "measured" with a profile, otherwise "unpadded"
    profile: tuple[Path, ...]
    slo_scale: float
    beat_ms: float
    routers: int | None
    copies: int
    need_attainment: float | None
    need_ttft_p95_ms: float | None
    processes: int | None
    save: Path | None


def bench_cluster(options: ClusterOptions, load: LoadOptions, arguments: Mapping[str, object]) -> int:
    """Simulates all policies and prints tables and, as the last line, one JSON document. Raises ConfigError."""
    if load.max_concurrency is not None or load.auto_rate or len(load.request_rate or ()) > 1:
        raise ConfigError(
            "a simulated load has one rate, and sends when requests are due: no --max-concurrency, no auto"
        )
    load = load if load.preset or load.trace else replace(load, preset=_PRESET)
    make_folder(options.save)
    workload = build(load.sized(load.spec()))
    study = _study(options, load)
    bare = base(study, workload, options.slo_scale)
    study = replace(study, setting=replace(study.setting, slo_ms=bare.slo_ms))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, soft_wrap=True, highlight=False, markup=False)
    processes = options.processes or len(os.sched_getaffinity(0))
    found = list(find_all(study, workload, options.routing, min(processes, len(options.routing))))
    for table in text_tables(found):
        console.print(to_rich(table))
    document = finite(_document(study, workload, bare, found, arguments))
    if options.save is not None:
        for path in write_files(options.save, {"cluster.json": json_bytes(document), **plots(found)}):
            console.print(f"written: {path}")
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


def _document(
    study: SweepSpec,
    workload: Workload,
    bare: SimulationResult,
    found: Sequence[PolicyResult],
    arguments: Mapping[str, object],
) -> dict[str, object]:
    return {
        "bench": "cluster",
        "versions": versions(),
        "arguments": {name: value for name, value in arguments.items() if name not in ("profile", "processes")},
        "notes": [*NOTES, *_assumptions(study, arguments), *workload.notes],
        "machines": [_machine_document(machine) for machine in study.machines],
        "instances": study.instances,
        "requests": len(workload.requests),
        "base": asdict(bare),
        "slo_ms": study.setting.slo_ms,
        "runs": [as_json(one) for one in found],
    }


def _assumptions(study: SweepSpec, arguments: Mapping[str, object]) -> Iterator[str]:
    yield _OF_PROFILES if arguments["profile"] else _OF_PAPERS
    if any(machine.model.padded for machine in study.machines):
        yield _PADDED


def _study(options: ClusterOptions, load: LoadOptions) -> SweepSpec:
    instances = options.instances or (find_preset(load.preset).servers if load.preset else 1)
    goal = None
    if options.need_attainment is not None or options.need_ttft_p95_ms is not None:
        goal = Goal(options.need_attainment, options.need_ttft_p95_ms)
    setting = Setting(
        (), "auto", inf, routers=options.routers, copies=options.copies, beat_ms=options.beat_ms, seed=load.seed
    )
    return SweepSpec(_machines(options), instances, setting, goal)


def _machines(options: ClusterOptions) -> tuple[Machine, ...]:
    if options.profile:
        like = paper_machine("unpadded")
        kernel = options.kernel or "measured"
        return tuple(profiled_machine(profiles.load(file), kernel, like) for file in options.profile)
    if options.kernel == "measured":
        raise ConfigError("--kernel measured needs --profile; the papers' machine has padded and unpadded kernels")
    return (paper_machine(options.kernel or "unpadded"),)


def _machine_document(machine: Machine) -> dict[str, object]:
    model = asdict(machine.model)
    sizes = ("max_running", "max_step_tokens", "kv_tokens", "device_adapter_bytes", "host_adapter_bytes", "rank_bytes")
    return model | {name: getattr(machine, name) for name in sizes}
