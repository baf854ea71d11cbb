"""What CUDA, torch, Triton and CuPy find around them: environment variables, folders, a C compiler. Imports none of
them."""

import os
import shutil
import subprocess
import sys
import sysconfig
from ctypes import CDLL
from pathlib import Path

from caraserve.gpu.driver.libcuda import LIBRARY
from caraserve.util.cache_folder import cache_folder

_MAPS = Path("/proc/self/maps")  # the files that this process has mapped
# What Triton may lack to compile C, and the packages of Debian and Ubuntu that bring it.
_NO_COMPILER, _NO_LIBRARY, _NO_HEADERS = "a C compiler", "the C library's headers", "Python's headers"
DEBIAN = {
    _NO_COMPILER: "gcc libc6-dev",
    _NO_LIBRARY: "libc6-dev",
    _NO_HEADERS: f"python{sys.version_info.major}.{sys.version_info.minor}-dev",
}


def prepare_environment() -> None:
    """Sets the environment variables that CUDA, torch, Triton and CuPy read at their start.

    With fewer connections, streams that share a hardware queue would delay one another. Kernels are loaded when they
    are first needed, which the warm-up sees to: loading all of torch's at once would take seconds, and device memory
    for thousands that nothing here launches. torch keeps cuBLAS's workspace of each stream: releases after 2.13 would
    allocate one for each product, which a captured graph must not. Caches go to the folder of all others, unless the
    user has named some. Triton finds the driver's library without ldconfig, whose cache may lack it in a container.
    """
    os.environ |= {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "LAZY",
        "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
    }
    os.environ["TRITON_CACHE_DIR"] = str(triton_cache())
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache_folder("cupy")))
    if folder := library_folder():
        os.environ.setdefault("TRITON_LIBCUDA_PATH", str(folder))


def triton_cache() -> Path:
    """Returns the folder of compiled Triton kernels: TRITON_CACHE_DIR, or one beside our other caches."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or cache_folder("triton"))


def library_folder(library: str = LIBRARY) -> Path | None:
    """Returns the folder that the driver's library is loaded from, or None if the machine has none."""
    try:
        CDLL(library)
    except OSError:
        return None
    name = Path(library).name  # of a link to the file that is mapped: libcuda.so.1 to libcuda.so.580.65.06
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        file = Path(line.split(maxsplit=5)[-1])
        if file.name.partition(".so")[0] == name.partition(".so")[0] and (file.parent / name).exists():
            return file.parent
    return None


def python_headers() -> Path:
    """Returns the folder in which Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder for what administrators install, which has no headers.
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def lacks_for_c(include: Path) -> str:
    """Returns what is missing to compile C that includes Python's headers, from `include`, or "". Triton takes the
    compiler that CC names, or gcc, or clang."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        return _NO_COMPILER
    if not (include / "Python.h").exists():
        return _NO_HEADERS
    command = [compiler, "-x", "c", "-fsyntax-only", f"-I{include}", "-"]
    tried = subprocess.run(command, input="#include <Python.h>\n", text=True, capture_output=True, check=False)
    return _NO_LIBRARY if tried.returncode else ""
