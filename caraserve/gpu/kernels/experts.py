"""Mixture of experts: each row goes through the experts that its router scores highest, and their outputs are summed by
weight.

Five launches, whose grids depend on the number of rows alone, so that they can be captured: route chooses experts; sort
groups the choices by expert, in tiles of rows; two grouped products multiply a tile by its expert's gate and up, and by
its down; the last one sums a row's results. Rows that belong to no token have no choices, and read no weights.

A choice is `row · top_k + its place among the row's choices`; what experts compute is stored by it. Nothing is added by
atomics, sums over choices have a fixed order, and the order of a product's sums depends on the number of rows in the
batch, which chooses the tiles (`product_shape`), and on nothing else of the other rows.

With few rows the time is that of reading the chosen experts' weights. Each is read once, by one program for 32 outputs:
one row of 8 choices among experts of 768 × 2048 has 192 programs for gate and up, and 512 for down, each with 24 to
48 KiB of weights on their way, more than a memory of 5 TB/s needs; so products are not split along their inputs.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.kernels.capability import SMALL_SHARED_MEMORY, compute_capability
from caraserve.gpu.kernels.elementwise import gated
from caraserve.model.plan import Activation
from caraserve.util.units import ceil_div

LAUNCHES = 5
_LEAST_ROWS = 16  # of a tile
_FEW, _SOME = 8, 96  # most rows, on average, that an expert has if tiles have 16 or 64
_WIDE_CAPABILITY = 90  # from it on accumulators of 128 × 256 leave registers for the rest
_SORTED_AT_ONCE = 2048  # choices
_COLUMNS = 512  # per program of the sum


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighted; see `plan.Moe`."""

    experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: tuple[int, int, Literal["max", "top2"]] | None = None
    correction: Tensor | None = None  # float32 [experts]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer, and how they are chosen."""

    routing: Routing
    activation: Activation
    gate_up: Tensor  # [experts, 2 · inner, hidden], gate first
    down: Tensor  # [experts, hidden, inner]
    gate_up_bias: Tensor | None = None  # [experts, 2 · inner]
    down_bias: Tensor | None = None  # [experts, hidden]

    @property
    def inner(self) -> int:
        return self.down.shape[2]

    @property
    def kernels(self) -> Hashable:
        """What the kernels depend on besides the number of rows."""
        how, biases = self.routing, (self.gate_up_bias is None, self.down_bias is None)
        choice = how.top_k, how.scores, how.normalise, how.scale, how.groups, how.correction is None
        return self.down.shape, self.activation, biases, choice


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of one expert each: `rows` choices of `ExpertRoom.order`, from `first` on. Those of 0 rows fill the grid."""

    expert: Tensor  # int32 [tiles]
    first: Tensor  # int32 [tiles]
    rows: Tensor  # int32 [tiles]


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """A lane's memory for the experts of one layer at a time. What is indexed by choice has rows of the layer's own
    width, one after another."""

    chosen: Tensor  # int32 [choices] expert; as many as there are experts: none
    weights: Tensor  # float32 [choices]
    order: Tensor  # int32 [choices] grouped by expert
    tiles: Tiles
    inner: Tensor  # [choices · widest inner] the products of gate and up
    done: Tensor  # [choices · hidden] the experts' outputs

    @classmethod
    def empty(
        cls, rows: int, top_k: int, experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> "ExpertRoom":
        """Allocates room for `rows` rows; the other sizes are the largest of any layer."""
        choices = rows * top_k

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        tiles = Tiles(*(ints(most_tiles(choices, experts, _LEAST_ROWS)) for _ in range(3)))
        chosen, weights = ints(choices), torch.zeros(choices, dtype=torch.float32, device=device)
        made = (torch.zeros(choices * width, dtype=dtype, device=device) for width in (inner, hidden))
        return cls(chosen, weights, ints(choices), tiles, *made)


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    logits, position, correction, chosen, weights, logits_stride, scale,
    IS_SIGMOID: tl.constexpr, NORMALISES: tl.constexpr, HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, KEPT: tl.constexpr, BY_TWO: tl.constexpr, TOP_K: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program chooses one row's experts, in GROUPS groups of SIZE each. Of equal scores the first expert's is
    chosen. Whatever the scores are, also NaN, an expert is one that there is, or GROUPS · SIZE for none."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BG), tl.arange(0, BS)
    expert = group[:, None] * SIZE + member[None, :]
    free = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    at = logits + row * logits_stride + expert
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-tl.load(at, mask=free, other=0.0).to(tl.float32)))
    else:
        value = tl.load(at, mask=free, other=float("-inf")).to(tl.float32)
        powers = tl.exp(value - tl.max(tl.max(value, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    key = scores
    if HAS_CORRECTION:
        key += tl.load(correction + expert, mask=free, other=0.0)
    key = tl.where(free & (key == key), key, float("-inf"))
    if KEPT < GROUPS:
        best = tl.max(key, 1)  # [BG]
        if BY_TWO and SIZE > 1:
            first = tl.min(tl.where(key == best[:, None], member[None, :], BS), 1)
            best += tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), key), 1)
        left = group < GROUPS
        for _ in range(KEPT):
            top = tl.max(tl.where(left, best, float("-inf")), 0)
            taken = tl.min(tl.where(left & (best == top), group, BG), 0)
            left = left & (group != taken)
        free = free & ((group < GROUPS) & (left == 0))[:, None]
    place = tl.arange(0, BK)
    experts, shares = tl.full((BK,), GROUPS * SIZE, tl.int32), tl.zeros((BK,), tl.float32)
    for k in range(TOP_K):
        open_key = tl.where(free, key, float("-inf"))
        is_top = free & (open_key == tl.max(tl.max(open_key, 1), 0))
        taken = tl.min(tl.min(tl.where(is_top, expert, GROUPS * SIZE), 1), 0)
        is_taken = free & (expert == taken)
        share = tl.sum(tl.sum(tl.where(is_taken, scores, 0.0), 1), 0)
        experts, shares = tl.where(place == k, taken, experts), tl.where(place == k, share, shares)
        free = free & (expert != taken)
    if NORMALISES:
        total = tl.sum(shares, 0)
        if IS_SIGMOID:
            total += 1e-20
        shares = shares / total
    has_token = tl.load(position + row) >= 0
    to = row * TOP_K + place
    tl.store(chosen + to, tl.where(has_token, experts, GROUPS * SIZE), mask=place < TOP_K)
    tl.store(weights + to, tl.where(has_token, shares * scale, 0.0), mask=place < TOP_K)


@triton.jit(do_not_specialize=["choices", "tiles", "tile_rows", "step"])  # which the number of rows decides
def sort_kernel(  # type: ignore[no-untyped-def]
    chosen, order, tile_expert, tile_first, tile_count, choices, tiles, tile_rows, step, BLOCK: tl.constexpr
):  # fmt: skip
    """One program collects the choices of one expert and cuts them into tiles of up to `tile_rows`.

    It finds its place in `order` from the choices of experts before it, and so it does among the tiles. With step 1
    there is a tile for each choice, and those that begin no tile have no rows. Otherwise, `step` being `tile_rows`, an
    expert has one tile more than fit into its choices, so that none begins before the last one's have ended."""
    expert, last, index = tl.program_id(0), tl.num_programs(0) - 1, tl.arange(0, BLOCK)
    before, own = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, choices, BLOCK):
        found = tl.load(chosen + start + index, mask=start + index < choices, other=last + 1)
        before += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    first, count = tl.sum(before, 0), tl.sum(own, 0)
    at = first
    for start in range(0, choices, BLOCK):
        found = tl.load(chosen + start + index, mask=start + index < choices, other=last + 1)
        is_own = (found == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(is_own, 0) - is_own, start + index, mask=is_own != 0)
        at += tl.sum(is_own, 0)
    if step == 1:
        begin, end = first, first + count
    else:
        begin, end = first // tile_rows + expert, (first + count) // tile_rows + expert + 1
    end = tl.where(expert == last, tiles, end)
    for start in range(begin, end, BLOCK):
        tile = start + index
        row = (tile - begin) * step
        rows = tl.where(row % tile_rows == 0, tl.minimum(tl.maximum(count - row, 0), tile_rows), 0)
        tl.store(tile_expert + tile, expert, mask=tile < end)
        tl.store(tile_first + tile, first + row, mask=tile < end)
        tl.store(tile_count + tile, rows, mask=tile < end)


@triton.jit
def expert_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, order, tile_expert, tile_first, tile_rows, x_stride, inputs, outputs, choices_of_row,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program computes BN outputs of one tile: activation(gate) · up, or without KIND a product alone. A choice
    reads row `choice // choices_of_row` of x."""
    tile, output, column = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    rows = tl.load(tile_rows + tile)
    if rows > 0:
        lane, is_output = tl.arange(0, BM), output < outputs
        is_row = lane < rows
        choice = tl.load(order + tl.load(tile_first + tile) + lane, mask=is_row, other=0)
        expert = tl.load(tile_expert + tile).to(tl.int64)
        x_at = x + (choice // choices_of_row).to(tl.int64)[:, None] * x_stride + column[None, :]  # [BM, BK]
        matrix = outputs * inputs
        matrices: tl.constexpr = 2 if KIND != "" else 1
        weight_at = weight + expert * matrices * matrix + output[None, :] * inputs + column[:, None]  # [BK, BN]
        total, ups = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for start in range(0, inputs, BK):
            inside = start + column < inputs
            is_weight = inside[:, None] & is_output[None, :]
            xs = tl.load(x_at + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            total = tl.dot(xs, tl.load(weight_at + start, mask=is_weight, other=0.0), total, input_precision="ieee")
            if KIND != "":
                up = tl.load(weight_at + matrix + start, mask=is_weight, other=0.0)
                ups = tl.dot(xs, up, ups, input_precision="ieee")
        if HAS_BIAS:
            bias_at = bias + expert * matrices * outputs + output
            total += tl.load(bias_at, mask=is_output, other=0.0).to(tl.float32)[None, :]
            if KIND != "":
                ups += tl.load(bias_at + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if KIND != "":
            total = gated(total, ups, KIND)
        to = out + choice.to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    done, chosen, weights, out, out_stride, width, experts, TOP_K: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program sums BLOCK columns of one row, its choices in their order; what no expert has computed is not
    read."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        choice = row * TOP_K + k
        is_done = inside & (tl.load(chosen + choice) < experts)
        value = tl.load(done + choice * width + column, mask=is_done, other=0.0).to(tl.float32)
        total += tl.load(weights + choice) * value
    to = out + row * out_stride + column
    if ADDS:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


def most_tiles(choices: int, experts: int, tile_rows: int) -> int:
    """Returns into how many tiles the choices may fall, whatever they are."""
    return min(choices, choices // tile_rows + experts)


def product_shape(choices: int, weight: Tensor, *, is_gated: bool) -> dict[str, Any]:
    """Returns tile sizes and launch options of a grouped product, by the mean number of an expert's rows. Tiles are
    larger than that, so that most experts have one, whose programs read its weights once. With many rows the tiles of
    GPUs that have the registers and shared memory for it are twice as wide, and read half as much for each sum.

    weight: [experts, outputs, inputs]."""
    experts = len(weight)
    if weight.dtype is torch.float32:
        return {"BM": _LEAST_ROWS, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 3}
    if choices <= _FEW * experts:
        return {"BM": _LEAST_ROWS, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}
    if choices <= _SOME * experts:
        return {"BM": 64, "BN": 64 if is_gated else 128, "BK": 64, "num_warps": 4, "num_stages": 3}
    width = 64 if is_gated else 128
    capability, are_aligned = compute_capability(weight.device), all(size % 16 == 0 for size in weight.shape[1:])
    if capability >= _WIDE_CAPABILITY and capability not in SMALL_SHARED_MEMORY and are_aligned:
        width *= 2
    return {"BM": 128, "BN": width, "BK": 64, "num_warps": 8, "num_stages": 3}


def route(logits: Tensor, position: Tensor, how: Routing, room: ExpertRoom) -> None:
    """Writes the experts of each row, best first, and their weights. logits: [rows, experts], rows at any stride;
    position: int32 [rows], negative for rows of no token."""
    groups, kept, score = how.groups or (1, 1, "max")
    size = how.experts // groups
    blocks = {"BG": triton.next_power_of_2(groups), "BS": triton.next_power_of_2(size)}
    route_kernel[(len(logits),)](
        logits, position, room.weights if how.correction is None else how.correction, room.chosen, room.weights,
        logits.stride(0), how.scale,
        IS_SIGMOID=how.scores == "sigmoid", NORMALISES=how.normalise, HAS_CORRECTION=how.correction is not None,
        GROUPS=groups, SIZE=size, KEPT=kept, BY_TWO=score == "top2", TOP_K=how.top_k,
        BK=triton.next_power_of_2(how.top_k), **blocks, num_warps=min(8, max(1, blocks["BG"] * blocks["BS"] // 256)),
    )  # fmt: skip


def sort(choices: int, experts: int, tile_rows: int, room: ExpertRoom) -> None:
    """Groups the first `choices` choices by expert and cuts them into tiles; all of `most_tiles` are written."""
    tiles = most_tiles(choices, experts, tile_rows)
    sort_kernel[(experts,)](
        room.chosen, room.order, room.tiles.expert, room.tiles.first, room.tiles.rows,
        choices, tiles, tile_rows, 1 if tiles == choices else tile_rows, BLOCK=_SORTED_AT_ONCE, num_warps=8,
    )  # fmt: skip


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    room: ExpertRoom,
    tiles: int,
    choices_of_row: int,
    shape: dict[str, Any],
    kind: Activation | None = None,
) -> None:
    """Multiplies the choices of each tile by its expert's weights, [experts, outputs, inputs], or with `kind` by both
    halves of these. out: [choices · outputs]; choices_of_row: that read the same row of x."""
    outputs, inputs = weight.shape[1] // (1 if kind is None else 2), weight.shape[2]
    expert_kernel[(ceil_div(outputs, shape["BN"]), tiles)](
        x, weight, weight if bias is None else bias, out, room.order,
        room.tiles.expert, room.tiles.first, room.tiles.rows, x.stride(0), inputs, outputs, choices_of_row,
        KIND=kind or "", HAS_BIAS=bias is not None, **shape,
    )  # fmt: skip


def sum_choices(out: Tensor, how: Routing, room: ExpertRoom, *, adds: bool) -> None:
    """Computes each row's sum of its experts' outputs by their weights, or adds it to `out`, [rows, hidden]."""
    rows, hidden = out.shape
    sum_kernel[(rows, ceil_div(hidden, _COLUMNS))](
        room.done, room.chosen, room.weights, out, out.stride(0), hidden, how.experts,
        TOP_K=how.top_k, ADDS=adds, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


def apply_experts(
    x: Tensor,
    logits: Tensor,
    position: Tensor,
    experts: ExpertWeights,
    room: ExpertRoom,
    out: Tensor,
    *,
    adds: bool,
) -> None:
    """Computes what the chosen experts make of each row, or adds it to `out`. Rows of no token get 0.

    x, out: [rows, hidden]; logits: [rows, experts]; position: int32 [rows], negative for rows of no token.
    """
    how, rows = experts.routing, len(x)
    choices = rows * how.top_k
    first = product_shape(choices, experts.gate_up, is_gated=True)
    second = product_shape(choices, experts.down, is_gated=False)
    tiles = most_tiles(choices, how.experts, first["BM"])
    route(logits, position, how, room)
    sort(choices, how.experts, first["BM"], room)
    given = experts.gate_up, experts.gate_up_bias, room.inner, room, tiles
    multiply(x, *given, how.top_k, first, experts.activation)
    inner = room.inner[: choices * experts.inner].view(choices, experts.inner)
    multiply(inner, experts.down, experts.down_bias, room.done, room, tiles, 1, second)
    sum_choices(out, how, room, adds=adds)
