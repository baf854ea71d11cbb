"""Records of a benchmark: planned requests, sent requests, runs, and the machine on which they were measured."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import caraserve


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload. `at_s` is its scheduled time since the start of the run."""

    index: int
    at_s: float
    adapter: int | None  # index into the run's adapters; None: the base model
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to send, and the ranks of their adapters."""

    requests: tuple[PlannedRequest, ...]  # in order of `at_s`
    ranks: tuple[int, ...]  # of the adapters, by index
    notes: tuple[str, ...] = ()  # assumptions and changes, a sentence each


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One sent request and its outcome. Times count from the run's start.

    `token_s` has the arrival time of each output token if the server sends token ids, otherwise of each event. `error`
    is None for a complete answer. `phases` has the server's own breakdown of the time in ms, if it reports one.
    """

    index: int
    model: str
    rank: int | None  # 0: the base model; None: an adapter of unknown rank
    due_s: float  # scheduled time of sending
    sent_s: float
    done_s: float
    prompt_tokens: int
    output_tokens: int
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    token_s: tuple[float, ...] = ()
    error: str | None = None
    phases: tuple[tuple[str, float], ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Time from sending to the first token; None without tokens."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        """Time from sending to the last byte."""
        return self.done_s - self.sent_s


@dataclass(frozen=True, slots=True)
class ServerUse:
    """What a run used of the server that the benchmark started."""

    cpu_cores: float  # mean CPU time a second, of the server and its workers
    loads: int  # of adapters to the device
    link_share: float | None  # share of time in which the emulated link was busy; None: no link is emulated
    worker_cores: float | None = None  # of `cpu_cores`, those of CPU LoRA workers; not in old reports


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload."""

    label: str  # the name in reports: a mode, a server, a rate
    records: tuple[RequestRecord, ...]  # by index, without requests that were never sent
    wall_s: float
    interrupted: bool = False
    concurrency: int | None = None  # limit of requests in flight, in a closed loop; None: open loop
    use: ServerUse | None = None  # None: of a server that is not the benchmark's


_COMPUTING = ("numpy", "numba", "torch", "cupy-cuda12x", "triton")


def machine() -> dict[str, str | int]:
    """Returns the CPU model, the number of cores that this process may use, the system, and today's date (UTC)."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "date": today(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python, this package and the installed numerical packages, and the commit if it is
    known."""
    found = {"caraserve": caraserve.__version__, "python": platform.python_version()}
    if (made_by := commit()) is not None:
        found["commit"] = made_by
    for package in _COMPUTING:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def today() -> str:
    """Returns the date (UTC)."""
    return datetime.now(UTC).date().isoformat()


def commit() -> str | None:
    """Returns the commit of a package that runs from its repository, with a sign if files differ from it, or what
    CARASERVE_COMMIT says: a copy of a checkout has no repository. None: unknown."""
    if named := os.environ.get("CARASERVE_COMMIT"):
        return named
    root = Path(caraserve.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
