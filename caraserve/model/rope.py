"""Rotary embedding tables: default, linear and llama3 frequencies. numpy.

The arithmetic is fp32 in the order that transformers uses, so that angles at long positions agree.
"""

import math

import numpy as np
from numpy.typing import NDArray

from caraserve.model.spec import RopeSpec

Floats = NDArray[np.float32]


def rope_tables(rope: RopeSpec, head_dim: int, positions: int) -> tuple[Floats, Floats]:
    """Returns cos and sin, each `[positions, head_dim / 2]`."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return np.cos(angles), np.sin(angles)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Floats:
    """Returns radians per position for each pair of dimensions, `[head_dim / 2]`."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: Floats = (np.float32(1.0) / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
    if rope.kind == "linear":
        return np.divide(frequencies, np.float32(rope.factor), dtype=np.float32)
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: NDArray[np.float32], rope: RopeSpec) -> Floats:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends those between."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    stretched = frequencies / np.float32(rope.factor)
    between = (1 - blend) * stretched + blend * frequencies
    result = np.where(wavelengths > longest, stretched, np.where(wavelengths < shortest, frequencies, between))
    return result.astype(np.float32)
