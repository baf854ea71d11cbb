"""Compiles the raw CUDA kernels to machine code with NVRTC through ctypes; needs neither a GPU nor a driver.

The library is part of the `nvidia-cuda-nvrtc` wheels, which CuPy and torch depend on, or of a CUDA toolkit. Its results
run on any driver of the same major version, so the caller passes that version.
"""

import ctypes
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path

from caraserve.core import outputs, request
from caraserve.cpu import handoff
from caraserve.cpu.sampling import MAX_END_IDS, SLOT_SAMPLING
from caraserve.errors import ConfigError
from caraserve.model.dtype import Dtype

SOURCES = ("bgmv", "handoff", "sampling", "words")
_HEADER = "common.cuh"
_MAJORS = (13, 12)  # newest first
_PACKAGES = {13: ("nvidia-cuda-nvrtc",), 12: ("nvidia-cuda-nvrtc-cu12",)}


class CompilationFailed(Exception):
    """NVRTC rejected a source; the message is its log."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What to compile: one source for one activation dtype and one architecture, such as `sm_90`."""

    source: str
    activation: Dtype
    arch: str

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options. Fused multiply-adds are off, except where the source writes one: the order of roundings
        determines the result."""
        macros = tuple(f"-D{name}={value}" for name, value in definitions(self.activation).items())
        return (f"-arch={self.arch}", "-std=c++17", "-fmad=false", *macros)

    def digest(self, compiler: str) -> str:
        """Returns a digest of everything that the machine code depends on."""
        text = "\0".join((*sources(self.source).values(), *self.options, compiler))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code and the PTX it was assembled from."""

    cubin: bytes
    ptx: str


def definitions(activation: Dtype) -> Mapping[str, int]:
    """Returns the constants that the kernels share with Python, by macro name."""
    words = ("REQUEST", "DONE", "INCARNATION", "COUNT", "SLICES", "SLICE_BYTES", "COUNTER_LEFT", "COUNTER_VALUE")
    return {
        "ACTIVATION": activation.value,
        **{name: getattr(handoff, name) for name in words},
        **{name: getattr(outputs, name) for name in ("SAMPLE", "SCORE", "NOT_FINITE")},
        "MAX_LOGIT_BIAS": request.MAX_LOGIT_BIAS,
        "MAX_END_IDS": MAX_END_IDS,
        "RECORD_BYTES": SLOT_SAMPLING.itemsize,
    }


def sources(name: str) -> dict[str, str]:
    """Returns the text of a source and of the files it includes, by file name, the source first."""
    folder = resources.files("caraserve.gpu.kernels")
    return {file: (folder / file).read_text(encoding="utf-8") for file in (f"{name}.cu", _HEADER)}


_KERNEL = re.compile(r"^KERNEL(?: __launch_bounds__\([^)]*\))? (?P<name>\w+)\((?P<parameters>[^)]*)\)", re.MULTILINE)


def kernels(source: str) -> dict[str, tuple[str, ...]]:
    """Returns the parameters, as written, of every kernel in a source, by kernel name."""
    text = sources(source)[f"{source}.cu"]
    return {
        match["name"]: tuple(" ".join(parameter.split()) for parameter in match["parameters"].split(","))
        for match in _KERNEL.finditer(text)
    }


class Nvrtc:
    """The library. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, unit: Unit) -> Compiled:
        """Compiles a unit. Raises CompilationFailed with the compiler's log; warnings count as errors."""
        (name, text), *headers = sources(unit.source).items()
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program),
                text.encode(),
                name.encode(),
                len(headers),
                _strings([header for _, header in headers]),
                _strings([header for header, _ in headers]),
            )
        )
        try:
            status = self._library.nvrtcCompileProgram(program, len(unit.options), _strings(unit.options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status != 0 or log:
                raise CompilationFailed(f"{name} for {unit.arch}: {log or self._message(status)}")
            return Compiled(self._read(program, "CUBIN"), self._read(program, "PTX").rstrip(b"\0").decode())
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise CompilationFailed(self._message(status))

    def _message(self, status: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(status)
        return text.decode()


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


@cache
def load(newest_major: int = _MAJORS[0]) -> Nvrtc:
    """Returns the newest NVRTC whose results run on a driver of CUDA `newest_major`. Raises ConfigError if there is
    none."""
    for major in _MAJORS:
        if major <= newest_major:
            candidates: list[Path | str] = [*_in_wheels(major), f"libnvrtc.so.{major}"]
            for candidate in candidates:
                try:
                    return Nvrtc(_open(candidate))
                except OSError:
                    continue
    command = "pip install nvidia-cuda-nvrtc" + ("" if newest_major > 12 else "-cu12")
    raise ConfigError(f"no NVRTC library for a driver of CUDA {newest_major} was found; {command}")


def cubin_file(unit: Unit, folder: Path, library: Nvrtc) -> Path:
    """Returns the file with a unit's machine code in `folder`, compiling it if no earlier start did."""
    path = (
        folder / f"{unit.source}-{unit.activation.name.lower()}-{unit.arch}-{unit.digest(library.version)[:16]}.cubin"
    )
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{path.name}.{os.getpid()}"  # several servers may start together: none may read a partial file
        made.write_bytes(library.compile(unit).cubin)
        made.replace(path)
    return path


def _open(library: Path | str) -> ctypes.CDLL:
    """Loads NVRTC after its builtins library: NVRTC opens that one by bare name, which works only if it is loaded."""
    if isinstance(library, Path):
        for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(library))


def _in_wheels(major: int) -> list[Path]:
    found = []
    for package in _PACKAGES[major]:
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        found += [Path(str(file.locate())) for file in files if file.name == f"libnvrtc.so.{major}"]
    return found
