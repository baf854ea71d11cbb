"""Mistral: one window of attention for all layers. Ministral: a window in some layers. Ministral 3: q grows with the
position, by a rotation's field; Mistral Small 3.1 and Ministral 3 wrap a text model."""

from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    Sizes,
    activation_of,
    plan_of_layers,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.families.wrapper import text_of, wrapped
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of

_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}
_ROPE_OF_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def plan_mistral(config: Config) -> DecoderPlan:
    """Returns the plan of a Mistral model. Raises ModelLoadError."""
    config = _DEFAULTS | dict(config)
    return _plan(config, "mistral", sizes_of(config), every_layer=True)


def plan_ministral(config: Config) -> DecoderPlan:
    """Returns the plan of a Ministral model. Raises ModelLoadError."""
    config = _DEFAULTS | dict(config)
    return _plan(config, "ministral", sizes_of(config), every_layer=False)


def plan_ministral3(config: Config) -> DecoderPlan:
    """Returns the plan of a Ministral 3 model for text. Raises ModelLoadError."""
    config = _DEFAULTS | {"sliding_window": None, "max_position_embeddings": 262144, "head_dim": 128} | dict(config)
    if config.get("rope_parameters") is None:
        config |= {"rope_parameters": _ROPE_OF_MINISTRAL3}
    return _plan(config, "ministral3", sizes_of(config, eps=1e-5), every_layer=True)


def plan_mistral3(config: Config) -> DecoderPlan:
    """Returns the plan of the text model in a Mistral 3 model with images. Raises ModelLoadError."""
    text = text_of(config, {"model_type": "mistral"})
    plan = plan_ministral3 if text["model_type"] == "ministral3" else plan_mistral
    return wrapped(plan(text), "mistral3")


def _plan(config: Config, family: str, sizes: Sizes, *, every_layer: bool) -> DecoderPlan:
    """`every_layer`: whether all layers have the window, or those of kind sliding_attention."""
    window, layers = window_of(config), sizes.layers
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    windows = (window,) * layers if every_layer else windows_of(config, layers, window, lambda layer: True)
    made = DenseLayers(sizes, (rope,) * layers, windows, activation=activation_of(config))
    return plan_of_layers(config, family, made)
