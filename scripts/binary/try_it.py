"""Starts what scripts/build_binary makes in an empty environment and asks it what needs each of its parts.

try_it.py image FOLDER CACHE tries the wheel in the folder of the image; try_it.py executable FILE CACHE tries the
executable, prints its size, and how long it takes to be ready. Both keep kernels in the folder CACHE, where the second
finds those of the first.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0  # beside tests, at the lowest priority, kernels take minutes to compile
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
# Of a slow link: CPU workers must help.
ASSISTED = ("--loading-mode", "assisted", "--emulate-link-mb-per-s", "5")
VOICES = ("pirate", "poet", "lawyer", "chef", "json")


class Program:
    """A program with the command `caraserve`, its cache, and the folder in which it is started."""

    def __init__(self, words: list[str], cache: Path, folder: Path) -> None:
        self._words, self._cache, self._folder = words, cache, folder
        cache.mkdir(parents=True, exist_ok=True)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts it with one variable."""
        variables = {"XDG_CACHE_HOME": str(self._cache)}
        command = [*self._words, *arguments]
        return subprocess.Popen(command, env=variables, cwd=self._folder, stdout=subprocess.PIPE, text=True)

    def said(self, *arguments: str) -> str:
        """Runs a command to its end; returns what it printed."""
        process = self.start(*arguments)
        text, _ = process.communicate(timeout=START_S)
        if process.returncode != 0:
            sys.exit(f"{arguments} ended with status {process.returncode}: {text}")
        return text

    @contextmanager
    def served(self, *options: str) -> Iterator[tuple[str, float]]:
        """Yields the address of a server of the demo, and the seconds that it took to start."""
        began_s = time.monotonic()
        # One thread: several wait for one another, for seconds on a machine that is busy with other things.
        process = self.start("serve", "--port", "0", "--cpu-threads", "1", "--log-level", "warning", *options)
        killer = Timer(START_S, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "ready at " in line), None)
            if line is None:
                sys.exit(f"the server ended with status {process.wait()} before it was ready")
            yield line.split("ready at ")[1].split()[0], time.monotonic() - began_s
        finally:
            killer.cancel()
            process.terminate()
            if process.wait(timeout=60) != 0:
                sys.exit(f"the server ended with status {process.returncode} after SIGTERM")


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """Returns the text of a response; any status but 200 is an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def try_page(url: str) -> None:
    """Asks for the page and for every file that it, or one of these, names."""
    left, seen = ["/"], set[str]()
    while left:
        path = left.pop()
        seen.add(path)
        named = re.findall(r'"(?:\.|page)/([\w-]+\.(?:css|js|svg))"', ask(url + path))
        left += {f"/page/{name}" for name in named} - seen
    if len(seen) < 20:
        sys.exit(f"the page names only {sorted(seen)}")


def try_chat(url: str) -> None:
    """Asks an adapter for one answer, and the base model for one that follows a schema."""
    chat = {"model": "pirate", "messages": [{"role": "user", "content": "Tell me about the sea."}]}
    chat |= {"temperature": 0, "max_tokens": 16}
    answer = json.loads(ask(f"{url}/v1/chat/completions", chat))["choices"][0]["message"]["content"]
    if not answer.startswith("Arrr, matey!"):
        sys.exit(f"the pirate says {answer!r}")
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    prompt = {"prompt": "The sea", "temperature": 0, "max_tokens": 64, "response_format": schema}
    json.loads(json.loads(ask(f"{url}/v1/completions", prompt))["choices"][0]["text"])


def try_workers(url: str) -> None:
    """Asks adapters until CPU workers, which start beside the server, have computed something."""
    for name in VOICES:
        ask(f"{url}/v1/completions", {"model": name, "prompt": "The sea", "temperature": 0, "max_tokens": 64})
        if number_of(url, "caraserve:lora_worker_slices_total") > 0:
            return
        time.sleep(1.0)
    sys.exit("no LoRA worker has computed anything")


def number_of(url: str, metric: str) -> float:
    """Returns the value of a metric that has one series."""
    return next(
        float(line.rpartition(" ")[2]) for line in ask(f"{url}/metrics").splitlines() if line.startswith(metric)
    )


def try_image(folder: Path, cache: Path) -> None:
    """Tries the command, its check of the machine, and a server."""
    program = Program([sys.executable, "-m", "scripts.binary.image", "run", str(folder)], cache, ROOT)
    version = program.said("--version").strip()
    program.said("doctor", "--port", "0")
    with program.served() as (url, seconds):
        try_page(url)
        try_chat(url)
    print(f"wheel of {version}: ready in {seconds:.0f} s")


def try_executable(file: Path, cache: Path) -> None:
    """Tries servers, without and with all kernels that they need."""
    program = Program([str(file)], cache, cache)
    with program.served(*ASSISTED) as (url, first_s):
        try_page(url)
        try_chat(url)
        try_workers(url)
    with program.served(*ASSISTED) as (url, second_s):
        try_chat(url)
    mb = file.stat().st_size / 1e6
    print(f"{file.name}: {mb:.0f} MB; ready in {first_s:.0f} s the first time, in {second_s:.1f} s later")


def main() -> None:
    what, path, cache = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve()
    (try_image if what == "image" else try_executable)(path, cache)


if __name__ == "__main__":
    main()
