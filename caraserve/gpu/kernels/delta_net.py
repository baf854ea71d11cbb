"""Gated delta nets: a causal convolution, a recurrence with a matrix for each value head, and a norm with a gate.

Arithmetic is fp32 for all tensor dtypes, and each result is rounded once; the matrices stay in fp32. A request's row
starts where the token before is of another request, so a captured graph needs no list of rows: of the programs of all
tokens, those of a row's first token compute the recurrence of the row. At position 0 the state counts as zero, whatever
the slot held before.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.kernels.norms import NormWeights
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.util.units import ceil_div

_CHANNELS = 256  # of the convolution, in a program
_COLUMNS = 32  # of a matrix, in a program: 128 × 32 numbers are 32 registers of 128 threads
_LENGTH_EPS = tl.constexpr(1e-6)  # added to the squared lengths of q and k
_LARGE_STEP = tl.constexpr(20.0)  # from here on ln(1 + e^x) is x in fp32


@dataclass(frozen=True, slots=True)
class DeltaNetState:
    """What one layer keeps of each request slot."""

    inputs: Tensor  # [slots, kernel - 1, channels], the convolution's last: position p is at p mod kernel - 1
    matrices: Tensor  # float32 [slots, value heads, key width, value width]


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """What a delta net has besides its linears, and where its inputs are in a row of projections: q, k and v are the
    first columns."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    z: int  # first columns
    a: int
    b: int
    convolution: Tensor  # float32 [channels, kernel]
    negative_rate: Tensor  # float32 [value heads], -e^A
    step_bias: Tensor  # float32 [value heads]
    norm: NormWeights  # of each head

    @property
    def channels(self) -> int:
        return self.convolution.shape[0]


@triton.jit
def convolve_kernel(  # type: ignore[no-untyped-def]
    projected, mixed, weight, inputs, token_slot, token_position, stride, mixed_stride, slot_stride,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK channels of one token: silu(Σ weight · inputs). Inputs of tokens before the row's
    first are in the slot's state."""
    token, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(token_position + token)
    if position >= 0:
        inside = channel < CHANNELS
        slot = tl.load(token_slot + token)
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(KERNEL):
            back = KERNEL - 1 - tap
            exists = (token >= back) & (position >= back)
            source = tl.where(exists, token - back, 0)
            is_here = exists & (tl.load(token_position + source) == position - back)
            is_here = is_here & (tl.load(token_slot + source) == slot)
            is_kept = (position >= back) & (is_here == 0)
            here = tl.load(projected + source * stride + channel, mask=inside & is_here, other=0.0)
            place = tl.where(is_kept, position - back, 0) % KEPT
            kept_at = inputs + slot.to(tl.int64) * slot_stride + place * CHANNELS + channel
            kept = tl.load(kept_at, mask=inside & is_kept, other=0.0)
            value = here.to(tl.float32) + kept.to(tl.float32)  # one of them is 0
            total += value * tl.load(weight + channel * KERNEL + tap, mask=inside, other=0.0)
        result = total / (1.0 + tl.exp(-total))
        tl.store(mixed + token * mixed_stride + channel, result.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    """Returns x divided by its length."""
    return x / tl.sqrt(tl.sum(x * x, 0) + _LENGTH_EPS)


@triton.jit
def _keep_inputs(  # type: ignore[no-untyped-def]
    projected, inputs, first, end, end_position, stride, channel, inside, CHANNELS: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """Keeps some channels of the row's last KEPT inputs, the row being the tokens [first, end)."""
    for back in tl.static_range(1, KEPT + 1):
        if end - back >= first:
            value = tl.load(projected + (end - back) * stride + channel, mask=inside)
            tl.store(inputs + (end_position - back) % KEPT * CHANNELS + channel, value, mask=inside)


@triton.jit
def recur_kernel(  # type: ignore[no-untyped-def]
    projected, mixed, out, inputs, matrices, negative_rate, step_bias, token_slot, token_position,
    stride, mixed_stride, out_stride, slot_stride, matrix_stride, scale,
    A: tl.constexpr, B: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEYS_PAD: tl.constexpr, CHANNELS: tl.constexpr, KEPT: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program advances BLOCK columns of one matrix S by all tokens of a row: S = decay · S, S += k (rate · (v -
    Sᵀk))ᵀ, and writes Sᵀq. It also keeps the inputs of the convolution that no program reads any more."""
    token, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(token_position + token)
    slot = tl.load(token_slot + token)
    before = tl.maximum(token - 1, 0)
    continues = (token > 0) & (tl.load(token_slot + before) == slot)
    continues = continues & (tl.load(token_position + before) == position - 1)
    if (position >= 0) & (continues == 0):
        key, column = tl.arange(0, KEYS_PAD), block * BLOCK + tl.arange(0, BLOCK)
        is_key, is_column = key < KEYS, column < VALUES
        group: tl.constexpr = VALUE_HEADS // KEY_HEADS
        q_first, v_first = head // group * KEYS, 2 * KEY_HEADS * KEYS + head * VALUES
        k_first = KEY_HEADS * KEYS + q_first
        rate_of_head, bias = tl.load(negative_rate + head), tl.load(step_bias + head)
        at = matrices + slot.to(tl.int64) * matrix_stride + head * (KEYS * VALUES)
        at = at + key[:, None] * VALUES + column[None, :]
        is_inside = is_key[:, None] & is_column[None, :]
        state = tl.load(at, mask=is_inside & (position > 0), other=0.0)
        first = token
        goes_on = position >= 0
        while goes_on:
            row, source = projected + token * stride, mixed + token * mixed_stride
            q = _unit(tl.load(source + q_first + key, mask=is_key, other=0.0).to(tl.float32)) * scale
            k = _unit(tl.load(source + k_first + key, mask=is_key, other=0.0).to(tl.float32))
            v = tl.load(source + v_first + column, mask=is_column, other=0.0).to(tl.float32)
            step = tl.load(row + A + head).to(tl.float32) + bias
            step = tl.where(step > _LARGE_STEP, step, tl.log(1.0 + tl.exp(tl.minimum(step, _LARGE_STEP))))
            state = state * tl.exp(rate_of_head * step)
            rate = 1.0 / (1.0 + tl.exp(-tl.load(row + B + head).to(tl.float32)))
            error = (v - tl.sum(state * k[:, None], 0)) * rate
            state = state + k[:, None] * error[None, :]
            result = tl.sum(state * q[:, None], 0)
            to = out + token * out_stride + head * VALUES + column
            tl.store(to, result.to(out.dtype.element_ty), mask=is_column)
            token += 1
            position += 1
            after = tl.minimum(token, TOKENS - 1)
            goes_on = (token < TOKENS) & (tl.load(token_slot + after) == slot)
            goes_on = goes_on & (tl.load(token_position + after) == position)
        tl.store(at, state, mask=is_inside)
        kept = inputs + slot.to(tl.int64) * slot_stride
        _keep_inputs(projected, kept, first, token, position, stride, v_first + column, is_column, CHANNELS, KEPT)
        if (head % group == 0) & (block == 0):
            _keep_inputs(projected, kept, first, token, position, stride, q_first + key, is_key, CHANNELS, KEPT)
            _keep_inputs(projected, kept, first, token, position, stride, k_first + key, is_key, CHANNELS, KEPT)


@triton.jit
def gate_heads_kernel(  # type: ignore[no-untyped-def]
    out, gate, weight, token_position, out_stride, gate_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program norms one head of one row of `out` and multiplies it by silu(gate)."""
    token, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    if tl.load(token_position + token) >= 0:
        inside, at = column < WIDTH, head * WIDTH + column
        value = tl.load(out + token * out_stride + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(value * value, 0)
        factor = 1.0 / tl.sqrt(squares / WIDTH + eps) + squares * 0.0  # NaN if a square overflows
        value = tl.load(weight + column, mask=inside, other=0.0) * (value * factor) * (z / (1.0 + tl.exp(-z)))
        tl.store(out + token * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def apply_delta_net(
    projected: Tensor, mixed: Tensor, out: Tensor, tokens: TokenTables, state: DeltaNetState, net: DeltaNetWeights
) -> None:
    """Computes a delta net's outputs of all rows, and advances the state of their requests.

    projected: [tokens, columns]; mixed: [tokens, channels], written; out: [tokens, value heads · value width]; rows at
    any stride. `tokens`: tables of the largest batch, in which positions of what no token takes are negative.
    """
    count, channels, kernel = len(projected), net.channels, net.convolution.shape[1]
    kept = max(1, kernel - 1)
    convolve_kernel[(count, ceil_div(channels, _CHANNELS))](
        projected, mixed, net.convolution, state.inputs, tokens.slot, tokens.position,
        projected.stride(0), mixed.stride(0), state.inputs.stride(0),
        CHANNELS=channels, KERNEL=kernel, KEPT=kept, BLOCK=_CHANNELS, num_warps=4,
    )  # fmt: skip
    columns = min(_COLUMNS, triton.next_power_of_2(net.value_width))
    recur_kernel[(count, net.value_heads, ceil_div(net.value_width, columns))](
        projected, mixed, out, state.inputs, state.matrices, net.negative_rate, net.step_bias, tokens.slot,
        tokens.position, projected.stride(0), mixed.stride(0), out.stride(0), state.inputs.stride(0),
        state.matrices.stride(0), net.key_width**-0.5,
        A=net.a, B=net.b, KEY_HEADS=net.key_heads, VALUE_HEADS=net.value_heads, KEYS=net.key_width,
        VALUES=net.value_width, KEYS_PAD=triton.next_power_of_2(net.key_width), CHANNELS=channels, KEPT=kept,
        TOKENS=len(tokens.position), BLOCK=columns, num_warps=4,
    )  # fmt: skip
    gate = projected[:, net.z : net.z + net.value_heads * net.value_width]
    gate_heads_kernel[(count, net.value_heads)](
        out, gate, net.norm.weight, tokens.position, out.stride(0), gate.stride(0), net.norm.eps,
        WIDTH=net.value_width, BLOCK=triton.next_power_of_2(net.value_width), num_warps=1,
    )  # fmt: skip
