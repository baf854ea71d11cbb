"""Compiled functions are linked by name, whichever process cached them, so no two may share a name. The cache belongs
to exactly the sources that run."""

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numba.core.registry import CPUDispatcher

import caraserve.cpu
from caraserve.cpu.kernel_cache import numba_folder


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


def test_the_cache_folder_is_used_even_if_numba_was_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache beside the sources may have been compiled from other sources."""
    program = (
        "import numba\n"
        "from caraserve.cpu import jit\n"
        "numba.njit(lambda: 1)()\n"  # compiling reads the settings again
        "from caraserve.cpu import thread_team\n"
        "print(thread_team.publish._cache.cache_path)\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(done.stdout.strip()) == numba_folder()
