"""Qwen2 and Qwen2.5: biases of q, k and v. Qwen3: norms of each head of q and k. Both: windows in some layers.
Qwen2-VL, Qwen2.5-VL and Qwen3-VL wrap such a text model, whose positions are the ordinary ones."""

from typing import Any

from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    flag,
    number,
    plan_of_layers,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.families.wrapper import text_of, wrapped
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan_qwen2(config: Config) -> DecoderPlan:
    """Returns the plan of a Qwen2 or Qwen2.5 model. Raises ModelLoadError."""
    return _plan({"num_key_value_heads": 32, "max_window_layers": 28} | dict(config), "qwen2", qkv_bias=True)


def plan_qwen3(config: Config) -> DecoderPlan:
    """Returns the plan of a Qwen3 model. Raises ModelLoadError."""
    has_bias = flag(config, "attention_bias")
    return _plan(
        {"num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128} | dict(config),
        "qwen3",
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norms="head",
    )


def plan_qwen2_vl(config: Config) -> DecoderPlan:
    """Returns the plan of the text model in a Qwen2-VL or Qwen2.5-VL model. Raises ModelLoadError."""
    defaults = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5}
    text = text_of(config, defaults)
    return wrapped(_plan(text, "qwen2", theta=1e6, qkv_bias=True), str(config.get("model_type") or "qwen2_5_vl"))


def plan_qwen3_vl(config: Config) -> DecoderPlan:
    """Returns the plan of the text model in a Qwen3-VL model. Raises ModelLoadError."""
    text = text_of(config, {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000})
    has_bias = flag(text, "attention_bias")
    made = _plan(text, "qwen3", theta=5e5, qkv_bias=has_bias, o_bias=has_bias, head_norms="head")
    return wrapped(made, "qwen3_vl")


def _plan(config: Config, family: str, *, theta: float = 1e4, **fields: Any) -> DecoderPlan:
    sizes = sizes_of(config, max_position=32768)
    rope = rope_of(config, sizes.head_dim, sizes.max_position, theta=theta)
    windows = _windows(config, sizes.layers)
    made = DenseLayers(sizes, (rope,) * sizes.layers, windows, activation=activation_of(config), **fields)
    return plan_of_layers(config, family, made)


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    window = window_of(config, 4096) if flag(config, "use_sliding_window") else None
    first = int(number(config, "max_window_layers", layers))
    return windows_of(config, layers, window, lambda layer: layer >= first)
