"""Builds and wires all parts of a server, then serves until a signal and drains.

Start order: first the cheap checks (paths, the port, the model's config, the tokenizer), then memory and kernels, then
threads. The port is bound first and listened on last, so that a server that listens can answer.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from caraserve import demo
from caraserve.backend_factory import ADAPTER_SLOTS, DeviceSearch, ServingBackend, build_backend, compile_copies
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.config import ClusterConfig, EngineConfig, HttpConfig, LoraConfig, ModelConfig
from caraserve.core.machine_profile import Profile
from caraserve.cpu.shared_memory import Arena
from caraserve.engine.merge_policy import MergePolicy
from caraserve.engine.stats import EngineObservers
from caraserve.http.tls_files import TlsFiles, first_context
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.loop import Engine
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.aliases import Aliases
from caraserve.lora.catalog import Catalog, CatalogRules
from caraserve.lora.folder_contents import why_alias
from caraserve.lora.folder_templates import FolderTemplates
from caraserve.lora.folder_watch import FolderWatch
from caraserve.lora.inspections import open_inspections
from caraserve.lora.management import AdapterManagement
from caraserve.lora.manager import AdapterManager
from caraserve.lora.registry import Registry
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.lora.settings import SettingsStore
from caraserve.lora.uploads import AdapterUploads
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.digest import model_digest
from caraserve.model.dtype import DTYPES
from caraserve.model.families import load_plan
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.apply import check_profile, loading_rules, prepare_machine
from caraserve.start_checks import (
    adapter_folders,
    adapter_roots,
    base_names,
    check_names,
    check_paths,
    check_routing,
    client_tls,
    exposure,
    served_base,
    upload_root,
    why_not_adapter,
)
from caraserve.telemetry.background import BackgroundTasks
from caraserve.telemetry.metrics import Metrics, WorkerCounts
from caraserve.telemetry.progress import progress
from caraserve.telemetry.trace import Trace
from caraserve.tokenizer.tokenizer import load_tokenizer
from caraserve.util.alarm import Alarm
from caraserve.util.garbage import GarbageCollector

if TYPE_CHECKING:
    from caraserve.cluster.membership.member import Member
    from caraserve.http.access.api_keys import ApiKeys
    from caraserve.http.api_request import RequestRouter

log = logging.getLogger(__name__)

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the address to use for a server that listens on all addresses
ADAPTER_BYTES = 1 << 30  # default size of the device cache where it does not share the KV cache's memory


@dataclass(frozen=True, slots=True)
class Served:
    """A running engine, and the objects that other parts of the server need beside it."""

    engine: Engine
    metrics: Metrics
    plan: DecoderPlan
    complaints: list[str]  # warnings about adapters, in folders or the registry, that cannot be served
    profile: Profile | None
    device: str
    reader: AdapterReader
    management: AdapterManagement
    settings: ReplicatedSettings


async def build_engine(
    stack: AsyncExitStack,
    model_config: ModelConfig,
    lora_config: LoraConfig,
    engine_config: EngineConfig,
    observers: EngineObservers | None = None,
    *,
    has_peers: bool = False,
) -> Served:
    """Builds all parts below HTTP and starts the engine's task; `stack` closes them in reverse order.

    `has_peers`: the machine is profiled in every loading mode, as others route to it by its profile. Raises ConfigError
    or ModelLoadError.
    """
    from caraserve.http.body.sampling import read_defaults

    observers = observers or EngineObservers()
    folder = model_config.model
    assert folder is not None, "with_demo comes first"
    search = DeviceSearch(engine_config.device)
    stack.callback(search.close)
    plan = load_plan(folder)
    tokenizer = load_tokenizer(
        *(folder, plan, model_config.chat_template, model_config.tool_call_parser),
        excludes_unused_tools=model_config.exclude_tools_when_tool_choice_none,
    )
    tokenizer.grammars.prepare()
    stack.push_async_callback(tokenizer.grammars.close)
    stack.push_async_callback(tokenizer.adapter_templates.close)
    names = base_names(model_config)
    check_paths(model_config, lora_config)
    check_names(model_config, lora_config, names)
    check_profile(lora_config, for_routing=has_peers)
    registry = Registry(lora_config.registry, model_digest(folder, model_config.load_format))
    stack.callback(registry.close)
    trace = None if engine_config.trace is None else Trace(engine_config.trace)
    if trace is not None:
        stack.callback(trace.close)
    backend = build_backend(plan, model_config, engine_config, lora_config, trace, search)
    stack.callback(backend.close)
    with progress("measuring this machine", 100, done="machine measured") as advance:
        profile = prepare_machine(
            *(backend, plan, model_config, engine_config, lora_config), advance, for_routing=has_peers
        )
    loop = asyncio.get_running_loop()

    def on_loop(call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call)

    metrics = Metrics(
        names[0],
        max_loras=lora_config.max_loras or ADAPTER_SLOTS - 1,
        block_tokens=backend.limits.block_tokens,
        workers=lambda: _worker_counts(backend),
        merges=lambda: backend.adapters_merged,
        late_kernels=lambda: backend.late_kernels,
    )
    base = None if model_config.load_format == "dummy" else BaseTensors(folder, plan)
    known = open_inspections(folder, model_config.load_format, lora_config.lora_dtype)
    reader = AdapterReader(plan, on_loop, base, DTYPES.get(lora_config.lora_dtype), compile_copies(), known)
    stack.callback(reader.close)
    arena = Arena(backend.host_memory)
    mode, pool_bytes = lora_config.mode, lora_config.lora_pool_bytes
    room = MemoryBudget(backend.limits, ADAPTER_BYTES if pool_bytes is None else pool_bytes)
    manager = AdapterManager(
        backend,
        room,
        arena,
        partial(reader.read, may_defer=not mode.preloads),
        on_loop,
        time.monotonic,
        loading_rules(backend, plan, profile, lora_config),
        lambda seconds, ok: metrics.observe_load(mode.name, seconds, outcome="ok" if ok else "failed"),
        reader.check,
    )
    rules = CatalogRules(
        names[0],
        adapter_roots(lora_config),
        room.most_adapter_bytes,
        arena.num_bytes,
        keep_on_device=mode.preloads,
        max_rank=lora_config.max_lora_rank,
        watched=lora_config.adapters_dir and lora_config.adapters_dir.resolve(),
        base=served_base(plan, model_config, lora_config, names, tokenizer),
    )
    catalog = Catalog(plan, registry, manager, reader, rules, observers.adapters, observers.uploads)
    most_bytes = min(rules.device_bytes, rules.host_bytes)
    uploads = AdapterUploads(catalog, reader, upload_root(lora_config), most_bytes, observers.removals)
    stack.push_async_callback(uploads.close)
    replicated = ReplicatedSettings(registry, observers.settings)
    stack.push_async_callback(replicated.close)
    takes_templates = rules.base.takes_templates
    settings = SettingsStore(replicated, catalog, read_defaults, takes_folder_templates=takes_templates)
    stack.push_async_callback(settings.close)
    aliases = Aliases(replicated, lambda name: catalog.find(name) is not None)
    management = AdapterManagement(uploads, aliases, settings)
    complaints = _add_adapters(catalog, aliases, lora_config)
    if takes_templates:
        await FolderTemplates(rules.base, settings).take_all(catalog)
    metrics.show(manager.counters.families)
    metrics.show(tokenizer.families)
    engine = Engine(
        base_names=names,
        backend=backend,
        catalog=catalog,
        tokenizer=tokenizer,
        config=engine_config,
        metrics=metrics,
        exclusive_loads=mode.stops_others,
        merging=MergePolicy(backend.limits.num_slots) if mode.merges else None,
        observers=observers.iterations,
        iteration_ms=PerfModel.of(profile, padded_rank=lora_config.padded_rank).iteration_ms if profile else None,
        alarm=stack.enter_context(contextlib.closing(Alarm())),
    )
    metrics.show(engine.unread.families)
    task = asyncio.create_task(engine.run(), name="caraserve-engine")
    task.add_done_callback(_stop_on_defect)
    stack.push_async_callback(_end_task, task)
    if mode.preloads:
        await catalog.preloaded()
    return Served(engine, metrics, plan, complaints, profile, backend.device_name, reader, management, replicated)


def _worker_counts(backend: ServingBackend) -> WorkerCounts:
    states = backend.workers.states()
    return WorkerCounts(
        alive=sum(state.pid is not None for state in states),
        deaths=sum(state.deaths for state in states),
        slices=backend.slices_handed_off,
        redone=backend.modules_redone,
    )


def _add_adapters(catalog: Catalog, aliases: Aliases, lora: LoraConfig) -> list[str]:
    modules = [(module.name, module.path) for module in lora.lora_modules]
    found: set[str] = set()
    complaints: list[str] = []

    def leave_out(path: Path, reason: str) -> None:
        catalog.refused.note(path.name, reason)
        complaints.append(f"{str(path)!r} in --adapters-dir is left out: {reason}")

    if lora.adapters_dir is not None:
        named = {name for name, _ in modules}
        for path in adapter_folders(lora.adapters_dir):
            if path.name in named:
                continue
            if (reason := why_not_adapter(path)) is not None:
                leave_out(path, reason)
            elif aliases.find(path.name) is not None:
                leave_out(path, why_alias(path.name))
            else:
                found.add(path.name)
                modules.append((path.name, path))
    with progress("adapters", len(modules)) as advance:
        return [*complaints, *catalog.add_at_start(modules, advance, found=found)]


def _stop_on_defect(task: "asyncio.Task[None]") -> None:
    """Aborts the process if the engine's task ends with an error, which only a defect can cause.

    The server would hang otherwise.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the engine has stopped", exc_info=error)
        os.kill(os.getpid(), signal.SIGABRT)


async def _end_task(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def serve(
    model_config: ModelConfig,
    lora_config: LoraConfig,
    engine_config: EngineConfig,
    http_config: HttpConfig,
    cluster_config: ClusterConfig,
    *,
    watching_signals: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. SIGHUP has keys, secrets and certificates read again.

    `watching_signals` is called after the signal handlers have been set. Raises ConfigError or ModelLoadError if the
    server cannot start, and ConfigError if the cluster rejects it.
    """
    from caraserve import serve_cluster
    from caraserve.cluster.node import LocalParts
    from caraserve.http.access.api_keys import ApiKeys
    from caraserve.http.app import make_app, start_http
    from caraserve.http.generation import LocalRouter
    from caraserve.http.server import bind
    from caraserve.http.tracing import OtlpExporter, Tracer

    model_config, lora_config = demo.with_demo(model_config, lora_config)
    check_routing(cluster_config)
    credentials = serve_cluster.check_cluster(cluster_config, http_config) if cluster_config.peers else None
    tls = client_tls(http_config, cluster_config)
    keys = ApiKeys(http_config)
    rereads: list[Callable[[], None]] = []
    _reread_on_hangup(rereads)
    async with AsyncExitStack() as stack:
        sockets = bind(http_config.host, http_config.port)
        for one in sockets:
            stack.callback(one.close)
        observers = EngineObservers()
        has_peers = bool(cluster_config.peers)
        served = await build_engine(stack, model_config, lora_config, engine_config, observers, has_peers=has_peers)
        for complaint in served.complaints:
            log.warning("%s", complaint)
        engine, metrics = served.engine, served.metrics
        cluster = None
        if credentials is not None:
            digest = model_identity(model_config, engine_config, served.plan)
            local = LocalParts(
                engine=engine,
                observers=observers,
                reader=served.reader,
                settings=served.settings,
                uploads=served.management.uploads,
                plan=served.plan,
                model_digest=digest,
                profile=served.profile,
                metrics=metrics,
            )
            cluster = serve_cluster.make_cluster(stack, cluster_config, lora_config, credentials, local)
        background = cluster.member.background if cluster else BackgroundTasks()
        tracer = None
        if http_config.otlp_traces_endpoint is not None:
            name = cluster_config.name or f"{http_config.host}:{http_config.port}"
            exporter = OtlpExporter(http_config.otlp_traces_endpoint, name)
            stack.push_async_callback(exporter.close)
            background.run(stack, exporter.run, "OTLP export")
            metrics.show(exporter.families)
            tracer = Tracer(exporter, lora_config.loading_mode)
        router = cluster.router if cluster else LocalRouter()
        app = make_app(
            engine,
            http_config,
            metrics,
            allow_lora_updates=lora_config.allow_runtime_lora_updating,
            router=router,
            cluster=cluster.member if cluster else None,
            background=background,
            management=served.management,
            keys=keys,
            tracer=tracer,
        )
        if cluster is not None:
            cluster.add_routes(app)
        runner, port = await start_http(app, http_config, sockets, first_context(tls))
        stack.push_async_callback(runner.cleanup)
        stop = _watch_signals()
        watching_signals()
        _watch_files(stack, background, rereads, keys if http_config.api_key_file else None, tls)
        if lora_config.adapters_dir is not None and not lora_config.mode.preloads:
            watch = FolderWatch(lora_config.adapters_dir, engine.catalog, served.management.aliases)
            background.run(stack, watch.run, "watch of --adapters-dir")
        if cluster is not None:
            await cluster.start(stack, app, http_config, port)
            rereads.append(cluster.reread)
        collector = GarbageCollector(lambda: engine.is_idle)
        collector.settle()
        background.run(stack, collector.run, "garbage collection")
        if warning := exposure(http_config):
            log.warning("%s", warning)
        _announce(served, http_config, port)
        await _stopped(stop, cluster.member if cluster else None)
        log.info(
            "draining: no new requests; up to %.0f s for those running, which a second Ctrl-C or SIGTERM ends at once",
            http_config.drain_timeout_s,
        )
        await _drain(engine, router, http_config.drain_timeout_s)
        if cluster is not None and cluster.member.ended.done():
            cluster.member.ended.result()


def _watch_files(
    stack: AsyncExitStack,
    background: BackgroundTasks,
    rereads: list[Callable[[], None]],
    keys: "ApiKeys | None",
    tls: TlsFiles | None,
) -> None:
    """Has the files of keys and certificates read again when they change, and on SIGHUP."""
    for files, name in ((keys, "API keys"), (tls, "TLS certificate")):
        if files is not None:
            background.run(stack, files.watch, name)
            rereads.append(files.reread)


async def _drain(engine: Engine, router: "RequestRouter", timeout_s: float) -> None:
    """Waits until all requests have ended; cancels those that take longer than `timeout_s`.

    The router forwards new requests until the engine has drained.
    """
    clock = asyncio.get_running_loop().time
    ends_s = clock() + timeout_s
    await engine.drain(timeout_s)
    await router.drain(ends_s - clock())


async def _stopped(stop: asyncio.Event, member: "Member | None") -> None:
    """Waits for a signal, or until the cluster has rejected this instance."""
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
    if member is not None:
        waits.append(member.ended)
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    waits[0].cancel()


def model_identity(model: ModelConfig, engine: EngineConfig, plan: DecoderPlan) -> str:
    """Returns a digest of the model's config, weights and dtype; instances with equal digests give equal answers."""
    assert model.model is not None
    weights = f"dummy {engine.seed}" if model.load_format == "dummy" else "checkpoint"
    return model_digest(model.model, plan.dtype if model.dtype == "auto" else model.dtype, weights)


def _reread_on_hangup(rereads: Sequence[Callable[[], None]]) -> None:
    """Has SIGHUP call `rereads`, which may be added to, and nothing else: other servers read their files again on it,
    so it ends none, not even one that is starting. An ignored SIGHUP, as under nohup, stays ignored."""

    def on_signal() -> None:
        for reread in rereads:
            reread()

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_signal)


def _watch_signals() -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _announce(served: Served, http: HttpConfig, port: int) -> None:
    """Prints the address, the model, the adapters and a curl command; with --log-format json, logs one line instead."""
    engine, infos = served.engine, served.engine.adapters()
    host = _LOOPBACK.get(http.host, http.host)
    url = f"{'https' if http.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    shown = ", ".join(f"{info.name} (rank {info.rank})" for info in infos[:8])
    more = f" and {len(infos) - 8} more" if len(infos) > 8 else ""
    millions = served.plan.num_parameters / 1e6
    size = f"{millions:.1f}M parameters in {engine.catalog.rules.base.formats}"
    ready = f"CaraServe is ready at {url}  ({engine.base_name}, {size}, on {served.device})"
    if http.log_format == "json":
        log.info("%s; adapters: %s%s", ready, shown or "none", more)
        return
    console = Console(stderr=False, soft_wrap=True, highlight=False, markup=False)
    console.print(f"{ready}\nadapters: {shown or 'none'}{more}")
    name = next((info.name for info in infos if not info.facts.num_classes), engine.base_name)
    chat = '"messages": [{"role": "user", "content": "Tell me about the sea."}]'
    route, text = ("chat/completions", chat) if engine.tokenizer.can_chat else ("completions", '"prompt": "The sea is"')
    key = " -H 'Authorization: Bearer YOUR-API-KEY'" if http.needs_keys else ""
    body = f'{{"model": "{name}", {text}}}'
    console.print(f"try:  curl {url}/v1/{route}{key} -H 'Content-Type: application/json' -d '{body}'")
