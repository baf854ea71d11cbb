"""The program of the single executable, run by a Python: helpers of the server, and the cache of its kernels."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    assert len(starts) == 5
    assert all(start.startswith('"-m", ') or start == '"-m",' for start in starts)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_cache", FOLDER / "kernel_cache.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel() -> None: ...


def test_kernels_are_found_again_wherever_the_executable_is_unpacked(
    cache: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    paths = {
        cache.ExecutableCacheLocator.from_function(kernel, f"/tmp/_MEI{number}/caraserve/cpu/a.py").get_cache_path()
        for number in range(2)
    }
    assert paths == {str(tmp_path / "cache" / "cpu")}


def test_a_cache_that_cannot_be_written_is_replaced_by_one_for_this_start(
    cache: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(sys, "_MEIPASS", str(tmp_path / "unpacked"), raising=False)
    locator = cache.ExecutableCacheLocator.from_function(kernel, "caraserve/cpu/a.py")
    assert locator.get_cache_path() == str(tmp_path / "unpacked" / "kernels" / "cpu")
    assert Path(locator.get_cache_path()).is_dir()
