"""Checks features of unmodified client libraries against a demo server, and writes a table.

    .venv/bin/python scripts/clients/check.py --save scripts/clients/results.md

Installs the newest libraries, Python's and Node's, into a temporary folder (about 1.2 GB, some minutes), starts
`caraserve serve` with a chat template that renders tools, and runs every feature in a process of its own. Exits with 1
if one fails. Without `npm` on the path, Node's are left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

HERE = Path(__file__).parent
# One virtual environment each: LlamaIndex needs openai before 3; lm-eval's tokenizer needs transformers, without torch.
PYTHON_CLIENTS = (
    (
        *("openai", "anthropic", "litellm", "langchain-openai", "instructor", "openai-agents", "httpx"),
        *("pydantic-ai-slim[openai]", "langchain-anthropic", "smolagents", "haystack-ai", "cohere"),
    ),
    ("llama-index-llms-openai-like", "lm-eval[api]", "transformers"),
)
NODE_CLIENTS = ("openai", "ai@6", "@ai-sdk/openai-compatible@2", "@ai-sdk/openai@3", "@ai-sdk/anthropic@3")
_CASE_S = 120.0
_MAX_ERROR_CHARACTERS = 160
# Runs one case, or lists all: argv is the server's URL, distribution and feature.
_RUN = "import sys, cases, benchmark_cases; cases.CASES[sys.argv[2], sys.argv[3]](sys.argv[1])"
_LIST = "import json, cases, benchmark_cases; print(json.dumps(list(cases.CASES)))"
_VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


@dataclass(frozen=True, slots=True)
class Result:
    """One feature of a client; `error` is the last line of its failure, empty if it works."""

    client: str
    version: str
    feature: str
    error: str


def main() -> int:
    """Runs all cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the table here, as Markdown")
    python_help = f"{len(PYTHON_CLIENTS)} interpreters that have the libraries already, one for each list of them"
    parser.add_argument("--python", type=Path, nargs=len(PYTHON_CLIENTS), metavar="FILE", help=python_help)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="caraserve-clients-") as folder, _server() as url:
        results = list(_python_results(args.python or _pythons(Path(folder)), url))
        if shutil.which("npm"):
            results += _node_results(Path(folder), url)
    table = _table(results)
    print(table)
    if args.save is not None:
        args.save.write_text(table, encoding="utf-8")
    return int(any(result.error for result in results))


@contextmanager
def _server() -> Iterator[str]:
    """Starts a server on a free port; yields its URL."""
    command = [sys.executable, "-m", "caraserve", "serve", "--port", "0"]
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            url = next((word for line in server.stdout for word in line.split() if word.startswith("http://")), "")
            if not url:
                raise SystemExit(f"the server has not started: {Path(log.name).read_text(encoding='utf-8')[-500:]}")
            url = url.rstrip("/").removesuffix("/v1")
            urlopen(f"{url}/ready", timeout=60).close()
            yield url
        finally:
            server.terminate()


def _pythons(folder: Path) -> list[Path]:
    """Makes a virtual environment for each list of clients; returns their interpreters."""
    _say("installing Python clients")
    pythons = [folder / str(number) / "bin" / "python" for number in range(len(PYTHON_CLIENTS))]
    for python, clients in zip(pythons, PYTHON_CLIENTS, strict=True):
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        # pip takes over ten minutes to choose versions of these; uv takes seconds.
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "uv"], check=True)
        subprocess.run([str(python), "-m", "uv", "pip", "install", "--quiet", "-p", str(python), *clients], check=True)
    return pythons


def _python_results(pythons: Sequence[Path], url: str) -> Iterator[Result]:
    installed: dict[str, tuple[Path, str]] = {}  # by distribution: the interpreter that has it, and its version
    for python, clients in zip(pythons, PYTHON_CLIENTS, strict=True):
        names = [client.partition("[")[0] for client in clients]
        versions = json.loads(_output([str(python), "-c", _VERSIONS, *names]))
        installed |= {name: (python, version) for name, version in versions.items()}
    for client, feature in json.loads(_output([str(pythons[0]), "-c", _LIST])):
        _say(f"{client}: {feature}")
        python, version = installed[client]
        yield Result(client, version, feature, _failure([str(python), "-c", _RUN, url, client, feature]))


def _failure(command: Sequence[str]) -> str:
    """Runs one case; returns the last line of its error, empty if it succeeds."""
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=_CASE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_CASE_S:g} s"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return _cell(lines[-1]) if done.returncode else ""


def _node_results(folder: Path, url: str) -> list[Result]:
    _say("installing Node's clients")
    shutil.copy(HERE / "cases.mjs", folder)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *NODE_CLIENTS], cwd=folder, check=True)
    _say("running Node's cases")
    lines = _output(["node", "cases.mjs", url], folder).splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    results = []
    for each in found:
        package = json.loads(
            (folder / "node_modules" / each["distribution"] / "package.json").read_text(encoding="utf-8")
        )
        client = f"{each['distribution']} (Node)"
        results.append(Result(client, package["version"], each["feature"], _cell(each["error"] or "")))
    return results


def _output(command: Sequence[str], folder: Path = HERE) -> str:
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout


def _cell(text: str) -> str:
    return text.replace("|", "/")[:_MAX_ERROR_CHARACTERS]


def _table(results: Sequence[Result]) -> str:
    worked = sum(not result.error for result in results)
    lines = [
        f"Client libraries with the demo server, {datetime.now(UTC):%Y-%m-%d}: {worked} of {len(results)} work",
        "",
        "| client | version | feature | result |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {one.client} | {one.version} | {one.feature} | {one.error or 'works'} |" for one in results]
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
