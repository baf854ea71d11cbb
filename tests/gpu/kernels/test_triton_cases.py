"""Runs the Triton kernels' cases in Triton's interpreter, which must be selected before Triton is imported.

On a machine with a GPU the same files test the compiled kernels: `pytest tests/gpu/kernels/triton_*_cases.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CASES = sorted(FOLDER.glob("triton_*_cases.py"))


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_all_cases_pass_in_the_interpreter(marked: str) -> None:
    """In one process: its imports take 13 s."""
    assert len(CASES) == 10
    # The interpreter computes with numpy, whose threads only compete for cores on such small tiles.
    settings = {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.gpu.fast_interpreter"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-m", marked, *map(str, CASES)]
    root = FOLDER.parents[2]
    result = subprocess.run(command, cwd=root, env=os.environ | settings, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
