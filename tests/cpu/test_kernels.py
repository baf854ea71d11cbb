"""Compares compiled kernels with numpy in double precision, for odd sizes; a row has the same bits in any batch."""

import ctypes
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.kernels import lora_shrink
from caraserve.cpu.linear import kernels_of
from caraserve.cpu.linear.base import K_BLOCK
from caraserve.cpu.structs import LORA_ENTRY, SITE
from caraserve.cpu.weight_memory import WeightMemory, convert
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.formats import Matrix, WeightFormat
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.plain import PLAIN
from caraserve.model.formats.scaled_codes import Inputs

DTYPES = (Dtype.F32, Dtype.BF16, Dtype.F16)
FORMATS: dict[str, WeightFormat] = {"fp8": Fp8(Inputs.KEPT), "int8": Int8(Inputs.KEPT)}
KINDS = (*(dtype.name for dtype in DTYPES), *FORMATS)
_SHRINK = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)(lora_shrink.address)


def stored(values: NDArray[np.float32], dtype: Dtype) -> tuple[NDArray[np.generic], NDArray[np.float64]]:
    """Returns values as stored, and the exact values that the stored ones represent."""
    raw = np.ascontiguousarray(convert(values.astype(np.float32), Dtype.F32, dtype))
    return raw, to_float32(raw, dtype).astype(np.float64)


def tensors_of(kind: str, outputs: int, inputs: int) -> Matrix:
    """Returns random weights as a checkpoint has them: numbers of a dtype, or codes with scales."""
    rng = np.random.default_rng(inputs + 1_000_000)
    if kind in FORMATS:
        codes = rng.integers(0, 127, (outputs, inputs), np.uint8) | rng.integers(0, 2, (outputs, inputs), np.uint8) << 7
        scale = rng.uniform(0.001, 0.01, (outputs, 1)).astype(np.float32)
        return Matrix({"codes": codes, "scale": scale}, group=inputs)
    raw, _ = stored(rng.standard_normal((outputs, inputs), np.float32), Dtype[kind])
    return Matrix({"weight": raw}, Dtype[kind])


class Weights:
    """Packed weights and the kernels of their format."""

    def __init__(self, kind: str, outputs: int, inputs: int) -> None:
        matrix, kernels = tensors_of(kind, outputs, inputs), kernels_of(FORMATS.get(kind, PLAIN))
        self.exact = FORMATS.get(kind, PLAIN).values(matrix).astype(np.float64)
        self._memory, self._site = WeightMemory(), np.zeros(1, SITE)
        dtype = Dtype.F32 if matrix.dtype is None else matrix.dtype
        packed = kernels.pack(matrix, dtype, self._memory)
        for name, value in {**packed, "inputs": inputs, "expand": kernels.expand}.items():
            self._site[name] = value
        self._product = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(kernels.product)
        prepare = int(self._site["prepare"][0])
        self._prepare = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(prepare) if prepare else None
        self._row = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernels.row)
        self._expand = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(kernels.expand)

    def multiply(self, x: NDArray[Any], panel: int, y: NDArray[np.float32], add: int) -> None:
        at = self._site.ctypes.data
        if self._prepare is not None:  # with other strides than those of x
            prepared = np.empty((len(x), int(self._site["prepared_bytes"][0]) + 64), np.uint8)
            to, stride = prepared.ctypes.data, prepared.shape[1]
            self._prepare(at, x.ctypes.data, x.strides[0], len(x), to, stride)
            x = prepared
        first_output = y.ctypes.data - 4 * PANEL * panel  # of panel 0
        self._product(at, x.ctypes.data, x.strides[0], len(x), panel, panel + 1, first_output, 4 * PANEL, add)

    def row(self, output: int) -> NDArray[np.float32]:
        y = np.empty(int(self._site["inputs"][0]), np.float32)
        self._row(self._site.ctypes.data, output, y.ctypes.data)
        return y

    def expanded(self, panel: int, first: int, count: int) -> NDArray[np.float32]:
        y = np.empty((count, PANEL), np.float32)
        self._expand(self._site.ctypes.data, panel, first, count, y.ctypes.data)
        return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [1, 17, 144, 2048, 2500])
def test_a_panel_is_the_matrix_product(kind: str, inputs: int) -> None:
    """Also where partial sums are stored in between, and in a panel that has fewer outputs than columns."""
    outputs = PANEL + 36
    weights = Weights(kind, outputs, inputs)
    for rows, panel in ((1, 0), (2, 1), (3, 0), (5, 1), (6, 0), (7, 1), (8, 0), (13, 1), (16, 0)):
        rng = np.random.default_rng(rows * inputs)
        x = rng.standard_normal((rows, inputs), np.float32)
        read = to_float32(*(stored(x, Dtype.BF16)[0], Dtype.BF16)) if kind == "BF16" else x
        y = rng.standard_normal((rows, PANEL), np.float32)
        before, expected = y.astype(np.float64), np.zeros((rows, PANEL))
        exact = weights.exact[PANEL * panel : PANEL * (panel + 1)]
        expected[:, : len(exact)] = read.astype(np.float64) @ exact.T
        weights.multiply(x, panel, y, 1)
        np.testing.assert_allclose(y, before + expected, atol=2e-6 * inputs**0.5 * 8)
        weights.multiply(x, panel, y, 0)
        np.testing.assert_allclose(y, expected, atol=2e-6 * inputs**0.5 * 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch(kind: str) -> None:
    """If the order of sums depended on the other rows, greedy output would, too."""
    x = np.random.default_rng(0).standard_normal((13, 2500), np.float32)
    weights = Weights(kind, PANEL, 2500)
    alone, together = np.empty((1, PANEL), np.float32), np.empty((13, PANEL), np.float32)
    weights.multiply(x, 0, together, 0)
    for row in range(13):
        weights.multiply(np.ascontiguousarray(x[row : row + 1]), 0, alone, 0)
        assert alone[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_expand_to_exactly_their_values(kind: str) -> None:
    weights = Weights(kind, 2 * PANEL, 150)
    for first, count in ((0, 64), (64, 64), (128, 22)):
        expected = weights.exact[PANEL:, first : first + count].T.astype(np.float32)
        assert (weights.expanded(1, first, count) == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_weights_of_one_output(kind: str) -> None:
    weights = Weights(kind, 2 * PANEL, 151)
    assert (weights.row(PANEL + 3) == weights.exact[PANEL + 3].astype(np.float32)).all()


def test_in_bfloat16_sums_are_those_of_the_instruction_for_pairs() -> None:
    """Which adds exact products to fp32 one after another; rows are rounded to bfloat16. A NaN stays one."""
    weights = Weights("BF16", PANEL, 2501)
    x = np.random.default_rng(4).standard_normal((7, 2501), np.float32)
    x[5, 3], x[6, 2500] = np.nan, -np.inf
    rounded = to_float32(stored(x, Dtype.BF16)[0], Dtype.BF16)
    expected, block = np.zeros((7, PANEL), np.float32), K_BLOCK  # partial sums are stored between blocks of inputs
    for first in range(0, 2501, block):
        sums = np.zeros((7, PANEL), np.float32)
        for index in range(first, min(first + block, 2501)):
            sums += rounded[:, index : index + 1] * weights.exact[:, index].astype(np.float32)
        expected = expected + sums
    y = np.empty((7, PANEL), np.float32)
    weights.multiply(x, 0, y, 0)
    assert np.isnan(y[5]).all()
    assert y[:5].tobytes() == expected[:5].tobytes()
    assert (y[6] == expected[6]).all()


_ASSEMBLY = """
import numba
from caraserve.cpu.tiles import PAIRS, gemm_tile

tile = gemm_tile(6, 4, PAIRS)

def product(x, w, k, y):
    tile(x, 4096, w, k, y, 256, 0)

print(numba.cfunc(numba.void(*[numba.int64] * 4))(product)._library.get_asm_str())
"""


@pytest.mark.parametrize("cpu", ["sapphirerapids", "znver4"])
def test_a_cpu_with_the_instruction_for_pairs_multiplies_by_it(cpu: str) -> None:
    features = "+avx512f,+avx512bw,+avx512vl,+avx512bf16,+f16c"
    target = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", _ASSEMBLY], env=os.environ | target, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("vdpbf16ps") >= 24


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [16, 80, 144])
def test_shrink_is_scale_times_x_times_a(dtype: Dtype, inputs: int) -> None:
    for rows in (1, 2, 3, 4, 7):
        rng = np.random.default_rng(inputs)
        x = rng.standard_normal((rows, inputs), np.float32)
        raw, a = stored(rng.standard_normal((16, inputs), np.float32), dtype)
        entry = np.zeros(1, LORA_ENTRY)
        entry[0] = (raw.ctypes.data, 0, 16, dtype.value, 0, 0.75)
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
