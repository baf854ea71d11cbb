"""The hand-off kernels with all threads of all blocks at once, beside workers and a watchdog: ThreadSanitizer finds no
data race, and finds one if any of the operations that order memory is relaxed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from caraserve.cpu import handoff
from caraserve.gpu.kernels import cuda_sources
from caraserve.model.dtype import Dtype
from tests.gpu.emulator import TYPES

_MAIN = Path(__file__).with_name("handoff_threads.cpp")
_FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", "-Wall", "-Werror", "-Wno-unknown-pragmas")
_OWN = (*("SLICE_X", "SLICE_Y", "SLICE_ROWS", "SLICE_COUNTER"), "COUNTER_SPENT_NS")  # words that only workers use


def missing() -> str | None:
    """Returns what is missing to compile with ThreadSanitizer, and how to install it."""
    if shutil.which("g++") is None:
        return "there is no g++; on Debian or Ubuntu: apt install g++"
    named = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    if Path(named.stdout.strip()).is_absolute():
        return None
    return "g++ has no libtsan, which comes with it on Debian and Ubuntu; on Fedora: dnf install libtsan"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := missing():
        pytest.fail(reason)
    folder = tmp_path_factory.mktemp("races")
    for file, text in cuda_sources.sources("handoff").items():
        (folder / file).write_text(text, encoding="utf-8")
    constants = {**cuda_sources.definitions(Dtype.F32), **{name: getattr(handoff, name) for name in _OWN}}
    macros = [f"-D{name}={value}" for name, value in constants.items()]
    command = ["g++", *_FLAGS, "-Wno-unused-function", *macros, f"-I{folder}", f"-I{TYPES.parent}", str(_MAIN)]
    done = subprocess.run([*command, "-o", str(folder / "program")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "program"


def run(program: Path, relaxed: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TSAN_OPTIONS": f"halt_on_error={int(bool(relaxed))} exitcode=66"}
    for prefix in ([], ["setarch", "-R"]):  # libtsan cannot map its memory beside addresses that are very random
        command = [*prefix, str(program), relaxed]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        if "unexpected memory mapping" not in done.stderr:
            break
    return done


def test_hand_offs_have_no_data_race_and_no_wrong_sum(program: Path) -> None:
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 wrong\n", "")


@pytest.mark.parametrize("relaxed", ["counter", "request", "done", "look"])
def test_a_relaxed_operation_is_reported(program: Path, relaxed: str) -> None:
    """`counter`: the blocks' count; `request`, `done`: the device's and the worker's releases; `look`: the device's
    acquires."""
    done = run(program, relaxed)
    assert done.returncode == 66
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
