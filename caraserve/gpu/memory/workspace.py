"""A lane's activations: allocated once for its largest batch; each pass uses the first rows."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caraserve.core.lora_layout import MAX_RANK, PANEL
from caraserve.gpu.attention.base import DecodeAttention, Scratch
from caraserve.gpu.kernels.bgmv_work import PLANES
from caraserve.gpu.kernels.experts import ExpertRoom
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from caraserve.gpu.memory.pass_shape import Capacity, PassShape
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up

_SAMPLING_BLOCKS = 128  # each has buffers as large as two rows of logits
_SCRATCH_BYTES = 256 << 20  # most bytes of attention scratch
_ROW_STEP = 8  # numbers: rows begin at multiples of 16 bytes, which cuBLAS' fast kernels need, whatever their width
# Most rows whose LoRA sums are kept apart: they are written and read in fp32, which takes longer for many rows than
# another launch that adds to the activations.
MOST_SUMS = 64
_ROWS_STEP = 16  # decoding rows are cut at multiples, so that all addresses are multiples of 64 bytes


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows of one pass, [tokens, …] in the model's dtype. Groups of one shape use the same memory in every layer, and
    what no two groups need at the same time shares it."""

    hidden: Tensor  # the residual stream
    normed: Tensor  # [tokens, hidden]
    added: Tensor  # [tokens, hidden], the output of a block, to be added to the residual stream
    inputs: tuple[Tensor, ...]  # by group shape: rows that it reads
    outputs: tuple[Tensor, ...]  # by group shape: rows that it writes

    @classmethod
    def empty(cls, plan: DecoderPlan, tokens: int, dtype: torch.dtype, device: torch.device) -> "Activations":
        """Allocates the rows of `tokens` tokens."""

        def rows(width: int) -> Tensor:
            return torch.zeros((tokens, width), dtype=dtype, device=device)

        shapes = plan.group_shapes
        hidden, normed, added = (rows(plan.hidden) for _ in range(3))
        widest = max((align_up(sum(shape.widths), _ROW_STEP) for shape in shapes if not shape.is_last), default=0)
        projected, body = rows(widest).view(-1), rows(max(shape.inputs for shape in shapes)).view(-1)
        sources = {"stream": hidden, "norm": normed}

        def within(memory: Tensor, width: int) -> Tensor:
            stride = align_up(width, _ROW_STEP)
            return memory[: tokens * stride].view(tokens, stride)[:, :width]

        return cls(
            hidden,
            normed,
            added,
            tuple(within(body, each.inputs) if each.reads == "body" else sources[each.reads] for each in shapes),
            tuple(added if each.is_last else within(projected, sum(each.widths)) for each in shapes),
        )

    def first(self, tokens: int) -> "Activations":
        """Returns views of the first `tokens` rows."""
        inputs, outputs = (tuple(rows[:tokens] for rows in each) for each in (self.inputs, self.outputs))
        return Activations(self.hidden[:tokens], self.normed[:tokens], self.added[:tokens], inputs, outputs)


@dataclass(frozen=True, slots=True)
class Workspace:
    """The memory that a lane's kernels use and no other lane reads or writes."""

    activations: Activations
    parts: tuple[Tensor, ...]  # float32 [PLANES, tokens, sites, max rank] by group shape: output of shrink
    shrunk: tuple[Tensor, ...]  # [tokens, sites, max rank] by group shape: sums of the planes, of prompts
    sums: tuple[Tensor, ...]  # float32 [rows, panels of all sites] by group shape: of LoRA beside base products
    scratch: dict[tuple[int, int], Scratch]  # of attention, by heads and head dim
    wanted: Tensor  # [outputs at once, hidden] normed rows for the logits
    logits: Tensor  # [outputs at once, vocab]
    products: Tensor  # float32 [outputs at once, MAX_RANK], of these rows and A of the head
    embeddings: Tensor  # [rows, hidden], or [tokens, hidden]
    weights: Tensor  # float32 [blocks, vocab], for sampling
    counts: Tensor  # int32 [blocks, vocab], zero between launches
    room: ProductRoom  # of products
    experts: ExpertRoom | None  # if layers have any
    mixed: Tensor | None  # [tokens, channels], what convolutions of delta nets write, if layers have any

    def decode_parts(self, shape: PassShape, heads: tuple[int, int]) -> list[tuple[slice, Scratch]]:
        """Splits the decoding rows so that the attention scratch of each part fits at this length of context. Returns
        (rows, scratch) of each part. `heads`: their number and width."""
        if shape.decode_rows == 0:
            return []
        scratch = self.scratch[heads]
        most = scratch.rows_at(shape.context)
        step = shape.decode_rows if most >= shape.decode_rows else most // _ROWS_STEP * _ROWS_STEP
        ends = [(start, min(start + step, shape.decode_rows)) for start in range(0, shape.decode_rows, step)]
        return [(slice(start, end), scratch.within(end - start, shape.context)) for start, end in ends]


def make_workspace(
    plan: DecoderPlan,
    dtype: torch.dtype,
    capacity: Capacity,
    max_rank: int,
    max_context: int,
    device: torch.device,
    attention: DecodeAttention[Any],
    room: RoomSize = RoomSize(),  # noqa: B008  frozen
) -> Workspace:
    """Allocates a lane's workspace. `max_rank`: the largest of any adapter; 0 if no adapter is ever served.
    `room`: what products of so many rows need besides."""

    def rows(count: int, width: int) -> Tensor:
        return torch.zeros((count, width), dtype=dtype, device=device)

    outputs = capacity.logits_rows
    blocks = min(outputs, _SAMPLING_BLOCKS)
    shapes = [(PLANES, capacity.tokens, len(each.widths), max_rank) for each in plan.group_shapes]
    part = torch.zeros(max(map(math.prod, shapes)), dtype=torch.float32, device=device)  # used by one group at a time
    shrunk = torch.zeros(max(map(math.prod, shapes)) // PLANES, dtype=dtype, device=device)
    sums = [
        (min(capacity.rows, MOST_SUMS), sum(align_up(width, PANEL) for width in each.widths))
        for each in plan.group_shapes
    ]
    summed = torch.zeros(max(map(math.prod, sums)), dtype=torch.float32, device=device)  # by one group at a time
    heads = dict.fromkeys((one.heads, one.head_dim) for one in plan.attentions)
    return Workspace(
        Activations.empty(plan, capacity.tokens, dtype, device),
        tuple(part[: math.prod(shape)].view(shape) for shape in shapes),
        tuple(shrunk[: math.prod(shape[1:])].view(shape[1:]) for shape in shapes),
        tuple(summed[: math.prod(shape)].view(shape) for shape in sums),
        {each: _scratch(each, capacity.rows, max_context, device, attention) for each in heads},
        rows(outputs, plan.hidden),
        rows(outputs, plan.vocab_size),
        torch.zeros((outputs, MAX_RANK), dtype=torch.float32, device=device),
        rows(capacity.embedded, plan.hidden),
        torch.zeros((blocks, plan.vocab_size), dtype=torch.float32, device=device),
        torch.zeros((blocks, plan.vocab_size), dtype=torch.int32, device=device),
        ProductRoom.empty(room, capacity.tokens, device),
        _expert_room(plan, capacity.tokens, dtype, device),
        rows(capacity.tokens, max(net.channels for net in plan.delta_nets.values())) if plan.delta_nets else None,
    )


def _expert_room(plan: DecoderPlan, tokens: int, dtype: torch.dtype, device: torch.device) -> ExpertRoom | None:
    bodies = plan.moes
    if not bodies:
        return None
    top_k, experts = max(body.top_k for body in bodies), max(body.experts for body in bodies)
    inner = max(body.down.inputs for body in bodies)
    return ExpertRoom.empty(tokens, top_k, experts, inner, plan.hidden, dtype, device)


def _scratch(
    heads: tuple[int, int], rows: int, max_context: int, device: torch.device, attention: DecodeAttention[Any]
) -> Scratch:
    """Allocates scratch for all rows at once, or for fewer if contexts are so long that it would exceed 256 MiB.
    `heads`: their number and width."""
    num_bytes = attention.scratch_bytes(*heads, max_context)
    fitting = max(_SCRATCH_BYTES // num_bytes // _ROWS_STEP, 1) * _ROWS_STEP
    count = min(align_up(rows, _ROWS_STEP), fitting)
    made: Scratch = attention.scratch(count, *heads, max_context, device)
    return made
