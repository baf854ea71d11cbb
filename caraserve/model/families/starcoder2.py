"""StarCoder2: LayerNorms, biases, an MLP without a gate, one window of attention for all layers."""

from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    flag,
    plan_of_layers,
    sizes_of,
    window_of,
)
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a StarCoder2 model. Raises ModelLoadError."""
    config = {"num_key_value_heads": 2} | dict(config)
    sizes = sizes_of(config, eps=1e-5, eps_key="norm_epsilon", max_position=4096)
    has_bias = flag(config, "use_bias", True)
    made = DenseLayers.alike(
        sizes,
        rope_of(config, sizes.head_dim, sizes.max_position),
        window_of(config),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        is_gated=False,
        mlp_names=("c_fc",),
        down_name="c_proj",
        activation=activation_of(config, default="gelu_pytorch_tanh"),
        norm_kind="layer",
        norm_bias=True,
    )
    return plan_of_layers(config, "starcoder2", made, ties_by_default=True)
