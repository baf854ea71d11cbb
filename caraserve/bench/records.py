"""Records of a benchmark: planned requests, sent requests, runs; and the machine that they were measured on."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import caraserve


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload. `at_s` counts from the workload's start; closed-loop clients ignore it."""

    index: int
    at_s: float
    adapter: int | None  # index into the run's adapters; None: the base model
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to send, and the ranks of their adapters."""

    requests: tuple[PlannedRequest, ...]  # by `at_s`
    ranks: tuple[int, ...]  # of the adapters, by index
    notes: tuple[str, ...] = ()  # what was assumed or changed, a sentence each


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as it went; times count from the run's start.

    `token_s` has the arrival of each output token, where the server names the tokens of an event, else of each event.
    `error` is None for a complete answer. `phases` is what the server said of where the time went, in ms, where it did.
    """

    index: int
    model: str
    rank: int | None  # 0: the base model; None: an adapter of unknown rank
    due_s: float  # when the schedule wanted it sent
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
        """From sending to the first token."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        """From sending to the last byte."""
        return self.done_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload."""

    label: str  # what the reader calls it: a mode, a server, a rate
    records: tuple[RequestRecord, ...]  # by index; those never sent are not there
    wall_s: float
    interrupted: bool = False
    concurrency: int | None = None  # a closed loop: requests waited until so few were under way; None: an open one


_COMPUTING = ("numpy", "numba", "torch", "cupy-cuda12x", "triton")


def machine() -> dict[str, str | int]:
    """Returns the CPU model, the number of cores that this process may use, and the system."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python, this package and the installed numerical packages."""
    found = {"caraserve": caraserve.__version__, "python": platform.python_version()}
    for package in _COMPUTING:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
