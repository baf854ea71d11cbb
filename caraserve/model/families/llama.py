"""Llama 2 and 3, and models in its form: biases where the configuration says so, attention over the whole context."""

from collections.abc import Mapping
from typing import Any

from caraserve.model.families.dense import DenseLayers, dense_plan
from caraserve.model.plan import DecoderPlan


def plan(config: Mapping[str, Any]) -> DecoderPlan:
    """Returns the plan of a Llama model. Raises ModelLoadError."""
    has_bias = bool(config.get("attention_bias", False))
    return dense_plan(
        config,
        "llama",
        lambda sizes, rope: DenseLayers(
            sizes,
            rope,
            windows=(None,) * sizes.layers,
            qkv_bias=has_bias,
            o_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
        ),
    )
