"""GPT-2: LayerNorms, learned positions, modules stored as [inputs, outputs], q, k and v in one module."""

from dataclasses import dataclass, replace

from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    flag,
    plan_of_layers,
    positive,
    refuse,
    sizes_of,
)
from caraserve.model.plan import Attention, DecoderPlan

_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclass(frozen=True)
class _Layers(DenseLayers):
    """Layers whose scores may be divided by the layer's number."""

    divides_by_layer: bool = False

    def attention(self, layer: int) -> Attention:
        made = super().attention(layer)
        return replace(made, scale=made.scale / (layer + 1)) if self.divides_by_layer else made


def plan(config: Config) -> DecoderPlan:
    """Returns the plan of a GPT-2 model. Raises ModelLoadError."""
    refuse(config, "add_cross_attention", False)
    config = dict(config) | {name: config.get(name, config.get(own)) for name, own in _NAMES.items()}
    inner = config.get("n_inner") or 4 * positive(config, "hidden_size")
    sizes = sizes_of(config | {"intermediate_size": inner}, eps=1e-5, eps_key="layer_norm_epsilon", max_position=1024)
    made = _Layers.alike(
        sizes,
        None,
        layer_prefix="transformer.h",
        final_norm="transformer.ln_f",
        attention_name="attn",
        qkv_names=("c_attn",),
        out_name="c_proj",
        mlp_names=("c_fc",),
        down_name="c_proj",
        norm_names=("ln_1", None, "ln_2", None),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        is_transposed=True,
        scale=None if flag(config, "scale_attn_weights", True) else 1.0,
        is_gated=False,
        activation=activation_of(config, "activation_function", "gelu_new"),
        norm_kind="layer",
        norm_bias=True,
        divides_by_layer=flag(config, "scale_attn_by_inverse_layer_idx"),
    )
    return plan_of_layers(
        config,
        "gpt2",
        made,
        ties_by_default=True,
        embed="transformer.wte.weight",
        positions="transformer.wpe.weight",
        checkpoint_prefixes=("transformer.", ""),  # the published files were saved without the module of the head
        adapter_prefixes=("transformer.",),
    )
