"""GLM-4.5: experts after the first layers, chosen by sigmoids with a correction among the best groups, and a shared
expert; half of each head is rotated."""

from caraserve.errors import ModelLoadError
from caraserve.model.families.dense import (
    Config,
    activation_of,
    flag,
    number,
    plan_of_layers,
    positive,
    sizes_of,
)
from caraserve.model.families.experts import ExpertLayers, expert_counts, experts_one_by_one, router
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan, Moe
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a GLM-4.5 model. Raises ModelLoadError."""
    config = {"num_key_value_heads": 8} | dict(config)
    sizes = sizes_of(config, eps=1e-5, max_position=131072)
    rope = rope_of(config, sizes.head_dim, sizes.max_position, partial=0.5)
    experts, top_k = expert_counts(config, ("n_routed_experts", "num_local_experts"), experts=128, top_k=8)
    groups = _groups(config, experts, top_k)
    inner, shared = positive(config, "moe_intermediate_size", 1408), positive(config, "n_shared_experts", 1)
    first, hidden = int(number(config, "first_k_dense_replace", 1)), sizes.hidden

    def moe(layer: int) -> Moe | None:
        if layer < first:
            return None
        name = f"model.layers.{layer}.mlp"
        linears = (
            router(f"{name}.gate", sizes, experts),
            *(
                LinearPlan.of_role(f"{name}.shared_experts.{role}_proj", hidden, shared * inner, role)
                for role in ("gate", "up")
            ),
        )
        return Moe(
            linears,
            LinearPlan.of_role(f"{name}.shared_experts.down_proj", shared * inner, hidden, "down"),
            experts,
            top_k,
            *experts_one_by_one(f"{name}.experts", hidden, inner),
            activation_of(config),
            scores="sigmoid",
            normalise=flag(config, "norm_topk_prob", True),
            scale=number(config, "routed_scaling_factor", 1.0),
            correction=f"{name}.gate.e_score_correction_bias",
            groups=(*groups, "top2"),
        )

    layers = ExpertLayers.alike(
        sizes,
        rope,
        qkv_bias=flag(config, "attention_bias"),
        head_norms="head" if flag(config, "use_qk_norm") else None,
        activation=activation_of(config),
        moe=moe,
    )
    return plan_of_layers(config, "glm4_moe", layers)


def _groups(config: Config, experts: int, top_k: int) -> tuple[int, int]:
    """Returns how many groups of experts there are, and how many are kept."""
    groups, kept = positive(config, "n_group", 1), positive(config, "topk_group", 1)
    if experts % groups or experts // groups < 2 or kept > groups or kept * experts // groups < top_k:
        raise ModelLoadError(
            f"config.json: {top_k} of {experts} experts cannot be chosen from {kept} of {groups} equal groups of "
            "two or more (num_experts_per_tok, n_routed_experts, topk_group, n_group)"
        )
    return groups, kept
