"""Products of grouped codes with rows of int8: sums of integers, which do not depend on the other rows."""

import os
import subprocess
import sys

import numpy as np
import pytest

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.linear.grouped import kernels_of_codes
from caraserve.cpu.linear.grouped_int8 import int8_kernels_of
from caraserve.model.formats.grouped import values_of
from tests.cpu.test_grouped import Floats, Site, made

OUTPUTS, INPUTS = PANEL + 36, 2304
INTEGERS = (
    *("centred", "added", "nested", "zeros", "curve", "halves and powers", "halves and divisors", "int8"),
    *("five bits", "five bits, nested", "six bits, nested"),
)


def rounded_to_int8(x: Floats) -> Floats:
    """Returns what the codes of rows stand for: the reference."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / largest))
    return np.asarray(codes * (largest / np.float32(127)), np.float32).reshape(x.shape)


def rows_of(count: int) -> Floats:
    return np.random.default_rng(count).standard_normal((count, INPUTS), np.float32)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_product_is_that_of_the_rounded_rows(name: str) -> None:
    kind, matrix = made(name, OUTPUTS, INPUTS)
    site, x = Site(int8_kernels_of(kind), matrix, OUTPUTS, INPUTS), rows_of(131)
    before = np.random.default_rng(0).standard_normal((131, 2 * PANEL), np.float32)
    expected = rounded_to_int8(x).astype(np.float64) @ values_of(kind, matrix).astype(np.float64).T
    for add in (0, 1):
        found = site.multiply(x, before, add)
        np.testing.assert_allclose(
            found[:, :OUTPUTS], add * before[:, :OUTPUTS] + expected, rtol=1e-4, atol=2e-6 * np.abs(expected).max()
        )
        for row in (0, 130):
            alone = site.multiply(x[row : row + 1], before[row : row + 1], add)
            assert alone.tobytes() == found[row : row + 1].tobytes()


@pytest.mark.parametrize("name", ["centred", "five bits", "six bits, nested", "int8"])
def test_the_largest_codes_do_not_overflow(name: str) -> None:
    kind, matrix = made(name, OUTPUTS, INPUTS)
    for code in (0, 1 << kind.bits - 1, (1 << kind.bits) - 1):
        matrix.arrays["codes"][:] = code
        x = np.full((1, INPUTS), -3.0, np.float32)
        found = Site(int8_kernels_of(kind), matrix, OUTPUTS, INPUTS).multiply(
            x, np.zeros((1, 2 * PANEL), np.float32), 0
        )
        expected = x.astype(np.float64) @ values_of(kind, matrix).astype(np.float64).T
        np.testing.assert_allclose(found[:, :OUTPUTS], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_stays_so(value: float) -> None:
    kind, matrix = made("centred", OUTPUTS, INPUTS)
    x = rows_of(1)
    x[0, 40] = value
    found = Site(int8_kernels_of(kind), matrix, OUTPUTS, INPUTS).multiply(x, np.zeros((1, 2 * PANEL), np.float32), 0)
    assert np.isnan(found[:, :OUTPUTS]).all()


@pytest.mark.parametrize("name", ["numbers, rounded", "fp8"])
def test_other_codes_are_multiplied_exactly(name: str) -> None:
    kind, _ = made(name, 4, 256)
    assert int8_kernels_of(kind) is kernels_of_codes(kind)


_ASSEMBLY = """
import numba
from caraserve.cpu.linear.byte_products import WORDS, emit_dots
from caraserve.cpu.simd import make_void_intrinsic, pointer

def emit(b, arguments):
    weights, x, y = arguments
    b.store(emit_dots(b, [b.load(pointer(b, weights, WORDS))], [x], 15), pointer(b, y, WORDS))

tile = make_void_intrinsic("dots", 3, emit)

def dots(weights, x, y):
    tile(weights, x, y)

print(numba.cfunc(numba.void(*[numba.int64] * 3))(dots)._library.get_asm_str())
"""


@pytest.mark.parametrize(
    ("cpu", "features", "register"),
    [("znver4", "+avx512f,+avx512bw,+avx512vl,+avx512vnni", "zmm"), ("alderlake", "+avxvnni", "ymm")],
)
def test_a_cpu_with_the_instruction_for_bytes_multiplies_by_it(cpu: str, features: str, register: str) -> None:
    target = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": f"+avx2,{features}"}
    done = subprocess.run(
        [sys.executable, "-c", _ASSEMBLY], env=os.environ | target, capture_output=True, text=True, check=True
    )
    products = [line for line in done.stdout.splitlines() if "vpdpbusd" in line]
    assert len(products) >= 1
    assert all(register in line for line in products)
