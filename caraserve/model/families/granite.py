"""Granite 3 and Granite 4 without state-space layers: embeddings, attention, what blocks add, and logits are multiplied
by numbers of the configuration. Granite 4 may have no rotations; its MLP has names of its own."""

from dataclasses import replace
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    Sizes,
    activation_of,
    flag,
    layer_kinds,
    number,
    plan_of_layers,
    positive,
    refuse,
    sizes_of,
)
from caraserve.model.plan import DecoderPlan, Rope
from caraserve.model.rope import rope_of


def plan_granite(config: Config) -> DecoderPlan:
    """Returns the plan of a Granite 3 model. Raises ModelLoadError."""
    sizes = sizes_of(config)
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    made = granite_layers(config, sizes, rope, mlp_bias=flag(config, "mlp_bias"))
    return granite_plan(config, "granite", made)


def plan_granite4(config: Config) -> DecoderPlan:
    """Returns the plan of a dense Granite 4 model. Raises ModelLoadError."""
    sizes = sizes_of(config)
    kinds = layer_kinds(config, sizes.layers) or config.get("layers_block_type") or ["linear_attention"]
    if other := set(kinds) - {"attention", "full_attention"}:
        raise ModelLoadError(f"config.json: layers of kind {min(other)!r} are not supported; attention is")
    refuse({"num_local_experts": 8} | dict(config), "num_local_experts", 0)  # experts beside the shared MLP
    refuse(config, "position_embedding_type", "rope", "nope")
    rotates = config.get("position_embedding_type") == "rope"
    rope = rope_of(config, sizes.head_dim, sizes.max_position) if rotates else None
    made = granite_layers(
        config,
        replace(sizes, intermediate=positive(config, "shared_intermediate_size", 1024)),
        rope,
        mlp_name="shared_mlp",
        mlp_names=("input_linear",),
        down_name="output_linear",
    )
    return granite_plan(config, "granitemoehybrid", made)


def granite_layers(
    config: Config, sizes: Sizes, rope: Rope | None, *, kind: type[DenseLayers] = DenseLayers, **fields: Any
) -> DenseLayers:
    """Returns layers with the multipliers of the configuration."""
    has_bias = flag(config, "attention_bias")
    return kind.alike(
        sizes,
        rope,
        qkv_bias=has_bias,
        o_bias=has_bias,
        scale=number(config, "attention_multiplier", 1.0),
        multiplier=number(config, "residual_multiplier", 1.0),
        activation=activation_of(config),
        **fields,
    )


def granite_plan(config: Config, family: str, made: DenseLayers) -> DecoderPlan:
    """Returns the plan of layers, with the multipliers of embeddings and logits."""
    scale, divisor = number(config, "embedding_multiplier", 1.0), number(config, "logits_scaling", 1.0)
    return plan_of_layers(config, family, made, embed_scale=scale, logit_scale=1 / divisor)
