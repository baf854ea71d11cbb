"""The base model's weights on the device, as its plan describes them; modules that read the same rows form one matrix.

Tensors are allocated in their final place and filled one by one, from a checkpoint's files (`checkpoint.py`) or with
random numbers on the device, so that no tensor is on the device twice, but for one module at a time, or the experts of
one layer, whose outputs are stored in another order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.attention.base import NO_WINDOW, LayerAttention
from caraserve.gpu.kernels.delta_net import DeltaNetWeights
from caraserve.gpu.kernels.experts import ExpertWeights
from caraserve.gpu.kernels.grouped import GroupedMatrix
from caraserve.gpu.kernels.heads import Heads, RopeTables
from caraserve.gpu.kernels.norms import NormWeights
from caraserve.gpu.linear.base import SCALE, TORCH_CODES, Fill, Linear, LinearLoader, ReadMatrix, row_pieces
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.experts import load_experts
from caraserve.gpu.linear.formats import class_of, load_linear
from caraserve.gpu.linear.grouped import GroupedLinear, load_matrices
from caraserve.gpu.linear.random_codes import random_matrix
from caraserve.gpu.linear.room import RoomSize
from caraserve.gpu.supported_plans import check_plan
from caraserve.model.dtype import Dtype
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.grouped import GroupedFormat
from caraserve.model.formats.plain import PLAIN
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import Attention, Block, DecoderPlan, DeltaNet, Group, LayerPlan, Moe, Norm, Rope
from caraserve.model.rope import alibi_slopes, growth_of_q, rope_tables
from caraserve.util.units import human_bytes

TORCH_DTYPES = {Dtype.F32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16}
DTYPES_OF_TORCH = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}
_DUMMY_STD, _DUMMY_CODES_STD = 0.02, 32.0
_DUMMY_INPUT_SCALE = 0.05
_DUMMY_EXPONENT = 120  # 2^-7: random codes of MXFP4 deviate by 2.9


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """What a block has besides its linears. `scalar` multiplies the stream after the block."""

    pre: NormWeights | None
    post: NormWeights | None
    multiplier: float
    scalar: float
    heads: Heads | None  # of attention
    attention: LayerAttention | None
    experts: ExpertWeights | None
    delta_net: DeltaNetWeights | None


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer."""

    blocks: tuple[BlockWeights, ...]
    linears: tuple[Linear, ...]  # by group of the layer


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of the base model that a pass reads."""

    dtype: torch.dtype  # of activations, and of weights that are numbers
    layers: tuple[Layer, ...]
    embedding: Tensor | GroupedMatrix  # [vocab, hidden]
    positions: Tensor | None  # float32 [positions, hidden], added to embeddings
    head: Linear  # [vocab, hidden]; the same tensors as those of `embedding` if they are tied
    final_norm: NormWeights
    head_bias: Tensor | None = None  # that `head` adds, [vocab]

    @property
    def device(self) -> torch.device:
        return self.final_norm.weight.device

    def room(self, rows: int) -> RoomSize:
        """Returns the memory that products of up to `rows` rows need."""
        linears = [self.head, *(linear for layer in self.layers for linear in layer.linears)]
        return RoomSize.for_all(linear.room(rows, self.dtype) for linear in linears)


def num_bytes(plan: DecoderPlan, dtype: torch.dtype) -> int:
    """Returns the device memory that `load` takes, without norms, biases and rotary tables. Experts are numbers, and so
    is an embedding that is not in grouped codes."""
    layers = (layer.with_expert_tensors(lambda one: replace(one, format=PLAIN)) for layer in plan.layers)
    embed = plan.embed_format if isinstance(plan.embed_format, GroupedFormat) else PLAIN
    return replace(plan, layers=tuple(layers), embed_format=embed).weight_bytes(dtype.itemsize)


def progress_steps(plan: DecoderPlan) -> int:
    """Returns how often `load` calls `progress`."""
    return len(plan.layers) + 1


def load(
    plan: DecoderPlan,
    dtype: torch.dtype,
    max_context: int,
    device: torch.device,
    fill: Fill,
    progress: Callable[[], None] = lambda: None,
    read: ReadMatrix = random_matrix,
) -> Weights:
    """Allocates the weights on `device` and fills them; calls `progress` after each layer and after the embeddings.
    `read`: of weights in grouped codes; without it they are random.

    Raises ModelLoadError for layers and sizes that the kernels do not support or if device memory is too small, and
    the errors of `fill`.
    """
    check_plan(plan)
    for stored in plan.formats:
        class_of(stored)
    try:
        loader = LinearLoader(dtype, device, fill, read, torch.ones(1, device=device))
        weights = _Loader(plan, max_context, loader).load(progress)
    except torch.OutOfMemoryError as error:
        need = human_bytes(num_bytes(plan, dtype))
        raise ModelLoadError(f"the model's weights take {need} of device memory, more than is free") from error
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of copies of modules whose outputs are stored in another order
    return weights


class _Loader:
    """Loads the weights of one model."""

    def __init__(self, plan: DecoderPlan, max_context: int, loader: LinearLoader) -> None:
        self._plan, self._max_context, self._loader = plan, max_context, loader
        self._ropes = {rope: self._rope(rope) for rope in plan.ropes}

    def load(self, progress: Callable[[], None]) -> Weights:
        plan, layers = self._plan, []
        for index, layer in enumerate(plan.layers):
            layers.append(self._layer(index, layer))
            progress()
        embedding = self._embedding()
        positions = None
        if plan.positions is not None:
            table = self._loader.filled(plan.positions, (plan.max_position, plan.hidden), torch.float32)
            positions = table[: self._max_context].clone()
        bias = None if plan.head_bias is None else self._loader.filled(plan.head_bias, (plan.vocab_size,))
        head = self._head(embedding)
        head = head if bias is None else head.with_bias(bias)
        final_norm = self._norm(plan.final, plan.hidden)
        assert final_norm is not None
        progress()
        return Weights(self._loader.dtype, tuple(layers), embedding, positions, head, final_norm, bias)

    def _embedding(self) -> Tensor | GroupedMatrix:
        """Returns the embedding: as grouped codes if it is stored so, else as numbers."""
        plan, stored = self._plan, self._plan.embed_format
        if not isinstance(stored, GroupedFormat):
            return self._numbers(plan.embed, stored)
        table = LinearPlan.of_role(plan.embed.removesuffix(".weight"), plan.hidden, plan.vocab_size, "out")
        (made,) = load_matrices(self._loader, stored, (table,))
        if made.order is not None:
            raise ModelLoadError(f"{plan.embed}: an embedding whose columns are in another order cannot be read")
        return made

    def _numbers(self, tensor: str, stored: WeightFormat) -> Tensor:
        """Returns embeddings, or the head's weights, as numbers, [vocab, hidden]."""
        made = self._loader.empty((self._plan.vocab_size, self._plan.hidden))
        class_of(stored).fill_numbers(tensor.removesuffix(".weight"), made, self._loader)
        return made

    def _head(self, embedding: Tensor | GroupedMatrix) -> Linear:
        plan, loader = self._plan, self._loader
        head: Linear
        if plan.has_unit_head_rows:
            if plan.head is not None:
                weight = self._numbers(plan.head, plan.head_format)
            elif isinstance(embedding, Tensor):
                weight = embedding.clone()
            else:
                weight = self._numbers(plan.embed, plan.embed_format)
            for rows in row_pieces(*weight.shape):
                weight[rows] = torch.nn.functional.normalize(weight[rows].float(), dim=1)
            head = DenseLinear.of(weight, None)
        elif plan.head is not None:
            linear = LinearPlan.of_role(plan.head.removesuffix(".weight"), plan.hidden, plan.vocab_size, "out")
            head = load_linear(loader, (replace(linear, format=plan.head_format),))
        elif isinstance(embedding, Tensor):
            head = DenseLinear.of(embedding, None)
        else:
            head = GroupedLinear(embedding, None)
        return head

    def _layer(self, index: int, layer: LayerPlan) -> Layer:
        linears, scalars = [], [1.0] * len(layer.blocks)
        for block in layer.blocks:
            linears += [load_linear(self._loader, group) for group in block.body.linear_groups]
        if self._plan.layer_scalars:
            scalars[-1] = self._number(self._plan.layer_scalars[index])
        blocks = []
        for number, (block, scalar) in enumerate(zip(layer.blocks, scalars, strict=True)):
            first = next(group for group in layer.groups if group.block == number)
            blocks.append(self._block(block, first, scalar))
        return Layer(tuple(blocks), tuple(linears))

    def _block(self, block: Block, first: Group, scalar: float) -> BlockWeights:
        heads = attention = None
        if isinstance(block.body, Attention):
            heads, attention = self._heads(block.body, first), self._attention(block.body)
        experts = load_experts(self._loader, block.body) if isinstance(block.body, Moe) else None
        delta_net = self._delta_net(block.body, first) if isinstance(block.body, DeltaNet) else None
        pre = None if block.reads_first_rows else self._norm(block.pre, self._plan.hidden)
        post = self._norm(block.post, self._plan.hidden)
        return BlockWeights(pre, post, block.multiplier, scalar, heads, attention, experts, delta_net)

    def _heads(self, body: Attention, group: Group) -> Heads:
        columns = columns_of(group)
        return Heads(
            heads=body.heads,
            kv_heads=body.kv_heads,
            head_dim=body.head_dim,
            q=columns["q"].start,
            k=columns["k"].start,
            v=columns.get("v", columns["k"]).start,
            rope=None if body.rope is None else self._ropes[body.rope],
            q_norm=self._norm(body.q_norm, body.head_dim, body.heads),
            k_norm=self._norm(body.k_norm, body.head_dim, body.kv_heads),
            v_norm=self._norm(body.v_norm, body.head_dim, body.kv_heads),
            norm_after_rope=body.norm_after_rope,
        )

    def _attention(self, body: Attention) -> LayerAttention:
        slopes = torch.from_numpy(alibi_slopes(body.heads)).to(self._loader.device) if body.alibi else None
        sinks = None if body.sinks is None else self._loader.filled(body.sinks, (body.heads,), torch.float32)
        return LayerAttention(body.scale, body.cap, body.window or NO_WINDOW, sinks, slopes)

    def _delta_net(self, body: DeltaNet, group: Group) -> DeltaNetWeights:
        def of_heads(name: str) -> Tensor:
            return self._loader.filled(name, (body.value_heads,), torch.float32)

        columns, norm = columns_of(group), self._norm(body.norm, body.value_width, body.value_heads)
        assert norm is not None
        return DeltaNetWeights(
            key_heads=body.key_heads,
            value_heads=body.value_heads,
            key_width=body.key_width,
            value_width=body.value_width,
            z=columns["z"].start,
            a=columns["a"].start,
            b=columns["b"].start,
            convolution=self._loader.filled(body.convolution, (body.channels, 1, body.kernel), torch.float32).squeeze(
                1
            ),
            negative_rate=of_heads(body.log_decay) if body.stores_rates else -of_heads(body.log_decay).exp(),
            step_bias=of_heads(body.step_bias),
            norm=norm,
        )

    def _rope(self, rope: Rope) -> RopeTables:
        cos, sin = (torch.from_numpy(table).to(self._loader.device) for table in rope_tables(rope, self._max_context))
        growth = growth_of_q(rope, self._max_context)
        return RopeTables(cos, sin, None if growth is None else torch.from_numpy(growth).to(self._loader.device))

    def _norm(self, norm: Norm | None, width: int, heads: int = 1) -> NormWeights | None:
        """Returns the weights of a norm of rows of `heads` · `width` elements."""
        if norm is None:
            return None
        shape = {"row": (heads * width,), "head": (width,), "heads": (heads, width)}[norm.scope]

        def ordered(name: str) -> Tensor:
            if "{head}" in name:
                values = self._loader.empty(shape, torch.float32)
                for head, row in enumerate(values):
                    self._loader.fill(name.format(head=head), row)
            else:
                values = self._loader.filled(name, shape, torch.float32)
            return values if norm.order is None else values.view(-1)[list(norm.order)].view(shape)

        if norm.weight is None:
            weight = torch.ones(shape, dtype=torch.float32, device=self._loader.device)
        else:
            weight = ordered(norm.weight)
        bias = None if norm.bias is None else ordered(norm.bias)
        return NormWeights(weight + norm.offset, bias, norm.eps, norm.kind == "layer", norm.scope)

    def _number(self, name: str) -> float:
        value = self._loader.filled(name, (1,), torch.float32)
        return 1.0 if value.is_meta else float(value)


def columns_of(group: Group) -> dict[str, slice]:
    """Returns the columns of each role in a row of a group's output."""
    starts = zip(group.sites, group.columns(), strict=True)
    return {site.role: slice(start, start + site.outputs) for site, start in starts}


def dummy(seed: int, device: torch.device) -> Fill:
    """Returns a Fill with random weights of plausible size, generated on the device; norms are 1 and biases 0. The same
    seed gives the same model on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, target: Tensor) -> None:
        if name.endswith(SCALE):
            target.fill_(_DUMMY_INPUT_SCALE if "input" in name else _DUMMY_STD / _DUMMY_CODES_STD)
        elif target.dim() == 1 or "norm" in name:
            target.fill_(float(not name.endswith("bias")))
        elif target.dtype is torch.uint8:  # of MXFP4
            target.fill_(_DUMMY_EXPONENT) if name.endswith("_scales") else target.random_(0, 256, generator=generator)
        elif target.dtype in TORCH_CODES.values():
            for rows in row_pieces(*target.shape):
                codes = target[rows]
                noise = torch.empty(codes.shape, device=device).normal_(0.0, _DUMMY_CODES_STD, generator=generator)
                codes.copy_(noise.round_().clamp_(-127, 127))
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)

    return fill
