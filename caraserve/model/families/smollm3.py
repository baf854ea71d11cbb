"""SmolLM3: every fourth layer without rotation."""

from caraserve.errors import ModelLoadError
from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    flag,
    plan_of_layers,
    positive,
    sizes_of,
    window_of,
    windows_of,
)
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a SmolLM3 model. Raises ModelLoadError."""
    sizes = sizes_of({"num_key_value_heads": 4} | dict(config), max_position=32768)
    rotates = config.get("no_rope_layers")  # 1: the layer has a rotation
    if rotates is None:
        interval = positive(config, "no_rope_layer_interval", 4)
        rotates = [(layer + 1) % interval != 0 for layer in range(sizes.layers)]
    if not isinstance(rotates, list) or len(rotates) < sizes.layers or any(one not in (0, 1) for one in rotates):
        raise ModelLoadError(f"config.json: no_rope_layers must have {sizes.layers} entries, 0 or 1 for each layer")
    rope = rope_of(config, sizes.head_dim, sizes.max_position, theta=2e6)
    window = window_of(config) if flag(config, "use_sliding_window") else None
    has_bias = flag(config, "attention_bias")
    made = DenseLayers(
        sizes,
        ropes=tuple(rope if each else None for each in rotates),
        windows=windows_of(config, sizes.layers, window, lambda layer: not rotates[layer]),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=flag(config, "mlp_bias"),
        activation=activation_of(config),
    )
    return plan_of_layers(config, "smollm3", made, ties_by_default=True)
