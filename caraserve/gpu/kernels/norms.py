"""Norms, and the residual sums before them. Arithmetic is fp32 for all tensor dtypes, and each result is rounded once.
A program norms a whole row, so no result depends on the number of rows."""

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.kernels.lora_sums import LoraSums, lora_arguments, lora_entry, with_lora

# What a norm does, as bits of a kernel's constant beside the first; 0 is no norm.
SUBTRACTS_MEAN, ADDS_BIAS, BY_HEAD = (tl.constexpr(1 << bit) for bit in (1, 2, 3))


@dataclass(frozen=True, slots=True)
class NormWeights:
    """y = x / √(mean x² + eps) · weight + bias, for x of which the mean is subtracted first if so stated."""

    weight: Tensor  # float32 [width]; of `heads` [heads, head dim]
    bias: Tensor | None  # like `weight`
    eps: float
    subtracts_mean: bool = False
    # row: over the whole row; head: over each head, with one weight for all; heads: with a weight for each head
    scope: Literal["row", "head", "heads"] = "row"


def norm_form(norm: NormWeights | None) -> int:
    """Returns what a norm does as a constant of a kernel."""
    if norm is None:
        return 0
    bits = (True, norm.subtracts_mean, norm.bias is not None, norm.scope == "heads")
    return sum(bit << index for index, bit in enumerate(bits))


@triton.jit
def _normed(value, weight, bias, column, inside, width, eps, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Norms one row. A square that overflows gives NaN: 1 / sqrt(inf) would give a row of zeros."""
    if SUBTRACTS_MEAN & FORM:
        value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    squares = tl.sum(value * value, 0)
    factor = 1.0 / tl.sqrt(squares / width + eps) + squares * 0.0
    result = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * (value * factor)
    if ADDS_BIAS & FORM:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return result


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    hidden, delta, out, rows, pre_weight, pre_bias, pre_eps, post_weight, post_bias, post_eps, multiplier, scalar,
    sums, lora_slots, ranks, scales, vectors, sums_stride, adapters, hidden_stride, delta_stride, out_stride, width,
    HAS_DELTA: tl.constexpr, HAS_LORA: tl.constexpr, HAS_ROWS: tl.constexpr, SCALES: tl.constexpr, PRE: tl.constexpr,
    POST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program adds to one row of `hidden` and norms it."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row).to(tl.int64)
    if source >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(hidden + source * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_DELTA or SCALES:
            if HAS_DELTA:
                added = tl.load(delta + source * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
                if HAS_LORA:
                    slot, entry = lora_entry(lora_slots, source, 0, adapters)
                    at = sums + source * sums_stride
                    added = with_lora(added, at, column, inside, width, slot, entry, ranks, scales, vectors)
                    added = added.to(delta.dtype.element_ty).to(tl.float32)
                if POST:
                    added = _normed(added, post_weight, post_bias, column, inside, width, post_eps, POST)
                if SCALES:
                    added = added * multiplier
                value = value + added
            if SCALES:
                value = value * scalar
            # The norm reads the rounded sum, as later layers do.
            rounded = value.to(hidden.dtype.element_ty)
            tl.store(hidden + source * hidden_stride + column, rounded, mask=inside)
            value = rounded.to(tl.float32)
        if PRE:
            result = _normed(value, pre_weight, pre_bias, column, inside, width, pre_eps, PRE)
            tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


def norm_warps(width: int) -> int:
    """Returns the number of warps for a row of `width` numbers: about 16 numbers per thread."""
    return int(min(16, max(1, triton.next_power_of_2(width) // 512)))


def add_and_norm(
    hidden: Tensor,
    delta: Tensor | None,
    out: Tensor | None,
    pre: NormWeights | None,
    post: NormWeights | None = None,
    multiplier: float = 1.0,
    scalar: float = 1.0,
    rows: Tensor | None = None,
    lora: LoraSums | None = None,
) -> None:
    """Computes `hidden = (hidden + post(delta) · multiplier) · scalar` in place, then `out = pre(hidden)`; rows of
    [tokens, width]. `lora`: of one projection, is added to `delta` first, which stays as it is in memory.

    Without `delta` nothing is added, without `post` delta is added as it is, and without `pre` only `hidden` is
    written. With `rows`, int32 [rows of out], row i of `out` is that of token rows[i], or is skipped if rows[i] is -1;
    no token may be named twice unless `hidden` stays as it is.
    """
    width, count = hidden.shape[1], (hidden if rows is None else rows).shape[0]
    pre_weight, pre_bias, pre_eps = _arguments(pre, hidden)
    post_weight, post_bias, post_eps = _arguments(post, hidden)
    norm_kernel[(count,)](
        hidden, hidden if delta is None else delta, hidden if out is None else out, hidden if rows is None else rows,
        pre_weight, pre_bias, pre_eps, post_weight, post_bias, post_eps, multiplier, scalar,
        *lora_arguments(lora, hidden), hidden.stride(0), 0 if delta is None else delta.stride(0),
        0 if out is None else out.stride(0), width,
        HAS_DELTA=delta is not None, HAS_LORA=lora is not None, HAS_ROWS=rows is not None,
        SCALES=(multiplier, scalar) != (1.0, 1.0),
        PRE=norm_form(pre), POST=norm_form(post), BLOCK=triton.next_power_of_2(width), num_warps=norm_warps(width),
    )  # fmt: skip


def norm_rows(x: Tensor, norm: NormWeights) -> None:
    """Norms rows of [tokens, width] in place, at any stride."""
    add_and_norm(x, None, x, norm)


def _arguments(norm: NormWeights | None, unread: Tensor) -> tuple[Tensor, Tensor, float]:
    """Returns weight, bias and eps; `unread` stands for what there is not."""
    if norm is None:
        return unread, unread, 0.0
    return norm.weight, unread if norm.bias is None else norm.bias, norm.eps
