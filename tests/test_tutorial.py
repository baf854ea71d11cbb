"""docs/tutorial.md: its commands work one after another, in CI with the bundled demo in place of SmolLM2. `-m slow`:
SmolLM2 gives the answers that the page has."""

import contextlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from caraserve import demo
from caraserve.demo import smollm2
from tests.test_server import Server, served

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(bash|python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
URL = "http://127.0.0.1:8000"
CURL = 'curl() { command curl --fail --no-progress-meter "$@" && echo; }\n'
NOT_RUN = ("cp", "scripts/serve", ".venv/bin/pip")  # `started` does what they do


class Answer(NamedTuple):
    """Who answered, and the text, or the functions that are called."""

    by: str
    text: str


@contextlib.contextmanager
def started(folder: Path, adapters: Mapping[str, Path], *options: str) -> Iterator[Server]:
    """Starts a server as the page does, with these adapters, and makes `folder` the current one."""
    kept = folder / "smollm2"
    for name, path in adapters.items():
        shutil.copytree(path, kept / "adapters" / name)
    files = ("--adapters-dir", str(kept / "adapters"), "--registry", str(kept / "registry.db"))
    # Outside of the folder: a package of another path would have its kernels compiled again.
    with served(*options, *files, "--allow-runtime-lora-updating") as server, contextlib.chdir(folder):
        yield server


def followed(url: str, model: Path) -> Iterator[tuple[list[Answer], str]]:
    """Follows the page in the current folder; yields each block's answers, and the text that the page prints below."""
    got: list[Answer] = []
    for language, text in BLOCKS:
        if language == "python":
            Path("train.py").write_text(text, encoding="utf-8")
        elif language == "text":
            yield got, text
            got = []
        else:
            for line in text.replace("\\\n", " ").splitlines():
                got += answers(ran(line.replace(URL, url), model))


def ran(line: str, model: Path) -> str:
    """Runs a command in the current folder; returns what it printed."""
    program, *words = shlex.split(line)
    if program in NOT_RUN:
        return ""
    if program == ".venv/bin/python":
        train(model, *words[2:])
        return ""
    done = subprocess.run(["bash", "-euc", CURL + line], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def train(model: Path, *words: str) -> None:
    """Runs train.py in this process, which has its packages in memory. The model's place is the first argument."""
    given, sys.argv = sys.argv, ["train.py", str(model), *words]
    try:
        runpy.run_path("train.py")
    finally:
        sys.argv = given


def answers(printed: str) -> Iterator[Answer]:
    """Yields the answers of models in a command's output."""
    for line in printed.splitlines():
        document = json.loads(line) if line.startswith("{") else {}
        for choice in document.get("choices", ()):
            calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
            text = " ".join(f"{call['name']} {call['arguments']}" for call in calls) or choice["message"]["content"]
            yield Answer(document["system_fingerprint"].partition("@")[0], text)


def test_the_commands_work_in_their_order(tmp_path: Path) -> None:
    voices = {"pirate": "pirate", "sql": "poet", "to-json": "json", "tools": "chef"}
    adapters = {name: demo.adapters_folder() / voice for name, voice in voices.items()}
    with started(tmp_path, adapters, "--served-model-name", "smollm2") as server:
        parts = list(followed(server.url, demo.model_folder()))
    assert [len(got) for got, _ in parts] == [len(shown.splitlines()) for _, shown in parts]
    assert [got[-1].by for got, _ in parts[-3:]] == ["desk-v1", "desk-v2", "desk-v1"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_answers_as_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    adapters = {path.name: path for path in smollm2.adapters_folder().iterdir()}
    with started(tmp_path, adapters, "--demo", "smollm2") as server:
        for got, shown in followed(server.url, smollm2.model_file()):
            assert [answer.text for answer in got] == shown.splitlines()
