"""Starts and ends servers for a benchmark: `caraserve serve` as a child process."""

import argparse
import asyncio
import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from caraserve.bench.records import Workload
from caraserve.bench.synthetic import SHAPES, write_adapters, write_model
from caraserve.core.lora_layout import lay_out, modules_of
from caraserve.errors import BackendFailed, ConfigError
from caraserve.gpu.driver.detect import detect
from caraserve.gpu.memory.pool import GRANULE_BYTES
from caraserve.model.dtype import Dtype
from caraserve.util.units import align_up

_READY = re.compile(rb"ready at (http://\S+)")
_START_S = 600.0  # enough to read a large model from a slow disk
_END_S = 10.0
_KEPT_LINES = 20  # of the server's output, for the error message if it fails
_PR_SET_PDEATHSIG = 1
# Not passed on to a server, whose key must be that in its arguments, which the benchmark uses.
_KEY_VARIABLES = ("CARASERVE_API_KEY", "CARASERVE_ADMIN_KEY", "VLLM_API_KEY")


@contextmanager
def working_folder() -> Iterator[Path]:
    """Yields a temporary folder for models, adapters and registries; deletes it on exit."""
    folder = Path(tempfile.mkdtemp(prefix="caraserve-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A random model and random adapters on disk, with the arguments to serve them."""

    model_arguments: tuple[str, ...]  # of `caraserve serve`, for the model alone
    adapter_arguments: tuple[str, ...]  # the same for the adapters; empty without any
    names: tuple[str, ...]  # of the adapters
    sizes: tuple[int, ...]  # bytes of each adapter
    granule_bytes: int = 1  # an adapter takes whole granules of the device's memory

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `caraserve serve` for a server of the model and the adapters."""
        return self.model_arguments + self.adapter_arguments

    @property
    def num_bytes(self) -> int:
        """The bytes of all adapters."""
        return sum(self.sizes)

    def room_bytes(self, count: int | None = None) -> int:
        """Returns the bytes that any `count` of the adapters take on the device; None means all."""
        taken = sorted((align_up(size, self.granule_bytes) for size in self.sizes), reverse=True)
        return max(1, sum(taken[:count]))

    def host_room(self) -> tuple[str, str]:
        """Returns the option for a host cache that fits all adapters, and those that a profile is measured with."""
        return "--max-host-adapters-bytes", str(2 * self.num_bytes + (256 << 20))


def longest(workload: Workload) -> int:
    """Returns a context length that fits every request, as a multiple of 64 tokens."""
    return align_up(max(each.prompt_tokens + each.output_tokens for each in workload.requests), 64) + 64


def device_of(serve: Sequence[str]) -> str:
    """Returns the device of a server with these arguments: `cpu` or `cuda`. Raises ConfigError for one that cannot be
    used."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="auto")
    return detect(parser.parse_known_args(list(serve))[0].device).device


def make_synthetic(
    folder: Path,
    model: str,
    dtype: str,
    max_position: int,
    ranks: Sequence[int],
    targets: Sequence[str],
    serve: Sequence[str] = (),
) -> Synthetic:
    """Writes a model of one of SHAPES without weights, and an adapter for each rank given.

    `serve`: arguments that its servers get besides. Raises ConfigError for an unknown shape or a full disk.
    """
    if model not in SHAPES:
        raise ConfigError(f"no model is called {model!r}; there are {', '.join(SHAPES)}")
    granule_bytes = GRANULE_BYTES if device_of(serve) == "cuda" else 1
    try:
        plan = write_model(folder / "model", SHAPES[model], dtype, max_position, weights=False)
        paths = write_adapters(
            folder / "adapters", plan, count=len(ranks), ranks=ranks or (1,), targets=targets, dtype="float16"
        )
    except OSError as error:
        raise ConfigError(f"adapters cannot be written to {folder}: {error.strerror}") from error
    modules = modules_of(plan, targets)
    bytes_of = {rank: lay_out(plan, Dtype.F16, dict.fromkeys(modules, (rank, 1.0)))[1][-1] for rank in set(ranks)}
    of_model = (str(folder / "model"), "--load-format", "dummy", "--served-model-name", model, "--dtype", dtype)
    of_adapters = ("--adapters-dir", str(folder / "adapters")) if paths else ()
    return Synthetic(of_model, of_adapters, tuple(paths), tuple(bytes_of[rank] for rank in ranks), granule_bytes)


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A running server that is ready for requests."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Returns the CPU time that the server and its child processes have used so far, in s."""
        return sum(_processes(self.pid).values()) / os.sysconf("SC_CLK_TCK")

    def workers_cpu_s(self) -> float:
        """Returns the CPU time of its child processes alone, which are CPU LoRA workers, in s."""
        return sum(ticks for pid, ticks in _processes(self.pid).items() if pid != self.pid) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Returns the memory of the server and its child processes; what they share counts once."""
        found = 0
        for pid in _processes(self.pid):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                found += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return found


def _processes(root: int) -> dict[int, int]:
    """Returns the CPU time in clock ticks of a process and of all its descendants, by process id."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended meanwhile
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {root}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return {pid: ticks[pid] for pid in family if pid in ticks}


def busy_s() -> float:
    """Returns the CPU time of the whole machine so far in s, including time that its hypervisor gave to others."""
    user, nice, system, _idle, _iowait, *others = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(map(int, (user, nice, system, *others))) / os.sysconf("SC_CLK_TCK")


def drop_cached(path: Path) -> None:
    """Removes a file from the page cache, so that reading it reads the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on disk yet stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def end_with_parent() -> None:
    """Runs in a child process: makes it end with the benchmark, even if that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def api_key_in(arguments: Sequence[str]) -> str | None:
    """Returns the first key of --api-key in a server's arguments, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key", nargs="+", action="extend", default=[])
    keys: list[str] = parser.parse_known_args(list(arguments))[0].api_key
    return keys[0] if keys else None


def free_ports(count: int) -> list[int]:
    """Returns ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Interrupted(Exception):
    """The benchmark was interrupted before a server was ready."""


@asynccontextmanager
async def own_server(
    arguments: Sequence[str],
    stopped: asyncio.Event,
    *,
    port: int = 0,
    join: Callable[[], None] = lambda: None,
    caraserve: Sequence[str] = (sys.executable, "-m", "caraserve"),
) -> AsyncIterator[OwnServer]:
    """Starts a server and yields it when it is ready; ends it on exit.

    `port` 0 is any free one. `join` is called in the new process, before the server starts: it may confine it.
    `caraserve`: the command. Raises BackendFailed with the end of its output if it does not get ready, Interrupted if
    `stopped` is set before.
    """
    command = [*caraserve, "serve", *arguments, "--port", str(port)]

    def prepare() -> None:
        end_with_parent()
        join()

    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in a terminal reaches only the benchmark, which ends its server
        preexec_fn=prepare,
        env={name: value for name, value in os.environ.items() if name not in _KEY_VARIABLES},
    )
    assert process.stdout is not None
    output: deque[bytes] = deque(maxlen=_KEPT_LINES)
    reading = None
    try:
        url = await _first(_ready(process.stdout, output), stopped)
        if url is None:
            said = b"".join(output).decode("utf-8", "replace").strip()
            raise BackendFailed(f"the server ended before it was ready:\n{said}")
        reading = asyncio.create_task(_keep_reading(process.stdout, output))
        yield OwnServer(url, process.pid)
    finally:
        await asyncio.shield(_end(process))
        if reading is not None:
            await reading


async def _first(ready: Coroutine[None, None, str | None], stopped: asyncio.Event) -> str | None:
    """Returns the URL of the server. Raises BackendFailed after 600 s, Interrupted if `stopped` is set."""
    tasks = asyncio.ensure_future(ready), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait(tasks, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            raise Interrupted
        if not tasks[0].done():
            raise BackendFailed(f"the server was not ready within {_START_S:.0f} s")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _ready(output: asyncio.StreamReader, kept: deque[bytes]) -> str | None:
    """Returns the URL that the server prints when it is ready; None if its output ends before."""
    while line := await output.readline():
        kept.append(line)
        if found := _READY.search(line):
            return found[1].decode("ascii")
    return None


async def _keep_reading(output: asyncio.StreamReader, kept: deque[bytes]) -> None:
    """Reads the server's output, so that the server never blocks on a full pipe."""
    while line := await output.readline():
        kept.append(line)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
