"""The raw CUDA kernels as sources, and how CuPy's NVRTC compiles them; needs neither a GPU nor a driver.

NVRTC is called as CuPy wraps it (`cupy.cuda.nvrtc`) and not through `cupy.RawModule(code=…)`. That adds the option
`-ftz=true`, so that the smallest numbers would become zeros, other than on the CPU; it compiles for the current device
only, while tests compile for all architectures without one; and its cache does not see when an included file changes.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from caraserve.core import outputs, request
from caraserve.cpu import handoff
from caraserve.cpu.sampling import MAX_END_IDS, SLOT_SAMPLING
from caraserve.errors import ConfigError
from caraserve.model.dtype import Dtype
from caraserve.util.units import align_up

SOURCES = ("bgmv", "handoff", "sampling", "words")
_OF_ACTIVATIONS = ("bgmv", "handoff", "sampling")  # the code of the others is the same for every dtype
_HEADER = "common.cuh"
_KERNEL = re.compile(r"^KERNEL(?: __launch_bounds__\([^)]*\))? (?P<name>\w+)\((?P<parameters>[^)]*)\)", re.MULTILINE)


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

    def digest(self, version: str) -> str:
        """Returns a digest of everything that the machine code depends on. `version`: of NVRTC."""
        text = "\0".join((*sources(self.source).values(), *self.options, version))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code and the PTX it was assembled from."""

    cubin: bytes
    ptx: str


def units(activation: Dtype, arch: str) -> list[Unit]:
    """Returns what a backend loads on this architecture."""
    return [Unit(source, activation if source in _OF_ACTIVATIONS else Dtype.F32, arch) for source in SOURCES]


def definitions(activation: Dtype) -> Mapping[str, int]:
    """Returns the constants that the kernels share with Python, by macro name."""
    words = (
        "REQUEST",
        "DONE",
        "INCARNATION",
        "COUNT",
        "SLICES",
        "SLICE_BYTES",
        "COUNTER_LEFT",
        "COUNTER_VALUE",
        "MOST_SITES",
    )
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


def kernels(source: str) -> dict[str, tuple[str, ...]]:
    """Returns the parameters, as written, of every kernel in a source, by kernel name."""
    text = sources(source)[f"{source}.cu"]
    return {
        match["name"]: tuple(" ".join(parameter.split()) for parameter in match["parameters"].split(","))
        for match in _KERNEL.finditer(text)
    }


def import_cupy() -> Any:
    """Returns CuPy, which is imported only where kernels are compiled or loaded. Raises ConfigError without it."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError("the CUDA kernels need CuPy; pip install 'caraserve[cuda13]' (or cuda12)") from error
    return cupy


def compiled(unit: Unit) -> Compiled:
    """Compiles a unit. Raises CompilationFailed with the compiler's log; warnings count as errors."""
    nvrtc = import_cupy().cuda.nvrtc
    (name, text), *headers = sources(unit.source).items()
    texts, names = [header.encode() for _, header in headers], [header.encode() for header, _ in headers]
    program = nvrtc.createProgram(text, name, texts, names)
    try:
        status = ""
        try:
            nvrtc.compileProgram(program, unit.options)
        except nvrtc.NVRTCError as error:
            status = str(error)
        log = nvrtc.getProgramLog(program).strip()
        if status or log:
            raise CompilationFailed(f"{name} for {unit.arch}: {log or status}")
        # CuPy drops the last byte of both. A cubin ends with 8 bytes of a header, the last of which is 0.
        cubin = nvrtc.getCUBIN(program)
        return Compiled(cubin.ljust(align_up(len(cubin), 8), b"\0"), nvrtc.getPTX(program).rstrip(b"\0").decode())
    finally:
        nvrtc.destroyProgram(program)


def cubin_file(unit: Unit, folder: Path) -> Path:
    """Returns the file with a unit's machine code in `folder`, compiling it if no earlier start did."""
    major, minor = import_cupy().cuda.nvrtc.getVersion()
    digest = unit.digest(f"{major}.{minor}")[:16]
    path = folder / f"{unit.source}-{unit.activation.name.lower()}-{unit.arch}-{digest}.cubin"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{path.name}.{os.getpid()}"  # several servers may start together: none may read a partial file
        made.write_bytes(compiled(unit).cubin)
        made.replace(path)
    return path
