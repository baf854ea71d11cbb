"""Gemma 1, 2 and 3 for text. All: norms whose weights are one more than stored, GeGLU, embeddings times √hidden, a tied
head. Since 2: norms after each block, windows in some layers, soft caps. Since 3: norms of heads, two rotations."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import DTYPES, Dtype, rounded, to_float32
from caraserve.model.families.dense import (
    LOCAL,
    Config,
    DenseLayers,
    Sizes,
    activation_of,
    dtype_of,
    number,
    plan_of_layers,
    positive,
    refuse,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.families.wrapper import text_of, wrapped
from caraserve.model.plan import DecoderPlan, Rope
from caraserve.model.rope import rope_of

_TANH = "gelu_pytorch_tanh"
_POST_NORMS = {
    "norm_names": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
}
# A wrapper's file lacks the fields of its text model that are the defaults of transformers.
_OF_GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}


def plan_gemma(config: Config) -> DecoderPlan:
    """Returns the plan of a Gemma 1 model. Raises ModelLoadError."""
    sizes = _sizes(config, kv_heads=16)
    return _plan(config, "gemma", sizes, sizes.head_dim, _same_ropes(config, sizes), (None,) * sizes.layers)


def plan_gemma2(config: Config) -> DecoderPlan:
    """Returns the plan of a Gemma 2 model. Raises ModelLoadError."""
    sizes = _sizes(config, kv_heads=4)
    windows = windows_of(config, sizes.layers, window_of(config, 4096), lambda layer: layer % 2 == 0)
    return _plan(
        config,
        "gemma2",
        sizes,
        number(config, "query_pre_attn_scalar", 256),
        _same_ropes(config, sizes),
        windows,
        logit_cap=_cap(config, "final_logit_softcapping", 30.0),
        cap=_cap(config, "attn_logit_softcapping", 50.0),
        **_POST_NORMS,
    )


def plan_gemma3(config: Config) -> DecoderPlan:
    """Returns the plan of a Gemma 3 model for text. Raises ModelLoadError."""
    if config.get("use_bidirectional_attention"):
        raise ModelLoadError("config.json: use_bidirectional_attention is not supported; attention here is causal")
    sizes = _sizes(config, kv_heads=4, max_position=131072)
    pattern = positive(config, "sliding_window_pattern", 6)
    windows = windows_of(config, sizes.layers, window_of(config, 4096), lambda layer: (layer + 1) % pattern != 0)
    everywhere, local = _ropes_of_gemma3(config, sizes)
    return _plan(
        config,
        "gemma3_text",
        sizes,
        number(config, "query_pre_attn_scalar", 256),
        tuple(everywhere if window is None else local for window in windows),
        windows,
        logit_cap=_cap(config, "final_logit_softcapping", None),
        cap=_cap(config, "attn_logit_softcapping", None),
        head_norms="head",
        **_POST_NORMS,
    )


def plan_gemma3_with_images(config: Config) -> DecoderPlan:
    """Returns the plan of the text model in a Gemma 3 model with images. Raises ModelLoadError."""
    return wrapped(plan_gemma3(text_of(config, _OF_GEMMA3)), "gemma3")


def _plan(
    config: Config,
    family: str,
    sizes: Sizes,
    query_scalar: float,
    ropes: Sequence[Rope],
    windows: Sequence[int | None],
    *,
    logit_cap: float | None = None,
    **fields: Any,
) -> DecoderPlan:
    activation = activation_of(config, "hidden_act" if family == "gemma" else "hidden_activation", default=_TANH)
    if activation == "gelu" and family == "gemma":
        activation = "gelu_tanh"  # old files of Gemma 1 say `gelu`; it was trained with tanh
    made = DenseLayers(
        sizes, ropes, windows, scale=query_scalar**-0.5, activation=activation, norm_offset=1.0, **fields
    )
    dtype = DTYPES.get(dtype_of(config), Dtype.F32)
    scale = to_float32(rounded(np.array([math.sqrt(sizes.hidden)], np.float32), dtype), dtype)
    return plan_of_layers(config, family, made, ties_by_default=True, embed_scale=float(scale[0]), logit_cap=logit_cap)


def _sizes(config: Config, *, kv_heads: int, max_position: int = 8192) -> Sizes:
    refuse(config, "attention_bias", False)
    defaults = {"head_dim": 256, "num_key_value_heads": kv_heads}
    return sizes_of(defaults | dict(config), max_position=max_position)


def _same_ropes(config: Config, sizes: Sizes) -> Sequence[Rope]:
    return (rope_of(config, sizes.head_dim, sizes.max_position),) * sizes.layers


def _cap(config: Config, key: str, default: float | None) -> float | None:
    return None if config.get(key, default) is None else number(config, key, default or 0.0)


def _ropes_of_gemma3(config: Config, sizes: Sizes) -> tuple[Rope, Rope]:
    """Returns the rotations of layers without a window and with one."""
    nested = config.get("rope_parameters") or {}
    if "full_attention" in nested:
        thetas = {"full_attention": 1e6, LOCAL: 1e4}
        everywhere, local = (
            rope_of({"rope_parameters": nested}, sizes.head_dim, sizes.max_position, theta=theta, kind=kind)
            for kind, theta in thetas.items()
        )
        return everywhere, local
    of_local = {"rope_theta": number(config, "rope_local_base_freq", 1e4)}
    everywhere = rope_of(config, sizes.head_dim, sizes.max_position, theta=1e6)
    return everywhere, rope_of(of_local, sizes.head_dim, sizes.max_position)
