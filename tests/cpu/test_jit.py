"""Compiled functions are linked by name, whichever process cached them, so no two may share a name. The cache belongs
to exactly the sources that run."""

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numba.core.registry import CPUDispatcher

import caraserve.cpu
from caraserve.cpu import jit
from caraserve.cpu.cache_locator import SourceCacheLocator
from caraserve.cpu.kernel_cache import kernel_folder

ROOT = Path(__file__).parents[2]


def compiled_by(module: Any) -> Iterator[CPUDispatcher]:
    """Returns the compiled functions of a module and all that they call."""
    left = [value for value in vars(module).values() if hasattr(value, "py_func") or hasattr(value, "_pyfunc")]
    while left:
        value = left.pop()
        function = getattr(value, "py_func", None) or value._pyfunc
        if isinstance(value, CPUDispatcher):
            yield value
        left += [cell.cell_contents for cell in function.__closure__ or () if hasattr(cell.cell_contents, "py_func")]


def test_compiled_functions_have_distinct_names() -> None:
    found: dict[tuple[str, str], set[int]] = {}
    for info in pkgutil.walk_packages(caraserve.cpu.__path__, "caraserve.cpu."):
        for function in compiled_by(importlib.import_module(info.name)):
            name = function.py_func.__module__, function.py_func.__qualname__
            found.setdefault(name, set()).add(id(function))
    assert len(found) > 50
    assert {name for name, functions in found.items() if len(functions) > 1} == set()


def cache_path(cache: Path, package: Path) -> subprocess.CompletedProcess[str]:
    """Prints the folder in which a process that has `package` on its path keeps a kernel. It has imported Numba before;
    compiling reads the settings again."""
    program = "import numba; from caraserve.cpu import jit; numba.njit(lambda: 1)();"
    program += "from caraserve.cpu import thread_team; print(thread_team.publish._cache.cache_path)"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(package)},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_equal_sources_have_their_kernels_in_one_folder_wherever_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache beside the sources may have been compiled from other sources."""
    shutil.copytree(ROOT / "caraserve", tmp_path / "caraserve", ignore=shutil.ignore_patterns("__pycache__", "demo"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = cache_path(tmp_path / "cache", tmp_path)
    assert Path(done.stdout.strip()) == kernel_folder() / "caraserve.cpu"


def test_where_the_cache_cannot_be_written_kernels_are_kept_until_the_process_ends(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = cache_path(tmp_path / "file", ROOT)
    folder = Path(done.stdout.strip()).parent
    assert "set XDG_CACHE_HOME to a folder that keeps them" in done.stderr
    assert folder.parent == Path(tempfile.gettempdir())
    assert not folder.exists()


def test_what_a_module_says_decides_whether_its_kernels_are_used(tmp_path: Path) -> None:
    """Also without an absolute path, which is all that modules of the executable know."""
    stamps = {
        SourceCacheLocator(cache_path, path).get_source_stamp()
        for path in ("caraserve/cpu/jit.py", jit.__file__, "caraserve/cpu/libc.py")
    }
    assert len(stamps) == 2
    assert SourceCacheLocator.from_function(cache_path, __file__) is None
