"""What Triton compiles: recorded without a GPU, and compiled ahead of the first launch.

Triton compiles a kernel again for each combination of argument types, alignments and constants. Compiled kernels are
kept in a folder on disk; a process that launches a kernel reads them from there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_WARP_THREADS = 32


@dataclass(frozen=True, slots=True)
class TritonBuild:
    """One variant of a kernel. `specialization`: types, alignments and constants, as Triton's JSON."""

    module: str
    kernel: str
    specialization: str


class _CompileOnly:
    """Stands for a GPU of a compute capability in Triton's place for the driver: it can compile and not launch."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, _WARP_THREADS)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> None:
    """Makes Triton compile for this compute capability (9.0 is 90) in this process, which can launch nothing."""
    driver.set_active(_CompileOnly(capability))


def recorded(launches: Callable[[], None]) -> list[TritonBuild]:
    """Calls `launches` and returns what Triton would compile for it; it compiles and launches nothing meanwhile. The
    process must be one of `compile_only`, with nothing compiled so far."""
    found: dict[TritonBuild, None] = {}

    def record(**event: Any) -> bool:
        kernel = event["fn"]
        found[TritonBuild(kernel.module, kernel.name, event["compile"]["specialization_data"])] = None
        return True  # Triton goes on neither to compile nor to launch

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, record
    try:
        launches()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found)


def compile_build(build: TritonBuild) -> None:
    """Compiles a variant, if no process did so before, and keeps it on disk. The process must be one of
    `compile_only`."""
    getattr(import_module(build.module), build.kernel).preload(build.specialization)
