"""Positions: rotary frequencies from a configuration, tables of cos and sin, growth of q, slopes of ALiBi.

The arithmetic is fp32 in the order that transformers uses, so that angles at long positions agree.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.plan import Rope

Floats = NDArray[np.float32]
DEFAULT_THETA = 10000.0


def rope_tables(rope: Rope, positions: int) -> tuple[Floats, Floats]:
    """Returns cos and sin times the rope's factor, each `[positions, frequencies]`."""
    frequencies = np.asarray(rope.frequencies, np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    factor = np.float32(rope.factor)
    return np.cos(angles) * factor, np.sin(angles) * factor


def growth_of_q(rope: Rope, positions: int) -> Floats | None:
    """Returns the factor of q at each position, `[positions]`, None if q does not grow."""
    if rope.q_growth is None:
        return None
    beta, length = rope.q_growth
    return (1 + beta * np.log1p(np.arange(positions) // length)).astype(np.float32)


def alibi_slopes(heads: int) -> Floats:
    """Returns each head's slope: powers of 2^(-8/n) for n = the largest power of two up to `heads`, then the odd powers
    of its root."""
    whole = 2 ** int(math.log2(heads))
    exponents = [8 / whole * (head + 1) for head in range(whole)]
    exponents += [4 / whole * (2 * head + 1) for head in range(heads - whole)]
    return (2.0 ** -np.array(exponents)).astype(np.float32)


def rope_of(config: Mapping[str, Any], head_dim: int, max_position: int, theta: float = DEFAULT_THETA) -> Rope:
    """Returns the rotation that a configuration describes. Raises ModelLoadError for a type that is not computed.

    `theta`: the base frequency if the configuration has none."""
    # transformers 5 writes one `rope_parameters`; older files have `rope_theta` and `rope_scaling`.
    fields: dict[str, Any] = {"rope_theta": config.get("rope_theta", theta)}
    fields |= config.get("rope_scaling") or {}
    fields |= config.get("rope_parameters") or {}
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in _STRETCHES:
        raise ModelLoadError(f"config.json: rope type {kind!r} is not supported; {_listed()} are")
    if float(config.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ModelLoadError("config.json: partial_rotary_factor other than 1 is not supported")
    fields.setdefault("original_max_position_embeddings", max_position)
    frequencies = _STRETCHES[kind](_frequencies(float(fields["rope_theta"]), head_dim), fields)
    return Rope(tuple(frequencies.tolist()))


def _frequencies(theta: float, rotated: int) -> Floats:
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    frequencies: Floats = (np.float32(1.0) / np.power(np.float32(theta), exponents)).astype(np.float32)
    return frequencies


def _as_they_are(frequencies: Floats, fields: Mapping[str, Any]) -> Floats:
    return frequencies


def _linear(frequencies: Floats, fields: Mapping[str, Any]) -> Floats:
    return np.divide(frequencies, np.float32(fields.get("factor", 1.0)), dtype=np.float32)


def _llama3(frequencies: Floats, fields: Mapping[str, Any]) -> Floats:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends those between."""
    low, high = float(fields.get("low_freq_factor", 1.0)), float(fields.get("high_freq_factor", 4.0))
    original = int(fields["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    stretched = frequencies / np.float32(float(fields.get("factor", 1.0)))
    between = (1 - blend) * stretched + blend * frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    return np.where(is_long, stretched, np.where(is_short, frequencies, between)).astype(np.float32)


_STRETCHES = {"default": _as_they_are, "linear": _linear, "llama3": _llama3}


def _listed() -> str:
    *first, last = _STRETCHES
    return f"{', '.join(first)} and {last}"
