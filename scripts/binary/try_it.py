"""Starts an executable of scripts/build_binary in an empty environment and asks it what needs each of its parts.

Prints its size and how long it takes to be ready, without and with compiled kernels. Takes the executable's path.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

START_S = 300.0
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@contextmanager
def served(program: Path, cache: str) -> Iterator[tuple[str, float]]:
    """Yields the address of a server, and the seconds that it took to start. Its link is slow: workers must help."""
    options = ["--port", "0", "--log-level", "warning", "--loading-mode", "assisted", "--emulate-link-mb-per-s", "5"]
    command = [str(program), "serve", *options]
    began_s = time.monotonic()
    process = subprocess.Popen(command, env={"XDG_CACHE_HOME": cache}, stdout=subprocess.PIPE, text=True)
    killer = Timer(START_S, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if "ready at " in line), None)
        if line is None:
            sys.exit(f"{program} ended with status {process.wait()} before it was ready")
        yield line.split("ready at ")[1].split()[0], time.monotonic() - began_s
    finally:
        killer.cancel()
        process.terminate()
        if process.wait(timeout=60) != 0:
            sys.exit(f"{program} ended with status {process.returncode} after SIGTERM")


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """Returns the text of a response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def try_everything(url: str) -> None:
    """Asks for an answer of each adapter, for one that follows a schema, for the page, and what the workers did."""
    prompt = {"prompt": "The sea", "temperature": 0, "max_tokens": 64}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    answer = json.loads(ask(f"{url}/v1/completions", prompt | {"response_format": schema}))
    json.loads(answer["choices"][0]["text"])
    if "<title>CaraServe" not in ask(url):
        sys.exit("the page is not there")
    for name in ("pirate", "poet", "lawyer", "chef", "json"):
        if "choices" not in ask(f"{url}/v1/completions", {"model": name} | prompt):
            sys.exit(f"the adapter {name} does not answer")
        if number_of(url, "caraserve:lora_worker_slices_total") > 0:
            return
        time.sleep(1.0)  # the workers start beside the server
    sys.exit("no LoRA worker has computed anything")


def number_of(url: str, metric: str) -> float:
    """Returns the value of a metric that has one series."""
    return next(
        float(line.rpartition(" ")[2]) for line in ask(f"{url}/metrics").splitlines() if line.startswith(metric)
    )


def main() -> None:
    program = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as cache:
        with served(program, cache) as (url, first_s):
            try_everything(url)
        with served(program, cache) as (url, second_s):
            try_everything(url)
    mb = program.stat().st_size / 1e6
    print(f"{program.name}: {mb:.0f} MB; ready in {first_s:.0f} s the first time, in {second_s:.1f} s later")


main()
