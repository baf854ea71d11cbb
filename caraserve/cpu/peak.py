"""Measures the peak rate of one core: fused multiply-adds that do not depend on one another. For benchmarks."""

import time

import numpy as np

from caraserve.core.lora_layout import aligned_bytes
from caraserve.cpu.jit import entry
from caraserve.cpu.simd import LANES, store_f32, vadd, vfma, vsplat, vsum

_CHAINS = 12  # more than the latency of a multiply-add times two a cycle
_STEPS = 200_000


@entry
def _chains(steps, out):  # type: ignore[no-untyped-def]
    a = b = c = d = e = f = g = h = i = j = k = m = vsplat(np.float32(1.0))
    x, y = vsplat(np.float32(0.999999)), vsplat(np.float32(1e-7))
    for _ in range(steps):
        a, b, c, d = vfma(a, x, y), vfma(b, x, y), vfma(c, x, y), vfma(d, x, y)
        e, f, g, h = vfma(e, x, y), vfma(f, x, y), vfma(g, x, y), vfma(h, x, y)
        i, j, k, m = vfma(i, x, y), vfma(j, x, y), vfma(k, x, y), vfma(m, x, y)
    total = vadd(vadd(vadd(a, b), vadd(c, d)), vadd(vadd(vadd(e, f), vadd(g, h)), vadd(vadd(i, j), vadd(k, m))))
    store_f32(out, vsum(total))


def peak_flops() -> float:
    """Measures the fp32 FLOP/s of this core at present, within about a millisecond."""
    out = aligned_bytes(64)
    started_s = time.perf_counter()
    _chains(_STEPS, int(out.ctypes.data))
    return 2 * LANES * _CHAINS * _STEPS / (time.perf_counter() - started_s)
