"""Positions: rotary frequencies from a configuration, tables of cos and sin, growth of q, slopes of ALiBi.

The arithmetic is fp32 in the order that transformers uses, so that angles at long positions agree.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.plan import Rope

Floats = NDArray[np.float32]
DEFAULT_THETA = 10000.0
Fields = Mapping[str, Any]


def rope_tables(rope: Rope, positions: int) -> tuple[Floats, Floats]:
    """Returns cos and sin times the rope's factor, each `[positions, frequencies]`. `positions`: those of the longest
    request, which decide between the frequencies for short and for long ones, for all alike: requests share KV blocks.
    """
    is_long = rope.long_frequencies and positions > rope.longest_short
    frequencies = np.asarray(rope.long_frequencies if is_long else rope.frequencies, np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    factor = np.float32(rope.factor)
    return np.cos(angles) * factor, np.sin(angles) * factor


def frequencies_note(ropes: Sequence[Rope], positions: int) -> str | None:
    """Returns which frequencies a server uses whose longest request has `positions`, None if there is no choice."""
    for rope in ropes:
        if rope.long_frequencies:
            which = "long" if positions > rope.longest_short else "short"
            return (
                f"rotations have the frequencies for {which} requests, because requests may have {positions} tokens; "
                f"up to --max-model-len {rope.longest_short} all requests get those for short ones"
            )
    return None


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


def rope_of(
    config: Fields,
    head_dim: int,
    max_position: int,
    *,
    theta: float = DEFAULT_THETA,
    partial: float = 1.0,
    kind: str | None = None,
) -> Rope:
    """Returns the rotation that a configuration describes. Raises ModelLoadError for a type that is not computed.

    `theta`, `partial`: the base frequency and the rotated part of a head if the configuration has none. `kind`: which
    of the rotations, if it has one for each kind of layers."""
    fields = rope_fields(config, theta, partial, kind)
    name = _kind_of(fields)
    if name not in _STRETCHES:
        raise ModelLoadError(f"config.json: rope type {name!r} is not supported; {_listed()} are")
    rotated = int(head_dim * float(fields["partial_rotary_factor"]))
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        raise ModelLoadError(
            f"config.json: partial_rotary_factor {fields['partial_rotary_factor']} rotates {rotated} of {head_dim} "
            "dimensions of a head; an even number of them can be rotated"
        )
    original = fields.get("original_max_position_embeddings") or max_position
    if not 0 < int(original) < 1 << 31:
        raise ModelLoadError(f"config.json: original_max_position_embeddings must be positive, not {original!r:.80}")
    fields = {"max_position_embeddings": max_position, **fields, "original_max_position_embeddings": int(original)}
    try:
        made = _STRETCHES[name](rotated, fields)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ModelLoadError(
            f"config.json: the fields of rope type {name!r} are not what it needs: {type(error).__name__} {error}"
        ) from None
    beta = fields.get("llama_4_scaling_beta")
    return made if not beta else replace(made, q_growth=(float(beta), int(original)))


def rope_fields(config: Fields, theta: float, partial: float, kind: str | None) -> dict[str, Any]:
    """Returns the fields of a rotation in one form. transformers 5 writes `rope_parameters`, one or one for each kind
    of layers; older files have `rope_theta`, `rope_scaling` and `partial_rotary_factor`."""
    fields: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": partial}
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(key) is not None:
            fields[key] = config[key]
    top = fields.get("original_max_position_embeddings")
    parameters = config.get("rope_parameters") or {}
    if kind in parameters:
        parameters = parameters[kind] or {}
    for own in (config.get("rope_scaling") or {}, parameters):
        fields |= {key: value for key, value in own.items() if value is not None}
    return fields if top is None else fields | {"original_max_position_embeddings": top}


def _kind_of(fields: Fields) -> str:
    name = fields.get("rope_type", fields.get("type")) or "default"
    if name == "yarn" and "long_factor" in fields:  # in old files of Phi-3
        return "longrope"
    return str({"mrope": "default", "su": "longrope"}.get(name, name))  # mrope of text is the ordinary rotation


def _frequencies(theta: float, rotated: int) -> Floats:
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    frequencies: Floats = (np.float32(1.0) / np.power(np.float32(theta), exponents)).astype(np.float32)
    return frequencies


def _rope(frequencies: NDArray[Any], **fields: Any) -> Rope:
    return Rope(tuple(np.asarray(frequencies, np.float32).tolist()), **fields)


def _default(rotated: int, fields: Fields) -> Rope:
    return _rope(_frequencies(float(fields["rope_theta"]), rotated))


def _linear(rotated: int, fields: Fields) -> Rope:
    frequencies = _frequencies(float(fields["rope_theta"]), rotated)
    return _rope(np.divide(frequencies, np.float32(fields.get("factor", 1.0)), dtype=np.float32))


def _llama3(rotated: int, fields: Fields) -> Rope:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends those between."""
    frequencies = _frequencies(float(fields["rope_theta"]), rotated)
    low, high = float(fields.get("low_freq_factor", 1.0)), float(fields.get("high_freq_factor", 4.0))
    original = int(fields["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    stretched = frequencies / np.float32(float(fields.get("factor", 1.0)))
    between = (1 - blend) * stretched + blend * frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    return _rope(np.where(is_long, stretched, np.where(is_short, frequencies, between)))


def _divided(rotated: int, fields: Fields) -> Rope:
    """Divides each frequency by a number of its own, as GGUF files have them for Llama 3."""
    divisors = np.array(fields["divisors"], np.float32)
    frequencies = _frequencies(float(fields["rope_theta"]), rotated)
    if divisors.shape != frequencies.shape or not (divisors > 0).all():
        raise ValueError(f"divisors must be {len(frequencies)} positive numbers")
    return _rope(frequencies / divisors)


def _yarn(rotated: int, fields: Fields) -> Rope:
    """Stretches frequencies with fewer than `beta_slow` turns within the original length by `factor`, keeps those with
    more than `beta_fast`, and blends those between (YaRN, equation 23)."""
    theta, original = float(fields["rope_theta"]), int(fields["original_max_position_embeddings"])
    factor = float(fields.get("factor") or fields["max_position_embeddings"] / original)

    def dimension(turns: float) -> float:
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(fields.get("beta_fast") or 32)), dimension(float(fields.get("beta_slow") or 1))
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = np.clip((np.arange(rotated // 2, dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    frequencies = _frequencies(theta, rotated)
    return _rope(frequencies / factor * ramp + frequencies * (1 - ramp), factor=_yarn_factor(factor, fields))


def _yarn_factor(factor: float, fields: Fields) -> float:
    """Returns the factor of cos and sin."""

    def growth(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return growth(float(fields["mscale"])) / growth(float(fields["mscale_all_dim"]))
    return growth(1.0)


def _longrope(rotated: int, fields: Fields) -> Rope:
    """Divides each frequency by a number of its own, of which there is one list for short requests and one for long
    ones (LongRoPE)."""
    original = int(fields["original_max_position_embeddings"])
    factor = float(fields.get("factor") or fields["max_position_embeddings"] / original)
    of_angles = fields.get("attention_factor")
    if of_angles is None:
        of_angles = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    frequencies = _frequencies(float(fields["rope_theta"]), rotated)
    short, long = (frequencies / np.array(fields[f"{which}_factor"], np.float32) for which in ("short", "long"))
    if short.shape != frequencies.shape or long.shape != frequencies.shape:
        raise ValueError(f"short_factor and long_factor must have {len(frequencies)} numbers")
    return _rope(short, factor=float(of_angles), long_frequencies=tuple(long.tolist()), longest_short=original)


def _dynamic(rotated: int, fields: Fields) -> Rope:
    """Raises θ by `alpha`, if that is given. Without, θ grows with requests beyond `max_position_embeddings` only, and
    longer ones are refused."""
    theta = float(fields["rope_theta"]) * float(fields.get("alpha") or 1.0) ** (rotated / (rotated - 2))
    return _rope(_frequencies(theta, rotated))


_STRETCHES: Mapping[str, Callable[[int, Fields], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "divided": _divided,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
}


def _listed() -> str:
    *first, last = _STRETCHES
    return f"{', '.join(first)} and {last}"
