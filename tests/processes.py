"""Runs several `caraserve serve` processes on this machine, sends them HTTP requests, and always ends them."""

import contextlib
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from threading import Event, Timer
from typing import Any

import numpy as np

from caraserve import demo
from caraserve.model.families import load_plan
from tests.lora.folders import tensor_name, write_adapter
from tests.serving import PROFILE

NAMES = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Server:
    """A ready process of the fleet."""

    process: "subprocess.Popen[str]"
    url: str

    def ask(self, path: str, body: object = None, method: str | None = None) -> Any:
        return self.answer(path, body, method)[0]

    def answer(self, path: str, body: object = None, method: str | None = None) -> tuple[Any, Mapping[str, str]]:
        """Returns the body and the headers of an answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text, headers = answer.read().decode(), answer.headers
        return json.loads(text) if text.startswith("{") else text, headers

    def ready(self) -> bool:
        try:
            return str(self.ask("/ready")) == ""
        except urllib.error.HTTPError:
            return False

    def states(self) -> dict[str, str]:
        return {member["name"]: member["state"] for member in self.ask("/v1/cluster")["data"]}

    def adapters(self) -> dict[str, Any]:
        return {adapter["name"]: adapter for adapter in self.ask("/v1/cluster/adapters")["data"]}

    def metric(self, series: str) -> float:
        """Returns the sum of the samples whose lines begin with `series`; fails if there are none."""
        lines = [line for line in self.ask("/metrics").splitlines() if line.startswith(series)]
        assert lines, f"no sample of {series}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def free_ports(count: int) -> list[int]:
    """Returns distinct ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def fleet(
    ports: list[int],
    folder: Path,
    more: Callable[[str], Sequence[str]] = lambda name: (),
    *,
    peers: Sequence[int] = (),
    on_start: Callable[[str, int], None] = lambda name, pid: None,
) -> Iterator[dict[str, Server]]:
    """Starts an instance on each port, all at once, and always ends them. `more`: returns arguments of an instance;
    `peers`: the ports in `--peers`, by default the first two; `on_start`: called with each process's name and id."""
    seeds = ",".join(f"127.0.0.1:{port}" for port in peers or ports[:2])
    sizes = ("--kv-cache-bytes", "16MiB", "--max-host-adapters-bytes", "16MiB", "--cpu-threads", "1")
    with contextlib.ExitStack() as stack:
        processes = []
        for name, port in zip(NAMES, ports, strict=False):
            own = ("--name", name, "--registry", str(folder / f"{name}.db"), "--port", str(port), "--peers", seeds)
            command = [sys.executable, "-m", "caraserve", "serve", "--profile", str(PROFILE), *own, *sizes]
            command += ["--lora-cpus", "0", "--allow-runtime-lora-updating", *more(name)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            stack.callback(_end, process)
            on_start(name, process.pid)
            processes.append(process)
        with ThreadPoolExecutor(len(ports)) as pool:
            servers = pool.map(_ready, processes, ports)
        yield dict(zip(NAMES, servers, strict=False))


def _ready(process: "subprocess.Popen[str]", port: int) -> Server:
    # One that never gets ready fails the test, not the run. Several without compiled kernels compile them all at once.
    killer = Timer(240, process.kill)
    killer.start()
    assert process.stdout is not None
    try:
        assert any(line.startswith("try:") for line in process.stdout), f"it ended with {process.wait()}"
    finally:
        killer.cancel()
    return Server(process, f"http://127.0.0.1:{port}")


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def refusal(*arguments: str) -> str:
    """Returns the one line that `caraserve serve` prints when it cannot start with these arguments."""
    command = [sys.executable, "-m", "caraserve", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def tiny_adapter(folder: Path, seed: int) -> Path:
    """Writes an adapter of a few kilobytes for the demo's model that changes its answers, different for each seed."""
    q = load_plan(demo.model_folder()).layers[0].linears[0]
    rng = np.random.default_rng(seed)
    tensors = {
        tensor_name(0, "q_proj", "A"): rng.standard_normal((1, q.inputs), np.float32),
        tensor_name(0, "q_proj", "B"): rng.standard_normal((q.outputs, 1), np.float32),
    }
    return write_adapter(folder, {"r": 1, "lora_alpha": 64, "layers_to_transform": [0]}, tensors)


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Returns as soon as the condition is true; fails if that takes longer than `seconds`, which do not include the
    time to look: on a busy machine, where the processes are slow, looking at them is slow as well."""
    for _ in range(ceil(seconds / 0.02)):
        if condition():
            return
        Event().wait(0.02)
    assert condition(), f"not within {seconds} s"


def all_alive(servers: dict[str, Server]) -> bool:
    return all(server.states() == dict.fromkeys(NAMES, "alive") for server in servers.values())
