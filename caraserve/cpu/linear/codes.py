"""What fp8 and int8 share: panels of codes of one byte, and a scale for each output."""

from typing import Any

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import variant
from caraserve.cpu.simd import LANES, vload, vmul, vstore
from caraserve.cpu.structs import site_at
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Code, decoded
from caraserve.model.formats import Array
from caraserve.util.units import align_up


def pack_codes(codes: Array, scale: Array, code: Code, memory: WeightMemory, factor: float = 1.0) -> dict[str, int]:
    """Packs codes as panels, and scales times `factor`, a power of two.

    A code without a value, which fp8 has, makes all weights of its output NaN; kernels have no NaN of their own.
    """
    codes = codes.astype(np.uint8, copy=False)
    scales = scale.astype(np.float32).reshape(-1) * np.float32(factor)
    missing = np.isnan(decoded(np.arange(256, dtype=np.uint8), code))
    if missing.any():
        scales[missing[codes].any(axis=1)] = np.nan
    return {"weight": memory.panels(codes), "scale": memory.vectors(scales, align_up(len(scales), PANEL))}


def code_expansion(name: str, load: Any) -> Any:
    """Makes the `expand` of a format: `load(address)` returns the values of sixteen codes."""

    @variant(name)
    def expand_codes(site_address, panel, first, count, y):  # type: ignore[no-untyped-def]
        site = site_at(site_address)
        codes, scales = site.weight + (panel * site.inputs + first) * PANEL, site.scale + 4 * PANEL * panel
        for row in range(count):
            for lane in range(0, PANEL, LANES):
                at = row * PANEL + lane
                vstore(y + 4 * at, vmul(load(codes + at), vload(scales + 4 * lane)))

    return expand_codes
