"""What fp8 and int8 share: panels of codes of one byte, and a scale for each output."""

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Code, decoded
from caraserve.model.formats import Array
from caraserve.util.units import align_up


def pack_codes(codes: Array, scale: Array, code: Code, memory: WeightMemory, factor: float = 1.0) -> dict[str, int]:
    """Packs codes as panels, and scales times `factor`, a power of two.

    A code without a value, which fp8 has, makes all weights of its output NaN; kernels have no NaN of their own.
    """
    codes = codes.astype(np.uint8, copy=False)
    scales = scale.astype(np.float32) * np.float32(factor)
    missing = np.isnan(decoded(np.arange(256, dtype=np.uint8), code))
    if missing.any():
        scales[missing[codes].any(axis=1)] = np.nan
    return {"weight": memory.panels(codes), "scale": memory.vectors(scales, align_up(len(scales), PANEL))}
