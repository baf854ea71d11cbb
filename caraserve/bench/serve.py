"""`caraserve bench serve`: sends a load to an endpoint, at one or several rates."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from caraserve.bench.capacity import measure_capacity, objective, probe_spec, rate_here
from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import Endpoint, find_endpoint
from caraserve.bench.options import TARGETS, LoadOptions, ReportOptions, with_rate
from caraserve.bench.records import Run
from caraserve.bench.report.run_plots import SWEEP_MARK
from caraserve.bench.report.summary import SloLimits, summarize
from caraserve.bench.runner import BenchmarkRunner, interruptible
from caraserve.bench.servers import Interrupted, api_key_in, longest, make_synthetic, own_server, working_folder
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.errors import CaraServeError, ConfigError

_RESIDENT_SHARE, _LEAST_RESIDENT = 8, 8  # with `distinct`, the device holds an eighth of the adapters, and at least 8
_DEVICE = ("--lora-pool-bytes",)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The endpoint to measure, or the server that the benchmark starts and measures."""

    url: str | None
    api_key: str | None
    backend: str
    lora_modules: Sequence[str] | None
    random_model: str | None
    targets: str
    dtype: str
    serve: tuple[str, ...] | None  # arguments of `caraserve serve`; None: a random model, or the demo

    def __post_init__(self) -> None:
        given = {"--url": self.url, "--random-model": self.random_model, "arguments after --": self.serve}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} both say what is measured; give one of them")


@dataclass(slots=True)
class Measurements:
    """The data of a report. `failure` is the error that ended the benchmark early, or None."""

    runs: list[Run]
    slo: SloLimits | None
    notes: list[str]
    failure: str | None = None


@contextlib.contextmanager
def keep_measured(measured: Measurements) -> Iterator[None]:
    """Records a failure after the first run instead of raising it, so that finished runs are reported."""
    try:
        yield
    except Interrupted:
        pass
    except (OSError, CaraServeError) as error:
        if not measured.runs:
            raise
        measured.failure = str(error)


async def bench_serve(target: BenchTarget, load: LoadOptions, report: ReportOptions, label: str | None) -> Measurements:
    """Measures the target at every rate. Raises ConfigError, BackendFailed or OSError if no run could be made."""
    runner = BenchmarkRunner(LoadSettings(load.seed, load.ignore_eos, load.concurrency))
    limits = objective(report.slo, report.slo_scale, load.preset)
    measured = Measurements([], limits.slo, [] if limits.note is None else [limits.note])
    with interruptible(runner), working_folder() as folder, keep_measured(measured):
        arguments = cached = None
        if target.url is None:
            arguments, cached = await asyncio.to_thread(_server_arguments, target, load, folder, measured.notes)
        rate = None
        if load.auto_rate:
            async with _open_endpoint(target, cached, runner.stopped) as endpoint:
                spec, names = _for_endpoint(load.spec(), load, target, endpoint, [])
                capacity = await measure_capacity(runner, endpoint, build(probe_spec(spec)), names)
            if not runner.stopped.is_set():
                rate = rate_here(capacity, load.preset, measured.notes)
        if not runner.stopped.is_set():
            async with _open_endpoint(target, arguments, runner.stopped) as endpoint:
                spec, names = _for_endpoint(load.spec(), load, target, endpoint, measured.notes)
                if arguments is not None:
                    await runner.warm_up(endpoint, names)
                rates = load.request_rate or (rate if rate is not None else spec.rate,)
                specs = [load.sized(spec if each is None else with_rate(spec, each)) for each in rates]
                await _play(runner, endpoint, specs, names, limits.scale, label, measured)
    return measured


async def _play(
    runner: BenchmarkRunner,
    endpoint: Endpoint,
    specs: Sequence[WorkloadSpec],
    names: Sequence[str],
    slo_scale: float | None,
    label: str | None,
    measured: Measurements,
) -> None:
    """Performs the runs; with `slo_scale`, first one without adapters, whose latencies set the SLO."""
    workloads = [build(spec) for spec in specs]
    measured.notes += dict.fromkeys(note for workload in workloads for note in workload.notes)
    for note in measured.notes:
        runner.log(note)
    if slo_scale is not None:
        plain = tuple(replace(each, adapter=None) for each in workloads[0].requests)
        base = await runner.play(endpoint, replace(workloads[0], requests=plain), names, "without adapters")
        if runner.stopped.is_set():
            return
        measured.slo = SloLimits.scaled(summarize(base), slo_scale)
    for spec, workload in zip(specs, workloads, strict=True):
        if runner.stopped.is_set():
            return
        shown = label or endpoint.base_model
        if len(specs) > 1:
            shown += f"{SWEEP_MARK}{'inf' if spec.rate is None else f'{spec.rate:g}'}/s"
        measured.runs.append(await runner.play(endpoint, workload, names, shown))


@asynccontextmanager
async def _open_endpoint(
    target: BenchTarget, arguments: Sequence[str] | None, stopped: asyncio.Event
) -> AsyncIterator[Endpoint]:
    """Yields the given endpoint, or that of a server started with these arguments."""
    if arguments is None:
        assert target.url is not None
        yield await find_endpoint(target.url, target.backend, target.api_key, target.lora_modules)
        return
    async with own_server(arguments, stopped) as server:
        yield await find_endpoint(server.url, target.backend, api_key_in(arguments), target.lora_modules)


def _server_arguments(
    target: BenchTarget, load: LoadOptions, folder: Path, notes: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns arguments of `caraserve serve`: of the server to measure, and of one with all adapters on the device.

    Those are the arguments after `--`; without any, those of a random model if --random-model or a preset is given, and
    otherwise those of the demo.
    """
    if target.serve is not None:
        return (target.serve, (*target.serve, "--loading-mode", "cached"))
    registry = ("--registry", str(folder / "registry.sqlite"))
    if target.random_model is None and load.preset is None:
        return (registry, (*registry, "--loading-mode", "cached"))
    model, note = load.model(target.random_model)
    notes += [] if note is None else [note]
    spec = load.spec()
    workload = build(spec)
    context = load.max_model_len or longest(workload)
    made = make_synthetic(folder, model, target.dtype, context, workload.ranks, TARGETS[target.targets])
    arguments = (*made.arguments, *registry, *made.host_room())
    device_bytes = made.room_bytes()
    cached = (*arguments, *_DEVICE, str(device_bytes), "--loading-mode", "cached")
    if spec.popularity.drops_after_use and made.names:
        count = len(made.names)
        resident = max(1, min(count // 2, max(_LEAST_RESIDENT, count // _RESIDENT_SHARE)))
        device_bytes = made.room_bytes(resident)
        notes.append(f"The device holds {resident} of {count} adapters, so that each has left it when its turn comes.")
    return ((*arguments, *_DEVICE, str(device_bytes)), cached)


def _for_endpoint(
    spec: WorkloadSpec, load: LoadOptions, target: BenchTarget, endpoint: Endpoint, notes: list[str]
) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """Returns the load for the endpoint's adapters, and their names.

    Ranks that the endpoint lists replace those of `spec`; the context is limited to the endpoint's.
    """
    names = endpoint.adapters
    if load.adapters is not None or load.preset is not None:
        wanted = max(1, round(spec.adapters * spec.scale.adapters)) if spec.adapters else 0
        if wanted > len(names):
            if load.adapters is not None:
                raise ConfigError(f"--adapters {wanted}: the endpoint has {len(names)}")
            notes.append(f"The endpoint has {len(names)} adapters, not the {wanted} of the setting.")
        names = names[:wanted]
    if not names:
        notes.append("No adapters: every request is for the base model.")
    if endpoint.unlisted:
        notes.append(f"The endpoint does not list {', '.join(endpoint.unlisted)} among its models.")
    if names and not all(name in endpoint.ranks for name in names):
        notes.append("The endpoint does not tell its adapters' ranks: where the load goes by them, those asked for do.")
    if names and spec.popularity.drops_after_use and (target.url is not None or target.serve is not None):
        notes.append("Adapters come in turn, but nothing makes them leave the device of a server that is not ours.")
    spread = spec.ranks or (1,)
    ranks = tuple(endpoint.ranks.get(name, spread[index % len(spread)]) for index, name in enumerate(names))
    limits = [limit for limit in (spec.max_context, endpoint.max_model_len) if limit is not None]
    return replace(
        spec,
        adapters=len(names),
        ranks=ranks,
        scale=replace(spec.scale, adapters=1.0),
        max_context=min(limits, default=None),
    ), names
