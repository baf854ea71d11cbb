"""Llama 2 and 3, and models in its form, as Falcon 3: biases where the configuration says so."""

from caraserve.model.families.dense import Config, DenseLayers, activation_of, flag, plan_of_layers, sizes_of
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a Llama model. Raises ModelLoadError."""
    sizes, has_bias = sizes_of(config), flag(config, "attention_bias")
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    made = DenseLayers.alike(
        sizes,
        rope,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=flag(config, "mlp_bias"),
        activation=activation_of(config),
    )
    return plan_of_layers(config, "llama", made)
