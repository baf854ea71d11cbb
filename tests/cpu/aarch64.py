"""Compiles kernels for aarch64 on another machine, and runs none: `python -m tests.cpu.aarch64 [SIGNATURES]`.

Prints the assembly of a tile and of what threads wait with. With a file of signatures, that `signatures` returned, it
compiles those functions too, and prints their names.
"""

import importlib
import pickle
import platform
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding

TRIPLE = "aarch64-unknown-linux-gnu"
CPU = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+neon"}


def signatures() -> list[tuple[str, str, Any]]:
    """Returns module, name and signature of all functions of the package that Python has called in this process."""
    from numba.core.registry import CPUDispatcher

    return [
        (name, own, signature)
        for name, module in list(sys.modules.items())
        for own, value in list(vars(module).items())
        if name.startswith("caraserve.") and isinstance(value, CPUDispatcher) and value.py_func.__module__ == name
        for signature in value.signatures
    ]


def _assembly() -> str:
    import numba

    from caraserve.cpu.barrier import meet
    from caraserve.cpu.simd import fence
    from caraserve.cpu.tiles import gemm_tile

    tile = gemm_tile(4, 2, 0)

    def product(barrier: int, team: int, x: int, w: int, k: int, y: int) -> None:
        tile(x, 4096, w, k, y, 256, 0)
        fence()
        meet(barrier, team)

    compiled = numba.cfunc(numba.void(*[numba.int64] * 6))(product)
    return str(compiled._library.get_asm_str())


def main() -> None:
    platform.machine = lambda: "aarch64"
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    llvmlite.binding.get_process_triple = llvmlite.binding.get_default_triple = lambda: TRIPLE
    sys.stdout.write(_assembly())
    for path in sys.argv[1:]:
        for module, name, signature in pickle.loads(Path(path).read_bytes()):  # noqa: S301  # a test's own
            getattr(importlib.import_module(module), name).compile(signature)
            sys.stdout.write(f"compiled {module} {name}\n")


if __name__ == "__main__":
    main()
