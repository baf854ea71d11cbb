"""What dense decoders share: reading sizes from a configuration, and layers of attention and a gated MLP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import Activation, Attention, Block, DecoderPlan, LayerPlan, Mlp, Norm, Rope
from caraserve.model.quantization import parse_quantization
from caraserve.model.rope import rope_of

PREFIX = "model"  # of tensor names


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that every configuration has, in elements."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    max_position: int
    rms_eps: float


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Reads the sizes. Raises ModelLoadError for one that is missing or that kernels do not support."""
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", default=heads)
    head_dim = positive(config, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: {heads} heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 16:
        raise ModelLoadError(f"config.json: head_dim {head_dim} is not a multiple of 16, which the kernels need")
    return Sizes(
        hidden=hidden,
        layers=positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        max_position=positive(config, "max_position_embeddings", default=2048),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
    )


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Returns a field that must be a positive integer. Raises ModelLoadError."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelLoadError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def windows_of(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window of attention, by `layer_types`, or from layer `max_window_layers` on."""
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", False):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", layers))
        return tuple(int(window) if layer >= first else None for layer in range(layers))
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True, slots=True)
class DenseLayers:
    """Layers of attention and a gated MLP with their usual names; families change fields."""

    sizes: Sizes
    rope: Rope
    windows: Sequence[int | None]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    has_head_norms: bool = False
    activation: Activation = "silu"
    norm_offset: float = 0.0

    def attention(self, layer: int) -> Attention:
        sizes, name = self.sizes, f"{PREFIX}.layers.{layer}.self_attn"
        width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        norms = (self._norm(f"{name}.{role}_norm.weight", scope="head") for role in "qk")
        q_norm, k_norm = norms if self.has_head_norms else (None, None)
        return Attention(
            linears=tuple(
                LinearPlan.of_role(f"{name}.{role}_proj", sizes.hidden, outputs, role, bias=self.qkv_bias)
                for role, outputs in zip("qkv", width, strict=True)
            ),
            out=LinearPlan.of_role(f"{name}.o_proj", width[0], sizes.hidden, "out", bias=self.o_bias),
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            window=self.windows[layer],
            rope=self.rope,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def mlp(self, layer: int) -> Mlp:
        sizes, name = self.sizes, f"{PREFIX}.layers.{layer}.mlp"
        return Mlp(
            linears=tuple(
                LinearPlan.of_role(f"{name}.{role}_proj", sizes.hidden, sizes.intermediate, role, bias=self.mlp_bias)
                for role in ("gate", "up")
            ),
            out=LinearPlan.of_role(f"{name}.down_proj", sizes.intermediate, sizes.hidden, "down", bias=self.mlp_bias),
            activation=self.activation,
        )

    def norm(self, layer: int, name: str) -> Norm:
        return self._norm(f"{PREFIX}.layers.{layer}.{name}.weight")

    @property
    def final(self) -> Norm:
        return self._norm(f"{PREFIX}.norm.weight")

    def _norm(self, weight: str, **fields: Any) -> Norm:
        return Norm(weight, self.sizes.rms_eps, offset=self.norm_offset, **fields)

    def layer(self, layer: int) -> LayerPlan:
        return LayerPlan(
            (
                Block(self.attention(layer), self.norm(layer, "input_layernorm")),
                Block(self.mlp(layer), self.norm(layer, "post_attention_layernorm")),
            )
        )


def dense_plan(config: Mapping[str, Any], family: str, layers: Callable[[Sizes, Rope], DenseLayers]) -> DecoderPlan:
    """Returns the plan of a family with SiLU whose layers `layers(sizes, rope)` describes. Raises ModelLoadError."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; only silu is")
    sizes = sizes_of(config)
    return plan_of_layers(config, family, layers(sizes, rope_of(config, sizes.head_dim, sizes.max_position)))


def plan_of_layers(
    config: Mapping[str, Any], family: str, made: DenseLayers, *, ties_by_default: bool = False, **fields: Any
) -> DecoderPlan:
    """Returns the plan of a model with these layers, in the weight formats of its configuration. `fields`: of the plan
    that are not the usual ones. Raises ModelLoadError."""
    sizes = made.sizes
    usual: dict[str, Any] = {
        "family": family,
        "vocab_size": sizes.vocab_size,
        "hidden": sizes.hidden,
        "layers": tuple(made.layer(layer) for layer in range(sizes.layers)),
        "final": made.final,
        "max_position": sizes.max_position,
        "dtype": dtype_of(config),
        "head": None if config.get("tie_word_embeddings", ties_by_default) else "lm_head.weight",
    }
    return DecoderPlan(**usual | fields).with_formats(parse_quantization(config))


def dtype_of(config: Mapping[str, Any]) -> str:
    """Returns the dtype of the checkpoint's weights."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
