"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: modules of q, k and v and of gate and up are fused; rotations of a part of each
head, with frequencies for short and for long requests."""

from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    plan_of_layers,
    sizes_of,
    window_of,
)
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a Phi-3 or Phi-4 model. Raises ModelLoadError."""
    config = {"original_max_position_embeddings": 4096} | dict(config)
    sizes = sizes_of(config, eps=1e-5, max_position=4096)
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    made = DenseLayers.alike(
        sizes,
        rope,
        window_of(config),
        qkv_names=("qkv_proj",),
        mlp_names=("gate_up_proj",),
        activation=activation_of(config),
    )
    return plan_of_layers(config, "phi3", made)
