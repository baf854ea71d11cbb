"""GLM-4-9B and GLM-4-0414: the first half of each head is rotated, in pairs of neighbours; gate and up are one module.
GLM-4-0414 has norms after each block too."""

from typing import Any

from caraserve.model.families.dense import Config, DenseLayers, activation_of, flag, plan_of_layers, sizes_of
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan_glm(config: Config) -> DecoderPlan:
    """Returns the plan of a GLM-4-9B model. Raises ModelLoadError."""
    return _plan(config, "glm")


def plan_glm4(config: Config) -> DecoderPlan:
    """Returns the plan of a GLM-4-0414 model. Raises ModelLoadError."""
    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return _plan(config, "glm4", norm_names=norms)


def _plan(config: Config, family: str, **fields: Any) -> DecoderPlan:
    config = {"num_key_value_heads": 2, "head_dim": 128} | dict(config)
    sizes = sizes_of(config, eps=1.5625e-7, max_position=131072)
    rope = rope_of(config, sizes.head_dim, sizes.max_position, partial=0.5)
    made = DenseLayers.alike(
        sizes,
        rope,
        is_interleaved=True,
        qkv_bias=flag(config, "attention_bias", True),
        mlp_names=("gate_up_proj",),
        activation=activation_of(config),
        **fields,
    )
    return plan_of_layers(config, family, made)
