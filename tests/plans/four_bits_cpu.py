"""The made-up format of four_bits.py on the CPU; its import registers it."""

from typing import Any

from llvmlite import ir

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.linear import register
from caraserve.cpu.linear.base import WeightKernels
from caraserve.cpu.linear.expanding import product, row_by_pieces
from caraserve.cpu.simd import LANES, VF, VI8, emit_load_bytes, vector_load, vload, vmul, vstore
from caraserve.cpu.structs import site_at
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Matrix
from tests.plans.four_bits import BLOCK, ZERO, FourBits


def pack(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
    """Packs pairs of codes, and scales, as panels."""
    return {"weight": memory.panels(matrix.arrays["codes"]), "scale": memory.panels(matrix.arrays["scale"])}


def _const(value: int) -> Any:
    return ir.Constant(VI8, [value] * LANES)


def _emit_low(b: Any, address: Any) -> Any:
    return b.sitofp(b.sub(b.and_(emit_load_bytes(b, address), _const(15)), _const(ZERO)), VF)


def _emit_high(b: Any, address: Any) -> Any:
    return b.sitofp(b.sub(b.lshr(emit_load_bytes(b, address), _const(4)), _const(ZERO)), VF)


_load_low, _load_high = vector_load(_emit_low), vector_load(_emit_high)


@compiled_separately(5)
def expand(site_address, panel, first, count, y):  # type: ignore[no-untyped-def]
    """Writes the weights of some inputs of a panel, fp32 [count, 64]."""
    site = site_at(site_address)
    for at in range(0, count, 2):
        codes = site.weight + (panel * site.inputs + first + at) // 2 * PANEL
        scales = site.scale + (panel * site.inputs + first + at) // BLOCK * (4 * PANEL)
        for lane in range(0, PANEL, LANES):
            scale, out = vload(scales + 4 * lane), y + 4 * (at * PANEL + lane)
            vstore(out, vmul(_load_low(codes + lane), scale))
            vstore(out + 4 * PANEL, vmul(_load_high(codes + lane), scale))


KERNELS = WeightKernels(pack, product.address, expand.address, row_by_pieces.address)
register(FourBits().name, KERNELS)
