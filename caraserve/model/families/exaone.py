"""EXAONE 4: norms after blocks and none before, norms of heads; three of four layers of the large model have a window,
and these alone rotate."""

from caraserve.errors import ModelLoadError
from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    plan_of_layers,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of an EXAONE 4 model. Raises ModelLoadError."""
    sizes = sizes_of({"num_key_value_heads": 32} | dict(config), eps=1e-5)
    pattern, window = config.get("sliding_window_pattern", 4), window_of(config, 4096)
    windows = windows_of(config, sizes.layers, window, lambda layer: _is_local(pattern, layer, sizes.layers))
    rope = rope_of(config, sizes.head_dim, sizes.max_position)
    made = DenseLayers(
        sizes,
        ropes=tuple(rope if window is None or each is not None else None for each in windows),
        windows=windows,
        head_norms="head",
        norm_names=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        activation=activation_of(config),
    )
    return plan_of_layers(config, "exaone4", made)


def _is_local(pattern: object, layer: int, layers: int) -> bool:
    """Returns whether a layer has a window: each but every `pattern`-th, or those with L in a text such as "LLLG", but
    not the last layer."""
    if pattern is None:
        return False
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return pattern[layer % len(pattern)] == "L" and layer + 1 < layers
    if isinstance(pattern, int) and pattern >= 0:
        return pattern > 0 and (layer + 1) % pattern != 0
    raise ModelLoadError(f"config.json: sliding_window_pattern must be a number or a text as 'LLLG', not {pattern!r}")
