"""Runs launches of the raw CUDA kernels on this machine's CPU: the same sources, compiled with cuda_on_host.h."""

import ctypes
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from caraserve.gpu.driver import nvrtc
from caraserve.gpu.kernels.cuda_launch import Launch
from caraserve.model.dtype import Dtype

_HERE = Path(__file__).parent
_FLAGS = (
    *("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-fno-exceptions", "-nostdlib++"),
    *("-fno-sanitize=all", "-fsanitize=alignment", "-fsanitize-trap=alignment", "-Wall", "-Werror"),
    *("-Wno-unknown-pragmas", "-Wno-unused-function", "-U_FORTIFY_SOURCE"),
)
# The compiler makes its own start files once and keeps them here, also if there is no home folder.
CACHES = dict.fromkeys(("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR"), f"{tempfile.gettempdir()}/zig-{os.getuid()}")


@cache
def _library(source: str, activation: Dtype) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        for file, text in nvrtc.sources(source).items():
            (Path(folder) / file).write_text(text, encoding="utf-8")
        main = [f'#include "{_HERE}/cuda_on_host.h"', f'#include "{source}.cu"']
        main += [f"EMULATE({kernel})" for kernel in nvrtc.kernels(source)]
        (Path(folder) / "main.cpp").write_text("\n".join(main), encoding="utf-8")
        macros = [f"-D{name}={value}" for name, value in nvrtc.definitions(activation).items()]
        target = Path(folder) / "kernels.so"
        command = [sys.executable, "-m", "ziglang", "c++", *_FLAGS, *macros, "main.cpp", "-o", str(target)]
        done = subprocess.run(command, cwd=folder, env=os.environ | CACHES, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(target))


def run(launch: Launch, activation: Dtype = Dtype.F32, seed: int = 0) -> None:
    """Runs a launch. Addresses in the arguments are those of this process. `seed`: order in which threads and blocks
    run."""
    kernel = getattr(_library(launch.source, activation), f"emulate_{launch.kernel}")
    assert len(launch.arguments) == len(nvrtc.kernels(launch.source)[launch.kernel])
    boxes = [np.array([argument]) for argument in launch.arguments]
    addresses = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
    assert kernel(launch.grid, launch.block, seed, addresses) == 0, f"{launch.kernel}: all threads wait for others"
