"""`caraserve serve` with CPU LoRA workers: no worker outlives it, wrong arguments are rejected, traces are complete."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import PROFILE
from tests.test_server import Server, served

CORE = min(os.sched_getaffinity(0))
NO_CORE = max(os.sched_getaffinity(0)) + 1
ASSISTED = ("--loading-mode", "assisted", "--lora-cpus", str(CORE), "--profile", str(PROFILE))
BIRTH_S = 120.0  # timeout for a worker to start; the first time, kernels are compiled
END_S = 5.0  # timeout for all processes to end
LAYERS = 4  # of the demo model


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
            if int(parent) == pid and state not in "ZX":
                found.append(int(folder.name))
    return found


def await_worker(server: Server) -> None:
    """Waits until the server reports that its CPU worker runs."""
    waiting, until_s = threading.Event(), time.monotonic() + BIRTH_S
    while not re.search(r"^caraserve:lora_workers\{.*\} 1$", read(f"{server.url}/metrics"), flags=re.MULTILINE):
        assert time.monotonic() < until_s, "no worker was born"
        waiting.wait(0.02)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@contextlib.contextmanager
def helpers(server: Server) -> Iterator[list[int]]:
    """Yields pidfds of the fork server and its worker, readable once the process has died; kills both at the end."""
    await_worker(server)
    (fork_server,) = children(server.process.pid)
    (worker,) = children(fork_server)
    descriptors = [os.pidfd_open(pid) for pid in (fork_server, worker)]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def have_ended(descriptors: list[int], within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    return all(select.select([each], [], [], max(0.0, until_s - time.monotonic()))[0] for each in descriptors)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_no_worker_outlives_its_server(number: signal.Signals, code: int) -> None:
    with served(*ASSISTED) as server, helpers(server) as descriptors:
        server.process.send_signal(number)
        assert server.process.wait(timeout=30) == code
        assert have_ended(descriptors, END_S)


WRONG = {
    "missing core": (["--lora-cpus", str(NO_CORE)], f"--lora-cpus names core {NO_CORE}; this process may use"),
    "no number": (["--lora-cpus", "one"], "--lora-cpus: 'one': write cores as in 1-3,6"),
    "backwards": (["--lora-cpus", "2-1"], "--lora-cpus: '2-1': the second core of a range is below the first"),
    "too many": (["--lora-cpus", "0-99999"], "--lora-cpus: '0-99999': no machine has so many cores"),
    "missing folder": (["--trace", "/nowhere/trace.json"], "--trace '/nowhere/trace.json' cannot be written"),
}
# One process for all: imports take most of the time of each. A start that fails leaves nothing for the next one.
STARTS = """
import json, sys
from caraserve.cli.main import main
for line in sys.stdin:
    try:
        code = main(json.loads(line))
    except SystemExit as end:
        code = end.code
    print(code, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[str]]:
    """Returns what each wrong start writes to standard error, and its code, as lines."""
    serve = ["serve", "--port", "0", *ASSISTED, "--log-level", "error"]
    lines = "\n".join(json.dumps([*serve, *arguments]) for arguments, _ in WRONG.values())
    command = [sys.executable, "-c", STARTS]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=True)
    found: list[list[str]] = [[]]
    for line in done.stderr.splitlines():
        found[-1].append(line)
        if line.isdigit():
            found.append([])
    return dict(zip(WRONG, found, strict=False))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_core_or_trace_file_is_a_one_line_error(name: str, refusals: dict[str, list[str]]) -> None:
    *usage, complaint, code = refusals[name]
    assert code == "2"
    assert usage == [] or usage[0].startswith("usage: caraserve serve")
    assert WRONG[name][1] in complaint


Event = dict[str, Any]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """Returns the trace of a server with one cold request, over a link so slow that CPU workers had to help."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with served(*ASSISTED, "--emulate-link-mb-per-s", "1", "--trace", str(path)) as server:
        await_worker(server)
        server.client().completions.create(model="pirate", prompt="Tell me about the sea", max_tokens=3)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0
    found: list[Event] = json.loads(path.read_text(encoding="utf-8"))
    return found


def spans(events: list[Event], track: str) -> list[Event]:
    numbers = {event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"}
    return [event for event in events if event.get("ph") == "X" and event["tid"] == numbers.get(track)]


def lies_in(inner: Event, outer: Event) -> bool:
    """True if `inner` lies within `outer`, to a nanosecond; times are in µs."""
    begins, ends = inner["ts"] - outer["ts"], outer["ts"] + outer["dur"] - inner["ts"] - inner["dur"]
    return bool(begins > -0.001 and ends > -0.001 and inner["dur"] >= 0)


@pytest.mark.parametrize("track", ["link", "iterations", "device", "CPU worker 0"])
def test_a_trace_has_a_track_for_each_part(events: list[Event], track: str) -> None:
    assert spans(events, track)


def test_a_trace_shows_every_layer_arriving_once(events: list[Event]) -> None:
    copies = [re.fullmatch(r"\w{12} layers (\d+) to (\d+)", span["name"]) for span in spans(events, "link")]
    layers = [layer for copy in copies if copy for layer in range(int(copy[1]), int(copy[2]) + 1)]
    assert sorted(layers) == list(range(LAYERS))


def test_a_trace_shows_every_layer_within_an_iteration(events: list[Event]) -> None:
    iterations = spans(events, "iterations")
    for layer in spans(events, "device"):
        assert any(lies_in(layer, iteration) for iteration in iterations)
    assert len(spans(events, "device")) == LAYERS * len(iterations)


def test_a_trace_shows_hand_offs_within_the_layers_that_they_are_for(events: list[Event]) -> None:
    layers = [span for span in spans(events, "device") if span["name"].endswith(", LoRA from CPU workers")]
    for span in spans(events, "CPU worker 0"):
        name, _, _ = span["name"].partition(":")
        assert any(layer["name"].startswith(f"{name},") and lies_in(span, layer) for layer in layers)
