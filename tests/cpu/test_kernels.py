"""Compares compiled kernels with numpy in double precision, for odd sizes; a row has the same bits in any batch."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.cpu.kernels import PANEL, lora_shrink, panel_gemm
from caraserve.cpu.structs import LORA_ENTRY
from caraserve.cpu.weights import convert
from caraserve.model.dtype import Dtype, to_float32

DTYPES = (Dtype.F32, Dtype.BF16, Dtype.F16)
_GEMM = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(panel_gemm.address)
_SHRINK = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)(lora_shrink.address)


def stored(values: NDArray[np.float32], dtype: Dtype) -> tuple[NDArray[np.generic], NDArray[np.float64]]:
    """Returns values as stored, and the exact values that the stored ones represent."""
    raw = np.ascontiguousarray(convert(values.astype(np.float32), Dtype.F32, dtype))
    return raw, to_float32(raw, dtype).astype(np.float64)


def gemm(x: NDArray[np.float32], raw: NDArray[np.generic], dtype: Dtype, y: NDArray[np.float32], add: int) -> None:
    rows, k = x.shape
    _GEMM(dtype.value, x.ctypes.data, 4 * k, rows, raw.ctypes.data, k, y.ctypes.data, 4 * PANEL, add)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 17, 144, 2048, 2500])
def test_a_panel_is_the_matrix_product(dtype: Dtype, k: int) -> None:
    """Also past `K_BLOCK`, where partial sums are stored in between."""
    for rows in (1, 2, 3, 5, 6, 7, 8, 13, 16):
        rng = np.random.default_rng(rows * k)
        x = rng.standard_normal((rows, k), np.float32)
        raw, weights = stored(rng.standard_normal((k, PANEL), np.float32), dtype)
        y = rng.standard_normal((rows, PANEL), np.float32)
        before = y.astype(np.float64)
        expected = x.astype(np.float64) @ weights
        gemm(x, raw, dtype, y, 1)
        np.testing.assert_allclose(y, before + expected, atol=2e-6 * k**0.5 * 8)
        gemm(x, raw, dtype, y, 0)
        np.testing.assert_allclose(y, expected, atol=2e-6 * k**0.5 * 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: Dtype) -> None:
    """If the order of sums depended on the other rows, greedy output would, too."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((13, 2500), np.float32)
    raw, _ = stored(rng.standard_normal((2500, PANEL), np.float32), dtype)
    alone, together = np.empty((1, PANEL), np.float32), np.empty((13, PANEL), np.float32)
    gemm(x, raw, dtype, together, 0)
    for row in range(13):
        gemm(np.ascontiguousarray(x[row : row + 1]), raw, dtype, alone, 0)
        assert alone[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [16, 80, 144])
def test_shrink_is_scale_times_x_times_a(dtype: Dtype, inputs: int) -> None:
    for rows in (1, 2, 3, 4, 7):
        rng = np.random.default_rng(inputs)
        x = rng.standard_normal((rows, inputs), np.float32)
        raw, a = stored(rng.standard_normal((16, inputs), np.float32), dtype)
        entry = np.zeros(1, LORA_ENTRY)
        entry[0] = (raw.ctypes.data, 0, 16, dtype.value, 0.75)
        y = np.zeros((rows, 16), np.float32)
        for group in (0, 8):
            _SHRINK(entry.ctypes.data, group, x.ctypes.data, 4 * inputs, rows, inputs, y.ctypes.data + 4 * group, 64)
        np.testing.assert_allclose(y, 0.75 * (x.astype(np.float64) @ a.T), atol=2e-5)


_ANSWER = """
import asyncio
from caraserve import demo
from tests.serving import engine_config, lora_config, model_config, running, submit

async def main(mode):
    adapters = {name: demo.adapters_folder() / name for name in ("pirate", "chef")}
    model = model_config(demo.model_folder(), dtype="float16")
    async with running(model, lora_config(adapters, mode=mode), engine_config()) as engine:
        print([(await submit(engine, range(2, 40), name, max_tokens=24)).token_ids for name in (None, *adapters)])

for mode in ("overlapped", "merged"):
    asyncio.run(main(mode))
"""


@pytest.mark.slow
def test_a_cpu_without_avx_gives_the_same_tokens() -> None:
    """Compiled for a CPU with neither AVX nor fp16 conversion, the same source gives the same tokens."""

    def answer(**target: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _ANSWER], env=os.environ | target, capture_output=True, text=True, check=True
        )
        return done.stdout

    # Optimising would take half as long again, and decides nothing about which instructions there are.
    assert answer(NUMBA_CPU_NAME="nehalem", NUMBA_CPU_FEATURES="", NUMBA_OPT="0") == answer() != ""
