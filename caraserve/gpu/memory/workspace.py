"""A lane's activations: allocated once for its largest batch; each pass uses the first rows."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caraserve.core.lora_layout import GROUPS
from caraserve.gpu.attention.base import DecodeAttention, Scratch
from caraserve.gpu.kernels.bgmv_work import PLANES
from caraserve.gpu.linear.base import RoundedRows
from caraserve.gpu.memory.pass_shape import Capacity, PassShape
from caraserve.model.spec import ModelSpec
from caraserve.util.units import align_up

_SAMPLING_BLOCKS = 128  # each has buffers as large as two rows of logits
_SCRATCH_BYTES = 256 << 20  # most bytes of attention scratch
_ROWS_STEP = 16  # decoding rows are cut at multiples, so that all addresses are multiples of 64 bytes


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows of one pass, [tokens, …] in the model's dtype."""

    hidden: Tensor  # the residual stream
    normed: Tensor  # [tokens, hidden]
    qkv: Tensor
    attended: Tensor  # [tokens, heads · head dim]
    delta: Tensor  # output of o or down, to be added to the residual stream
    gate_up: Tensor
    activated: Tensor  # [tokens, intermediate]

    def first(self, tokens: int) -> "Activations":
        """Returns views of the first `tokens` rows."""
        parts = self.hidden, self.normed, self.qkv, self.attended, self.delta, self.gate_up, self.activated
        return Activations(*(part[:tokens] for part in parts))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Input of each module group of layout.GROUPS."""
        return self.normed, self.attended, self.normed, self.activated

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Output of each module group of layout.GROUPS."""
        return self.qkv, self.delta, self.gate_up, self.delta


@dataclass(frozen=True, slots=True)
class Workspace:
    """The memory that a lane's kernels use and no other lane reads or writes."""

    activations: Activations
    parts: tuple[Tensor, ...]  # float32 [PLANES, tokens, modules, max rank] by module group: output of shrink
    shrunk: tuple[Tensor, ...]  # [tokens, modules, max rank] by module group: sums of the planes, of prompts
    scratch: Scratch
    wanted: Tensor  # [outputs at once, hidden] normed rows for the logits
    logits: Tensor  # [outputs at once, vocab]
    embeddings: Tensor  # [rows, hidden]
    weights: Tensor  # float32 [blocks, vocab], for sampling
    counts: Tensor  # int32 [blocks, vocab], zero between launches
    rounded: RoundedRows | None  # if the weights need it

    def decode_parts(self, shape: PassShape) -> list[tuple[slice, Scratch]]:
        """Splits the decoding rows so that the attention scratch of each part fits at this length of context. Returns
        (rows, scratch) of each part."""
        if shape.decode_rows == 0:
            return []
        most = self.scratch.rows_at(shape.context)
        step = shape.decode_rows if most >= shape.decode_rows else most // _ROWS_STEP * _ROWS_STEP
        ends = [(start, min(start + step, shape.decode_rows)) for start in range(0, shape.decode_rows, step)]
        return [(slice(start, end), self.scratch.within(end - start, shape.context)) for start, end in ends]


def make_workspace(
    spec: ModelSpec,
    dtype: torch.dtype,
    capacity: Capacity,
    max_rank: int,
    max_context: int,
    device: torch.device,
    attention: DecodeAttention[Any],
    *,
    rounds_inputs: bool = False,
) -> Workspace:
    """Allocates a lane's workspace. `max_rank`: the largest of any adapter; 0 if no adapter is ever served.
    `rounds_inputs`: that of the weights."""
    q, kv, _ = (spec.site_shape(site)[1] for site in GROUPS[0])

    def rows(count: int, width: int) -> Tensor:
        return torch.zeros((count, width), dtype=dtype, device=device)

    widths = (spec.hidden, spec.hidden, q + 2 * kv, q, spec.hidden, 2 * spec.intermediate, spec.intermediate)
    outputs = capacity.logits_rows
    blocks = min(outputs, _SAMPLING_BLOCKS)
    shapes = [(PLANES, capacity.tokens, len(group), max_rank) for group in GROUPS]
    part = torch.zeros(max(map(math.prod, shapes)), dtype=torch.float32, device=device)  # used by one group at a time
    shrunk = torch.zeros(max(map(math.prod, shapes)) // PLANES, dtype=dtype, device=device)
    activations = Activations(*(rows(capacity.tokens, width) for width in widths))
    widest = max(part.shape[1] for part in activations.inputs)
    return Workspace(
        activations,
        tuple(part[: math.prod(shape)].view(shape) for shape in shapes),
        tuple(shrunk[: math.prod(shape[1:])].view(shape[1:]) for shape in shapes),
        _scratch(spec, capacity.rows, max_context, device, attention),
        rows(outputs, spec.hidden),
        rows(outputs, spec.vocab_size),
        rows(capacity.rows, spec.hidden),
        torch.zeros((blocks, spec.vocab_size), dtype=torch.float32, device=device),
        torch.zeros((blocks, spec.vocab_size), dtype=torch.int32, device=device),
        RoundedRows.empty(widest, capacity.tokens, device) if rounds_inputs else None,
    )


def _scratch(
    spec: ModelSpec, rows: int, max_context: int, device: torch.device, attention: DecodeAttention[Any]
) -> Scratch:
    """Allocates scratch for all rows at once, or for fewer if contexts are so long that it would exceed 256 MiB."""
    num_bytes = attention.scratch_bytes(spec.heads, spec.head_dim, max_context)
    fitting = max(_SCRATCH_BYTES // num_bytes // _ROWS_STEP, 1) * _ROWS_STEP
    count = min(align_up(rows, _ROWS_STEP), fitting)
    made: Scratch = attention.scratch(count, spec.heads, spec.head_dim, max_context, device)
    return made
