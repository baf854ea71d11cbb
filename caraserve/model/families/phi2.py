"""Phi-1, 1.5 and 2: one LayerNorm for both blocks, biases, also of the head, an MLP without a gate."""

from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    plan_of_layers,
    refuse,
    sizes_of,
)
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a Phi-2 model. Raises ModelLoadError."""
    refuse(config, "qk_layernorm", False)
    sizes = sizes_of(config, eps=1e-5, eps_key="layer_norm_eps")
    made = DenseLayers.alike(
        sizes,
        rope_of(config, sizes.head_dim, sizes.max_position, partial=0.5),
        final_norm="model.final_layernorm",
        out_name="dense",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        is_gated=False,
        mlp_names=("fc1",),
        down_name="fc2",
        activation=activation_of(config, default="gelu_new"),
        norm_kind="layer",
        norm_bias=True,
        norm_names=("input_layernorm", None, None, None),
        is_parallel=True,
    )
    return plan_of_layers(config, "phi", made, head_bias="lm_head.bias")
