"""The kernels of grouped codes have the bits of plain fp32 kernels on the values of the codes."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.linear.base import WeightKernels
from caraserve.cpu.linear.grouped import kernels_of_codes
from caraserve.cpu.linear.plain import KERNELS as PLAIN
from caraserve.cpu.structs import SITE
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, Dtype, rounded
from caraserve.model.formats import Matrix
from caraserve.model.formats.bitsandbytes import TABLES
from caraserve.model.formats.grouped import (
    FP4,
    INTEGERS_4,
    INTEGERS_5,
    INTEGERS_8,
    SUPER_GROUP,
    GroupedCodes,
    Offset,
    Scale,
    centred,
    values_of,
)
from caraserve.model.formats.scaled_codes import CODES
from caraserve.util.units import align_up, ceil_div

Floats = NDArray[np.float32]
_CURVE = tuple(float(value) for value in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
KINDS = {  # and inputs of a group
    "centred": (GroupedCodes(4, centred(4), Scale.F16), 32),
    "added": (GroupedCodes(4, INTEGERS_4, Scale.F16, Offset.ADDED), 32),
    "five bits": (GroupedCodes(5, centred(5), Scale.F16), 32),
    "five bits, nested": (GroupedCodes(5, INTEGERS_5, Scale.NESTED, Offset.NESTED), 32),
    "nested": (GroupedCodes(4, INTEGERS_4, Scale.NESTED, Offset.NESTED), 32),
    "six bits, nested": (GroupedCodes(6, centred(6), Scale.NESTED), 16),
    "zeros": (GroupedCodes(8, INTEGERS_8, Scale.F16, Offset.ZERO), 128),
    "zeros, rounded": (GroupedCodes(4, INTEGERS_4, Scale.F16, Offset.ZERO, Dtype.F16), 64),
    "curve": (GroupedCodes(4, _CURVE, Scale.F16), 32),
    "curve, nested": (GroupedCodes(4, _CURVE, Scale.NESTED), 16),
    "halves and powers": (GroupedCodes(4, FP4, Scale.E8M0), 32),
    "halves and divisors": (GroupedCodes(4, FP4, Scale.E4M3), 16),
    "numbers, rounded": (GroupedCodes(4, TABLES["nf4"], Scale.F32, Offset.NONE, Dtype.BF16), 64),
    "fp8": (CODES[Code.F8_E4M3], 128),
    "int8": (CODES[Code.I8], 4096),
}


def made(name: str, outputs: int, inputs: int) -> tuple[GroupedCodes, Matrix]:
    """Returns random codes with their scales."""
    (kind, group), rng = KINDS[name], np.random.default_rng(outputs + inputs)
    groups, above = (outputs, ceil_div(inputs, group)), (outputs, ceil_div(inputs, SUPER_GROUP))

    def numbers(shape: tuple[int, int], scale: Scale) -> NDArray[np.generic]:
        values = rng.uniform(-0.01, 0.01, shape).astype(np.float32)
        return rounded(values, Dtype[scale.name])

    arrays: dict[str, NDArray[np.generic]] = {"codes": rng.integers(0, 1 << kind.bits, (outputs, inputs), np.uint8)}
    if kind.scale is Scale.E4M3:
        arrays["scale"] = rng.integers(0, 127, groups, np.uint8)
        arrays["divisor"] = rng.uniform(100, 3000, outputs).astype(np.float32)
    elif kind.scale is Scale.E8M0:
        arrays["scale"] = rng.integers(100, 125, groups, np.uint8)
    elif kind.scale is Scale.NESTED:
        signed = kind.offset is Offset.NONE
        arrays["scale"] = rng.integers(-128, 128, groups, np.int8) if signed else rng.integers(0, 64, groups, np.uint8)
        arrays["super_scale"] = numbers(above, Scale.F16)
    else:
        arrays["scale"] = numbers(groups, kind.scale)
    if kind.offset is Offset.ADDED:
        arrays["offset"] = numbers(groups, kind.scale)
    elif kind.offset is Offset.ZERO:
        arrays["zero"] = rng.integers(0, 1 << kind.bits, groups, np.uint8)
    elif kind.offset is Offset.NESTED:
        arrays["offset"] = rng.integers(0, 64, groups, np.uint8)
        arrays["super_offset"] = numbers(above, Scale.F16)
    return kind, Matrix(arrays, group=min(group, inputs))


class Site:
    """A packed matrix and its kernels."""

    def __init__(self, kernels: WeightKernels, matrix: Matrix, outputs: int, inputs: int) -> None:
        self._memory, self._site = WeightMemory(), np.zeros(1, SITE)
        self._inputs, self._panels = inputs, ceil_div(outputs, PANEL)
        fields = {"inputs": inputs, "panels": self._panels, "expand": kernels.expand, "product": kernels.product}
        fields |= kernels.pack(matrix, Dtype.F32, self._memory)
        for name, value in fields.items():
            self._site[name] = value
        self._kernels = kernels

    def _call(self, address: int, *arguments: int) -> None:
        words = [ctypes.c_int64] * (len(arguments) + 1)
        ctypes.CFUNCTYPE(None, *words)(address)(self._site.ctypes.data, *arguments)

    def multiply(self, x: Floats, y: Floats, add: int) -> Floats:
        """Returns `y (+)= x @ w` for all panels, of rows prepared as the format wants it."""
        y, rows = y.copy(), x.view(np.uint8)
        if self._site["prepared_bytes"][0]:
            rows = np.zeros((len(x), int(self._site["prepared_bytes"][0])), np.uint8)
            prepare, stride = int(self._site["prepare"][0]), x.strides[0]
            self._call(prepare, x.ctypes.data, stride, len(x), rows.ctypes.data, rows.strides[0])
        to = (y.ctypes.data, y.strides[0], add)
        product = int(self._site["product"][0])
        self._call(product, rows.ctypes.data, rows.strides[0], len(x), 0, self._panels, *to)
        return y

    def expanded(self, panel: int) -> Floats:
        """Returns the weights of a panel, [64, inputs]."""
        y = np.full((self._inputs + 1, PANEL), 7, np.float32)
        for first in range(0, self._inputs, 64):
            count = min(64, self._inputs - first)
            self._call(self._kernels.expand, panel, first, count, y[first:].ctypes.data)
        assert (y[-1] == 7).all()
        return y[:-1].T

    def row(self, output: int) -> Floats:
        y = np.empty(self._inputs, np.float32)
        self._call(self._kernels.row, output, y.ctypes.data)
        return y


def check(kind: GroupedCodes, matrix: Matrix, outputs: int, inputs: int) -> None:
    """Compares all kernels with plain ones."""
    values, width = values_of(kind, matrix), align_up(outputs, PANEL)
    order = np.array(matrix.order or range(inputs))
    codes = Site(kernels_of_codes(kind), matrix, outputs, inputs)
    plain = Site(PLAIN, Matrix({"weight": values[:, order]}, Dtype.F32), outputs, inputs)
    for rows, add in ((1, 0), (1, 1), (7, 0), (130, 1)):
        rng = np.random.default_rng(rows)
        x, y = rng.standard_normal((rows, inputs), np.float32), rng.standard_normal((rows, width), np.float32)
        found, expected = codes.multiply(x, y, add), plain.multiply(np.ascontiguousarray(x[:, order]), y, add)
        assert found[:, :outputs].tobytes() == expected[:, :outputs].tobytes()
        exact = add * y[:, :outputs].astype(np.float64) + x.astype(np.float64) @ values.T
        size = add * np.abs(y[:, :outputs]) + np.abs(x) @ np.abs(values.T)
        assert (np.abs(found[:, :outputs] - exact) <= 1e-5 * size).all()
    assert (codes.row(outputs - 1) == values[-1]).all()  # a zero may have another sign
    last = values[PANEL * (outputs // PANEL) :, order]
    assert (codes.expanded(outputs // PANEL)[: len(last)] == last).all()


@pytest.mark.parametrize("name", KINDS)
def test_codes_have_the_bits_of_their_values(name: str) -> None:
    """Also where partial sums are added up, and in a panel that has fewer outputs than columns."""
    outputs, inputs = PANEL + 36, 2304
    check(*made(name, outputs, inputs), outputs, inputs)


@pytest.mark.parametrize("name", ["centred", "fp8", "int8"])
@pytest.mark.parametrize("inputs", [1, 83, 300])
def test_the_last_group_may_have_fewer_inputs(name: str, inputs: int) -> None:
    check(*made(name, 3, inputs), 3, inputs)


def test_columns_in_the_order_of_their_groups_read_gathered_rows() -> None:
    kind, matrix = made("zeros", 70, 256)
    order = tuple(np.random.default_rng(0).permutation(256).tolist())
    check(kind, replace(matrix, order=order), 70, 256)


def test_groups_that_cut_a_chunk_of_codes_are_refused() -> None:
    kind, matrix = made("centred", 4, 64)
    with pytest.raises(ModelLoadError, match="groups of 12 inputs; the CPU computes multiples of 8"):
        kernels_of_codes(kind).pack(replace(matrix, group=12), Dtype.F32, WeightMemory())
