"""Qwen2 and Qwen2.5: biases of q, k and v. Qwen3: norms of each head of q and k. Both: windows in some layers."""

from collections.abc import Mapping
from typing import Any

from caraserve.model.families.dense import DenseLayers, dense_plan, windows_of
from caraserve.model.plan import DecoderPlan


def plan_qwen2(config: Mapping[str, Any]) -> DecoderPlan:
    """Returns the plan of a Qwen2 or Qwen2.5 model. Raises ModelLoadError."""
    return dense_plan(
        config,
        "qwen2",
        lambda sizes, rope: DenseLayers(sizes, rope, windows_of(config, sizes.layers), qkv_bias=True),
    )


def plan_qwen3(config: Mapping[str, Any]) -> DecoderPlan:
    """Returns the plan of a Qwen3 model. Raises ModelLoadError."""
    has_bias = bool(config.get("attention_bias", False))
    return dense_plan(
        config,
        "qwen3",
        lambda sizes, rope: DenseLayers(
            sizes,
            rope,
            windows_of(config, sizes.layers),
            qkv_bias=has_bias,
            o_bias=has_bias,
            has_head_norms=True,
        ),
    )
