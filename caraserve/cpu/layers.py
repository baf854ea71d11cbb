"""What a decoder computes beside matrix products: embedding, norms, rotary embedding, activations. Rows are fp32."""

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately, kernel
from caraserve.cpu.simd import (
    LANES,
    load_f32,
    store_f32,
    vadd,
    vdiv,
    vexp,
    vfma,
    vload,
    vmax,
    vmin,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
    vtanh,
)
from caraserve.cpu.structs import NO_COLUMN, norm_at, site_at
from caraserve.cpu.tiles import call_by_address
from caraserve.model.plan import Activation

# The number of each activation in an MLP_BODY record.
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3, "clamped_swiglu": 4}
_SILU, _GELU_TANH, _GELU, _RELU2, _CLAMPED_SWIGLU = (
    np.int64(ACTIVATIONS[name]) for name in ("silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu")
)
# Abramowitz and Stegun 7.1.26: erfc(x) = (a₁t + … + a₅t⁵) e^(−x²) for x ≥ 0 and t = 1 / (1 + px), within 1.5e-7.
_ERF_P = np.float32(0.3275911)
_ERF_A = tuple(np.float32(a) for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
_HALF_ROOT = np.float32(0.5**0.5)
_call3 = call_by_address(3)
_CLAMP, _CLAMPED_SLOPE = np.float32(7.0), np.float32(1.702)


@kernel
def scale_row(x, width, factor):  # type: ignore[no-untyped-def]
    """Computes `x *= factor` for x[width], a whole number of vectors."""
    by = vsplat(factor)
    for d in range(0, width, LANES):
        vstore(x + 4 * d, vmul(vload(x + 4 * d), by))


@kernel
def embed(token, model, y):  # type: ignore[no-untyped-def]
    """Writes the embedding of `token`, times the model's factor, to y[hidden], padded."""
    _call3(site_at(model.embed).row, model.embed, token, y)
    if model.embed_scale != np.float32(1.0):
        scale_row(y, model.hidden_pad, model.embed_scale)


@kernel
def copy_vector(x, count, y):  # type: ignore[no-untyped-def]
    """Copies x[count] to y."""
    for d in range(count):
        store_f32(y + 4 * d, load_f32(x + 4 * d))


@kernel
def add_vector(x, count, y):  # type: ignore[no-untyped-def]
    """Computes `y += x` for x[count]."""
    for d in range(count):
        store_f32(y + 4 * d, load_f32(y + 4 * d) + load_f32(x + 4 * d))


@kernel
def add_scaled(x, width, factor, scalar, y):  # type: ignore[no-untyped-def]
    """Computes `y = (y + x · factor) · scalar` for x[width], a whole number of vectors."""
    by, over_all = vsplat(factor), vsplat(scalar)
    for lane in range(0, 4 * width, 4 * LANES):
        vstore(y + lane, vmul(vfma(vload(x + lane), by, vload(y + lane)), over_all))


@kernel
def add_bias(y, y_stride, rows, bias):  # type: ignore[no-untyped-def]
    """Computes `y[rows, 64] += bias[64]`."""
    for row in range(rows):
        for lane in range(0, PANEL, LANES):
            at = y + row * y_stride + 4 * lane
            vstore(at, vadd(vload(at), vload(bias + 4 * lane)))


@kernel
def apply_vectors(vectors, outputs, first, end, y, y_stride, rows, residual):  # type: ignore[no-untyped-def]
    """Computes `y = y · factor + bias` for the panels [first, end) of rows. `vectors`: address of the factors of
    `outputs` numbers, and the biases after them. `residual`: address of what is added then, with y's stride, or 0."""
    for lane in range(4 * PANEL * first, 4 * PANEL * end, 4 * LANES):
        factor, bias = vload(vectors + lane), vload(vectors + 4 * outputs + lane)
        for row in range(lane, lane + rows * y_stride, y_stride):
            value = vfma(vload(y + row), factor, bias)
            vstore(y + row, vadd(value, vload(residual + row)) if residual != 0 else value)


@kernel
def move_panels(x, first, end, stride, rows, y):  # type: ignore[no-untyped-def]
    """Moves the panels [first, end) of rows from x to y, which have one stride, and leaves zeros in x."""
    zero = vsplat(np.float32(0.0))
    for row in range(rows):
        for lane in range(row * stride + 4 * PANEL * first, row * stride + 4 * PANEL * end, 4 * LANES):
            vstore(y + lane, vload(x + lane))
            vstore(x + lane, zero)


# --- norms ---


@compiled_separately(4)
def normalise(norm_address, x, y, head):  # type: ignore[no-untyped-def]
    """Writes a row, or head number `head` of it, normalised to y, which may be x. Elements are zero-padded.

    Gives NaN if a square overflows: 1 / sqrt(inf) would give a row of zeros and equal logits, which look valid.
    """
    norm = norm_at(norm_address)
    width, padded, at = norm.width, 4 * norm.padded, head * norm.head_bytes
    if norm.subtracts_mean:
        total = vsplat(np.float32(0.0))
        for lane in range(0, padded, 4 * LANES):
            total = vadd(total, vload(x + lane))
        mean = vsplat(vsum(total) / np.float32(width))
        for lane in range(0, padded, 4 * LANES):
            vstore(y + lane, vsub(vload(x + lane), mean))
        for place in range(4 * width, padded, 4):
            store_f32(y + place, np.float32(0.0))
        x = y
    total = vsplat(np.float32(0.0))
    for lane in range(0, padded, 4 * LANES):
        value = vload(x + lane)
        total = vfma(value, value, total)
    mean_square = vsum(total) / np.float32(width)
    factor = vsplat(np.float32(1.0) / np.sqrt(mean_square + norm.eps) + mean_square * np.float32(0.0))
    weight, bias = norm.weight + at, norm.bias + at
    for lane in range(0, padded, 4 * LANES):
        value = vmul(vload(weight + lane), vmul(vload(x + lane), factor))
        vstore(y + lane, vadd(value, vload(bias + lane)) if norm.bias != 0 else value)


# --- rotary embedding ---


@kernel
def rotate(head, pairs, cos, sin):  # type: ignore[no-untyped-def]
    """Applies the rotary embedding to the first dimensions of a head: (x1, x2) → (x1·cos - x2·sin, x2·cos + x1·sin)
    for each pair of dimensions (d, d + pairs). Products are rounded before they are added."""
    second = head + 4 * pairs
    whole = 4 * (pairs // LANES * LANES)
    for at in range(0, whole, 4 * LANES):
        c, s, x1, x2 = vload(cos + at), vload(sin + at), vload(head + at), vload(second + at)
        vstore(head + at, vsub(vmul(x1, c), vmul(x2, s)))
        vstore(second + at, vadd(vmul(x2, c), vmul(x1, s)))
    for at in range(whole, 4 * pairs, 4):
        c, s, x1, x2 = load_f32(cos + at), load_f32(sin + at), load_f32(head + at), load_f32(second + at)
        store_f32(head + at, x1 * c - x2 * s)
        store_f32(second + at, x2 * c + x1 * s)


# --- activations ---


@kernel
def sigmoid(x):  # type: ignore[no-untyped-def]
    """Returns 1 / (1 + e^-x) of sixteen numbers."""
    one, zero = vsplat(np.float32(1.0)), vsplat(np.float32(0.0))
    return vdiv(one, vadd(one, vexp(vsub(zero, x))))


@kernel
def _gelu(x):  # type: ignore[no-untyped-def]
    """Returns x · Φ(x) with Φ(x) = erfc(-x / √2) / 2."""
    one, zero = vsplat(np.float32(1.0)), vsplat(np.float32(0.0))
    z = vmul(vmax(x, vsub(zero, x)), vsplat(_HALF_ROOT))  # |x| / √2
    t = vdiv(one, vfma(vsplat(_ERF_P), z, one))
    poly = vsplat(_ERF_A[4])
    for index in range(4):
        poly = vfma(poly, t, vsplat(_ERF_A[3 - index]))
    tail = vmul(vmul(poly, t), vexp(vsub(zero, vmul(z, z))))  # erfc(z)
    # max(x, 0) - |x| · tail / 2: both signs without a branch, and a tail that does not cancel
    magnitude = vmul(vmax(x, vsub(zero, x)), vsplat(np.float32(0.5)))
    return vsub(vmax(zero, x), vmul(magnitude, tail))


@kernel
def _activated(kind, x):  # type: ignore[no-untyped-def]
    """Returns the activation of sixteen numbers. A NaN stays one."""
    if kind == _SILU:
        return vmul(x, sigmoid(x))
    if kind == _GELU_TANH:  # x · (1 + tanh u) / 2 = x · σ(2u) with u = √(2/π) · (x + 0.044715 x³)
        root = np.float32(2.0 * (2.0 / np.pi) ** 0.5)
        inner = vfma(vmul(vmul(x, x), x), vsplat(np.float32(0.044715)), x)
        return vmul(x, sigmoid(vmul(inner, vsplat(root))))
    if kind == _GELU:
        return _gelu(x)
    return vmul(x, vmax(vsplat(np.float32(0.0)), x))  # relu²


@kernel
def _gated(kind, gate, up):  # type: ignore[no-untyped-def]
    if kind == _CLAMPED_SWIGLU:
        most, one = vsplat(_CLAMP), vsplat(np.float32(1.0))
        gate, up = vmin(most, gate), vmax(vsplat(-_CLAMP), vmin(most, up))
        return vmul(vadd(up, one), vmul(gate, sigmoid(vmul(gate, vsplat(_CLAMPED_SLOPE)))))
    return vmul(_activated(kind, gate), up)


@kernel
def activate(mlp, rows, row_bytes, tokens, panel):  # type: ignore[no-untyped-def]
    """Computes the activation of one panel in place: of gate and up in gate's columns, or of up alone in up's.

    `rows`: address of `tokens` rows of `row_bytes` each, in which the record `mlp` names the columns.
    """
    kind, is_gated = mlp.activation, mlp.gate != NO_COLUMN
    up = rows + mlp.up + 4 * PANEL * panel
    gate = rows + mlp.gate + 4 * PANEL * panel if is_gated else up
    for token in range(tokens):
        for lane in range(token * row_bytes, token * row_bytes + 4 * PANEL, 4 * LANES):
            if is_gated:
                vstore(gate + lane, _gated(kind, vload(gate + lane), vload(up + lane)))
            else:
                vstore(up + lane, _activated(kind, vload(up + lane)))


@kernel
def cap_logits(y, width, scale, cap):  # type: ignore[no-untyped-def]
    """Computes `y = cap · tanh(y · scale / cap)` for y[width], or `y · scale` if the cap is 0."""
    for lane in range(0, width, LANES):
        value = vmul(vload(y + 4 * lane), vsplat(scale))
        vstore(y + 4 * lane, soft_cap(value, cap))


@kernel
def soft_cap(x, cap):  # type: ignore[no-untyped-def]
    """Returns `cap · tanh(x / cap)` of sixteen numbers, x if the cap is 0."""
    if cap == np.float32(0.0):
        return x
    return vmul(vsplat(cap), vtanh(vdiv(x, vsplat(cap))))
