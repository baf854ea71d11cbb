"""The description of a decoder: what its layers compute, from which tensors. Data only; both backends execute it.

A family (`families/`) turns a configuration into a plan. Backends, loaders, adapters and memory budgets take sizes and
names from the plan; groups, sites and columns are derived here and nowhere else.

    DecoderPlan → layers: LayerPlan → blocks: Block, computing [pre norm] → body → [post norm] · multiplier → stream
    body: Attention | Mlp | Moe | DeltaNet → linears: LinearPlan → parts: Part

A linear is a module as checkpoints and adapters name it. A part is those of its outputs that play one role. A site is a
part in its layer. A fused module (`qkv_proj`) has several parts, others have one, so backends see the same sites.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from caraserve.model.formats import WeightFormat
from caraserve.model.formats.plain import PLAIN
from caraserve.model.linear_plan import LinearPlan, Rows, accumulated
from caraserve.util.units import align_up

# The rows that a group reads: the stream itself, its norm, or what the body computes from the block's first group.
Source = Literal["stream", "norm", "body"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class Norm:
    """y = x / √(mean x² + eps) · (weight + offset) + bias; `layer` subtracts the mean of x first."""

    # name of the tensor; None: no weight. With scope `heads` it may have `{head}`: there is a tensor for each head
    weight: str | None
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0  # added to the weight in float32
    bias: str | None = None
    # row: over the whole row; head: over each head, with one weight for all; heads: with a weight for each head
    scope: Literal["row", "head", "heads"] = "row"
    order: Rows | None = None  # of the weight's elements, where outputs of q and k are reordered


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of pairs (i, i + n) of a head's first 2n dimensions by position · frequencies[i]."""

    frequencies: tuple[float, ...]  # radians per position, float32 values; 0 does not rotate
    factor: float = 1.0  # of cos and sin
    q_growth: tuple[float, int] | None = None  # (β, length): q · (1 + β · ln(1 + ⌊position / length⌋))
    # Instead of `frequencies`, where a server admits requests of more than `longest_short` tokens.
    long_frequencies: tuple[float, ...] = ()
    longest_short: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the KV cache: softmax(cap · tanh(q k · scale / cap)) v."""

    linears: tuple[LinearPlan, ...]  # with the roles q, k, and v and gate where there are such
    out: LinearPlan
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # positions that a token sees, its own included; None: all
    cap: float | None = None
    rope: Rope | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norm_after_rope: bool = False
    sinks: str | None = None  # tensor [heads], a score for each head that takes weight and has no value
    gated: bool = False  # the output is multiplied by σ(gate)
    alibi: bool = False

    @property
    def linear_groups(self) -> tuple[tuple[LinearPlan, ...], ...]:
        return self.linears, (self.out,)


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate) · up), or down(activation(up)) without gate."""

    linears: tuple[LinearPlan, ...]  # with the roles gate and up, or up alone
    out: LinearPlan
    activation: Activation = "silu"

    @property
    def linear_groups(self) -> tuple[tuple[LinearPlan, ...], ...]:
        return self.linears, (self.out,)

    @property
    def is_gated(self) -> bool:
        return any(part.role == "gate" for linear in self.linears for part in linear.parts)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """Where a matrix of every expert, [outputs, inputs], is stored: a tensor for each, with `{expert}` in its name,
    or one for all, whose first axis is the experts."""

    tensor: str
    outputs: int
    inputs: int
    stored_outputs: int | None = None  # of the tensor, if it has others beside these
    rows: Rows | None = None  # which of them these are; None: all
    is_transposed: bool = False  # stored as [inputs, outputs]; formats other than numbers never are
    bias: str | None = None  # tensor with the same outputs, named as `tensor` is
    format: WeightFormat = PLAIN


@dataclass(frozen=True, slots=True)
class Moe:
    """The sum of the outputs of the `top_k` experts that the router scores highest, weighted by their scores: each
    down(activation(gate) · up). Of equal scores the lower expert's is the higher. A shared expert, which every token
    takes, is added, times σ(shared_gate) if there is that role.

    Raises ValueError if a gated shared expert has a bias after its down: backends gate what down reads."""

    linears: tuple[LinearPlan, ...]  # with the role router, and shared_gate, gate and up of the shared expert
    out: LinearPlan | None  # down of the shared expert; None: there is none
    experts: int
    top_k: int
    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor
    activation: Activation = "silu"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # the weights of the chosen experts sum to 1
    scale: float = 1.0  # of these weights
    correction: str | None = None  # tensor [experts], added to scores for choosing only
    groups: tuple[int, int, Literal["max", "top2"]] | None = None  # (groups, kept ones, how a group is scored)

    def __post_init__(self) -> None:
        if self.gates_shared and self.out is not None and self.out.bias:
            raise ValueError(f"{self.out.module}: a gated shared expert has no bias, which backends would not gate")

    @property
    def linear_groups(self) -> tuple[tuple[LinearPlan, ...], ...]:
        return (self.linears,) if self.out is None else (self.linears, (self.out,))

    @property
    def gates_shared(self) -> bool:
        """True if what the shared expert's down reads is multiplied by σ(shared_gate)."""
        return any(part.role == "shared_gate" for linear in self.linears for part in linear.parts)

    @property
    def tensors(self) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta rule over q, k and v after a causal convolution and silu. The state of a request: for each value
    head a matrix [key width, value width], and the last inputs of the convolution."""

    linears: tuple[LinearPlan, ...]  # with the roles q, k, v, z, a, b
    out: LinearPlan
    convolution: str  # tensor [channels, 1, kernel]
    log_decay: str  # tensor [value heads], A
    step_bias: str  # tensor [value heads], dt_bias
    norm: Norm
    key_heads: int  # each serves as many consecutive value heads as the others
    value_heads: int
    key_width: int
    value_width: int
    kernel: int  # tokens that the convolution sees
    stores_rates: bool = False  # the tensor `log_decay` has -e^A in place of A

    @property
    def channels(self) -> int:  # of the convolution: q, k and v
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def linear_groups(self) -> tuple[tuple[LinearPlan, ...], ...]:
        return self.linears, (self.out,)


Body = Attention | Mlp | Moe | DeltaNet


@dataclass(frozen=True, slots=True)
class Block:
    """stream += post(body(rows)) · multiplier, where rows = pre(stream), or the rows of the layer's first block."""

    body: Body
    pre: Norm | None
    post: Norm | None = None
    reads_first_rows: bool = False
    multiplier: float = 1.0

    @property
    def reads(self) -> Source:
        """What the body reads."""
        return "stream" if self.pre is None and not self.reads_first_rows else "norm"

    @property
    def adds_directly(self) -> bool:
        """True if the body's output can be added to the stream where it is computed."""
        return self.post is None and self.multiplier == 1.0


@dataclass(frozen=True, slots=True)
class Site:
    """A part of a linear in its layer: what a backend multiplies by one adapter's A and B."""

    index: int  # in the layer
    role: str
    linear: int  # index of its linear in the layer
    part: int  # index in that linear
    group: int  # index of its group in the layer
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What groups of different layers share whose rows lie in the same memory and have the same columns."""

    index: int  # in the layer
    inputs: int
    widths: tuple[int, ...]
    reads: Source

    @property
    def is_last(self) -> bool:
        """True if these groups compute what their blocks add to the stream."""
        return self.reads == "body"


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive sites that read the same rows: one packed matrix in memory, one output buffer."""

    index: int
    block: int  # index of the block in the layer
    sites: tuple[Site, ...]
    inputs: int
    reads: Source

    @property
    def shape(self) -> "GroupShape":
        return GroupShape(self.index, self.inputs, self.widths, self.reads)

    @property
    def widths(self) -> tuple[int, ...]:
        """The outputs of each site."""
        return tuple(site.outputs for site in self.sites)

    def columns(self, step: int = 1) -> tuple[int, ...]:
        """Returns the first column of each site in a row of the group's output, each a multiple of `step`."""
        return tuple(accumulated(align_up(width, step) for width in self.widths))[:-1]

    def width(self, step: int = 1) -> int:
        """Returns the columns of a row of the group's output."""
        return sum(align_up(width, step) for width in self.widths)


@dataclass(frozen=True)
class LayerPlan:
    """The blocks of one layer, in order, and the groups and sites that follow from them.

    Raises ValueError if blocks that read the first one's rows do not follow it: these are kept until the next norm."""

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        shared = [block.reads_first_rows for block in self.blocks[1:]]
        if shared != sorted(shared, reverse=True):
            raise ValueError("blocks that read the first block's rows must follow it, before blocks with their own")

    @cached_property
    def linears(self) -> tuple[LinearPlan, ...]:
        """The modules that adapters may change, in the order of use."""
        return tuple(linear for block in self.blocks for group in block.body.linear_groups for linear in group)

    @property
    def moes(self) -> tuple[Moe, ...]:
        return tuple(block.body for block in self.blocks if isinstance(block.body, Moe))

    def with_linears(self, change: Callable[[LinearPlan], LinearPlan]) -> "LayerPlan":
        """Returns the layer with each of its linears changed."""
        return LayerPlan(tuple(replace(block, body=_changed(block.body, change)) for block in self.blocks))

    def with_expert_tensors(self, change: Callable[[ExpertTensor], ExpertTensor]) -> "LayerPlan":
        """Returns the layer with each matrix of its experts changed."""

        def changed(body: Body) -> Body:
            if not isinstance(body, Moe):
                return body
            return replace(body, gate=change(body.gate), up=change(body.up), down=change(body.down))

        return LayerPlan(tuple(replace(block, body=changed(block.body)) for block in self.blocks))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        groups: list[Group] = []
        linear, index = 0, 0
        for block_index, block in enumerate(self.blocks):
            for step, linears in enumerate(block.body.linear_groups):
                sites = []
                for one in linears:
                    for part_index, part in enumerate(one.parts):
                        place = index, part.role, linear, part_index, len(groups)
                        sites.append(Site(*place, inputs=one.inputs, outputs=part.outputs))
                        index += 1
                    linear += 1
                reads: Source = "body" if step else block.reads
                groups.append(Group(len(groups), block_index, tuple(sites), linears[0].inputs, reads))
        return tuple(groups)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        return tuple(site for group in self.groups for site in group.sites)

    @property
    def attention(self) -> Attention | None:
        """The layer's attention, which has KV blocks; None in a layer of another kind."""
        return next((block.body for block in self.blocks if isinstance(block.body, Attention)), None)


@dataclass(frozen=True)
class DecoderPlan:
    """A decoder-only language model. Sizes are in elements; names are those of the checkpoint's tensors."""

    family: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerPlan, ...]
    final: Norm
    max_position: int
    dtype: str  # as the checkpoint states it: float32, bfloat16 or float16
    embed: str = "model.embed_tokens.weight"
    embed_scale: float = 1.0  # rounded to the checkpoint's dtype
    positions: str | None = None  # tensor [positions, hidden], added to embeddings
    head: str | None = "lm_head.weight"  # None: tied to the embedding
    head_format: WeightFormat = PLAIN
    embed_format: WeightFormat = PLAIN
    head_bias: str | None = None
    has_unit_head_rows: bool = False  # rows of the head are divided by their lengths
    logit_scale: float = 1.0
    logit_cap: float | None = None
    layer_scalars: tuple[str, ...] = ()  # a tensor [1] for each layer, which multiplies the stream after it
    checkpoint_prefixes: tuple[str, ...] = ()  # instead of the first word of `embed` in names of a checkpoint
    adapter_prefixes: tuple[str, ...] = ("model.",)  # before `layers.` in names of an adapter's tensors
    ignored_prefixes: tuple[str, ...] = ()  # of tensors that a text model does not use
    # Instead of the plan's, where a checkpoint has names of its own: all tensors that it has.
    names_in_file: Mapping[str, str] = field(default_factory=dict, hash=False)

    def stored_names(self, tensor: str) -> tuple[str, ...]:
        """Returns the names that a tensor of the plan may have in a checkpoint."""
        if self.names_in_file:
            return (self.names_in_file[tensor],) if tensor in self.names_in_file else ()
        own, rest = self.embed.partition(".")[0] + ".", tensor.partition(".")[2]
        if not self.checkpoint_prefixes:
            return (tensor,)
        if tensor.startswith(own):
            return tuple(prefix + rest for prefix in self.checkpoint_prefixes)
        return tensor, f"language_model.{tensor}"

    @property
    def formats(self) -> frozenset[WeightFormat]:
        """All formats of weights."""
        return frozenset({*self.layer_formats, self.embed_format, self.head_format})

    @property
    def layer_formats(self) -> frozenset[WeightFormat]:
        """The formats of linears and experts."""
        of_linears = {linear.format for layer in self.layers for linear in layer.linears}
        return frozenset({*of_linears, *(one.format for moe in self.moes for one in moe.tensors)})

    @property
    def is_quantized(self) -> bool:
        """True if some weights of layers are not plain numbers."""
        return bool(self.quantized_formats)

    @property
    def quantized_formats(self) -> list[str]:
        """The names of the layers' formats that are not plain numbers, sorted."""
        return sorted({one.name for one in self.layer_formats if one is not PLAIN})

    def format_names(self, dtype: str = "auto") -> str:
        """Returns the names of the layers' formats, and `dtype` (`auto`: the checkpoint's) for plain numbers."""
        plain = self.dtype if dtype == "auto" else dtype
        return "; ".join(sorted({plain if one is PLAIN else one.name for one in self.layer_formats}))

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotations of the layers; each needs a table of cos and sin."""
        return tuple(dict.fromkeys(one.rope for one in self.attentions if one.rope is not None))

    @property
    def attentions(self) -> Iterator[Attention]:
        return (layer.attention for layer in self.layers if layer.attention is not None)

    @cached_property
    def moes(self) -> tuple[Moe, ...]:
        return tuple(moe for layer in self.layers for moe in layer.moes)

    @cached_property
    def delta_nets(self) -> Mapping[int, DeltaNet]:  # by layer
        found = ((layer, block.body) for layer, one in enumerate(self.layers) for block in one.blocks)
        return {layer: body for layer, body in found if isinstance(body, DeltaNet)}

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The names by which adapters target modules, in the order of use in the layers that have them first."""
        return tuple(dict.fromkeys(linear.target for layer in self.layers for linear in layer.linears))

    @cached_property
    def adapter_modules(self) -> dict[str, tuple[int, int]]:
        """The names that adapters may have for each linear, with every prefix: {name: (layer, index in the layer)}."""
        modules: dict[str, tuple[int, int]] = {}
        for layer, one in enumerate(self.layers):
            for index, linear in enumerate(one.linears):
                name = linear.name_in_adapters
                own = max(filter(name.startswith, self.adapter_prefixes), key=len, default=None)
                others = () if own is None else (prefix + name.removeprefix(own) for prefix in self.adapter_prefixes)
                modules |= dict.fromkeys((name, *others), (layer, index))
        return modules

    @cached_property
    def group_shapes(self) -> tuple[GroupShape, ...]:
        """The different shapes of groups, in the order of use."""
        return tuple(dict.fromkeys(group.shape for layer in self.layers for group in layer.groups))

    @cached_property
    def shapes_of_groups(self) -> tuple[tuple[int, ...], ...]:
        """The index in `group_shapes` of each group, by layer and by group."""
        numbers = {shape: number for number, shape in enumerate(self.group_shapes)}
        return tuple(tuple(numbers[group.shape] for group in layer.groups) for layer in self.layers)

    @cached_property
    def attention_inputs(self) -> frozenset[int]:
        """The group shapes with q, k and v, which most adapters change alone."""
        return frozenset(
            shape
            for layer, shapes in zip(self.layers, self.shapes_of_groups, strict=True)
            for group, shape in zip(layer.groups, shapes, strict=True)
            if isinstance(layer.blocks[group.block].body, Attention) and not group.shape.is_last
        )

    @cached_property
    def most_sites(self) -> int:
        """The sites of the layer that has most, by which tables of adapters are indexed."""
        return max(len(layer.sites) for layer in self.layers)

    @cached_property
    def most_groups(self) -> int:
        return max(len(layer.groups) for layer in self.layers)

    @cached_property
    def widest_input(self) -> int:
        return max(group.inputs for layer in self.layers for group in layer.groups)

    @cached_property
    def widest_output(self) -> int:
        return max(site.outputs for layer in self.layers for site in layer.sites)

    @cached_property
    def num_parameters(self) -> int:
        """The weights of embeddings, head and linear modules, without norms and biases."""
        layers = sum(linear.inputs * linear.outputs for layer in self.layers for linear in layer.linears)
        experts = sum(moe.experts * one.inputs * one.outputs for moe in self.moes for one in moe.tensors)
        return layers + experts + self.vocab_size * self.hidden * (1 if self.head is None else 2)

    def weight_bytes(self, itemsize: int) -> int:
        """Returns the bytes of these weights if all keep their formats. `itemsize`: of a weight that is a number."""
        kept = [(one.format, one.inputs, one.outputs) for layer in self.layers for one in layer.linears]
        kept += [(one.format, one.inputs, one.outputs) for moe in self.moes for one in moe.tensors * moe.experts]
        kept.append((self.embed_format, self.hidden, self.vocab_size))
        if self.head is not None:
            kept.append((self.head_format, self.hidden, self.vocab_size))
        numbers = self.num_parameters - sum(inputs * outputs for _, inputs, outputs in kept)
        if self.head is None and self.has_unit_head_rows:  # the head cannot share the embedding's memory
            numbers += self.hidden * self.vocab_size
        return numbers * itemsize + sum(one.num_bytes(inputs, outputs, itemsize) for one, inputs, outputs in kept)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of K and V of one token over all layers."""
        return sum(2 * one.kv_heads * one.head_dim for one in self.attentions) * itemsize


def _changed(body: Body, change: Callable[[LinearPlan], LinearPlan]) -> Body:
    changed: dict[str, Any] = {"linears": tuple(map(change, body.linears))}
    if body.out is not None:
        changed["out"] = change(body.out)
    return replace(body, **changed)
