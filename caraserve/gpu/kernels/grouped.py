"""Products with grouped codes (model/formats/grouped.py), matrices of what they stand for, and the rows of an embedding
that is stored so.

Codes become weights in registers: fp32 and bit for bit those of `values_of`, then rounded to the dtype of the inputs,
for any number of rows. Sums are fp32. The order of a row's sums depends on the number of rows in the batch, which
chooses the tiles (`product_shape`), and on nothing else of the other rows.

Inputs are cut into blocks of 32. Byte j of a block's codes of 4 bits has input j in its low half and input 16 + j in
the high one, so that a tile of bytes is two tiles of weights, which are multiplied one after the other. What codes of 5
and 6 bits have above that lies in words: bit j of a block's word, or the bits 2j and 2j + 1 of the word of each half.
Scales are loaded for units of 16 inputs.
"""

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.gpu.kernels.quantized import product_shape, store_product
from caraserve.model.dtype import Code, Dtype, decoded
from caraserve.model.formats.grouped import FP4, SUPER_GROUP, GroupedCodes, Scale
from caraserve.util.units import ceil_div

BLOCK, UNIT = 32, 16  # inputs
_UNIT = tl.constexpr(UNIT)
_SUPER_GROUP = tl.constexpr(SUPER_GROUP)
_E2M1_BIAS, _E4M3_BIAS = tl.constexpr(2.0**14), tl.constexpr(2.0**8)  # of the float16 that the moved bits make
_EMBED_UNITS = 8  # of each half that a program dequantises
_NUMBERS_OUTPUTS, _NUMBERS_UNITS = 8, 8  # that a program dequantises
_SIGNED_VALUES = tuple(float(code - (code & 128) * 2) for code in range(256))
_E4M3_VALUES = decoded(np.arange(256, dtype=np.uint8), Code.F8_E4M3)


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Weights in device memory; the arrays of the file's format, with codes of less than 8 bits packed."""

    kind: GroupedCodes
    group: int  # inputs with one scale, a multiple of UNIT; 0: all
    inputs: int
    codes: Tensor  # uint8 [outputs, bytes]
    high: Tensor | None  # int32 [outputs, words], the fifth and sixth bits
    scale: Tensor  # [outputs, groups]
    offset: Tensor | None  # [outputs, groups]
    scale_above: Tensor | None  # float32 [outputs] divisors, or float16 [outputs, inputs / 256] super-scales
    offset_above: Tensor | None  # float16 [outputs, inputs / 256]
    table: Tensor | None  # float32 [2^bits], of values that are looked up
    order: Tensor | None = None  # int32 [inputs], the input of each column

    @property
    def outputs(self) -> int:
        return len(self.codes)

    def rows(self, rows: slice) -> "GroupedMatrix":
        """Returns a view of some outputs."""
        by_output = {"codes", "high", "scale", "offset", "scale_above", "offset_above"}
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name in by_output}
        return replace(self, **{name: array[rows] for name, array in arrays.items() if array is not None})

    @property
    def nbytes(self) -> int:
        arrays = self.codes, self.high, self.scale, self.offset, self.scale_above, self.offset_above, self.order
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def kernels(self) -> Hashable:
        """What kernels depend on besides sizes."""
        return self.kind, self.group, self.order is not None


def values_are(kind: GroupedCodes) -> str:
    """Returns how a kernel finds the values of codes: "integer", "signed", "e2m1", "e4m3" or "table"."""
    if kind.are_integers:
        return "integer"
    if kind.values == _SIGNED_VALUES:
        return "signed"
    if kind.values == FP4:
        return "e2m1"
    is_e4m3 = kind.bits == 8 and np.array_equal(np.array(kind.values, np.float32), _E4M3_VALUES, equal_nan=True)
    return "e4m3" if is_e4m3 else "table"


@triton.jit
def _spread(units, BN: tl.constexpr, UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Repeats a number of each unit for its inputs."""
    return tl.reshape(tl.broadcast_to(units[:, :, None], (BN, UNITS, _UNIT)), (BN, UNITS * _UNIT))


@triton.jit
def _float_of_e4m3(bits):  # type: ignore[no-untyped-def]
    """Returns the values of E4M3 codes, given as int32: the sign moves to that of float16, exponent and fraction
    follow. The two codes without a value give NaN."""
    moved = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), moved.to(tl.float32) * _E4M3_BIAS)


@triton.jit
def _value(code, table, VALUES: tl.constexpr, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the values of codes, given as int32."""
    if VALUES == "integer":
        value = code.to(tl.float32) + FIRST
    elif VALUES == "signed":
        value = ((code ^ 128) - 128).to(tl.float32)
    elif VALUES == "e2m1":
        moved = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
        value = moved.to(tl.float32) * _E2M1_BIAS
    elif VALUES == "e4m3":
        value = _float_of_e4m3(code)
    else:
        value = tl.load(table + code)
    return value


@triton.jit
def _input(start, half, BITS: tl.constexpr, UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the inputs of a half of the tile that begins at input `start`."""
    column = tl.arange(0, UNITS * _UNIT)
    if BITS == 8:
        return start + half * (UNITS * _UNIT) + column
    return start + column // _UNIT * (2 * _UNIT) + half * _UNIT + column % _UNIT


@triton.jit
def _code(  # type: ignore[no-untyped-def]
    codes, high, output, is_output, start, half, row_bytes, words, BITS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Loads the codes of a half, int32 [outputs, inputs]."""
    column, unit, row = tl.arange(0, UNITS * _UNIT), tl.arange(0, UNITS), output.to(tl.int64)
    BN: tl.constexpr = output.shape[0]  # noqa: N806
    if BITS == 8:
        byte = start + half * (UNITS * _UNIT) + column
    else:
        byte = start // 2 + column
    inside = is_output[:, None] & (byte < row_bytes)[None, :]
    code = tl.load(codes + row[:, None] * row_bytes + byte[None, :], mask=inside, other=0).to(tl.int32)
    if BITS < 8:
        code = (code >> (4 * half)) & 15
    if BITS == 5:
        word = start // 32 + unit
        at = high + row[:, None] * words + word[None, :]
        bits = _spread(tl.load(at, mask=is_output[:, None] & (word < words)[None, :], other=0), BN, UNITS)
        code |= ((bits >> (column % _UNIT + half * _UNIT)[None, :]) & 1) << 4
    if BITS == 6:
        word = 2 * (start // 32 + unit) + half
        at = high + row[:, None] * words + word[None, :]
        bits = _spread(tl.load(at, mask=is_output[:, None] & (word < words)[None, :], other=0), BN, UNITS)
        code |= ((bits >> (2 * (column % _UNIT))[None, :]) & 3) << 4
    return code


@triton.jit
def dequantised(  # type: ignore[no-untyped-def]
    codes, high, scale, offset, scale_above, offset_above, table, output, is_output, start, half,
    inputs, row_bytes, words, groups, supers,
    BITS: tl.constexpr, VALUES: tl.constexpr, FIRST: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    ROUNDS_TO: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Returns a tile of weights, fp32 [outputs, UNITS · 16]: the inputs `_input` of some outputs. Weights of outputs
    that are not there are finite."""
    unit, row = tl.arange(0, UNITS), output.to(tl.int64)[:, None]
    BN: tl.constexpr = output.shape[0]  # noqa: N806
    if BITS == 8:
        first = start + half * (UNITS * _UNIT) + unit * _UNIT
    elif GROUP % 32 == 0:  # a scale for both halves of a block, which the compiler loads once
        first = start + unit * (2 * _UNIT)
    else:
        first = start + unit * (2 * _UNIT) + half * _UNIT
    inside = is_output[:, None] & (first < inputs)[None, :]
    group = tl.zeros((UNITS,), tl.int32) if GROUP == 0 else first // GROUP
    at, at_above = row * groups + group[None, :], row * supers + (first // _SUPER_GROUP)[None, :]
    if SCALE == "E8M0":
        bits = tl.load(scale + at, mask=inside, other=0).to(tl.int32)
        factor = tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif SCALE == "E4M3":
        divisor = tl.load(scale_above + output, mask=is_output, other=1.0)
        numbers = _float_of_e4m3(tl.load(scale + at, mask=inside, other=0).to(tl.int32))
        factor = tl.div_rn(numbers, tl.broadcast_to(divisor[:, None], (BN, UNITS)))
    else:
        factor = tl.load(scale + at, mask=inside, other=0).to(tl.float32)
        if SCALE == "NESTED":
            factor *= tl.load(scale_above + at_above, mask=inside, other=0.0).to(tl.float32)
    code = _code(codes, high, output, is_output, start, half, row_bytes, words, BITS, UNITS)
    weight = _value(code, table, VALUES, FIRST) * _spread(factor, BN, UNITS)
    if OFFSET != "NONE":
        added = tl.load(offset + at, mask=inside, other=0).to(tl.float32)
        if OFFSET == "ZERO":
            added = -factor * added
        elif OFFSET == "NESTED":
            added = -tl.load(offset_above + at_above, mask=inside, other=0.0).to(tl.float32) * added
        weight += _spread(added, BN, UNITS)
    if ROUNDS_TO == "F16":
        weight = weight.to(tl.float16).to(tl.float32)
    elif ROUNDS_TO == "BF16":
        weight = weight.to(tl.bfloat16).to(tl.float32)
    return weight


@triton.jit(do_not_specialize=["rows"])  # otherwise a new batch size would compile again while requests wait
def grouped_product_kernel(  # type: ignore[no-untyped-def]
    codes, high, scale, offset, scale_above, offset_above, table, order, x, out, bias,
    rows, outputs, inputs, row_bytes, words, groups, supers, x_stride, out_stride,
    BITS: tl.constexpr, VALUES: tl.constexpr, FIRST: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    ROUNDS_TO: tl.constexpr, GROUP: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """One program computes BN outputs of BM rows. Weights are the left operand, which tensor cores take from registers,
    where they have become numbers."""
    row, output = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    is_row, is_output = row < rows, output < outputs
    x_row = x + row.to(tl.int64)[None, :] * x_stride
    total = tl.zeros((BN, BM), tl.float32)
    for start in range(0, inputs, 2 * UNITS * _UNIT):
        for half in tl.static_range(2):
            column = _input(start, half, BITS, UNITS)
            inside = column < inputs
            if HAS_ORDER:
                column = tl.load(order + column, mask=inside, other=0)
            xs = tl.load(x_row + column[:, None], mask=inside[:, None] & is_row[None, :], other=0.0)
            weights = dequantised(
                codes, high, scale, offset, scale_above, offset_above, table, output, is_output, start, half,
                inputs, row_bytes, words, groups, supers,
                BITS, VALUES, FIRST, SCALE, OFFSET, ROUNDS_TO, GROUP, UNITS,
            )  # fmt: skip
            total = tl.dot(weights.to(xs.dtype), xs, total, input_precision="ieee")
    store_product(total, bias, out, row, output, is_row, is_output, out_stride, HAS_BIAS)


@triton.jit
def grouped_numbers_kernel(  # type: ignore[no-untyped-def]
    codes, high, scale, offset, scale_above, offset_above, table, order, numbers,
    outputs, inputs, row_bytes, words, groups, supers,
    BITS: tl.constexpr, VALUES: tl.constexpr, FIRST: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    ROUNDS_TO: tl.constexpr, GROUP: tl.constexpr, HAS_ORDER: tl.constexpr, BN: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """One program dequantises 32 · UNITS inputs of BN outputs."""
    output, start = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * (2 * UNITS * _UNIT)
    is_output = output < outputs
    to = numbers + output.to(tl.int64)[:, None] * inputs
    for half in tl.static_range(2):
        column = _input(start, half, BITS, UNITS)
        inside = column < inputs
        if HAS_ORDER:
            column = tl.load(order + column, mask=inside, other=0)
        weights = dequantised(
            codes, high, scale, offset, scale_above, offset_above, table, output, is_output, start, half,
            inputs, row_bytes, words, groups, supers,
            BITS, VALUES, FIRST, SCALE, OFFSET, ROUNDS_TO, GROUP, UNITS,
        )  # fmt: skip
        tl.store(to + column[None, :], weights.to(numbers.dtype.element_ty), mask=is_output[:, None] & inside[None, :])


@triton.jit
def grouped_embed_kernel(  # type: ignore[no-untyped-def]
    codes, high, scale, offset, scale_above, offset_above, table, history, token_slot, token_position, hidden,
    inputs, row_bytes, words, groups, supers, history_stride, hidden_stride,
    BITS: tl.constexpr, VALUES: tl.constexpr, FIRST: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    ROUNDS_TO: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """One program embeds 32 · UNITS columns of one token. Where it stands for a vector, `hidden` has that already."""
    token, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * (2 * UNITS * _UNIT)
    position = tl.load(token_position + token)
    slot = tl.load(token_slot + token, mask=position >= 0, other=0).to(tl.int64)
    known = tl.load(history + slot * history_stride + position, mask=position >= 0, other=0)
    row = tl.zeros((1,), tl.int32) + tl.maximum(known, 0)
    is_row = tl.zeros((1,), tl.int32) + position >= 0
    for half in tl.static_range(2):
        column = _input(start, half, BITS, UNITS)
        weights = dequantised(
            codes, high, scale, offset, scale_above, offset_above, table, row, is_row, start, half,
            inputs, row_bytes, words, groups, supers,
            BITS, VALUES, FIRST, SCALE, OFFSET, ROUNDS_TO, GROUP, UNITS,
        )  # fmt: skip
        weights = tl.where(is_row[:, None], weights, 0.0)
        to = hidden + token * hidden_stride + column[None, :]
        tl.store(to, weights.to(hidden.dtype.element_ty), mask=(column < inputs)[None, :] & (known >= 0))


def multiply(x: Tensor, weight: GroupedMatrix, out: Tensor, bias: Tensor | None = None) -> None:
    """Computes `out = x weightᵀ + bias`. x: [rows, inputs]; out: [rows, outputs]; bias: [outputs]."""
    (rows, inputs), outputs = x.shape, weight.outputs
    arrays, sizes, forms = _arguments(weight)
    shape = product_shape(rows, x.dtype)
    units = max(2, shape.pop("BK") // BLOCK)
    grouped_product_kernel[(ceil_div(rows, shape["BM"]), ceil_div(outputs, shape["BN"]))](
        *arrays, weight.codes if weight.order is None else weight.order, x, out, x if bias is None else bias,
        rows, outputs, inputs, *sizes, x.stride(0), out.stride(0),
        **forms, HAS_ORDER=weight.order is not None, HAS_BIAS=bias is not None, UNITS=units, **shape,
    )  # fmt: skip


def dequantise(weight: GroupedMatrix, numbers: Tensor) -> None:
    """Writes the weights that codes stand for, the inputs in the order of x: [outputs, inputs], contiguous."""
    arrays, sizes, forms = _arguments(weight)
    outputs, inputs = numbers.shape
    grouped_numbers_kernel[(ceil_div(outputs, _NUMBERS_OUTPUTS), ceil_div(inputs, BLOCK * _NUMBERS_UNITS))](
        *arrays, weight.codes if weight.order is None else weight.order, numbers, outputs, inputs, *sizes,
        **forms, HAS_ORDER=weight.order is not None, BN=_NUMBERS_OUTPUTS, UNITS=_NUMBERS_UNITS, num_warps=4,
    )  # fmt: skip


def embed_grouped(history: Tensor, weight: GroupedMatrix, tokens: TokenTables, hidden: Tensor) -> None:
    """Writes the embedding of each token, as `elementwise.embed` does without scale and positions. Columns are in the
    order of inputs."""
    count, width = hidden.shape
    arrays, sizes, forms = _arguments(weight)
    grouped_embed_kernel[(count, ceil_div(width, BLOCK * _EMBED_UNITS))](
        *arrays, history, tokens.slot, tokens.position, hidden,
        width, *sizes, history.stride(0), hidden.stride(0), **forms, UNITS=_EMBED_UNITS, num_warps=4,
    )  # fmt: skip


def _arguments(weight: GroupedMatrix) -> tuple[list[Tensor], list[int], dict[str, Any]]:
    """Returns the arrays, sizes and forms that kernels take of a matrix."""
    kind, none = weight.kind, weight.codes
    found = weight.high, weight.scale, weight.offset, weight.scale_above, weight.offset_above, weight.table
    arrays = [weight.codes, *(none if array is None else array for array in found)]
    words = 0 if weight.high is None else weight.high.shape[1]
    above = weight.scale_above
    supers = above.shape[1] if above is not None and kind.scale is Scale.NESTED else 0
    forms = {
        "BITS": kind.bits,
        "VALUES": values_are(kind),
        "FIRST": kind.values[0],
        "SCALE": kind.scale.name,
        "OFFSET": kind.offset.name,
        "ROUNDS_TO": "" if kind.rounds_to in (None, Dtype.F32) else kind.rounds_to.name,
        "GROUP": weight.group,
    }
    return arrays, [weight.codes.shape[1], words, weight.scale.shape[1], supers], forms
