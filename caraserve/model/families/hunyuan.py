"""HunYuan dense: norms of heads after the rotation, whose base frequency a field raises."""

from caraserve.model.families.dense import Config, DenseLayers, activation_of, flag, plan_of_layers, sizes_of
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a dense HunYuan model. Raises ModelLoadError."""
    sizes, has_bias = sizes_of(config, eps=1e-5), flag(config, "attention_bias")
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    made = DenseLayers.alike(
        sizes,
        rope,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norms="head",
        head_norm_names=("query_layernorm", "key_layernorm"),
        norm_after_rope=True,
        activation=activation_of(config),
    )
    return plan_of_layers(config, "hunyuan_v1_dense", made)
