"""Kernels, compiled again so that Python can call them: their own code has no entry for it, and a call would crash."""

from typing import Any

import numba

from caraserve.cpu.jit import OPTIONS


def callable_from_python(kernel: Any) -> Any:
    """Returns the function of `kernel` or `reduction` compiled for calls by Python."""
    return numba.njit(**OPTIONS)(kernel.py_func)
