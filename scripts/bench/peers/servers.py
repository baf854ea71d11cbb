"""Servers under comparison: their commands, their processes, and stopping those that are not measured."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from caraserve.bench.client.endpoint import Endpoint, find_endpoint
from caraserve.bench.servers import OwnServer, end_with_parent
from caraserve.errors import BackendFailed
from scripts.bench.peers.builds import LlamaCpp, Vllm
from scripts.bench.peers.models import ModelFiles

CONTEXT_TOKENS = 2304  # fits a prompt of 2,048 tokens and its output
MOST_REQUESTS = 16
OURS, LLAMA, VLLM = "CaraServe", "llama.cpp", "vLLM"
_START_S = 900.0  # vLLM compiles at its first start
_END_S = 20.0
_POLL_S = 0.1
_SHOWN_CHARACTERS = 1500  # of the log of a server that failed
_ADAPTER_BYTES = "4GiB"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server. `on_adapters`, `on_base`: whether requests on adapters are sent to it, and others."""

    name: str
    kind: str  # OURS, LLAMA or VLLM
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    on_adapters: bool = True
    on_base: bool = True

    @property
    def title(self) -> str:
        """The name of the server among those of one format; two of a kind may have the same `name`."""
        return self.name if self.on_base else f"{self.name} with adapters"

    def takes_part(self, adapters: bool) -> bool:
        """Returns whether it is measured with requests on adapters, or with requests on the base model."""
        return self.on_adapters if adapters else self.on_base


def our_command(model: ModelFiles, threads: int, extra: Sequence[str] = ()) -> ServerCommand | None:
    """Returns the command of `caraserve serve`; `extra` arguments become part of its name. None: no file for it."""
    path = model.folder or model.gguf
    if path is None:
        return None
    arguments = [sys.executable, "-m", "caraserve", "serve", str(path), "--served-model-name", "base"]
    arguments += ["--dtype", model.dtype] if model.dtype != "auto" else []
    arguments += ["--device", "cpu", "--cpu-threads", str(threads), "--max-num-seqs", str(MOST_REQUESTS)]
    arguments += ["--max-model-len", str(CONTEXT_TOKENS), "--kv-cache-bytes", "1GiB", "--no-log-requests"]
    if model.adapters:
        arguments += ["--lora-modules", *(f"{name}={folder}" for name, folder, _ in model.adapters)]
        arguments += ["--loading-mode", "cached", "--lora-pool-bytes", _ADAPTER_BYTES]
    return ServerCommand(" ".join((OURS, *extra)), OURS, (*arguments, *extra), on_adapters=bool(model.adapters))


def llama_command(model: ModelFiles, threads: int, llama: LlamaCpp) -> ServerCommand | None:
    """Returns the command of llama.cpp's server; None without a GGUF file."""
    if model.gguf is None:
        return None
    arguments = [str(llama.server), "--model", str(model.gguf), "--threads", str(threads), "--alias", "base"]
    arguments += ["--ctx-size", str(MOST_REQUESTS * CONTEXT_TOKENS), "--parallel", str(MOST_REQUESTS)]
    arguments += ["--no-kv-unified", "--cache-ram", "0", "--log-verbosity", "1"]
    arguments += ["--threads-http", "64"]  # one serves each connection, also an idle one
    if model.adapters:
        arguments += ["--lora", ",".join(str(path) for _, _, path in model.adapters), "--lora-init-without-apply"]
    return ServerCommand(LLAMA, LLAMA, tuple(arguments), on_adapters=bool(model.adapters))


def vllm_commands(model: ModelFiles, threads: int, vllm: Vllm) -> tuple[ServerCommand, ...]:
    """Returns the commands of vLLM: one server for the base model, and one for its adapters, which would slow the first
    down. None of them reads GGUF."""
    if model.folder is None:
        return ()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = {
        "LD_PRELOAD": ":".join(map(str, vllm.preload)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    # The package is called vllm-cpu: its command `vllm`, which looks for a package of that name, does not start.
    program = str(vllm.python), "-m", "vllm.entrypoints.openai.api_server"
    arguments: tuple[str, ...] = (*program, "--model", str(model.folder), "--served-model-name", "base")
    arguments += ("--dtype", model.dtype)
    arguments += ("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MOST_REQUESTS))
    base = ServerCommand(VLLM, VLLM, arguments, environment, on_adapters=False)
    if not model.adapters:
        return (base,)
    named = (f"{name}={folder}" for name, folder, _ in model.adapters)
    lora = ("--enable-lora", "--max-loras", str(MOST_REQUESTS), "--max-lora-rank", "64", "--lora-modules", *named)
    return base, ServerCommand(VLLM, VLLM, arguments + lora, environment, on_base=False)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is ready, and stopped unless it is being measured."""

    command: ServerCommand
    endpoint: Endpoint
    process: OwnServer

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Lets its processes run meanwhile."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)


@asynccontextmanager
async def started(command: ServerCommand, logs: Path) -> AsyncIterator[RunningServer]:
    """Starts a server, yields it when it is ready, stopped, and ends it on exit. Raises BackendFailed with the end of
    its log if it does not get ready."""
    port = _free_port()
    log = logs / (re.sub(r"[^\w.-]+", "_", command.title) + ".log")  # arguments may have any characters
    process = _spawned(command, port, log)
    url = f"http://127.0.0.1:{port}"
    try:
        if not await _ready(url + ("/ready" if command.kind == OURS else "/health"), process):
            raise BackendFailed(f"{command.title} did not get ready; its log is {log}:\n{_tail(log)}")
        backend = "llamacpp" if command.kind == LLAMA else "openai"
        running = RunningServer(command, await find_endpoint(url, backend, None, None), OwnServer(url, process.pid))
        os.killpg(process.pid, signal.SIGSTOP)
        yield running
    finally:
        _end(process)


def _spawned(command: ServerCommand, port: int, log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command.arguments, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # of this session: if this process is killed, Linux wakes the group up and hangs it up
            preexec_fn=end_with_parent,
            env={**os.environ, **command.environment},
        )


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:].strip()


async def _ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Returns whether the server says so before it ends or 15 minutes pass."""
    end_s = time.monotonic() + _START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while process.poll() is None and time.monotonic() < end_s:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return True
            await asyncio.sleep(_POLL_S)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server with its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGCONT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
