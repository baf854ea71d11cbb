"""The commands and the code of README.md and docs/ work as they stand, in their order, and the demo's answers are good.

`test_readme.py` checks what is not run here: options, and files that pages name.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from caraserve import demo
from caraserve.cli.options import OptionParser
from caraserve.config import SERVE_CONFIGS
from caraserve.http.access.api_keys import ApiKeys
from caraserve.start_checks import check_paths
from tests.test_server import Server, served

ROOT = Path(__file__).parent.parent
OF_ITS_OWN = "tutorial.md"  # which test_tutorial.py runs
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != OF_ITS_OWN)]
URL = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN = ("curl", "mkdir", "cp", "tar", "printf", "key=")
NOT_RUN = {
    "scripts/serve": "the fixture's server stands for it: its options are checked, with the files that they name",
    "scripts/test": "runs this test",
    "scripts/gpu_check": "needs a GPU, or minutes on an emulated one",
    ".venv/bin/caraserve": "benchmarks take minutes; test_readme.py parses their options",
}
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")  # with an apostrophe: th' does not count as `th`


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo as the pages start it, with a folder of adapters that can be written to."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(demo.adapters_folder(), folder / "adapters")
    options = ("--adapters-dir", str(folder / "adapters"), "--registry", str(folder / "registry.db"))
    with served(*options, "--allow-runtime-lora-updating") as started:
        yield started


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a clone has, which is the current one."""
    for name in ("caraserve", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns the language and the text of each block to copy of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def ran(language: str, text: str, url: str) -> str:
    """Runs one block in the current folder; returns what it printed."""
    text = text.replace(URL, url)
    if language == "python":
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, "<page>", "exec"), names)
        if "client" in names:
            names["client"].close()
        return printed.getvalue()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line]
    assert all(line.startswith((*RUN, *NOT_RUN)) for line in lines), lines
    script = "\n".join(line for line in lines if line.startswith(RUN))
    curl = 'curl() { command curl --fail-with-body --no-progress-meter "$@" && echo; }\n'
    done = subprocess.run(["bash", "-euc", curl + script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    for line in lines:
        check_serve(line)
    return done.stdout


def check_serve(line: str) -> None:
    """Checks that files and folders that the options of `scripts/serve` name exist; /path/to/… stands for any."""
    program, *words = shlex.split(line, comments=True)
    if program != "scripts/serve" or any("/path/to/" in word for word in words):
        return
    model, lora, _, http, _ = OptionParser(SERVE_CONFIGS).parse_args(words).configs
    check_paths(model, lora)
    ApiKeys(http)


def words(text: str) -> set[str]:
    return {word.lower() for word in WORD.findall(text)}


def answers(printed: str) -> Iterator[str]:
    """Yields the texts that a model wrote, of the JSON documents in a command's output."""
    for line in printed.splitlines():
        document = json.loads(line) if line.startswith("{") else {}
        for choice in document.get("choices", ()):
            yield choice["text"] if "text" in choice else choice["message"]["content"] or ""
        for part in document.get("content", ()):
            yield part["text"]


@pytest.fixture(scope="module")
def vocabulary() -> set[str]:
    """All words that the demo was trained on: what else it writes is garbled."""
    files = [ROOT / "scripts" / name for name in ("demo_world.toml", "demo_text.py")]
    names = " ".join((demo.BASE_NAME, *demo.ADAPTER_NAMES))  # which the pages' code prints
    return words(names).union(*(words(file.read_text(encoding="utf-8")) for file in files))


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_every_block_to_copy_works_in_its_order(page: Path, server: Server, vocabulary: set[str]) -> None:
    for language, text in blocks(page):
        printed = ran(language, text, server.url)
        written = [printed] if language == "python" else answers(printed)
        for answer in written:
            assert words(answer) <= vocabulary, answer


@pytest.mark.parametrize(
    ("example", "answer"),
    [
        ('"prompt": "The sea"', "covers most of our planet."),
        ('"query": "Why is the sea salty?"', '"text":"Rivers carry salt to the sea."'),
        ('"choice": [" salt", " stars"]', '"text":" salt"'),
        ("response_format=Facts", "json topic='cats' kind='animal' answer=['Cats "),
        ("client.responses.create", "Arrr, matey! Th' sea "),
        ("/v1/messages", "Arrr, matey! Th' sea "),
        ('"tool_choice": "required"', '"name":"look_up","arguments":"'),
        ('"text_2": ["Blue is the sea.", "A contract."]', '"score":0.8'),
        ("def adapter_bytes", "80.0\n"),
        ("/v1/adapters/json", f'"bytes":{8 * 3392 * 4 * 4}'),  # rank 4 counts as 8; inputs + outputs; layers; fp32
    ],
)
def test_examples_answers_are_those_that_a_reader_expects(example: str, answer: str, server: Server) -> None:
    (block,) = {block for page in PAGES for block in blocks(page) if example in block[1]}
    assert answer in ran(*block, server.url)


def test_the_alerts_of_the_checklist_ask_for_metrics_that_there_are(server: Server) -> None:
    text = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    asked = set(re.findall(r"\b(?:vllm|caraserve):[a-z_]+", "".join(re.findall(r"^ +expr: .*$", text, re.MULTILINE))))
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        families = set(re.findall(r"^# TYPE (\S+) ", response.read().decode(), re.MULTILINE))
    assert len(asked) > 5
    with_peers = {"caraserve:background_task_up"}
    assert {re.sub(r"_(bucket|count)$", "", name) for name in asked} - with_peers <= families


def test_the_check_of_the_page_finds_the_projects_environment_and_names_a_folder_that_cannot_be(tmp_path: Path) -> None:
    """Started by a Python that has no packages, as the one of a shell."""
    command = [os.path.realpath(sys.executable), "-I", "-S", str(ROOT / "scripts" / "page_check")]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("usage: page_check"), done.stderr
    (tmp_path / "file").touch()
    command += ["--screenshots", str(tmp_path / "file" / "pictures")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == f"page_check: --screenshots {tmp_path}/file/pictures: Not a directory\n"
