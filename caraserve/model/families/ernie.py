"""ERNIE 4.5, dense: Llama with heads rotated in pairs of neighbours, and biases everywhere or nowhere."""

from caraserve.model.families.dense import Config, DenseLayers, activation_of, flag, plan_of_layers, sizes_of
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of an ERNIE 4.5 model. Raises ModelLoadError."""
    config = {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True} | dict(config)
    sizes = sizes_of(config, eps=1e-5, max_position=131072)
    bias = flag(config, "use_bias")
    made = DenseLayers.alike(
        sizes,
        rope_of(config, sizes.head_dim, sizes.max_position, theta=500000.0),
        is_interleaved=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        activation=activation_of(config),
    )
    return plan_of_layers(config, "ernie4_5", made)
