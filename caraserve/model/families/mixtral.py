"""Mixtral: experts in every layer, chosen by a softmax; one window of attention for all layers."""

from caraserve.model.families.dense import Config, activation_of, plan_of_layers, sizes_of, window_of
from caraserve.model.families.experts import ExpertLayers, expert_counts, experts_one_by_one, router
from caraserve.model.plan import DecoderPlan, Moe
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a Mixtral model. Raises ModelLoadError."""
    config = {"num_key_value_heads": 8} | dict(config)
    sizes = sizes_of(config, eps=1e-5, max_position=131072)
    rope = rope_of(config, sizes.head_dim, sizes.max_position, theta=1e6)
    experts, top_k = expert_counts(config, ("num_local_experts", "num_experts"), experts=8, top_k=2)
    activation = activation_of(config)

    def moe(layer: int) -> Moe:
        name = f"model.layers.{layer}.block_sparse_moe"
        stored = experts_one_by_one(f"{name}.experts", sizes.hidden, sizes.intermediate, ("w1", "w3", "w2"))
        return Moe((router(f"{name}.gate", sizes, experts),), None, experts, top_k, *stored, activation)

    return plan_of_layers(config, "mixtral", ExpertLayers.alike(sizes, rope, window_of(config), moe=moe))
