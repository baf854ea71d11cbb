"""StableLM 2 and 3: LayerNorms, rotation of a quarter of each head; some models have one norm for both blocks, and
norms of heads with a weight for each."""

from caraserve.model.families.dense import Config, DenseLayers, activation_of, flag, plan_of_layers, sizes_of
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a StableLM model. Raises ModelLoadError."""
    config = {"num_key_value_heads": 32} | dict(config)
    sizes = sizes_of(config, eps=1e-5, eps_key="layer_norm_eps", max_position=4096)
    is_parallel = flag(config, "use_parallel_residual")
    made = DenseLayers.alike(
        sizes,
        rope_of(config, sizes.head_dim, sizes.max_position, partial=0.25),
        qkv_bias=flag(config, "use_qkv_bias"),
        head_norms="heads" if flag(config, "qk_layernorm") else None,
        head_norm_names=("q_layernorm.norms.{head}", "k_layernorm.norms.{head}"),
        norm_kind="layer",
        norm_bias=True,
        norm_names=("input_layernorm", None, None if is_parallel else "post_attention_layernorm", None),
        is_parallel=is_parallel,
        activation=activation_of(config),
    )
    return plan_of_layers(config, "stablelm", made)
