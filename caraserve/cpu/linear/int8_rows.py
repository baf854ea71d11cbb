"""Rows as int8, for products of integers: codes of 32 inputs at a time, with a scale.

A prepared row has the codes twice: in the order of the inputs, and with those of an even index first of each eight, as
words of 4-bit weights hold them. Then 16 bytes for each 32 inputs: scale (fp32), scale · sum of the codes (fp32), their
sum (int32).
"""

import numpy as np

from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.simd import load_f32, store_f32, store_i32, store_u8
from caraserve.cpu.structs import site_at

BLOCK = 32  # inputs with one scale
BLOCK_BYTES = 16  # after the codes
_LARGEST, _ROUNDS = np.float32(127.0), np.float32(12582912.0)  # 1.5 · 2^23: adding it rounds to an integer


def row_bytes(inputs: int) -> int:
    """Returns the bytes of a prepared row."""
    return 2 * inputs + inputs // BLOCK * BLOCK_BYTES


@compiled_separately(6)
def quantise(site_address, x, x_stride, rows, to, to_stride):  # type: ignore[no-untyped-def]
    """Writes rows of fp32 as int8: code = x · 127 / largest |x| of its block, rounded to nearest even."""
    inputs = site_at(site_address).inputs
    for row in range(rows):
        at, codes = x + row * x_stride, to + row * to_stride
        blocks = codes + 2 * inputs
        for first in range(0, inputs, 32):
            largest, nothing = np.float32(0.0), np.float32(0.0)
            for index in range(first, first + 32):
                value = load_f32(at + 4 * index)
                largest = max(largest, abs(value))
                nothing += value * np.float32(0.0)  # NaN if a value is not finite
            factor = _LARGEST / largest if largest > 0 else np.float32(0.0)
            scale, total = largest / _LARGEST + nothing, np.int32(0)
            for index in range(32):
                value = load_f32(at + 4 * (first + index)) * factor
                code = np.int32(value + _ROUNDS - _ROUNDS)
                total += code
                place = index // 8 * 8 + index % 8 // 2 + index % 2 * 4
                store_u8(codes + first + index, np.uint8(code))
                store_u8(codes + inputs + first + place, np.uint8(code))
            store_f32(blocks, scale)
            store_f32(blocks + 4, scale * np.float32(total))
            store_i32(blocks + 8, total)
            blocks += 16
