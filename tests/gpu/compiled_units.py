"""CUDA sources compiled for GPUs, each once for all tests of a process: a unit takes up to 5 s."""

from functools import cache

from caraserve.gpu.kernels import cuda_sources
from caraserve.gpu.kernels.cuda_sources import Compiled, Unit

_compile = cuda_sources.compiled  # tests replace it by what follows


@cache
def compiled(unit: Unit) -> Compiled:
    """Compiles a unit; a warning fails the compilation."""
    return _compile(unit)
