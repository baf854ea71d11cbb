"""The CPU kernels for aarch64: compiled here, and run nowhere."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from caraserve.cpu import memory_order
from tests.compiled_first import _compile_kernels
from tests.cpu.aarch64 import CPU, signatures

ROOT = Path(__file__).parents[2]


def compiled(cache: Path, *words: str) -> str:
    """Compiles in another process; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cpu.aarch64", *words],
        cwd=ROOT,
        env=os.environ | CPU | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_multiply_with_neon_and_wait_with_ordered_loads(tmp_path: Path) -> None:
    assembly = compiled(tmp_path)
    for instruction in (
        "fmla\tv",  # sixteen fp32 in four registers
        "ldar\t",  # an acquiring load
        "stlr\t",  # a releasing store
        "dmb\tish",  # a fence
        "yield",
    ):
        assert instruction in assembly, instruction


def test_plain_python_orders_what_it_shares_by_a_fence_where_the_cpu_does_not() -> None:
    memory_order.compiled_fence()()
    assert memory_order.keep_order() is None


@pytest.mark.slow
def test_all_kernels_of_a_server_compile(tmp_path: Path) -> None:
    _compile_kernels()
    (tmp_path / "signatures").write_bytes(pickle.dumps(signatures()))
    names = compiled(tmp_path / "cache", str(tmp_path / "signatures"))
    assert "compiled caraserve.cpu.forward step" in names
    assert "compiled caraserve.cpu.lora_workers.worker _work" in names
