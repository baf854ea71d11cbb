"""What a benchmark's figures were measured on."""

import platform
from pathlib import Path

import numba
import numpy as np
from bandwidth import cores

import caraserve


def machine() -> dict[str, str | int]:
    """This machine's CPU, the cores that this process may use, its system."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": cores(),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of everything that computes."""
    return {
        "caraserve": caraserve.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }
