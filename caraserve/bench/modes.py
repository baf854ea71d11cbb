"""`caraserve bench modes`: sends one load to several loading modes in turn, each in a server of its own.

A machine's speed drifts during a benchmark. So each repeat runs all modes, every repeat starts with another mode, and a
mode's latencies are compared with those of `cached` in the same repeat, which had the same requests. Many short repeats
therefore show more than a few long ones.
"""

import argparse
import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import TypeAlias

from caraserve.bench.capacity import measure_capacity, objective, probe_spec, rate_here
from caraserve.bench.client.dialects import LoadSettings, PromptEmbeds
from caraserve.bench.client.endpoint import Endpoint, adapter_loads, find_endpoint
from caraserve.bench.options import TARGETS, LoadOptions, ReportOptions, with_rate
from caraserve.bench.records import Run, ServerUse, Workload
from caraserve.bench.runner import BenchmarkRunner, TimeLeft, interruptible
from caraserve.bench.serve import Measurements, keep_measured
from caraserve.bench.servers import (
    OwnServer,
    Synthetic,
    api_key_in,
    busy_s,
    device_of,
    longest,
    make_synthetic,
    own_server,
    working_folder,
)
from caraserve.bench.synthetic import SHAPES
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.errors import ConfigError

BASELINE = "cached"
_ALL_ON_DEVICE = ("cached", "merged")
_TRIES = 3
_SERVER_START_S = 15.0  # about, with a model of 100 million parameters
_CALM_PATIENCE_S = 20
_GROWTH = 1.5  # a server's memory after its runs ÷ that after its start, at most: KV blocks are touched on first use
_ALONE_REQUESTS = 12  # sent one after another, to measure the CPU time of one


@dataclass(frozen=True, slots=True)
class ModesOptions:
    """Options of `caraserve bench modes` besides load and report."""

    modes: tuple[str, ...]
    repeats: int
    resident: int | None  # adapters that fit on the device, in modes that load; None: a quarter of them
    random_model: str | None
    targets: str
    dtype: str
    emulate_link_mb_per_s: float | None
    load_share: float | None  # emulate the link that loads an adapter for every request in this share of the time
    prompt_embeds: bool  # prompts are vectors in place of tokens
    lora_kernels: tuple[str, ...]  # each mode runs with each of them; empty: the server's default
    calm_cores: float  # cores that other programs may use; a run during which they use more is repeated
    cores_used: float | None  # sets the rate at which `cached` keeps so many cores busy; None: by capacity
    serve: tuple[str, ...]  # additional arguments of `caraserve serve`, for every mode


def modes_options(args: argparse.Namespace) -> tuple[ModesOptions, LoadOptions, ReportOptions]:
    """Returns the options that `bench_parser` has parsed. Raises ConfigError for options that contradict each other."""
    values = {name: getattr(args, name) for name in ModesOptions.__slots__ if name != "serve"}
    options = ModesOptions(**values, serve=args.serve_arguments)
    return options, LoadOptions.from_args(args), ReportOptions.from_args(args)


# --- the loads ---


@dataclass(frozen=True, slots=True)
class ModeLoads:
    """The requests of every repeat. `order`: in which adapters are dealt, round after round, where no request is to
    find its adapter on the device; otherwise empty."""

    repeats: tuple[Workload, ...]
    order: tuple[int, ...] = ()

    def used(self) -> list[int]:
        """Returns the adapters that requests use, by index."""
        found = {request.adapter for load in self.repeats for request in load.requests}
        return sorted(adapter for adapter in found if adapter is not None)

    def held_before(self, repeat: int, resident: int) -> list[int]:
        """Returns the `resident` adapters to request last before a repeat, so that the device holds them.

        Where no request is to find its adapter on the device, they are those that were dealt last: with adapters of
        equal rank, of which the device drops the least recently used, the repeat then finds none. Otherwise they are
        the last by index.
        """
        count = len(self.repeats[0].ranks)
        resident = min(resident, count)
        if not self.order:
            return list(range(count - resident, count))
        first = sum(len(load.requests) for load in self.repeats[:repeat])
        return [self.order[(first - back) % count] for back in range(resident, 0, -1)]


def mode_loads(spec: WorkloadSpec, repeats: int) -> ModeLoads:
    """Builds the requests of each repeat with a seed of its own. Raises ConfigError.

    Where adapters leave the device after use, they are dealt in one order, which each repeat continues where the one
    before ended: an adapter is requested again only after all others.
    """
    loads = [build(replace(spec, seed=spec.seed + repeat)) for repeat in range(repeats)]
    if not spec.popularity.drops_after_use or not loads[0].ranks:
        return ModeLoads(tuple(loads))
    first = dict.fromkeys(request.adapter for request in loads[0].requests if request.adapter is not None)
    order = *first, *(adapter for adapter in range(len(loads[0].ranks)) if adapter not in first)
    dealt = cycle(order)
    for index, load in enumerate(loads):
        requests = tuple(replace(request, adapter=next(dealt)) for request in load.requests)
        loads[index] = replace(load, requests=requests)
    return ModeLoads(tuple(loads), order)


# --- the servers ---


@dataclass(frozen=True, slots=True)
class ModeVariant:
    """A loading mode with a LoRA kernel. `label` omits the kernel if it is the first of those requested."""

    mode: str
    kernel: str | None  # None: the server's own choice
    label: str


def mode_variants(options: ModesOptions) -> list[ModeVariant]:
    """Returns every mode with every kernel; kernels alternate within a mode, so that drift affects them alike."""
    if not options.lora_kernels:
        return [ModeVariant(mode, None, mode) for mode in options.modes]
    first = options.lora_kernels[0]
    return [
        ModeVariant(mode, kernel, mode if kernel == first else f"{mode} {kernel}")
        for mode in options.modes
        for kernel in options.lora_kernels
    ]


WarmServer: TypeAlias = tuple[OwnServer, Endpoint]


class ModeServers:
    """Gives each run the server of its variant.

    A machine's speed drifts within minutes: by 15 % from one setting to the next, in one measurement. So short runs of
    all variants should alternate, which a start of 10 to 20 s before every run would prevent. Servers that together
    need more memory than there is run one at a time. `count`: of variants. `keep` is False where servers cannot run
    at the same time, as on one GPU.
    """

    def __init__(
        self, start: Callable[[ModeVariant], AbstractAsyncContextManager[WarmServer]], count: int, keep: bool
    ) -> None:
        self._start, self._count, self._keep = start, count, keep
        self._stack = AsyncExitStack()
        self._running: dict[ModeVariant, WarmServer] = {}

    async def __aenter__(self) -> "ModeServers":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def serve(self, variant: ModeVariant) -> AsyncIterator[WarmServer]:
        """Yields a warm server of a variant. Raises BackendFailed and Interrupted as `own_server` does."""
        if variant not in self._running:
            async with AsyncExitStack() as starting:
                warm = await starting.enter_async_context(self._start(variant))
                if not self._keep_running(warm[0]):
                    yield warm
                    return
                self._running[variant] = warm
                self._stack.push_async_exit(starting.pop_all().__aexit__)
        yield self._running[variant]

    def _keep_running(self, server: OwnServer) -> bool:
        """Returns whether servers are kept; the first one's memory decides for all."""
        if self._keep and not self._running:
            needed_bytes = (self._count - 1) * _GROWTH * server.memory_bytes()
            self._keep = needed_bytes < available_bytes()
        return self._keep


def available_bytes() -> int:
    """Returns the memory that programs can use without swapping."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:")


# --- the benchmark ---


async def bench_modes(options: ModesOptions, load: LoadOptions, report: ReportOptions) -> Measurements:
    """Runs every mode in every repeat. Raises ConfigError or BackendFailed."""
    if BASELINE not in options.modes:
        raise ConfigError(f"--modes: all others are compared with {BASELINE}, which is missing")
    _check(options, load, report)
    runner = BenchmarkRunner(LoadSettings(load.seed, load.ignore_eos, load.concurrency))
    limits = objective(report.slo, None, load.preset)
    measured = Measurements([], limits.slo, [])
    if limits.scale is not None:
        measured.notes.append("The setting's objective goes by a run without adapters, which `bench serve` makes.")
    with interruptible(runner), working_folder() as folder, keep_measured(measured):
        bench = await asyncio.to_thread(_prepared, options, load, folder, measured.notes)
        spec = bench.spec
        if load.concurrency is None and load.request_rate is None and (load.auto_rate or load.rate_scale is None):
            rate = await _rate(runner, bench, load.preset, measured.notes)
            spec = spec if runner.stopped.is_set() else with_rate(spec, rate)
        spec = load.sized(spec)
        if options.load_share is not None and not runner.stopped.is_set():
            bench = bench.with_link(spec.arrivals.rate(spec.rate) * spec.scale.rate, measured.notes)
        bench = replace(bench, loads=mode_loads(spec, options.repeats))
        measured.notes += bench.loads.repeats[0].notes
        for note in measured.notes:
            runner.log(note)
        variants = mode_variants(options)
        load_s = mean(one.requests[-1].at_s for one in bench.loads.repeats)
        open_s = None if load.concurrency is not None or load_s == 0 else load_s  # None: answers decide
        start_s = len(variants) * _SERVER_START_S
        runner.time_left = TimeLeft(len(variants), options.repeats, open_s, start_s, time.monotonic)
        if not runner.stopped.is_set():
            runner.log(runner.time_left.outline())
        start = partial(_warm_server, runner, bench)
        together = device_of(options.serve) == "cpu"  # on a GPU, each server takes the memory
        async with ModeServers(start, len(variants), together) as servers:
            for repeat in range(options.repeats):
                turn = repeat % len(variants)
                for variant in (*variants[turn:], *variants[:turn]):
                    if not runner.stopped.is_set():
                        measured.runs.append(await _run(runner, bench, servers, variant, repeat, measured.notes))
                        runner.time_left.run_ended()
    labels = [variant.label for variant in variants]
    measured.runs.sort(key=lambda run: (run.label != BASELINE, labels.index(run.label)))
    return measured


def _check(options: ModesOptions, load: LoadOptions, report: ReportOptions) -> None:
    """Raises ConfigError for options that would have no effect."""
    if report.slo_scale is not None:
        raise ConfigError("--slo-scale is for bench serve; modes are compared with cached")
    if load.request_rate is not None and len(load.request_rate) > 1:
        raise ConfigError("--request-rate: bench modes runs at one rate")
    if options.load_share is not None and options.emulate_link_mb_per_s is not None:
        raise ConfigError("--load-share chooses the emulated link; give it or --emulate-link-mb-per-s")
    if options.cores_used is not None and (load.request_rate is not None or load.rate_scale is not None):
        raise ConfigError("--cores-used chooses the rate; give it or a rate")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The model, the adapters and the load, which are the same for every server."""

    options: ModesOptions
    made: Synthetic
    folder: Path  # for a registry of each server
    spec: WorkloadSpec
    loads: ModeLoads
    resident: int

    @property
    def load_s(self) -> float | None:
        """The mean time to copy an adapter over the emulated link; None: none is emulated."""
        link = self.options.emulate_link_mb_per_s
        return None if link is None else self.made.num_bytes / max(1, len(self.made.names)) / (link * 1e6)

    def with_link(self, rate: float, notes: list[str]) -> "_Prepared":
        """Returns the same with a link that is busy for `load_share` of the time if every request loads an adapter."""
        assert self.options.load_share is not None
        load_s = self.options.load_share / rate
        mean_bytes = self.made.num_bytes / max(1, len(self.made.names))
        notes.append(
            f"Loading an adapter takes {1000 * load_s:.0f} ms, so that the loads of all requests at {rate:.3g}/s would "
            f"keep the link busy for {self.options.load_share:.0%} of the time: {mean_bytes / load_s / 1e6:.3g} MB/s."
        )
        return replace(self, options=replace(self.options, emulate_link_mb_per_s=mean_bytes / load_s / 1e6))

    def used_names(self) -> list[str]:
        """Returns the adapters that requests use."""
        return [self.made.names[index] for index in self.loads.used()]

    def held_names(self, variant: ModeVariant, repeat: int) -> list[str]:
        """Returns the adapters to request before a repeat, so that every run of it begins with them on the device."""
        resident = 0 if variant.mode in _ALL_ON_DEVICE else self.resident
        return [self.made.names[index] for index in self.loads.held_before(repeat, resident)]

    def arguments(self, variant: ModeVariant) -> tuple[str, ...]:
        """Returns the arguments of `caraserve serve` for a variant."""
        held = None if variant.mode in _ALL_ON_DEVICE else self.resident
        link = self.options.emulate_link_mb_per_s
        return (
            *self.made.arguments,
            *("--registry", str(self.folder / f"{variant.label}.sqlite")),
            *("--loading-mode", variant.mode),
            *(("--lora-kernel", variant.kernel) if variant.kernel is not None else ()),
            *("--lora-pool-bytes", str(self.made.room_bytes(held))),
            *self.made.host_room(),
            *(("--emulate-link-mb-per-s", f"{link:g}") if link is not None else ()),
            *self.options.serve,
        )


def _prepared(options: ModesOptions, load: LoadOptions, folder: Path, notes: list[str]) -> _Prepared:
    """Writes a random model and random adapters to `folder`, and adds notes about them."""
    spec = load.spec()
    model, note = load.model(options.random_model)
    notes += [] if note is None else [note]
    loads = mode_loads(spec if spec.rate is not None else with_rate(spec, math.inf), 1)
    ranks = loads.repeats[0].ranks
    count = len(ranks)
    context = load.max_model_len or longest(loads.repeats[0])
    made = make_synthetic(folder, model, options.dtype, context, ranks, TARGETS[options.targets], options.serve)
    resident = options.resident or max(1, count // 4)
    if resident > count:
        raise ConfigError(f"--resident {resident}: there are only {count} adapters")
    link = options.emulate_link_mb_per_s
    mean_bytes = made.num_bytes / max(1, count)
    notes.append(
        f"{model} with random weights in {options.dtype}; {count} adapters of "
        f"{mean_bytes / 1e6:.1f} MB on average, {resident} of them on the device at once except in "
        f"{' and '.join(_ALL_ON_DEVICE)}, where all are."
    )
    if link is not None:
        load_ms = mean_bytes / (link * 1e6) * 1000
        notes.append(f"The link to the device is emulated at {link:g} MB/s: {load_ms:.1f} ms for such an adapter.")
    spec = replace(spec, adapters=count, scale=replace(spec.scale, adapters=1.0), max_context=context)
    return _Prepared(options, made, folder, spec, loads, resident)


async def _run(
    runner: BenchmarkRunner,
    bench: _Prepared,
    servers: ModeServers,
    variant: ModeVariant,
    repeat: int,
    notes: list[str],
) -> Run:
    """Returns a run that other programs did not disturb; after three tries, the least disturbed."""
    tries: list[tuple[float, Run]] = []
    while len(tries) < _TRIES and not runner.stopped.is_set():
        async with servers.serve(variant) as warm:
            await runner.warm_up(warm[1], bench.held_names(variant, repeat))
            tries.append(await _measured(runner, bench, warm, bench.loads.repeats[repeat], variant.label))
        if tries[-1][0] <= bench.options.calm_cores:
            break
        again = f"; the run is made again: try {len(tries) + 1} of {_TRIES}" if len(tries) < _TRIES else ""
        runner.log(f"{variant.label}: other programs used {tries[-1][0]:.1f} cores meanwhile{again}")
    elsewhere, run = min(tries, key=lambda each: (each[1].interrupted, each[0]))
    if elsewhere > bench.options.calm_cores:
        notes.append(
            f"While {variant.label} was measured (repeat {repeat + 1}), other programs used {elsewhere:.1f} cores."
        )
    return run


async def _measured(
    runner: BenchmarkRunner, bench: _Prepared, warm: WarmServer, workload: Workload, label: str
) -> tuple[float, Run]:
    """Measures one run on a warm server. Returns the cores that other programs used, and the run."""
    server, endpoint = warm
    await _calm(bench.options.calm_cores)
    loads = (await adapter_loads(endpoint)).ended
    server_s, workers_s = server.cpu_s(), server.workers_cpu_s()
    client_s, busy_before_s = time.process_time(), busy_s()
    run = await runner.play(endpoint, workload, bench.made.names, label)
    server_s, workers_s = server.cpu_s() - server_s, server.workers_cpu_s() - workers_s
    client_s = time.process_time() - client_s
    elsewhere_s = busy_s() - busy_before_s - server_s - client_s
    loads = (await adapter_loads(endpoint)).ended - loads
    if not run.wall_s:
        return 0.0, run
    link_share = None if bench.load_s is None else loads * bench.load_s / run.wall_s
    use = ServerUse(server_s / run.wall_s, loads, link_share, workers_s / run.wall_s)
    return elsewhere_s / run.wall_s, replace(run, use=use)


async def _calm(cores: float) -> None:
    """Waits until the machine has been idle for a second, at most 20 s."""
    for _ in range(_CALM_PATIENCE_S):
        before_s = busy_s()
        await asyncio.sleep(1.0)
        if busy_s() - before_s < cores:
            return


@asynccontextmanager
async def _warm_server(runner: BenchmarkRunner, bench: _Prepared, variant: ModeVariant) -> AsyncIterator[WarmServer]:
    """Starts a server that has read the files of all adapters that runs use."""
    async with own_server(bench.arguments(variant), runner.stopped) as server:
        endpoint = await find_endpoint(server.url, "openai", api_key_in(bench.options.serve), bench.made.names)
        await runner.warm_up(endpoint, bench.used_names())
        if bench.options.prompt_embeds:
            hidden = SHAPES[endpoint.base_model].hidden
            endpoint = replace(endpoint, dialect=PromptEmbeds(endpoint.base_model, hidden=hidden))
        yield server, endpoint


async def _rate(runner: BenchmarkRunner, bench: _Prepared, preset: str | None, notes: list[str]) -> float:
    """Returns the rate in requests per second; NaN when interrupted.

    With `cores_used`, it is the rate that keeps so many cores busy; otherwise the same share of this machine's capacity
    as the paper's rate was of its machine's.
    """
    if bench.options.cores_used is not None:
        return await _rate_for_cores(runner, bench, bench.options.cores_used, notes)
    loads = mode_loads(probe_spec(bench.spec), 1)
    runner.log("First this machine's capacity is measured: the rate follows from it, and the time of all runs.")
    async with _baseline(runner, replace(bench, loads=loads)) as (_, endpoint):
        capacity = await measure_capacity(runner, endpoint, loads.repeats[0], bench.made.names)
    return math.nan if runner.stopped.is_set() else rate_here(capacity, preset, notes)


async def _rate_for_cores(runner: BenchmarkRunner, bench: _Prepared, cores: float, notes: list[str]) -> float:
    """Returns the rate that keeps so many cores busy, by the CPU time of requests sent one after another."""
    loads = mode_loads(replace(with_rate(bench.spec, math.inf), num_requests=_ALONE_REQUESTS, duration_s=None), 1)
    async with _baseline(runner, replace(bench, loads=loads)) as (server, endpoint):
        cpu_s = server.cpu_s()
        await runner.play(endpoint, loads.repeats[0], bench.made.names, "calibration", concurrency=1)
        cpu_s = server.cpu_s() - cpu_s
    if runner.stopped.is_set():
        return math.nan
    rate = cores * _ALONE_REQUESTS / cpu_s
    notes.append(
        f"A request alone takes {1000 * cpu_s / _ALONE_REQUESTS:.0f} ms of CPU here, so {rate:.3g} requests/s keep "
        f"{cores:g} cores busy."
    )
    return rate


def _baseline(runner: BenchmarkRunner, bench: _Prepared) -> AbstractAsyncContextManager[WarmServer]:
    variants = mode_variants(bench.options)
    return _warm_server(runner, bench, next(variant for variant in variants if variant.label == BASELINE))
