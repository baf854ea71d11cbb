"""`caraserve doctor`: what this machine has for serving, one line for each check, and what to do about the rest.

Takes serve's options, and checks with serve's own functions what they name. No weights are loaded, nothing is compiled,
and no package of the GPU is imported.
"""

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from caraserve.backend_factory import check_options, dtype_of
from caraserve.cli.memory_need import MemoryNeed
from caraserve.config import ClusterConfig, EngineConfig, HttpConfig, LoraConfig, ModelConfig
from caraserve.cpu.kernel_cache import has_kernels
from caraserve.demo import with_demo
from caraserve.errors import CaraServeError, ConfigError, ModelLoadError
from caraserve.gpu.driver.detect import Gpu, Installed, choose, installed, look
from caraserve.http.access.api_keys import ApiKeys
from caraserve.http.server import bind
from caraserve.lora.catalog import above_max_rank
from caraserve.lora.peft import check_layout
from caraserve.lora.registry import Registry
from caraserve.lora.served_base import ServedBase
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.checkpoint import stored_tensors
from caraserve.model.families import load_plan
from caraserve.model.opened_file import TensorFileError
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.apply import check_profile
from caraserve.serve_cluster import check_cluster
from caraserve.start_checks import (
    adapter_folders,
    base_names,
    check_names,
    check_paths,
    check_routing,
    client_tls,
    exposure,
    served_names,
    why_not_adapter,
)
from caraserve.telemetry.trace import check_writable
from caraserve.tokenizer.tokenizer import load_tokenizer
from caraserve.util.cache_folder import cache_folder, why_unwritable
from caraserve.util.memory import limit_bytes, machine_bytes, machine_free_bytes
from caraserve.util.units import human_bytes

State = Literal["ok", "warning", "problem"]
_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_NEWEST_PYTHON = (3, 14)  # newest that numba has wheels for
_ALL_WELL = "all is well. Only a start reads weights, compiles kernels, and reads adapters"
_LEAST_FREE_BYTES = 1 << 30  # below it, the demo and the compiler of its kernels are short of memory


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. `advice`: what to do, empty if there is nothing to do."""

    what: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about this machine that checks judge. `limit_bytes`: the container's memory limit, None without one."""

    python: tuple[int, int, int]
    architecture: str
    cpu_flags: frozenset[str]
    cores: int
    usable_cores: int
    free_bytes: int
    memory_bytes: int
    limit_bytes: int | None
    has_memfd: bool
    gpu: Gpu | None
    gpu_problem: str  # why there is no GPU; empty on a machine without a driver
    packages: Installed

    @classmethod
    def here(cls) -> "MachineFacts":
        """Reads the facts; starts a process that asks the GPU's driver, if there is one."""
        gpu, gpu_problem = look()
        return cls(
            python=sys.version_info[:3],
            architecture=platform.machine(),
            cpu_flags=_cpu_flags(Path("/proc/cpuinfo")),
            cores=os.cpu_count() or 1,
            usable_cores=len(os.sched_getaffinity(0)),
            free_bytes=machine_free_bytes(),
            memory_bytes=machine_bytes(),
            limit_bytes=limit_bytes(),
            has_memfd=_has_memfd(),
            gpu=gpu,
            gpu_problem=gpu_problem,
            packages=installed(has_gpu=gpu is not None),
        )


@dataclass(frozen=True, slots=True)
class Configs:
    """The configuration that serve would get from the same command line."""

    model: ModelConfig
    lora: LoraConfig
    engine: EngineConfig
    http: HttpConfig
    cluster: ClusterConfig


def doctor(configs: Configs) -> int:
    """Prints all findings; returns the exit code: 1 if there is a problem."""
    findings = examine(MachineFacts.here(), configs)
    console = Console(soft_wrap=True, highlight=False)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        text = f"  {finding.what:{width}}  {finding.found}{f'; {finding.advice}' if finding.advice else ''}"
        console.print(Text(f"{finding.state:7}", _STYLES[finding.state]) + Text(text))
    counts = [(sum(finding.state == state for finding in findings), state) for state in ("problem", "warning")]
    summary = ", ".join(f"{count} {state}{'s' * (count > 1)}" for count, state in counts if count)
    console.print(summary or _ALL_WELL, markup=False)
    return int(counts[0][0] > 0)


def examine(machine: MachineFacts, configs: Configs) -> list[Finding]:
    """Returns the findings on a machine and on what a server would be started with."""
    return [
        _python(machine),
        _cpu(machine),
        _memory(machine),
        _shared_memory(machine),
        _kernel_cache(cache_folder("kernels")),
        *_gpu(machine, configs.engine.device),
        *_configured(machine, configs),
    ]


# --- the machine ---


def _python(machine: MachineFacts) -> Finding:
    found = ".".join(map(str, machine.python))
    if machine.python[:2] > _NEWEST_PYTHON:
        newest = ".".join(map(str, _NEWEST_PYTHON))
        return Finding("Python", "warning", found, f"it may be too new for numba; Python {newest} is known to work")
    return Finding("Python", "ok", found)


def _cpu(machine: MachineFacts) -> Finding:
    flags, cores = machine.cpu_flags, f"{machine.usable_cores} of {machine.cores} cores"
    if machine.architecture not in ("x86_64", "AMD64"):
        return Finding("CPU", "ok", f"{machine.architecture}, {cores}")
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if {"avx2", "fma"} <= flags else ""
    found = f"{cores}, {vectors or 'no AVX2'}, {'' if 'f16c' in flags else 'no '}F16C"
    if not vectors:
        return Finding("CPU", "warning", found, "its arithmetic takes several times as long as with AVX2")
    if "f16c" not in flags:
        return Finding("CPU", "warning", found, "float16 weights are slow; give --dtype bfloat16 or float32")
    if machine.usable_cores == 1:
        return Finding("CPU", "warning", found, "computing delays the event loop on one core; two or more are better")
    return Finding("CPU", "ok", found)


def _memory(machine: MachineFacts) -> Finding:
    found = f"{human_bytes(machine.free_bytes)} free of {human_bytes(machine.memory_bytes)}"
    if machine.limit_bytes is not None and machine.limit_bytes < machine.memory_bytes:
        found += f", {human_bytes(machine.limit_bytes)} allowed to this container"
        if machine.limit_bytes < machine.free_bytes:
            advice = "sizes that follow the free memory may exceed it; give --kv-cache-bytes"
            return Finding("memory", "warning", found, advice)
    if machine.free_bytes < _LEAST_FREE_BYTES:
        return Finding("memory", "warning", found, "end other processes, or compiling kernels may run out of memory")
    return Finding("memory", "ok", found)


def _shared_memory(machine: MachineFacts) -> Finding:
    if machine.has_memfd:
        return Finding("shared memory", "ok", "memfd works; the size of /dev/shm does not matter")
    advice = "a sandbox forbids memfd_create: allow it"
    return Finding("shared memory", "problem", "memfd does not work", advice)


def _kernel_cache(folder: Path) -> Finding:
    if problem := why_unwritable(folder):
        return Finding("kernel cache", "problem", problem, "set XDG_CACHE_HOME to a folder that can be")
    if has_kernels():
        return Finding("kernel cache", "ok", f"{folder} has kernels of this version; other options may need more")
    found = f"{folder} has no kernels of this version: the next start compiles them"
    return Finding("kernel cache", "ok", f"{found}, in about half a minute on an idle machine")


def _gpu(machine: MachineFacts, wanted: str) -> Iterator[Finding]:
    gpu, packages = machine.gpu, machine.packages
    if gpu is None:
        yield Finding("GPU", "warning" if machine.gpu_problem else "ok", machine.gpu_problem or "no NVIDIA driver")
    else:
        capability = f"{gpu.capability // 10}.{gpu.capability % 10}"
        yield Finding("GPU", "ok", f"{gpu.name}, compute capability {capability}")
        yield Finding("driver", "ok", f"for CUDA {gpu.driver_version // 1000}.{gpu.driver_version % 1000 // 10}")
    absent: State = "ok" if gpu is None else "warning"
    torch = f"{packages.torch}, {_built_for(packages.torch_cuda)}" if packages.torch else ""
    cupy = "" if packages.cupy_cuda is None else _built_for(packages.cupy_cuda)
    for name, found in (("torch", torch), ("CuPy", cupy), ("Triton", "installed" if packages.triton else "")):
        needless = "" if gpu else "; serving on the CPU needs none"
        yield Finding(name, "ok" if found else absent, found or f"not installed{needless}")
    try:
        choice = choose(wanted, gpu, machine.gpu_problem, packages)
    except CaraServeError as error:
        yield Finding("device", "problem", error.message)
    else:
        yield Finding("device", "warning" if choice.note else "ok", choice.note or choice.device)


def _built_for(cuda: int | None) -> str:
    return "built without CUDA" if cuda is None else f"built for CUDA {cuda or 'of an unknown version'}"


# --- what a server would be started with ---


def _configured(machine: MachineFacts, configs: Configs) -> Iterator[Finding]:
    try:
        model, lora = with_demo(configs.model, configs.lora)
    except CaraServeError as error:  # the demo's model cannot be downloaded
        yield Finding("model", "problem", error.message)
        return
    device = _device(machine, configs.engine.device)
    room_bytes = min(machine.free_bytes, machine.limit_bytes or machine.free_bytes) if device == "cpu" else None
    yield _checked("address", lambda: _address(configs.http, configs.cluster))
    if configs.http.needs_keys:
        yield _checked("keys", lambda: _keys(configs.http))
    if warning := exposure(configs.http):
        yield Finding("access", "warning", warning)
    yield _checked("model", lambda: _model(model, room_bytes))
    plan = _plan_of(model)
    yield _checked("options", lambda: _options(plan, model, configs.engine, lora, device))
    if plan is not None and device:
        yield from _memory_need(machine, plan, model, configs.engine, lora, room_bytes)
    yield _checked("files", lambda: _files(configs.engine, lora, configs.cluster))
    yield _checked("adapters", lambda: _adapters(plan, model, lora))
    yield from _left_out(plan, model, lora)


def _checked(what: str, check: Callable[[], str]) -> Finding:
    """Returns what `check` found, or the error that it raised, which says what to do."""
    try:
        return Finding(what, "ok", check())
    except CaraServeError as error:
        return Finding(what, "problem", error.message)
    except OSError as error:
        return Finding(what, "problem", f"{error.filename or what}: {error.strerror}")


def _address(http: HttpConfig, cluster: ClusterConfig) -> str:
    """Binds the port, and reads certificates and secrets. Raises ConfigError."""
    sockets = bind(http.host, http.port)
    port = sockets[0].getsockname()[1]
    for one in sockets:
        one.close()
    check_routing(cluster)
    tls = ", certificates are valid" if client_tls(http, cluster) is not None else ""
    if not cluster.peers:
        return f"{http.host}:{port} is free{tls}"
    check_cluster(cluster, http)
    return f"{http.host}:{port} is free{tls}, {len(cluster.peers)} peers given"


def _keys(http: HttpConfig) -> str:
    """Reads the keys. Raises ConfigError."""
    return f"{ApiKeys(http).num_keys} given or in --api-key-file"


def _device(machine: MachineFacts, wanted: str) -> str:
    """Returns the device that would be served on; "" if there is none, which another line says."""
    try:
        return choose(wanted, machine.gpu, machine.gpu_problem, machine.packages).device
    except CaraServeError:
        return ""


def _plan_of(config: ModelConfig) -> DecoderPlan | None:
    """Returns the model's shapes; None if they cannot be read, which another line says."""
    assert config.model is not None, "with_demo comes first"
    try:
        return load_plan(config.model)
    except (CaraServeError, OSError):
        return None


def _options(plan: DecoderPlan | None, model: ModelConfig, engine: EngineConfig, lora: LoraConfig, device: str) -> str:
    """Checks options against the model and the device. Raises ConfigError or ModelLoadError."""
    if plan is None or not device:
        return "not checked without a model and a device"
    check_options(plan, model, engine, lora, device)
    return f"the model on {device} takes them"


def _memory_need(
    machine: MachineFacts,
    plan: DecoderPlan,
    model: ModelConfig,
    engine: EngineConfig,
    lora: LoraConfig,
    room_bytes: int | None,
) -> Iterator[Finding]:
    """Yields what the server takes of the memory. `room_bytes`: what is free; None: it is a GPU's."""
    try:
        if room_bytes is None:
            assert machine.gpu is not None
            need = MemoryNeed.on_gpu(plan, model, engine, machine.gpu.total_bytes)
        else:
            need = MemoryNeed.on_cpu(plan, model, engine, lora, room_bytes)
    except CaraServeError:  # the line before says it
        return
    if need.weights_bytes > need.room_bytes and room_bytes is not None:
        return  # a line before says it
    if need.least_bytes > need.room_bytes:
        advice = "that is too little; lower --max-model-len or --kv-cache-bytes, or choose smaller weights"
        yield Finding("sizes", "problem", str(need), advice)
    elif need.most_bytes > need.room_bytes:
        advice = "full caches do not fit: lower --max-host-adapters-bytes, --lora-pool-bytes or --kv-cache-bytes"
        yield Finding("sizes", "warning", str(need), advice)
    else:
        yield Finding("sizes", "ok", str(need))


def _files(engine: EngineConfig, lora: LoraConfig, cluster: ClusterConfig) -> str:
    """Opens the files of --trace, --registry and --profile, and leaves none that was not there. Raises ConfigError."""
    check_profile(lora, for_routing=bool(cluster.peers))
    if engine.trace is not None:
        with _removed_if_new(engine.trace):
            check_writable(engine.trace)
    if lora.registry is not None:
        with _removed_if_new(lora.registry):
            Registry(lora.registry).close()
    return "those of --trace, --registry and --profile can be used"


@contextmanager
def _removed_if_new(path: Path) -> Iterator[None]:
    """Removes the file at `path` at the end if there was none before."""
    was_there = path.is_symlink() or path.exists()
    try:
        yield
    finally:
        if not was_there:
            path.unlink(missing_ok=True)


def _model(config: ModelConfig, room_bytes: int | None) -> str:
    """Reads all of a model folder but its weights. `room_bytes`: the memory that they must fit into, None if they go to
    a GPU. Raises ModelLoadError."""
    folder = config.model
    assert folder is not None, "with_demo comes first"
    plan = load_plan(folder)
    load_tokenizer(folder, plan, config.chat_template, config.tool_call_parser)
    if config.load_format != "dummy":
        try:
            stored_tensors(folder)
        except TensorFileError as error:
            raise ModelLoadError(str(error)) from error
    num_bytes = plan.weight_bytes(dtype_of(plan, config.dtype).itemsize)
    if room_bytes is not None and num_bytes > room_bytes:
        raise ModelLoadError(f"{folder}: weights of {human_bytes(num_bytes)}, and {human_bytes(room_bytes)} are free")
    return f"{folder}: {plan.family}, weights of {human_bytes(num_bytes)} ({plan.format_names(config.dtype)})"


def _adapters(plan: DecoderPlan | None, model: ModelConfig, lora: LoraConfig) -> str:
    """Checks the names of adapters, and files of --lora-modules but their weights. Raises ConfigError or OSError."""
    check_paths(model, lora)
    check_names(model, lora, base_names(model))
    why_refused = _refusals(plan, model, lora)
    for module in lora.lora_modules:
        if why := why_refused(module.path):
            raise ConfigError(f"adapter {module.name!r} at {module.path}: {why}")
    return f"{len(lora.lora_modules) + len(_found(lora))} named or found; their weights are checked at the start"


def _found(lora: LoraConfig) -> list[Path]:
    """Returns the folders in --adapters-dir. Raises ConfigError."""
    named = {module.name for module in lora.lora_modules}
    folders = [] if lora.adapters_dir is None else adapter_folders(lora.adapters_dir)
    return [path for path in folders if path.name not in named]


def _left_out(plan: DecoderPlan | None, model: ModelConfig, lora: LoraConfig) -> Iterator[Finding]:
    """Yields a warning if the start would leave out folders of --adapters-dir."""
    try:
        folders = _found(lora)
    except ConfigError:  # the line before says it
        return
    why_refused = _refusals(plan, model, lora)
    reasons = [(path, why_not_adapter(path) or why_refused(path)) for path in folders]
    refused = [(path, why) for path, why in reasons if why]
    if refused:
        path, why = refused[0]
        found = f"{len(refused)} of {len(folders)} folders in --adapters-dir would be left out: {path.name!r}: {why}"
        yield Finding("left out", "warning", found, "the log of the start names all" if len(refused) > 1 else "")


def _refusals(plan: DecoderPlan | None, model: ModelConfig, lora: LoraConfig) -> Callable[[Path], str]:
    """Returns a function that says why an adapter cannot be served, as its configuration and its tensors' shapes show;
    "" if it can be, or without a plan."""
    if plan is None or model.model is None:
        return lambda path: ""
    base = None if model.load_format == "dummy" else BaseTensors(model.model, plan)
    served = ServedBase(served_names(model, base_names(model)), requires_name=lora.require_base_name)

    def why_refused(path: Path) -> str:
        try:
            spec = check_layout(path, plan, base)
        except CaraServeError as error:
            return error.message
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        refusal = above_max_rank(spec.rank, lora.max_lora_rank) or served.refusal(spec.trained_on)
        return "" if refusal is None else refusal.message

    return why_refused


# --- facts ---


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """Returns the features of the first core as Linux names them."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("caraserve"))
    except OSError:
        return False
    return True
