"""Products with quantised weights, whose values are codes of one byte times a scale for each output; and what torch's
products of many rows need: codes of inputs, weights as numbers, scales for sums.

Inputs are multiplied as they are, or quantised first, row by row (`round_rows`). Codes become numbers in registers,
exactly, and sums are fp32; scales are applied to the sums, in fp32, before the result is rounded once. So a result is
that of the dequantised weights, but for the order of rounding. The order of a row's sums depends on the number of rows
in the batch, which chooses the tiles (`product_shape`), and on nothing else of the other rows.

An fp8 code becomes a float16 by moving its bits, or by the GPU's own instruction from compute capability 8.9 on. The
moved bits stand for 1/256 of the value, because the two types' exponents differ in bias by 8.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.kernels.capability import FP8_CAPABILITY
from caraserve.model.dtype import Code
from caraserve.util.units import ceil_div

_COLUMNS, _CODES = 1024, 2048  # per program of the elementwise kernels: 16 codes a thread, one load
_LEAST_SCALE = tl.constexpr(1e-30)  # of a row of zeros, by which it is divided
_BIAS = tl.constexpr(256.0)
_HALF_STEP, _LEAST_POWER = tl.constexpr(2.0**-14), tl.constexpr(2.0**-112)  # whose product is not subnormal


@triton.jit
def round_kernel(  # type: ignore[no-untyped-def]
    x, codes, scales, given, x_stride, width,
    LARGEST: tl.constexpr, FP8: tl.constexpr, IS_STATIC: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program quantises one row; NaN and infinities become NaN. `FORM`: what is stored, the "values" of codes, the
    "bits" of those of fp8, "integers", whose row gets NaN as its scale if it has any, or the "numbers" that the codes
    stand for."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(given) if IS_STATIC else tl.maximum(tl.div_rn(tl.max(tl.abs(value), 0), LARGEST), _LEAST_SCALE)
    value = tl.div_rn(value, scale)
    limited = tl.minimum(tl.maximum(value, -LARGEST), LARGEST) + value * 0.0
    step = 1.0  # between codes
    if FP8:
        bits = limited.to(tl.int32, bitcast=True)
        # A sixteenth of a binade from 2^-6 on has eight codes; below it the step stays the same.
        step = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), 0.015625) * 0.125
    rounder = step * 12582912.0  # 1.5 · 2^23: to this sum the hardware rounds to multiples of `step`, halves to even
    rounded = (limited + rounder) - rounder
    if FORM == "bits":
        bits = rounded.to(tl.int32, bitcast=True)
        size = tl.abs(rounded)
        code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), ((bits & 0x7FFFFFFF) >> 20) - 960)
        code = tl.where(rounded == rounded, code, 0x7F) | ((bits >> 24) & 0x80)
        tl.store(codes + row * width + column, code.to(tl.int8), mask=inside)
    elif FORM == "integers":
        is_number = rounded == rounded
        tl.store(codes + row * width + column, tl.where(is_number, rounded, 0.0).to(tl.int8), mask=inside)
        scale = 1.0 if IS_STATIC else scale
        scale = tl.where(tl.min(is_number.to(tl.int32), 0) == 1, scale, float("nan"))
    else:
        rounded = rounded * scale if FORM == "numbers" else rounded
        tl.store(codes + row * width + column, rounded.to(codes.dtype.element_ty), mask=inside)
    if FORM == "integers" or not IS_STATIC:
        tl.store(scales + row, scale)


@triton.jit
def halve_kernel(x, halves, scales, x_stride, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program scales one row by the power of two that makes its largest number 2^14 to 2^15."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(tl.abs(value), 0).to(tl.int32, bitcast=True) & 0x7F800000
    scale = tl.maximum(bits.to(tl.float32, bitcast=True), _LEAST_POWER) * _HALF_STEP
    tl.store(halves + row * width + column, tl.div_rn(value, scale).to(tl.float16), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _values(codes, dtype: tl.constexpr, FP8: tl.constexpr, HAS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the values of int8 or fp8 codes, given as int8; those of fp8 by the 256th without its instructions."""
    if not FP8:
        return codes.to(dtype)
    if HAS_FP8:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    # The sign stays in the highest bit, its copy in the next one goes, exponent and fraction follow.
    return ((codes.to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def store_product(  # type: ignore[no-untyped-def]
    total, bias, out, row, output, is_row, is_output, out_stride, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Adds the bias to sums, fp32 [outputs, rows], and stores them as rows."""
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    to = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["rows"])  # otherwise a new batch size would compile again while requests wait
def product_kernel(  # type: ignore[no-untyped-def]
    weight, x, out, scale, x_scale, bias, rows, outputs, inputs, x_stride, out_stride,
    FP8: tl.constexpr, HAS_FP8: tl.constexpr, HAS_X_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program computes BN outputs of BM rows. Weights are the left operand, which tensor cores take from registers,
    where they have become numbers."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    output, column = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    is_row, is_output = row < rows, output < outputs
    weight_at = weight + output.to(tl.int64)[:, None] * inputs + column[None, :]
    x_at = x + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for start in range(0, inputs, BK):
        inside = start + column < inputs
        codes = tl.load(weight_at + start, mask=is_output[:, None] & inside[None, :], other=0)
        xs = tl.load(x_at + start, mask=inside[:, None] & is_row[None, :], other=0.0)
        total = tl.dot(_values(codes, xs.dtype, FP8, HAS_FP8), xs, total, input_precision="ieee")
    factor = tl.load(scale + output, mask=is_output, other=0.0)
    if FP8 and not HAS_FP8:
        factor *= _BIAS
    result = total * factor[:, None]
    if HAS_X_SCALE:
        result *= tl.load(x_scale + row, mask=is_row, other=0.0)[None, :]
    store_product(result, bias, out, row, output, is_row, is_output, out_stride, HAS_BIAS)


@triton.jit
def scale_kernel(  # type: ignore[no-untyped-def]
    sums, out, scale, x_scale, bias, sums_stride, out_stride, outputs,
    HAS_X_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program scales BLOCK columns of one row and adds the bias."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.load(sums + row * sums_stride + column, mask=inside, other=0).to(tl.float32)
    result = total * tl.load(scale + column, mask=inside, other=0.0)
    if HAS_X_SCALE:
        result *= tl.load(x_scale + row)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def numbers_kernel(  # type: ignore[no-untyped-def]
    codes, scale, numbers, inputs, FP8: tl.constexpr, HAS_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program dequantises BLOCK inputs of one output."""
    output, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < inputs, output.to(tl.int64) * inputs + column
    factor = tl.load(scale + output)
    if FP8 and not HAS_FP8:
        factor *= _BIAS
    values = _values(tl.load(codes + at, mask=inside, other=0), tl.float32, FP8, HAS_FP8)
    tl.store(numbers + at, (values * factor).to(numbers.dtype.element_ty), mask=inside)


def round_rows(
    x: Tensor, codes: Tensor, scales: Tensor, code: Code, given: Tensor | None = None, *, as_numbers: bool = False
) -> bool:
    """Quantises rows of x, [rows, width], each by the scale of its own largest number, or all by `given`. Returns
    whether each row has a scale in `scales`.

    codes: [rows, width], contiguous: float8_e4m3fn, int8, or another float type for their values, or with `as_numbers`
    for what they stand for; scales: float32 [rows], written unless `given`, but for int8 always; given: float32 [1].
    Values beyond the largest code become that; NaN stays, in int8 as the row's scale.
    """
    rows, width = x.shape
    form = {torch.float8_e4m3fn: "bits", torch.int8: "integers"}.get(codes.dtype, "numbers" if as_numbers else "values")
    round_kernel[(rows,)](
        x, codes.view(torch.int8) if form == "bits" else codes, scales, scales if given is None else given,
        x.stride(0), width,
        LARGEST=code.largest, FP8=code is Code.F8_E4M3, IS_STATIC=given is not None, FORM=form, **_of_row(width),
    )  # fmt: skip
    return given is None or form == "integers"


def halve_rows(x: Tensor, halves: Tensor, scales: Tensor) -> None:
    """Divides rows of x, bfloat16 [rows, width], by powers of two, so that they become float16 without loss, but for
    numbers that are less than 2^-28 of their row's largest.

    halves: float16 [rows, width], contiguous; scales: float32 [rows], these powers. A row that is not finite becomes
    NaN where it is multiplied by its scale.
    """
    rows, width = x.shape
    halve_kernel[(rows,)](x, halves, scales, x.stride(0), width, **_of_row(width))


def _of_row(width: int) -> dict[str, Any]:
    """Returns the block and launch options of programs that each take a whole row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scale: Tensor,
    code: Code,
    capability: int,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Computes `out = x weightᵀ · scale · x_scale + bias`.

    x: [rows, inputs], or the values of its codes; weight: int8 [outputs, inputs], contiguous codes; scale: float32
    [outputs]; x_scale: float32 [rows]; out: [rows, outputs]; bias: [outputs]. `capability`: 90 for 9.0.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    shape = product_shape(rows, x.dtype)
    product_kernel[(ceil_div(rows, shape["BM"]), ceil_div(outputs, shape["BN"]))](
        weight, x, out, scale, scale if x_scale is None else x_scale, scale if bias is None else bias,
        rows, outputs, inputs, x.stride(0), out.stride(0),
        FP8=code is Code.F8_E4M3, HAS_FP8=capability >= FP8_CAPABILITY,
        HAS_X_SCALE=x_scale is not None, HAS_BIAS=bias is not None, **shape,
    )  # fmt: skip


def product_shape(rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns tile sizes and launch options of a product. Up to 16 rows weights set the time: narrow tiles, so that
    there are programs for all multiprocessors, and 24 KiB of weights on their way in each."""
    if dtype is torch.float32:
        return {"BN": 32, "BM": 16, "BK": 32, "num_warps": 4, "num_stages": 3}
    if rows <= 16:
        return {"BN": 32, "BM": 16, "BK": 256, "num_warps": 4, "num_stages": 4}
    return {"BN": 64, "BM": 32 if rows <= 32 else 64, "BK": 128, "num_warps": 4, "num_stages": 3}


def scale_rows(
    sums: Tensor, out: Tensor, scale: Tensor, x_scale: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """Computes `out = sums · scale · x_scale + bias`, [rows, outputs]; arguments as of `multiply`. `sums`: numbers or
    int32, which may be `out`."""
    rows, outputs = out.shape
    scale_kernel[(rows, ceil_div(outputs, _COLUMNS))](
        sums, out, scale, scale if x_scale is None else x_scale, scale if bias is None else bias,
        sums.stride(0), out.stride(0), outputs,
        HAS_X_SCALE=x_scale is not None, HAS_BIAS=bias is not None, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


def dequantise(codes: Tensor, scale: Tensor, numbers: Tensor, code: Code, capability: int) -> None:
    """Writes the weights that codes stand for. codes: int8 [outputs, inputs]; scale: float32 [outputs]; numbers:
    [outputs, inputs]; all contiguous. `capability`: 90 for 9.0."""
    outputs, inputs = codes.shape
    numbers_kernel[(outputs, ceil_div(inputs, _CODES))](
        codes, scale, numbers, inputs,
        FP8=code is Code.F8_E4M3, HAS_FP8=capability >= FP8_CAPABILITY, BLOCK=_CODES, num_warps=4,
    )  # fmt: skip
