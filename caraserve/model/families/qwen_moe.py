"""Qwen2-MoE: experts and a gated shared expert, biases of q, k and v. Qwen3-MoE: experts, norms of heads of q and k. In
both some layers may have an MLP."""

from collections.abc import Callable
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.families.dense import (
    Config,
    Sizes,
    activation_of,
    flag,
    number,
    plan_of_layers,
    positive,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.families.experts import ExpertLayers, expert_counts, experts_one_by_one, router
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan, Moe
from caraserve.model.rope import rope_of

_COUNT_KEYS = ("num_experts", "num_local_experts")  # transformers 5 saves Qwen3-MoE with the second


def plan_qwen2_moe(config: Config) -> DecoderPlan:
    """Returns the plan of a Qwen2-MoE model. Raises ModelLoadError."""
    config = {"num_key_value_heads": 16} | dict(config)
    sizes = sizes_of(config, max_position=32768)
    experts, top_k = expert_counts(config, _COUNT_KEYS, experts=60, top_k=4)
    inner, shared = (
        positive(config, f"{name}intermediate_size", size) for name, size in (("moe_", 1408), ("shared_expert_", 5632))
    )

    def moe(layer: int) -> Moe:
        name, hidden = f"model.layers.{layer}.mlp", sizes.hidden
        of_shared = f"{name}.shared_expert"
        linears = (
            router(f"{name}.gate", sizes, experts),
            LinearPlan.of_role(f"{name}.shared_expert_gate", hidden, 1, "shared_gate"),
            LinearPlan.of_role(f"{of_shared}.gate_proj", hidden, shared, "gate"),
            LinearPlan.of_role(f"{of_shared}.up_proj", hidden, shared, "up"),
        )
        out = LinearPlan.of_role(f"{of_shared}.down_proj", shared, hidden, "down")
        stored = experts_one_by_one(f"{name}.experts", hidden, inner)
        return Moe(
            linears, out, experts, top_k, *stored, activation_of(config), normalise=flag(config, "norm_topk_prob")
        )

    window = window_of(config, 4096) if flag(config, "use_sliding_window") else None
    last = int(number(config, "max_window_layers", 28))
    windows = windows_of(config, sizes.layers, window, lambda layer: layer % 2 == 0 and layer < last)
    return _plan(config, "qwen2_moe", sizes, windows, moe, qkv_bias=flag(config, "qkv_bias", True))


def plan_qwen3_moe(config: Config) -> DecoderPlan:
    """Returns the plan of a Qwen3-MoE model. Raises ModelLoadError."""
    config = {"num_key_value_heads": 4} | dict(config)
    sizes = sizes_of(config, max_position=32768)
    experts, top_k = expert_counts(config, _COUNT_KEYS, experts=128, top_k=8)
    inner = positive(config, "moe_intermediate_size", 768)

    def moe(layer: int) -> Moe:
        name = f"model.layers.{layer}.mlp"
        stored = experts_one_by_one(f"{name}.experts", sizes.hidden, inner)
        linears = (router(f"{name}.gate", sizes, experts),)
        return Moe(
            linears, None, experts, top_k, *stored, activation_of(config), normalise=flag(config, "norm_topk_prob")
        )

    window = window_of(config, 4096) if flag(config, "use_sliding_window") else None
    has_bias = flag(config, "attention_bias")
    fields = {"qkv_bias": has_bias, "o_bias": has_bias, "head_norms": "head"}
    return _plan(config, "qwen3_moe", sizes, (window,) * sizes.layers, moe, **fields)


def _plan(
    config: Config, family: str, sizes: Sizes, windows: tuple[int | None, ...], moe: Callable[[int], Moe], **fields: Any
) -> DecoderPlan:
    """`moe` is called for layers with experts."""
    step, dense = positive(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelLoadError(f"config.json: mlp_only_layers must be a list of layers, not {dense!r}")

    def moe_or_none(layer: int) -> Moe | None:
        return moe(layer) if layer not in dense and (layer + 1) % step == 0 else None

    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    layers = ExpertLayers(
        sizes, (rope,) * sizes.layers, windows, activation=activation_of(config), moe=moe_or_none, **fields
    )
    return plan_of_layers(config, family, layers)
