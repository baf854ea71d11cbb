"""What dense decoders share: reading sizes from a configuration, and layers of attention and an MLP.

A family fills in `DenseLayers` with what differs from Llama, and overrides a method for modules of a form of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from caraserve.errors import ModelLoadError
from caraserve.model.linear_plan import LinearPlan, Part, Rows, accumulated, interleaved_rows
from caraserve.model.plan import Activation, Attention, Block, Body, DecoderPlan, LayerPlan, Mlp, Norm, Rope

Config = Mapping[str, Any]

LOCAL, _EVERYWHERE = "sliding_attention", "full_attention"
# Of fields, beyond any model: what follows from larger ones would take all memory before a tensor is missed.
_MOST, _MOST_LAYERS, _MOST_OUTPUTS = 1 << 31, 4096, 1 << 23
_LARGEST = 1e30  # number, whose products are finite in float32
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}


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
    eps: float  # of norms


def sizes_of(config: Config, *, eps: float = 1e-6, eps_key: str = "rms_norm_eps", max_position: int = 2048) -> Sizes:
    """Reads the sizes; `eps` and `max_position` are used if the configuration has none. Raises ModelLoadError for one
    that is missing or that kernels do not support."""
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", default=heads)
    head_dim = positive(config, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: {heads} heads cannot share {kv_heads} key-value heads evenly")
    layers = positive(config, "num_hidden_layers", most=_MOST_LAYERS)
    if layers * heads * head_dim > _MOST_OUTPUTS:
        raise ModelLoadError(
            f"config.json: {layers} layers with {heads} heads of {head_dim} are more than {_MOST_OUTPUTS} outputs of q"
        )
    if (norm_eps := number(config, eps_key, eps)) < 0:
        raise ModelLoadError(f"config.json: {eps_key} must not be negative, as {norm_eps} is")
    if head_dim % 16:
        raise ModelLoadError(f"config.json: head_dim {head_dim} is not a multiple of 16, which the kernels need")
    return Sizes(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        max_position=positive(config, "max_position_embeddings", default=max_position),
        eps=norm_eps,
    )


def shown(value: Any) -> str:
    """Returns a field's value for a message: at most 80 characters."""
    return repr(value)[:80]


def positive(config: Config, key: str, default: int | None = None, *, most: int = _MOST) -> int:
    """Returns a field that must be a positive integer. Raises ModelLoadError."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ModelLoadError(f"config.json: {key} must be a positive integer up to {most}, not {shown(value)}")
    return value


def number(config: Config, key: str, default: float) -> float:
    """Returns a field that must be a number. Raises ModelLoadError."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _LARGEST:  # nor NaN
        raise ModelLoadError(f"config.json: {key} must be a number, not {shown(value)}")
    return float(value)


def flag(config: Config, key: str, default: bool = False) -> bool:
    """Returns a field that must be true or false. Raises ModelLoadError."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelLoadError(f"config.json: {key} must be true or false, not {shown(value)}")
    return value


def refuse(config: Config, key: str, *accepted: Any) -> None:
    """Raises ModelLoadError if a field is set and is not one of the accepted values."""
    value = config.get(key)
    if value is not None and value not in accepted:
        right = " or ".join(map(repr, accepted))
        raise ModelLoadError(f"config.json: {key} {shown(value)} is not supported; {right} is")


def activation_of(config: Config, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Returns the function of MLPs that a field names. Raises ModelLoadError."""
    name = config.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelLoadError(f"config.json: {key} {shown(name)} is not supported; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def layer_kinds(config: Config, layers: int) -> Sequence[str] | None:
    """Returns `layer_types`, None if the configuration has none. Raises ModelLoadError if their number is wrong."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise ModelLoadError(f"config.json: layer_types must have {layers} entries, one for each layer")
    return kinds


def window_of(config: Config, default: int | None = None) -> int | None:
    """Returns `sliding_window`: how many positions a token sees, None for all. Raises ModelLoadError."""
    if config.get("sliding_window", default) is None:
        return None
    return positive(config, "sliding_window", default)


def windows_of(
    config: Config, layers: int, window: int | None, is_local: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Returns each layer's window: `window` where `layer_types` says so, or, if the configuration has none, in layers
    for which `is_local` is true."""
    kinds = layer_kinds(config, layers)
    if unknown := [kind for kind in kinds or () if kind not in (LOCAL, _EVERYWHERE)]:
        raise ModelLoadError(
            f"config.json: layer_types has {shown(unknown[0])}; {LOCAL} and {_EVERYWHERE} are supported"
        )
    local = [is_local(layer) if kinds is None else kinds[layer] == LOCAL for layer in range(layers)]
    return tuple(window if each else None for each in local)


@dataclass(frozen=True)
class DenseLayers:
    """Layers of attention and an MLP. The defaults are Llama's."""

    sizes: Sizes
    ropes: Sequence[Rope | None]  # by layer
    windows: Sequence[int | None]  # by layer
    # names of modules and tensors
    layer_prefix: str = "model.layers"
    final_norm: str = "model.norm"
    attention_name: str = "self_attn"
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one: a fused module
    out_name: str = "o_proj"
    mlp_name: str = "mlp"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj")  # one: a fused module, or up alone
    down_name: str = "down_proj"
    # before attention, after it, before the MLP, after it
    norm_names: tuple[str | None, str | None, str | None, str | None] = (
        *("input_layernorm", None),
        *("post_attention_layernorm", None),
    )
    # linears
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    is_transposed: bool = False
    # attention
    scale: float | None = None  # None: head_dim^-0.5
    cap: float | None = None
    is_interleaved: bool = False  # rotation of pairs (2i, 2i + 1)
    head_norms: Literal["head", "heads", "row"] | None = None  # scope of the norms of q and k
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norm_after_rope: bool = False
    has_sinks: bool = False
    # MLP
    is_gated: bool = True
    activation: Activation = "silu"
    # norms and blocks
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_bias: bool = False
    is_parallel: bool = False  # the MLP reads what attention reads
    multiplier: float = 1.0

    @classmethod
    def alike(cls, sizes: Sizes, rope: Rope | None, window: int | None = None, **fields: Any) -> Self:
        """Returns layers that have the same rotation and the same window."""
        return cls(sizes, (rope,) * sizes.layers, (window,) * sizes.layers, **fields)

    def layer(self, layer: int) -> LayerPlan:
        before, after, before_mlp, after_mlp = (
            None if name is None else self.norm(f"{self.layer_prefix}.{layer}.{name}") for name in self.norm_names
        )
        body = self.mlp(layer)
        return LayerPlan(
            (
                Block(self.attention(layer), before, after, multiplier=self.multiplier),
                Block(body, before_mlp, after_mlp, reads_first_rows=self.is_parallel, multiplier=self.multiplier),
            )
        )

    # --- attention ---

    def attention(self, layer: int) -> Attention:
        sizes, name, rope = self.sizes, f"{self.layer_prefix}.{layer}.{self.attention_name}", self.ropes[layer]
        rotated = 2 * len(rope.frequencies) if rope is not None and self.is_interleaved else 0
        q_norm, k_norm = (
            self._head_norm(f"{name}.{norm}", heads, rotated)
            for norm, heads in zip(self.head_norm_names, (sizes.heads, sizes.kv_heads), strict=True)
        )
        width = sizes.heads * sizes.head_dim
        return Attention(
            linears=self.qkv(name, rotated),
            out=self._linear(f"{name}.{self.out_name}", width, sizes.hidden, "out", bias=self.o_bias),
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5 if self.scale is None else self.scale,
            window=self.windows[layer],
            cap=self.cap,
            rope=rope,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_after_rope=self.norm_after_rope,
            sinks=f"{name}.sinks" if self.has_sinks else None,
        )

    def qkv(self, name: str, rotated: int) -> tuple[LinearPlan, ...]:
        """Returns the modules of q, k and v. `rotated`: dimensions of a head whose order the rotation changes."""
        heads = {"q": self.sizes.heads, "k": self.sizes.kv_heads, "v": self.sizes.kv_heads}
        return self._linears(
            [f"{name}.{one}" for one in self.qkv_names],
            self.sizes.hidden,
            [(role, count * self.sizes.head_dim) for role, count in heads.items()],
            bias=self.qkv_bias,
            orders={role: self._order(heads[role], rotated) for role in "qk"},
        )

    def _order(self, heads: int, rotated: int) -> tuple[int, ...] | None:
        return interleaved_rows(heads, self.sizes.head_dim, rotated) if rotated else None

    def _head_norm(self, name: str, heads: int, rotated: int) -> Norm | None:
        if self.head_norms is None:
            return None
        order = self._order(1 if self.head_norms == "head" else heads, rotated)
        return Norm(
            f"{name}.weight",
            self.sizes.eps,
            kind=self.norm_kind,
            offset=self.norm_offset,
            scope=self.head_norms,
            order=order,
        )

    # --- MLP ---

    def mlp(self, layer: int) -> Body:
        """Returns the second block's body."""
        return self.gated_mlp(f"{self.layer_prefix}.{layer}.{self.mlp_name}", self.sizes.intermediate)

    def gated_mlp(self, name: str, intermediate: int) -> Mlp:
        """Returns an MLP with the family's names."""
        hidden, roles = self.sizes.hidden, ("gate", "up") if self.is_gated else ("up",)
        linears = self._linears(
            [f"{name}.{one}" for one in self.mlp_names],
            hidden,
            [(role, intermediate) for role in roles],
            bias=self.mlp_bias,
        )
        down = self._linear(f"{name}.{self.down_name}", intermediate, hidden, "down", bias=self.mlp_bias)
        return Mlp(linears, down, self.activation)

    # --- norms and linears ---

    def norm(self, name: str) -> Norm:
        """Returns a norm of rows."""
        bias = f"{name}.bias" if self.norm_bias else None
        return Norm(f"{name}.weight", self.sizes.eps, kind=self.norm_kind, offset=self.norm_offset, bias=bias)

    @property
    def final(self) -> Norm:
        return self.norm(self.final_norm)

    def _linears(
        self,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[tuple[str, int]],
        *,
        bias: bool,
        orders: Mapping[str, Rows | None] | None = None,
    ) -> tuple[LinearPlan, ...]:
        """Returns modules with these parts, (role, outputs) each: one with all of them, or one for each. `orders`: of
        the outputs of a part, by role."""

        def parts(of: Sequence[tuple[str, int]]) -> tuple[Part, ...]:
            made = []
            for start, (role, size) in zip(accumulated(size for _, size in of), of, strict=False):
                order = (orders or {}).get(role)
                rows = range(start, start + size) if order is None else tuple(start + row for row in order)
                made.append(Part(role, rows))
            return tuple(made)

        modules = [outputs] if len(names) == 1 else [[one] for one in outputs]
        return tuple(
            LinearPlan(name, inputs, sum(size for _, size in of), parts(of), bias, self.is_transposed)
            for name, of in zip(names, modules, strict=True)
        )

    def _linear(self, name: str, inputs: int, outputs: int, role: str, *, bias: bool) -> LinearPlan:
        return self._linears([name], inputs, [(role, outputs)], bias=bias)[0]


def plan_of_layers(
    config: Config, family: str, made: DenseLayers, *, ties_by_default: bool = False, **fields: Any
) -> DecoderPlan:
    """Returns the plan of a model with these layers. `fields`: of the plan that are not the usual ones. Raises
    ModelLoadError."""
    sizes = made.sizes
    usual: dict[str, Any] = {
        "family": family,
        "vocab_size": sizes.vocab_size,
        "hidden": sizes.hidden,
        "layers": tuple(made.layer(layer) for layer in range(sizes.layers)),
        "final": made.final,
        "max_position": sizes.max_position,
        "dtype": dtype_of(config),
        "head": None if flag(config, "tie_word_embeddings", ties_by_default) else "lm_head.weight",
    }
    return DecoderPlan(**usual | fields)


def dtype_of(config: Config) -> str:
    """Returns the dtype of the checkpoint's weights."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
