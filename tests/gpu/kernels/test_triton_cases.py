"""Runs the cases of the Triton kernels through Triton's interpreter, which must be chosen before Triton is imported.

On a machine with a GPU the same files test the compiled kernels: `pytest tests/gpu/kernels/triton_*_cases.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_all_cases_pass_in_the_interpreter() -> None:
    # One process for all, since importing takes as long as running them.
    cases = sorted(str(path) for path in FOLDER.glob("triton_*_cases.py"))
    # The interpreter computes with numpy, whose threads would only fight over the cores for such small tiles.
    settings = {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases]
    root = FOLDER.parents[2]
    result = subprocess.run(command, cwd=root, env=os.environ | settings, capture_output=True, text=True)
    assert len(cases) == 6
    assert result.returncode == 0, result.stdout + result.stderr
