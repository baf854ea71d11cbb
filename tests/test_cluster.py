"""Several `caraserve serve` processes as one service: who sees whom, what survives, what is refused at the start."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer
from typing import Any

from caraserve import demo
from tests.serving import PROFILE

NAMES = ("a", "b", "c", "d", "e")


@dataclass(frozen=True)
class Server:
    """A ready process of the fleet."""

    process: "subprocess.Popen[str]"
    url: str

    def ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def ready(self) -> bool:
        try:
            return self.ask("/ready") == ""
        except urllib.error.HTTPError:
            return False

    def states(self) -> dict[str, str]:
        return {member["name"]: member["state"] for member in self.ask("/v1/cluster")["data"]}

    def adapters(self) -> dict[str, Any]:
        return {adapter["name"]: adapter for adapter in self.ask("/v1/cluster/adapters")["data"]}


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now; all differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def fleet(
    ports: list[int], folder: Path, more: Callable[[str], Sequence[str]] = lambda name: ()
) -> Iterator[dict[str, Server]]:
    """Starts an instance on each port, all at once, and always ends them. `more`: arguments of an instance."""
    peers = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
    sizes = ("--kv-cache-bytes", "16MiB", "--max-host-adapters-bytes", "16MiB", "--cpu-threads", "1")
    with contextlib.ExitStack() as stack:
        processes = []
        for name, port in zip(NAMES, ports, strict=False):
            own = ("--name", name, "--registry", str(folder / f"{name}.db"), "--port", str(port), "--peers", peers)
            command = [sys.executable, "-m", "caraserve", "serve", "--profile", str(PROFILE), *own, *sizes]
            command += ["--lora-cpus", "0", "--allow-runtime-lora-updating", *more(name)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            stack.callback(_end, process)
            processes.append(process)
        with ThreadPoolExecutor(len(ports)) as pool:
            servers = pool.map(_ready, processes, ports)
        yield dict(zip(NAMES, servers, strict=False))


def _ready(process: "subprocess.Popen[str]", port: int) -> Server:
    killer = Timer(120, process.kill)  # one that never gets ready fails the test, not the run
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


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Returns as soon as something holds; fails if that takes longer."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"not within {seconds} s"
        Event().wait(0.02)


def all_alive(servers: dict[str, Server]) -> bool:
    return all(server.states() == dict.fromkeys(NAMES, "alive") for server in servers.values())


def plan_of(server: Server) -> float:
    """The time step of the placement that it goes by; 0: none."""
    (line,) = [line for line in server.ask("/metrics").splitlines() if line.startswith("caraserve:plan_epoch{")]
    return float(line.rpartition(" ")[2])


def test_the_life_of_a_fleet(tmp_path: Path) -> None:
    ports = free_ports(len(NAMES))
    poet = {"lora_name": "bard", "lora_path": str(demo.adapters_folder() / "poet")}
    with fleet(ports, tmp_path) as servers:
        until(lambda: all_alive(servers), 4)
        a, b, c, d, e = servers.values()
        until(lambda: all(one["load"] is not None for one in b.ask("/v1/cluster")["data"]), 1)
        assert {one["load"]["status"] for one in b.ask("/v1/cluster")["data"]} == {"serving"}
        until(lambda: all(server.ready() for server in servers.values()), 2)

        a.ask("/v1/load_lora_adapter", poet)
        until(lambda: all("bard" in server.adapters() for server in servers.values()), 2)
        assert c.adapters()["bard"]["digest"] == c.adapters()["poet"]["digest"]
        until(lambda: set(c.adapters()["bard"]["holders"]) == set(NAMES), 2)
        b.ask("/v1/unload_lora_adapter", {"lora_name": "pirate"})
        until(lambda: all("pirate" not in server.adapters() for server in servers.values()), 2)
        until(lambda: "pirate" not in [model["id"] for model in c.ask("/v1/models")["data"]], 2)

        c.process.kill()
        until(lambda: all(server.states()["c"] != "alive" for server in (a, b, d, e)), 0.5)
        until(lambda: all(server.states()["c"] == "dead" for server in (a, b, d, e)), 3)
        b.process.send_signal(signal.SIGTERM)
        assert b.process.wait(20) == 0
        assert a.states()["b"] == "left"
        metrics = a.ask("/metrics")
        assert 'caraserve:cluster_members{state="dead"' in metrics
        assert "caraserve:cluster_facts_refused_total" in metrics
    with fleet(ports, tmp_path) as servers:
        until(lambda: all_alive(servers), 4)
        assert all("bard" in server.adapters() for server in servers.values())
        until(lambda: len({plan_of(server) for server in servers.values()}) == 1 and plan_of(servers["a"]) > 0, 20)
        answer = servers["a"].ask("/v1/completions", {"model": "bard", "prompt": "O sea", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4


def test_a_cluster_open_to_anybody_is_refused_in_a_line_before_anything_is_loaded() -> None:
    command = [sys.executable, "-m", "caraserve", "serve", "--peers", "10.0.0.7:8000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--cluster-secret-file is needed" in line
