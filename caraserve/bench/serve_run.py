"""`caraserve bench serve`: one load against one endpoint, once or at several rates. Level 5."""

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from caraserve.bench.capacity import CONCURRENCY, PROBE_REQUESTS, capacity_per_s, share_of_capacity
from caraserve.bench.client.endpoint import Endpoint, find_endpoint
from caraserve.bench.client.player import Settings
from caraserve.bench.conduct import Conductor, interruptible
from caraserve.bench.objective import objective
from caraserve.bench.options import TARGETS, LoadOptions, ReportOptions, with_rate
from caraserve.bench.records import Run, Workload
from caraserve.bench.report.figures import SWEEP_MARK
from caraserve.bench.report.slo import Slo
from caraserve.bench.report.summary import summarize
from caraserve.bench.servers import Interrupted, make_synthetic, own_server, working_folder
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.bench.workload.presets import find_preset
from caraserve.errors import ConfigError

_RESIDENT_SHARE, _LEAST_RESIDENT = 8, 8  # of random adapters, where each is to be loaded for every request
_DEVICE = ("--max-device-adapters-bytes",)


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured: an endpoint, or a server of our own."""

    url: str | None
    api_key: str | None
    backend: str
    lora_modules: tuple[str, ...] | None
    random_model: str | None
    targets: str
    dtype: str
    serve: tuple[str, ...] | None  # arguments of `caraserve serve`; None: a random model, or the demo


@dataclass(slots=True)
class Measured:
    """All that a report is made of."""

    runs: list[Run]
    slo: Slo | None
    notes: list[str]


async def bench_serve(target: Target, load: LoadOptions, report: ReportOptions, label: str | None) -> Measured:
    """Raises ConfigError, BackendFailed, or OSError when the endpoint goes away."""
    conductor = Conductor(Settings(load.seed, load.ignore_eos, load.concurrency))
    limits = objective(report.slo, report.slo_scale, load.preset)
    measured = Measured([], limits.slo, [] if limits.note is None else [limits.note])
    with interruptible(conductor), working_folder() as folder, contextlib.suppress(Interrupted):
        own = None
        if target.url is None:
            own = await asyncio.to_thread(_own, target, load, folder, measured.notes)
        rate = None
        if load.auto_rate:
            async with _reached(target, own.cached if own is not None else None, conductor.stopped) as endpoint:
                rate = await _auto_rate(conductor, endpoint, load, measured.notes)
        if not conductor.stopped.is_set():
            async with _reached(target, own.arguments if own is not None else None, conductor.stopped) as endpoint:
                await _play(conductor, endpoint, load, rate, limits.scale, label, measured)
    return measured


async def _play(
    conductor: Conductor,
    endpoint: Endpoint,
    load: LoadOptions,
    rate: float | None,
    slo_scale: float | None,
    label: str | None,
    measured: Measured,
) -> None:
    """The load at every rate asked for, or at the one found; before it without adapters, where limits go by that."""
    spec, names = _for_endpoint(load.spec(), load, endpoint, measured.notes)
    rates = [rate or spec.rate] if load.request_rate is None or rate is not None else list(load.request_rate)
    workloads = [build(spec if each is None else with_rate(spec, each)) for each in rates]
    measured.notes += dict.fromkeys(note for workload in workloads for note in workload.notes)
    for note in measured.notes:
        conductor.say(note)
    if slo_scale is not None:
        base = await conductor.play(endpoint, _without_adapters(workloads[0]), names, "without adapters")
        measured.slo = Slo.scaled(summarize(base), slo_scale)
    for each, workload in zip(rates, workloads, strict=True):
        if conductor.stopped.is_set():
            break
        shown = label or endpoint.base_model
        shown = shown if len(rates) == 1 else f"{shown}{SWEEP_MARK}{each:g}/s"
        measured.runs.append(await conductor.play(endpoint, workload, names, shown))


@asynccontextmanager
async def _reached(target: Target, arguments: Sequence[str] | None, stopped: asyncio.Event) -> AsyncIterator[Endpoint]:
    """The endpoint given, or that of a server started with these arguments."""
    if arguments is None:
        assert target.url is not None
        yield await find_endpoint(target.url, target.backend, target.api_key, target.lora_modules)
        return
    async with own_server(arguments, stopped) as server:
        yield await find_endpoint(server.url, target.backend, os.environ.get("CARASERVE_API_KEY"), target.lora_modules)


@dataclass(frozen=True, slots=True)
class _Own:
    """Arguments of `caraserve serve`: of the server that is measured, and of one with all adapters on the device."""

    arguments: tuple[str, ...]
    cached: tuple[str, ...]


def _own(target: Target, load: LoadOptions, folder: Path, notes: list[str]) -> _Own:
    """The server asked for; else a random model, where a preset or a name asks for one; else the demo."""
    if target.serve is not None:
        return _Own(target.serve, (*target.serve, "--loading-mode", "cached"))
    registry = ("--registry", str(folder / "registry.sqlite"))
    if target.random_model is None and load.preset is None:
        return _Own(registry, (*registry, "--loading-mode", "cached"))
    model, note = load.model(target.random_model)
    notes += [] if note is None else [note]
    spec = load.spec()
    workload = build(spec)
    context = load.max_model_len or _longest(workload)
    made = make_synthetic(folder, model, target.dtype, context, workload.ranks, TARGETS[target.targets])
    arguments = (*made.arguments, *registry, *_host_room(made.room_bytes()))
    device_bytes = made.room_bytes()
    cached = (*arguments, *_DEVICE, str(device_bytes), "--loading-mode", "cached")
    if spec.popularity.drops_after_use and made.names:
        resident = min(len(made.names), max(_LEAST_RESIDENT, len(made.names) // _RESIDENT_SHARE))
        device_bytes = made.room_bytes(resident)
        notes.append(
            f"The device holds {resident} of {len(made.names)} adapters, so that each has left it when its turn comes."
        )
    return _Own((*arguments, *_DEVICE, str(device_bytes)), cached)


def _host_room(adapter_bytes: int) -> tuple[str, str]:
    """A host tier with room for all adapters, and for those that a profile is measured with before them."""
    return "--max-host-adapters-bytes", str(2 * adapter_bytes + (256 << 20))


def _longest(workload: Workload) -> int:
    """Context that every request fits into, in steps that need not be a power of two."""
    return -(-max(each.prompt_tokens + each.output_tokens for each in workload.requests) // 64) * 64 + 64


def _for_endpoint(
    spec: WorkloadSpec, load: LoadOptions, endpoint: Endpoint, notes: list[str]
) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """The load for the adapters that there are, and their names. Theirs are the ranks that count."""
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
    ranks = tuple(endpoint.ranks.get(name, 1) for name in names)
    limits = [limit for limit in (spec.max_context, endpoint.max_model_len) if limit is not None]
    return replace(
        spec,
        adapters=len(names),
        ranks=ranks,
        scale=replace(spec.scale, adapters=1.0),
        max_context=min(limits, default=None),
    ), names


async def _auto_rate(conductor: Conductor, endpoint: Endpoint, load: LoadOptions, notes: list[str]) -> float:
    """The rate here that compares with the paper's there."""
    preset = find_preset(load.preset) if load.preset is not None else None
    spec, names = _for_endpoint(load.spec(), load, endpoint, [])
    workload = build(replace(with_rate(spec, math.inf), num_requests=PROBE_REQUESTS, duration_s=None))
    run = await conductor.play(endpoint, workload, names, "capacity", CONCURRENCY)
    if conductor.stopped.is_set():
        return math.nan
    try:
        capacity = capacity_per_s(run)
    except ValueError as error:
        raise ConfigError(f"--rate-scale auto: {error}") from None
    share = share_of_capacity(preset)
    rate = share * capacity
    asked = f"{spec.rate:g} requests/s" if spec.rate is not None else "load"
    notes.append(
        f"This machine bears {capacity:.3g} requests/s with {CONCURRENCY} under way. The setting's {asked} is taken "
        f"for {share:.0%} of its machine's capacity, which is {rate:.3g} requests/s here."
    )
    return rate


def _without_adapters(workload: Workload) -> Workload:
    return replace(workload, requests=tuple(replace(each, adapter=None) for each in workload.requests))
