"""Nemotron 4 and Minitron: LayerNorms whose weights are one more than stored, squared ReLU without a gate, rotation of
half of each head."""

from caraserve.model.families.dense import Config, DenseLayers, activation_of, flag, plan_of_layers, sizes_of
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a Nemotron model. Raises ModelLoadError."""
    sizes = sizes_of(config, eps=1e-5, eps_key="norm_eps", max_position=4096)
    has_bias = flag(config, "attention_bias")
    made = DenseLayers.alike(
        sizes,
        rope_of(config, sizes.head_dim, sizes.max_position, partial=0.5),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=flag(config, "mlp_bias"),
        is_gated=False,
        mlp_names=("up_proj",),
        activation=activation_of(config, default="relu2"),
        norm_kind="layer",
        norm_offset=1.0,
        norm_bias=True,
    )
    return plan_of_layers(config, "nemotron", made)
