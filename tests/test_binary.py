"""The program of the single executable, run by a Python: the command, and helpers of the server."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "scripts" / "binary"


def ran(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(FOLDER / "main.py"), *words]
    return subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True, check=False)


def test_without_m_it_is_the_command() -> None:
    ended = ran("--version")
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "caraserve")


def test_it_runs_the_modules_of_helpers_and_no_others() -> None:
    assert ran("-m", "caraserve", "--version").stdout.startswith("caraserve ")
    for words in (("-m",), ("-m", "http.server"), ("-m", "caraserver")):
        ended = ran(*words)
        assert (ended.returncode, ended.stderr.count("\n"), ended.stdout) == (1, 1, "")


def test_every_helper_of_the_server_is_started_as_a_module_of_the_package() -> None:
    sources = [path for path in (ROOT / "caraserve").rglob("*.py") if "bench" not in path.parts]
    starts = [one for path in sources for one in re.findall(r"sys\.executable,\s*([^\n]+)", path.read_text())]
    assert len(starts) == 6
    assert all(start.startswith('"-m", ') or start == '"-m",' for start in starts)
