"""Qwen3.5 and Qwen3.6, dense: gated delta nets in three layers of four, gated attention in the others. Norms of rows
and heads have an offset of 1, those inside of delta nets have none."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caraserve.errors import ModelLoadError
from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    flag,
    layer_kinds,
    plan_of_layers,
    positive,
    refuse,
    sizes_of,
)
from caraserve.model.families.wrapper import text_of, wrapped
from caraserve.model.linear_plan import LinearPlan, Part, part_rows
from caraserve.model.plan import Attention, Block, DecoderPlan, DeltaNet, LayerPlan, Norm
from caraserve.model.rope import rope_of

_DEFAULTS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
_INTERVAL = 4  # every fourth layer has attention if `layer_types` does not say
_LINEAR, _FULL = "linear_attention", "full_attention"
_NEXT_TOKENS = "mtp."  # tensors of the layers that predict several tokens


def plan_text(config: Config) -> DecoderPlan:
    """Returns the plan of a Qwen3.5 text model. Raises ModelLoadError."""
    config = _DEFAULTS | dict(config)
    refuse(config, "hidden_act", "silu")  # delta nets would use another one as well
    sizes = sizes_of(config, max_position=32768)
    rope = rope_of(config, sizes.head_dim, sizes.max_position, partial=0.25)
    has_bias = flag(config, "attention_bias")
    made = _Layers.alike(
        sizes,
        rope,
        activation=activation_of(config),
        norm_offset=1.0,
        head_norms="head",
        qkv_bias=has_bias,
        o_bias=has_bias,
        kinds=_kinds(config, sizes.layers),
        key_heads=positive(config, "linear_num_key_heads", 16),
        value_heads=positive(config, "linear_num_value_heads", 32),
        key_width=positive(config, "linear_key_head_dim", 128),
        value_width=positive(config, "linear_value_head_dim", 128),
        kernel=positive(config, "linear_conv_kernel_dim", 4),
    )
    if made.value_heads % made.key_heads:
        raise ModelLoadError(
            f"config.json: {made.value_heads} value heads cannot share {made.key_heads} key heads evenly"
        )
    return plan_of_layers(config, "qwen3_5_text", made, ignored_prefixes=(_NEXT_TOKENS,))


def plan_with_images(config: Config) -> DecoderPlan:
    """Returns the plan of the text model in a Qwen3.5 model with images. Raises ModelLoadError."""
    plan = wrapped(plan_text(text_of(config)), "qwen3_5")
    return replace(plan, ignored_prefixes=(*plan.ignored_prefixes, _NEXT_TOKENS))


def _kinds(config: Config, layers: int) -> Sequence[str]:
    kinds = layer_kinds(config, layers)
    if kinds is None:
        interval = positive(config, "full_attention_interval", _INTERVAL)
        return [_LINEAR if (layer + 1) % interval else _FULL for layer in range(layers)]
    if not {_FULL} <= {*kinds} <= {_LINEAR, _FULL}:
        raise ModelLoadError(f"config.json: layer_types must be {_LINEAR} or {_FULL}, and one of them {_FULL}")
    return kinds


@dataclass(frozen=True)
class _Layers(DenseLayers):
    """Layers whose first block is attention with a gate, or a delta net."""

    kinds: Sequence[str] = ()  # by layer
    key_heads: int = 0
    value_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    kernel: int = 0

    def layer(self, layer: int) -> LayerPlan:
        made = super().layer(layer)
        if self.kinds[layer] == _FULL:
            return made
        first, *rest = made.blocks
        return LayerPlan((Block(self._delta_net(f"{self.layer_prefix}.{layer}.linear_attn"), first.pre), *rest))

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), gated=True)

    def qkv(self, name: str, rotated: int) -> tuple[LinearPlan, ...]:
        """Returns the modules of q, k and v; q's outputs are, for each head, those of q and those of the gate."""
        _, k, v = super().qkv(name, rotated)
        heads, dim = self.sizes.heads, self.sizes.head_dim
        first = [2 * dim * head + row for head in range(heads) for row in range(dim)]
        parts = Part("q", tuple(first)), Part("gate", tuple(dim + row for row in first))
        q = LinearPlan(f"{name}.{self.qkv_names[0]}", self.sizes.hidden, 2 * heads * dim, parts, self.qkv_bias)
        return q, k, v

    def _delta_net(self, name: str) -> DeltaNet:
        hidden, keys, values = self.sizes.hidden, self.key_heads * self.key_width, self.value_heads * self.value_width
        qkv = LinearPlan(
            f"{name}.in_proj_qkv", hidden, 2 * keys + values, part_rows((("q", keys), ("k", keys), ("v", values)))
        )
        widths = {"z": values, "b": self.value_heads, "a": self.value_heads}
        others = (LinearPlan.of_role(f"{name}.in_proj_{role}", hidden, width, role) for role, width in widths.items())
        return DeltaNet(
            linears=(qkv, *others),
            out=LinearPlan.of_role(f"{name}.out_proj", values, hidden, "out"),
            convolution=f"{name}.conv1d.weight",
            log_decay=f"{name}.A_log",
            step_bias=f"{name}.dt_bias",
            norm=Norm(f"{name}.norm.weight", self.sizes.eps, scope="head"),
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_width=self.key_width,
            value_width=self.value_width,
            kernel=self.kernel,
        )
