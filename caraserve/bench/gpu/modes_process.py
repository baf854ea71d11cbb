"""`caraserve bench modes` in a process of its own. Level 5."""

import subprocess
import sys
from collections.abc import Sequence

from caraserve.errors import BackendFailed


def run_bench_modes(argv: Sequence[str], timeout_s: float) -> None:
    """In a process of its own, which ends with its servers when it takes too long. Raises BackendFailed."""
    command = [sys.executable, "-m", "caraserve", "bench", "modes", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its server, which a kill would leave to itself for a moment
        _, said = process.communicate()
        raise BackendFailed(f"bench modes took longer than {timeout_s:.0f} s:\n{said[-2000:]}") from None
    if process.returncode != 0:
        raise BackendFailed(f"bench modes ended with {process.returncode}:\n{said[-2000:]}")
