"""Text models inside models with images: their configuration is a part of the file, their names have other prefixes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.plan import DecoderPlan

# Releases of transformers have written these before `layers.` in checkpoints and in adapters.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_OF_IMAGES = (
    "vision_tower.",
    "visual.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.visual.",
    "model.multi_modal_projector.",
)
_OUTER = ("dtype", "torch_dtype")


def text_of(config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the configuration of the text model: `text_config`, or the file itself if it has none. `defaults`: of
    fields that it lacks. Raises ModelLoadError."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"config.json: text_config must be a JSON object, not {text!r}")
    found = {key: config[key] for key in _OUTER if config.get(key) is not None}
    found |= dict(defaults or {}) | {key: value for key, value in text.items() if key not in found}
    ties = [one["tie_word_embeddings"] for one in (config, text) if one.get("tie_word_embeddings") is not None]
    return found | ({"tie_word_embeddings": any(ties)} if ties else {})


def wrapped(plan: DecoderPlan, family: str) -> DecoderPlan:
    """Returns the plan of a text model with the prefixes that its tensors may have in the wrapping model."""
    return replace(
        plan,
        family=family,
        checkpoint_prefixes=_PREFIXES,
        adapter_prefixes=_PREFIXES,
        ignored_prefixes=_OF_IMAGES,
    )
