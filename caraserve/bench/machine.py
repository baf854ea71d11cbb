"""What a benchmark's figures were measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import caraserve

_COMPUTING = ("numpy", "numba", "torch", "cupy-cuda12x", "triton")


def machine() -> dict[str, str | int]:
    """This machine's CPU, the cores that this process may use, its system."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of everything that computes, as far as it is installed."""
    found = {"caraserve": caraserve.__version__, "python": platform.python_version()}
    for package in _COMPUTING:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
