"""OLMo 2 and 3: norms after blocks and none before, norms of all of q and all of k. OLMo 3: windows in three of four
layers, and a rotation for each kind of layer."""

from collections.abc import Sequence
from typing import Any

from caraserve.model.families.dense import (
    LOCAL,
    Config,
    DenseLayers,
    Sizes,
    activation_of,
    flag,
    plan_of_layers,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.plan import DecoderPlan, Rope
from caraserve.model.rope import rope_of


def plan_olmo2(config: Config) -> DecoderPlan:
    """Returns the plan of an OLMo 2 model. Raises ModelLoadError."""
    sizes = sizes_of(config, eps=1e-5)
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    return _plan(config, "olmo2", sizes, (rope,) * sizes.layers, (None,) * sizes.layers)


def plan_olmo3(config: Config) -> DecoderPlan:
    """Returns the plan of an OLMo 3 model. Raises ModelLoadError."""
    sizes = sizes_of(config, eps=1e-5)
    windows = windows_of(config, sizes.layers, window_of(config, 4096), lambda layer: (layer + 1) % 4 != 0)
    nested = "full_attention" in (config.get("rope_parameters") or {})
    # A scaled rotation is that of layers without a window; files of one rotation leave the others unscaled.
    plain: dict[str, Any] = {"rope_theta": config.get("rope_theta")} if not nested else dict(config)
    local = rope_of(plain, sizes.head_dim, sizes.max_position, theta=5e5, kind=LOCAL)
    everywhere = rope_of(config, sizes.head_dim, sizes.max_position, theta=5e5, kind="full_attention")
    ropes = tuple(everywhere if window is None else local for window in windows)
    return _plan(config, "olmo3", sizes, ropes, windows)


def _plan(
    config: Config, family: str, sizes: Sizes, ropes: Sequence[Rope], windows: Sequence[int | None]
) -> DecoderPlan:
    has_bias = flag(config, "attention_bias")
    made = DenseLayers(
        sizes,
        ropes,
        windows,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norms="row",
        norm_names=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        activation=activation_of(config),
    )
    return plan_of_layers(config, family, made)
