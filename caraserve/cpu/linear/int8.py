"""Weights as int8 codes with a scale for each output."""

from typing import Any

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.linear import WeightKernels
from caraserve.cpu.linear.codes import pack_codes
from caraserve.cpu.linear.expanding import product
from caraserve.cpu.simd import LANES, VF, VI, emit_load_bytes, vector_load, vload, vmul, vstore
from caraserve.cpu.structs import site_at
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Code, Dtype
from caraserve.model.formats import Matrix


def pack(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
    """Packs codes as panels of bytes, and their scales."""
    return pack_codes(matrix.arrays["codes"], matrix.arrays["scale"], Code.I8, memory)


def _emit(b: Any, address: Any) -> Any:
    return b.sitofp(b.sext(emit_load_bytes(b, address), VI), VF)


_load = vector_load(_emit)


@compiled_separately(5)
def expand(site_address, panel, first, count, y):  # type: ignore[no-untyped-def]
    """Writes the weights of some inputs of a panel, fp32 [count, 64]: code times scale."""
    site = site_at(site_address)
    codes, scales = site.weight + (panel * site.inputs + first) * PANEL, site.scale + 4 * PANEL * panel
    for lane in range(0, PANEL, LANES):
        scale = vload(scales + 4 * lane)
        for at in range(lane, count * PANEL, PANEL):
            vstore(y + 4 * at, vmul(_load(codes + at), scale))


KERNELS = WeightKernels(pack, product.address, expand.address)
