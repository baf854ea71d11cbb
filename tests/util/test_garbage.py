"""Runs the cases of the garbage collector, which search all objects of their process many times, in a small process:
this one has imported what all tests need, and every search would take a second."""

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("garbage_cases.py")


def test_all_cases_pass_in_a_process_with_few_objects() -> None:
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(CASES)]
    done = subprocess.run(command, cwd=CASES.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout
