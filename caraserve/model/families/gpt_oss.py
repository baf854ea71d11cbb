"""GPT-OSS: experts in every layer with biases and a clamped SwiGLU, in one tensor for all of a layer, gate and up in
turns; sinks of attention, windows in some layers."""

from caraserve.model.families.dense import (
    Config,
    flag,
    plan_of_layers,
    refuse,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.families.experts import ExpertLayers, expert_counts, router
from caraserve.model.plan import DecoderPlan, ExpertTensor, Moe
from caraserve.model.rope import rope_of

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a GPT-OSS model. Raises ModelLoadError."""
    config = {"num_key_value_heads": 8, "head_dim": 64} | dict(config)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config |= {"rope_parameters": _ROPE}
    refuse(config, "hidden_act", "silu")
    refuse(config, "swiglu_alpha", 1.702)
    refuse(config, "swiglu_limit", 7.0)
    sizes = sizes_of(config, eps=1e-5, max_position=131072)
    rope = rope_of(config, sizes.head_dim, sizes.max_position, theta=150000.0)
    experts, top_k = expert_counts(config, ("num_local_experts", "num_experts"), experts=128, top_k=4)
    hidden, inner, has_bias = sizes.hidden, sizes.intermediate, flag(config, "attention_bias", True)

    def moe(layer: int) -> Moe:
        name = f"model.layers.{layer}.mlp"
        gate, up, down = (
            ExpertTensor(
                f"{name}.experts.{module}",
                outputs,
                inputs,
                stored,
                rows,
                is_transposed=True,
                bias=f"{name}.experts.{module}_bias",
            )
            for module, outputs, inputs, stored, rows in (
                ("gate_up_proj", inner, hidden, 2 * inner, range(0, 2 * inner, 2)),
                ("gate_up_proj", inner, hidden, 2 * inner, range(1, 2 * inner, 2)),
                ("down_proj", hidden, inner, None, None),
            )
        )
        linears = (router(f"{name}.router", sizes, experts, bias=True),)
        return Moe(linears, None, experts, top_k, gate, up, down, "clamped_swiglu")

    layers = ExpertLayers(
        sizes,
        (rope,) * sizes.layers,
        windows_of(config, sizes.layers, window_of(config, 128), lambda layer: layer % 2 == 0),
        qkv_bias=has_bias,
        o_bias=has_bias,
        has_sinks=True,
        moe=moe,
    )
    return plan_of_layers(config, "gpt_oss", layers)
