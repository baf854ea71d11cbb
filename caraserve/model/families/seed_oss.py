"""Seed-OSS: biases of q, k and v, heads wider than the hidden size divided by their number."""

from caraserve.model.families.dense import Config, DenseLayers, activation_of, flag, plan_of_layers, sizes_of
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a Seed-OSS model. Raises ModelLoadError."""
    sizes = sizes_of({"num_key_value_heads": 8, "head_dim": 128} | dict(config), max_position=524288)
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    made = DenseLayers.alike(
        sizes,
        rope,
        qkv_bias=flag(config, "attention_bias", True),
        o_bias=flag(config, "attention_out_bias"),
        mlp_bias=flag(config, "mlp_bias"),
        activation=activation_of(config),
    )
    return plan_of_layers(config, "seed_oss", made)
