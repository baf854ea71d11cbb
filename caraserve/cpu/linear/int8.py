"""Weights as int8 codes with a scale for each output."""

from typing import Any

from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.linear.base import WeightKernels
from caraserve.cpu.linear.codes import code_expansion, pack_codes
from caraserve.cpu.linear.expanding import product, row_by_pieces
from caraserve.cpu.simd import VF, VI, emit_load_bytes, vector_load
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Code, Dtype
from caraserve.model.formats import Matrix


def pack(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
    """Packs codes as panels of bytes, and their scales."""
    return pack_codes(matrix.arrays["codes"] ^ 128, matrix.arrays["scale"], Code.I8, memory)


def _emit(b: Any, address: Any) -> Any:
    return b.sitofp(b.sext(emit_load_bytes(b, address), VI), VF)


_expand = code_expansion("int8", vector_load(_emit))


@compiled_separately(5)
def expand(site_address, panel, first, count, y):  # type: ignore[no-untyped-def]
    """Writes the weights of some inputs of a panel, fp32 [count, 64]: code times scale."""
    _expand(site_address, panel, first, count, y)


KERNELS = WeightKernels(pack, product.address, expand.address, row_by_pieces.address)
