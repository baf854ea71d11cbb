"""`caraserve bench modes` in a process of its own."""

import subprocess
import sys
from collections.abc import Sequence

from caraserve.errors import BackendFailed


def run_bench_modes(argv: Sequence[str], timeout_s: float) -> None:
    """In a process of its own. One that takes too long is asked to end, and leaves a report of what it has by then.
    Raises BackendFailed when it fails of itself."""
    command = [sys.executable, "-m", "caraserve", "bench", "modes", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its server, which a kill would leave to itself for a moment
        process.communicate()
        return
    if process.returncode != 0:
        raise BackendFailed(f"bench modes ended with {process.returncode}:\n{said[-2000:]}")
