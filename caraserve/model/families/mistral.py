"""Mistral: one window of attention for all layers."""

from collections.abc import Mapping
from typing import Any

from caraserve.model.families.dense import DenseLayers, dense_plan
from caraserve.model.plan import DecoderPlan


def plan(config: Mapping[str, Any]) -> DecoderPlan:
    """Returns the plan of a Mistral model. Raises ModelLoadError."""
    window = config.get("sliding_window")
    window = None if window is None else int(window)
    return dense_plan(config, "mistral", lambda sizes, rope: DenseLayers(sizes, rope, (window,) * sizes.layers))
