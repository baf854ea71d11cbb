"""Compiled functions are linked by name, whichever process has put them into the cache: no two may share one."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from numba.core.registry import CPUDispatcher

import caraserve.cpu


def compiled_by(module: Any) -> Iterator[CPUDispatcher]:
    """All that the module's functions call, too."""
    left = [value for value in vars(module).values() if hasattr(value, "py_func") or hasattr(value, "_pyfunc")]
    while left:
        value = left.pop()
        function = getattr(value, "py_func", None) or value._pyfunc
        if isinstance(value, CPUDispatcher):
            yield value
        left += [cell.cell_contents for cell in function.__closure__ or () if hasattr(cell.cell_contents, "py_func")]


def test_no_two_functions_have_one_name() -> None:
    found: dict[tuple[str, str], set[int]] = {}
    for info in pkgutil.iter_modules(caraserve.cpu.__path__):
        for function in compiled_by(importlib.import_module(f"caraserve.cpu.{info.name}")):
            name = function.py_func.__module__, function.py_func.__qualname__
            found.setdefault(name, set()).add(id(function))
    assert len(found) > 50
    assert {name for name, functions in found.items() if len(functions) > 1} == set()
