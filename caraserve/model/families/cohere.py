"""Command R and R7B: one LayerNorm without bias for both blocks, rotation of pairs of neighbours, scaled logits. R7B:
windows in three of four layers, which alone rotate."""

from collections.abc import Sequence
from typing import Any

from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    Sizes,
    activation_of,
    flag,
    number,
    plan_of_layers,
    positive,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan_cohere(config: Config) -> DecoderPlan:
    """Returns the plan of a Command R model. Raises ModelLoadError."""
    sizes = _sizes(config)
    head_norms = "heads" if flag(config, "use_qk_norm") else None
    rotates = (True,) * sizes.layers
    return _plan(config, "cohere", sizes, rotates, (None,) * sizes.layers, theta=5e5, head_norms=head_norms)


def plan_cohere2(config: Config) -> DecoderPlan:
    """Returns the plan of a Command R7B or Command A model. Raises ModelLoadError."""
    sizes = _sizes(config)
    pattern = positive(config, "sliding_window_pattern", 4)
    windows = windows_of(config, sizes.layers, window_of(config, 4096), lambda layer: (layer + 1) % pattern != 0)
    return _plan(config, "cohere2", sizes, [each is not None for each in windows], windows, theta=1e4)


def _sizes(config: Config) -> Sizes:
    return sizes_of(config, eps=1e-5, eps_key="layer_norm_eps", max_position=8192)


def _plan(
    config: Config,
    family: str,
    sizes: Sizes,
    rotates: Sequence[bool],
    windows: Sequence[int | None],
    *,
    theta: float,
    **fields: Any,
) -> DecoderPlan:
    has_bias = flag(config, "attention_bias")
    rope = rope_of(config, sizes.head_dim, sizes.max_position, theta=theta)
    made = DenseLayers(
        sizes,
        ropes=[rope if each else None for each in rotates],
        windows=windows,
        is_interleaved=True,
        qkv_bias=has_bias,
        o_bias=has_bias,
        norm_kind="layer",
        norm_names=("input_layernorm", None, None, None),
        is_parallel=True,
        activation=activation_of(config),
        **fields,
    )
    scale = number(config, "logit_scale", 0.0625)
    return plan_of_layers(config, family, made, ties_by_default=True, logit_scale=scale)
