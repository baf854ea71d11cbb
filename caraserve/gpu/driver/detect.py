"""Detects whether there is a usable GPU, and what is missing if there is an unusable one.

A separate process queries the driver, because workers are forked later and must not inherit an initialised driver.
Neither torch nor CuPy is imported.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from ctypes import CDLL
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from caraserve.errors import ConfigError
from caraserve.gpu.driver import environment
from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.driver.libcuda import LIBRARY, Attribute, Cuda
from caraserve.util.cache_folder import why_unwritable

DEVICES = ("auto", "cuda", "cpu")  # values of --device

_OLDEST_CUDA = 12
_NEWEST_CUDA = 13  # newest CUDA major version for which there is an extra
_OLDEST_CAPABILITY = 80
# Releases of torch whose plain wheels are built for a CUDA version.
_TORCH = {12: "torch>=2.9,<2.11", 13: "torch>=2.11,<2.14"}
_LOOK_S = 60.0  # timeout of the query: a driver without persistence mode takes seconds to start


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device, and what decides whether it is usable. CUDA 13.2 is 13020, compute capability 9.0 is 90."""

    name: str
    capability: int
    driver_version: int
    total_bytes: int  # of its memory


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed packages that a GPU needs. `torch_cuda`, `cupy_cuda`: major version of the CUDA they were built
    for; None if not installed or built without CUDA; 0 if unknown. `lacks_for_c`: what Triton lacks to compile C, as it
    does at its first use. `unwritable`: why kernels cannot be cached. Both are empty if all is well."""

    torch: str
    torch_cuda: int | None
    cupy_cuda: int | None
    triton: bool
    lacks_for_c: str = ""
    unwritable: str = ""


_NOTHING = Installed(torch="", torch_cuda=None, cupy_cuda=None, triton=False)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device to serve on. `note`: one line for the operator on why an existing GPU is not used."""

    device: Literal["cuda", "cpu"]
    note: str = ""


def choose(wanted: str, gpu: Gpu | None, problem: str, installed: Installed) -> DeviceChoice:
    """Returns the device to serve on. `wanted` is one of DEVICES; `problem` says why there is no GPU, and is empty on a
    machine without a driver. Raises ConfigError if a GPU is wanted and none is usable."""
    if wanted == "cpu":
        return DeviceChoice("cpu")
    if gpu is not None:
        problem = _problem(gpu, installed)
    if gpu is not None and not problem:
        return DeviceChoice("cuda")
    if wanted == "cuda":
        raise ConfigError(f"--device cuda: {problem or 'there is no NVIDIA driver on this machine'}")
    return DeviceChoice("cpu", f"{problem}; serving on the CPU" if problem else "")


def _problem(gpu: Gpu, installed: Installed) -> str:
    """Returns why the GPU is unusable and the command that fixes it, or "" if it is usable."""
    cuda = gpu.driver_version // 1000
    version = f"{cuda}.{gpu.driver_version % 1000 // 10}"
    if gpu.capability < _OLDEST_CAPABILITY:
        capability = f"{gpu.capability // 10}.{gpu.capability % 10}"
        return f"{gpu.name} has compute capability {capability}, and 8.0 (A100, A10, RTX 30) is the least"
    if cuda < _OLDEST_CUDA:
        return f"the NVIDIA driver is one of CUDA {version}, and CUDA {_OLDEST_CUDA} is the least; update the driver"
    missing, commands = _missing(cuda, installed)
    if missing:
        return f"{gpu.name} (driver of CUDA {version}) lacks {' and '.join(missing)}: {' && '.join(commands)}"
    if installed.unwritable:
        return f"{gpu.name} needs a cache of kernels, and {installed.unwritable}; set XDG_CACHE_HOME to another folder"
    return ""


def _missing(cuda: int, installed: Installed) -> tuple[list[str], list[str]]:
    """Returns what is missing for a driver of this CUDA version, and the commands that install it, in order."""
    wheels = min(cuda, _NEWEST_CUDA)
    missing, commands, extra = [], [], []
    if installed.torch_cuda is None or installed.torch_cuda > cuda:
        built = "without CUDA" if installed.torch_cuda is None else f"for CUDA {installed.torch_cuda}"
        there = f"{installed.torch} is built {built}" if installed.torch else "none is installed"
        missing.append(f"a torch for CUDA {wheels} ({there})")
        commands.append(f"pip install --force-reinstall '{_TORCH[wheels]}'")
    if installed.cupy_cuda is None:
        extra.append("CuPy")
    elif installed.cupy_cuda > cuda:
        extra.append(f"a CuPy for CUDA {wheels}")
        commands.append(f"pip uninstall -y cupy-cuda{installed.cupy_cuda}x")  # two CuPy packages break each other
    if not installed.triton:
        extra.append("Triton")
    if extra:
        commands.append(f"pip install 'caraserve[cuda{wheels}]'")
    missing += extra
    if installed.lacks_for_c:
        missing.append(f"{installed.lacks_for_c}, which Triton needs")
        commands.append(f"apt-get install {environment.DEBIAN[installed.lacks_for_c]}")
    return missing, commands


def detect(wanted: str, library: str = LIBRARY) -> DeviceChoice:
    """Applies `choose` to this machine; queries nothing if `wanted` is `cpu`. Raises ConfigError as `choose` does."""
    if wanted == "cpu":
        return DeviceChoice("cpu")
    gpu, problem = look(library)
    # Without a GPU no package matters, and reading which ones are installed would take 0.1 s of every start.
    return choose(wanted, gpu, problem, _NOTHING if gpu is None else installed())


def look(library: str = LIBRARY) -> tuple[Gpu | None, str]:
    """Returns the first GPU, or why there is none; the reason is empty on a machine without a driver."""
    try:
        CDLL(library)
    except OSError:
        return None, ""
    command = [sys.executable, "-m", "caraserve.gpu.driver.detect", library]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"the NVIDIA driver did not start within {_LOOK_S:.0f} s"
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or [f"status {asked.returncode}"])[-1]
        return None, f"the NVIDIA driver cannot be used: {last}"
    answer = json.loads(asked.stdout)
    return (None, answer) if isinstance(answer, str) else (Gpu(**answer), "")


def installed(*, has_gpu: bool = True) -> Installed:
    """Reads which packages are installed, without importing them; and where there is a GPU, whether Triton can compile
    and keep its kernels."""
    return Installed(
        torch=f"torch {_version('torch')}" if find_spec("torch") else "",
        torch_cuda=_torch_cuda(),
        cupy_cuda=_cupy_cuda(metadata.distributions()) if find_spec("cupy") else None,
        triton=find_spec("triton") is not None,
        lacks_for_c=environment.lacks_for_c(environment.python_headers()) if has_gpu else "",
        unwritable=why_unwritable(environment.triton_cache()) if has_gpu else "",
    )


def has_packages() -> bool:
    """Returns whether all packages that a GPU needs are installed, torch with CUDA."""
    return _torch_cuda() is not None and all(find_spec(package) is not None for package in ("cupy", "triton"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of no version"


def _torch_cuda() -> int | None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    built = re.search(r"^cuda\b[^=]*= *'(\d+)", text, re.MULTILINE)
    return int(built[1]) if built else None


def _cupy_cuda(distributions: Iterable[metadata.Distribution]) -> int:
    names = (str(distribution.metadata["Name"]).lower() for distribution in distributions)
    wheels = [re.fullmatch(r"cupy-cuda(\d+)x", name) for name in names]
    return max((int(wheel[1]) for wheel in wheels if wheel), default=0)


def _answer(library: str) -> dict[str, str | int] | str:
    """Runs in the separate process: returns the first GPU, or what is wrong with it."""
    try:
        cuda = Cuda(library)
        if cuda.number("cuDeviceGetCount") == 0:
            return "the NVIDIA driver sees no GPU"
        device = cuda.number("cuDeviceGet", 0)
        gpu = Gpu(
            name=cuda.text("cuDeviceGetName", device),
            capability=capability(cuda, device),
            driver_version=cuda.number("cuDriverGetVersion"),
            total_bytes=cuda.number("cuDeviceTotalMem_v2", device),
        )
    except DriverError as error:
        return f"the NVIDIA driver cannot be used: {error}"
    return asdict(gpu)


def capability(cuda: Cuda, handle: int) -> int:
    """Returns a device's compute capability; 9.0 is 90."""
    major, minor = Attribute.COMPUTE_CAPABILITY_MAJOR, Attribute.COMPUTE_CAPABILITY_MINOR
    return 10 * cuda.attribute(major, handle) + cuda.attribute(minor, handle)


if __name__ == "__main__":
    json.dump(_answer(sys.argv[1]), sys.stdout)
