"""Granite-MoE: experts in every layer, in one tensor for all of a layer; Granite's multipliers."""

from caraserve.model.families.dense import Config, activation_of, sizes_of
from caraserve.model.families.experts import ExpertLayers, expert_counts, router
from caraserve.model.families.granite import granite_layers, granite_plan
from caraserve.model.plan import DecoderPlan, ExpertTensor, Moe
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a Granite-MoE model. Raises ModelLoadError."""
    sizes = sizes_of(config)
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    experts, top_k = expert_counts(config, ("num_local_experts",), experts=8, top_k=2)
    hidden, inner = sizes.hidden, sizes.intermediate

    def moe(layer: int) -> Moe:
        name = f"model.layers.{layer}.block_sparse_moe"
        gate, up = (
            ExpertTensor(f"{name}.input_linear.weight", inner, hidden, 2 * inner, range(first, first + inner))
            for first in (0, inner)
        )
        down = ExpertTensor(f"{name}.output_linear.weight", hidden, inner)
        linears = (router(f"{name}.router.layer", sizes, experts),)
        return Moe(linears, None, experts, top_k, gate, up, down, activation_of(config))

    return granite_plan(config, "granitemoe", granite_layers(config, sizes, rope, kind=ExpertLayers, moe=moe))
