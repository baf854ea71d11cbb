"""Runs launches of the raw CUDA kernels on this machine's CPU: the same sources, compiled with cuda_on_host.h."""

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.kernels import cuda_sources
from caraserve.model.dtype import Dtype

_HEADER, TYPES = (Path(__file__).with_name(name) for name in ("cuda_on_host.h", "cuda_types.h"))
_FLAGS = (
    *("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-fno-exceptions", "-nostdlib++"),
    *("-fno-sanitize=all", "-fsanitize=alignment", "-fsanitize-trap=alignment", "-Wall", "-Werror"),
    *("-Wno-unknown-pragmas", "-Wno-unused-function", "-U_FORTIFY_SOURCE"),
)
_FOLDER = Path(tempfile.gettempdir()) / f"caraserve-tests-{os.getuid()}"  # of libraries that test processes share
# The compiler makes its own start files once and keeps them here, also if there is no home folder.
_CACHES = dict.fromkeys(("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR"), f"{tempfile.gettempdir()}/zig-{os.getuid()}")


def shared_library(compiler: str, flags: Sequence[str], main: str, files: Mapping[str, str]) -> Path:
    """Returns a library compiled from the source `main`, one of `files`, for this CPU; any process compiles it once.

    `compiler`: "cc" or "c++".
    """
    made_from = version("ziglang"), platform.uname(), compiler, *flags, main, *sorted(files.items())
    target = _FOLDER / f"{sha256(repr(made_from).encode()).hexdigest()}.so"
    if not target.exists():
        _FOLDER.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            for file, text in files.items():
                (Path(folder) / file).write_text(text, encoding="utf-8")
            command = [sys.executable, "-m", "ziglang", compiler, *flags, main, "-o", "made.so"]
            env = os.environ | _CACHES
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            (Path(folder) / "made.so").replace(target)  # at once, as two processes may have compiled it
    return target


@cache
def _library(source: str, activation: Dtype) -> ctypes.CDLL:
    main = [f'#include "{_HEADER.name}"', f'#include "{source}.cu"']
    main += [f"EMULATE({kernel})" for kernel in cuda_sources.kernels(source)]
    headers = {header.name: header.read_text(encoding="utf-8") for header in (_HEADER, TYPES)}
    files = {**cuda_sources.sources(source), **headers, "main.cpp": "\n".join(main)}
    macros = [f"-D{name}={value}" for name, value in cuda_sources.definitions(activation).items()]
    return ctypes.CDLL(str(shared_library("c++", (*_FLAGS, *macros), "main.cpp", files)))


@cache
def _argument_counts(source: str) -> dict[str, int]:
    """Returns the number of arguments of each kernel."""
    return {kernel: len(arguments) for kernel, arguments in cuda_sources.kernels(source).items()}


def run_early(launch: Launch, activation: Dtype, written: NDArray[np.float32], seed: int = 0) -> None:
    """Runs a launch as if it began before the launch that wrote `written` had done so: until it waits for that, the
    numbers are NaN."""
    kept = written.copy()
    written.view(np.uint32)[:] = 0xFFFFFFFF  # another NaN than those that may be in `written`
    where = ctypes.c_void_p(written.ctypes.data), ctypes.c_void_p(kept.ctypes.data), ctypes.c_size_t(kept.nbytes)
    _library(launch.source, activation).emulate_unwritten(*where)
    run(launch, activation, seed)
    assert written.tobytes() == kept.tobytes(), f"{launch.kernel} ends without waiting"


def run(launch: Launch, activation: Dtype = Dtype.F32, seed: int = 0) -> None:
    """Runs a launch. Addresses in the arguments are those of this process. `seed`: order in which threads and blocks
    run."""
    kernel = getattr(_library(launch.source, activation), f"emulate_{launch.kernel}")
    assert len(launch.arguments) == _argument_counts(launch.source)[launch.kernel]
    boxes = [np.array([argument]) for argument in launch.arguments]
    addresses = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
    assert kernel(launch.grid, launch.block, seed, addresses) == 0, f"{launch.kernel}: all threads wait for others"
