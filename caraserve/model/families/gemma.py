"""Gemma 1, 2 and 3 for text. All: norms whose weights are one more than stored, GeGLU, embeddings times √hidden, a tied
head. Since 2: norms after each block, windows in some layers, soft caps. Since 3: norms of heads, two rotations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from caraserve.errors import ModelLoadError
from caraserve.model.families.dense import DenseLayers, Sizes, dtype_of, plan_of_layers, positive, sizes_of
from caraserve.model.plan import Attention, Block, DecoderPlan, LayerPlan, Rope
from caraserve.model.rope import rope_of

Config = Mapping[str, Any]
_TANH = ("gelu_pytorch_tanh", "gelu_tanh", "gelu")  # `gelu` in old files of Gemma 1, which were trained with tanh
_LOCAL = "sliding_attention"


@dataclass(frozen=True, slots=True)
class _Layers(DenseLayers):
    """Layers with norms after their blocks, where the family has such. `ropes`: by layer."""

    scale: float = 1.0
    cap: float | None = None
    ropes: Sequence[Rope] = ()
    has_post_norms: bool = False

    def attention(self, layer: int) -> Attention:
        made = DenseLayers.attention(self, layer)
        return replace(made, scale=self.scale, cap=self.cap, rope=self.ropes[layer])

    def layer(self, layer: int) -> LayerPlan:
        if not self.has_post_norms:
            return DenseLayers.layer(self, layer)
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        before, after, before_mlp, after_mlp = (self.norm(layer, f"{name}_layernorm") for name in norms)
        return LayerPlan((Block(self.attention(layer), before, after), Block(self.mlp(layer), before_mlp, after_mlp)))


def plan_gemma(config: Config) -> DecoderPlan:
    """Returns the plan of a Gemma 1 model. Raises ModelLoadError."""
    sizes = _sizes(config)
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    return _plan(config, "gemma", _layers(sizes, sizes.head_dim, (rope,) * sizes.layers))


def plan_gemma2(config: Config) -> DecoderPlan:
    """Returns the plan of a Gemma 2 model. Raises ModelLoadError."""
    sizes = _sizes(config)
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    made = _layers(
        sizes,
        config.get("query_pre_attn_scalar", 256),
        (rope,) * sizes.layers,
        windows=_windows(config, sizes, pattern=2),
        cap=_cap(config, "attn_logit_softcapping", 50.0),
        has_post_norms=True,
    )
    return _plan(config, "gemma2", made, logit_cap=_cap(config, "final_logit_softcapping", 30.0))


def plan_gemma3(config: Config) -> DecoderPlan:
    """Returns the plan of a Gemma 3 model for text. Raises ModelLoadError."""
    if config.get("use_bidirectional_attention"):
        raise ModelLoadError("config.json: use_bidirectional_attention is not supported; attention here is causal")
    sizes = _sizes(config)
    windows = _windows(config, sizes, pattern=6)
    everywhere, local = _ropes_of_gemma3(config, sizes)
    made = _layers(
        sizes,
        config.get("query_pre_attn_scalar", 256),
        tuple(everywhere if window is None else local for window in windows),
        windows=windows,
        cap=_cap(config, "attn_logit_softcapping", None),
        has_head_norms=True,
        has_post_norms=True,
    )
    return _plan(config, "gemma3_text", made, logit_cap=_cap(config, "final_logit_softcapping", None))


def _plan(config: Config, family: str, made: _Layers, **fields: Any) -> DecoderPlan:
    activation = config.get("hidden_activation") or config.get("hidden_act", _TANH[0])
    if activation not in _TANH:
        raise ModelLoadError(f"config.json: hidden_activation {activation!r} is not supported; {_TANH[0]} is")
    scale = _rounded(math.sqrt(made.sizes.hidden), dtype_of(config))
    return plan_of_layers(config, family, made, ties_by_default=True, embed_scale=scale, **fields)


def _layers(sizes: Sizes, query_scalar: float, ropes: Sequence[Rope], **fields: Any) -> _Layers:
    defaults: dict[str, Any] = {"windows": (None,) * sizes.layers, "activation": "gelu_tanh", "norm_offset": 1.0}
    return _Layers(**defaults | fields, sizes=sizes, rope=ropes[0], ropes=ropes, scale=float(query_scalar) ** -0.5)


def _sizes(config: Config) -> Sizes:
    if config.get("attention_bias"):
        raise ModelLoadError("config.json: attention_bias is not supported for Gemma; its checkpoints have none")
    return replace(
        sizes_of({"head_dim": 256, **config}), max_position=positive(config, "max_position_embeddings", 8192)
    )


def _windows(config: Config, sizes: Sizes, pattern: int) -> tuple[int | None, ...]:
    """Returns each layer's window, by `layer_types`; without, every layer but each `pattern`-th has one."""
    window, kinds = positive(config, "sliding_window", 4096), config.get("layer_types")
    if kinds is None:
        pattern = positive(config, "sliding_window_pattern", pattern)
        return tuple(window if (layer + 1) % pattern else None for layer in range(sizes.layers))
    if len(kinds) != sizes.layers:
        raise ModelLoadError(f"config.json: layer_types has {len(kinds)} entries for {sizes.layers} layers")
    return tuple(window if kind == _LOCAL else None for kind in kinds)


def _cap(config: Config, key: str, default: float | None) -> float | None:
    value = config.get(key, default)
    return None if value is None else float(value)


def _ropes_of_gemma3(config: Config, sizes: Sizes) -> tuple[Rope, Rope]:
    """Returns the rotations of layers without a window and with one."""
    fields = config.get("rope_parameters") or {}
    if "full_attention" in fields:
        both = [{"rope_parameters": fields[kind]} for kind in ("full_attention", _LOCAL)]
    else:
        own = {key: config[key] for key in ("rope_theta", "rope_scaling") if key in config}
        both = [{"rope_theta": 1e6} | own, {"rope_theta": config.get("rope_local_base_freq", 1e4)}]
    everywhere, local = (rope_of(each, sizes.head_dim, sizes.max_position) for each in both)
    return everywhere, local


def _rounded(value: float, dtype: str) -> float:
    """Returns a number as a checkpoint's dtype has it, rounded to the nearest, ties to even."""
    if dtype == "float16":
        return float(np.float16(value))
    if dtype == "bfloat16":
        bits = int(np.float32(value).view(np.uint32))
        return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))
    return float(np.float32(value))
