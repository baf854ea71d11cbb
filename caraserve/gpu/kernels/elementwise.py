"""Embedding, activations and logits. Arithmetic is fp32 for all tensor dtypes, and each result is rounded once."""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.kernels.lora_sums import LoraSums, lora_arguments, lora_entry, lora_place, with_lora
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.model.plan import Activation
from caraserve.util.units import ceil_div

_COLUMNS = 1024  # per program


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    history, weight, positions, token_slot, token_position, hidden, scale,
    history_stride, weight_stride, positions_stride, hidden_stride, width,
    IS_THERE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program embeds BLOCK columns of one token. Where it stands for a vector, `hidden` has that already."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(token_position + token)
    slot = tl.load(token_slot + token, mask=position >= 0, other=0).to(tl.int64)
    known = tl.load(history + slot * history_stride + position, mask=position >= 0, other=0).to(tl.int64)
    inside = (column < width) & (known >= 0)
    at = hidden + token * hidden_stride + column if IS_THERE else weight + known * weight_stride + column
    row = tl.load(at, mask=inside & (position >= 0), other=0.0)
    if HAS_SCALE:
        row = row.to(tl.float32) * scale
    if HAS_POSITIONS:
        vector = tl.load(hidden + token * hidden_stride + column, mask=(column < width) & (known < 0), other=0.0)
        at = positions + position.to(tl.int64) * positions_stride + column
        inside = column < width
        row = row.to(tl.float32) + vector.to(tl.float32) + tl.load(at, mask=inside & (position >= 0), other=0.0)
    tl.store(hidden + token * hidden_stride + column, row.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activated(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == "silu":
        result = x * _sigmoid(x)
    elif KIND == "sigmoid":
        result = _sigmoid(x)
    elif KIND == "gelu_tanh":  # x · (1 + tanh u) / 2 = x · σ(2u) with u = √(2/π) · (x + 0.044715 x³)
        result = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * (x * x * x)))
    elif KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "relu2", "an activation of plan.Activation")
        result = x * tl.maximum(x, 0.0)
    return result


@triton.jit
def gated(g, u, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns activation(g) · u in fp32. A NaN stays one."""
    if KIND == "clamped_swiglu":
        g = tl.minimum(g, 7.0, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, 7.0, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        result = g * _sigmoid(1.702 * g) * u
    else:
        result = _activated(g, KIND) * u
    return result


@triton.jit
def activate_kernel(  # type: ignore[no-untyped-def]
    gate, up, row_gate, out, sums, lora_slots, ranks, scales, vectors, sums_stride, adapters,
    gate_stride, up_stride, row_gate_stride, out_stride, width,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, HAS_ROW_GATE: tl.constexpr, HAS_LORA: tl.constexpr,
    GATE_SITE: tl.constexpr, GATE_SUMS: tl.constexpr, UP_SITE: tl.constexpr, UP_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK columns of one row. A NaN stays one."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_LORA:
        slot, entry = lora_entry(lora_slots, row, UP_SITE, adapters)
        at = sums + row * sums_stride + UP_SUMS
        u = with_lora(u, at, column, inside, width, slot, entry, ranks, scales, vectors)
        u = u.to(up.dtype.element_ty).to(tl.float32)
    if IS_GATED:
        g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_LORA:
            slot, entry = lora_entry(lora_slots, row, GATE_SITE, adapters)
            at = sums + row * sums_stride + GATE_SUMS
            g = with_lora(g, at, column, inside, width, slot, entry, ranks, scales, vectors)
            g = g.to(gate.dtype.element_ty).to(tl.float32)
        result = gated(g, u, KIND)
    else:
        result = _activated(u, KIND)
    if HAS_ROW_GATE:
        result *= _sigmoid(tl.load(row_gate + row * row_gate_stride).to(tl.float32))
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def cap_kernel(logits, stride, width, factor, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program scales and caps BLOCK columns of one row in place; `factor` is that of tanh's exponent."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + column
    value = tl.load(at, mask=column < width, other=0.0).to(tl.float32) * factor
    if HAS_CAP:
        value = cap - 2.0 * cap / (tl.exp(value) + 1.0)  # cap · tanh
    tl.store(at, value.to(logits.dtype.element_ty), mask=column < width)


def embed(
    history: Tensor,
    weight: Tensor | None,
    tokens: TokenTables,
    hidden: Tensor,
    scale: float = 1.0,
    positions: Tensor | None = None,
) -> None:
    """Writes `embedding · scale` of each token, read from the history at its slot and position; position -1 gives
    zeros. Where the history has a negative token, `hidden` has its vector already, which no scale multiplies. Adds the
    row of the token's position to either, if there are such.

    history: int32 [slots, positions + 1], also written by sampling; weight: [vocab, width], None if `hidden` has the
    rows of the embedding already; hidden: [tokens, width]; positions: float32 [positions, width].
    """
    count, width = hidden.shape
    embed_kernel[(count, ceil_div(width, _COLUMNS))](
        history, hidden if weight is None else weight, hidden if positions is None else positions,
        tokens.slot, tokens.position, hidden, scale,
        history.stride(0), 0 if weight is None else weight.stride(0),
        0 if positions is None else positions.stride(0), hidden.stride(0), width,
        IS_THERE=weight is None, HAS_SCALE=scale != 1.0, HAS_POSITIONS=positions is not None,
        BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


def activate(
    gate: Tensor | None,
    up: Tensor,
    out: Tensor,
    kind: Activation,
    row_gate: Tensor | None = None,
    lora: LoraSums | None = None,
) -> None:
    """Computes `out = activation(gate) · up · σ(row_gate)`, or `activation(up)` without a gate; [tokens, width], rows
    at any stride. row_gate: [tokens, 1]; without it nothing is multiplied. `lora`: of `gate` and `up`, is added to them
    first, which stay as they are in memory."""
    if gate is None and kind == "clamped_swiglu":
        raise ValueError("clamped_swiglu multiplies two inputs, but there is no gate")
    _activate(gate, up, out, kind, row_gate, lora)


def multiply_by_gate(attended: Tensor, gate: Tensor) -> None:
    """Computes `attended = attended · σ(gate)` in place; [tokens, width], rows at any stride."""
    _activate(gate, attended, attended, "sigmoid")


def _activate(
    gate: Tensor | None,
    up: Tensor,
    out: Tensor,
    kind: Activation | Literal["sigmoid"],
    row_gate: Tensor | None = None,
    lora: LoraSums | None = None,
) -> None:
    width = out.shape[1]
    (gate_site, gate_sums), (up_site, up_sums) = (lora_place(lora, role) for role in ("gate", "up"))
    activate_kernel[(out.shape[0], ceil_div(width, _COLUMNS))](
        up if gate is None else gate, up, up if row_gate is None else row_gate, out, *lora_arguments(lora, up),
        0 if gate is None else gate.stride(0), up.stride(0), 0 if row_gate is None else row_gate.stride(0),
        out.stride(0), width,
        KIND=kind, IS_GATED=gate is not None, HAS_ROW_GATE=row_gate is not None, HAS_LORA=lora is not None,
        GATE_SITE=gate_site, GATE_SUMS=gate_sums, UP_SITE=up_site, UP_SUMS=up_sums, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


def cap_logits(logits: Tensor, scale: float, cap: float | None) -> None:
    """Computes `cap · tanh(logits · scale / cap)` in place, or `logits · scale` without a cap; [rows, vocab]."""
    count, width = logits.shape
    cap_kernel[(count, ceil_div(width, _COLUMNS))](
        logits, logits.stride(0), width, scale if cap is None else 2.0 * scale / cap, cap or 0.0,
        HAS_CAP=cap is not None, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
