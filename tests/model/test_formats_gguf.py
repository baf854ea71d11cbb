"""Blocks of GGUF files have the values that the package gguf gives them, to the bit."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Array, Matrix
from caraserve.model.formats.gguf_blocks import GGUF_BLOCKS, GgufBlocks, gguf_format
from caraserve.model.formats.plain import PLAIN
from tests.model.tensors import Tensors

GOLDEN = np.load(Path(__file__).parent / "golden" / "gguf.npz")  # by golden/make_gguf.py
KINDS = list(GGUF_BLOCKS)


def blocks_of(kind: str) -> NDArray[np.uint8]:
    return GOLDEN[kind].copy()


def format_of(kind: str) -> GgufBlocks:
    found = gguf_format(kind)
    assert isinstance(found, GgufBlocks)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_library(kind: str) -> None:
    wanted = GOLDEN[f"{kind} values"]
    matrix = format_of(kind).read(Tensors({"up.weight": blocks_of(kind)}), "up", wanted.shape)
    np.testing.assert_array_equal(format_of(kind).values(matrix), wanted)
    assert matrix.group == format_of(kind).group
    assert matrix.arrays["codes"].max() < 1 << format_of(kind).kind.bits


@pytest.mark.parametrize("kind", KINDS)
def test_experts_lie_one_after_another(kind: str) -> None:
    rows, inputs = GOLDEN[f"{kind} values"].shape
    stacked = np.stack([blocks_of(kind), blocks_of(kind)[::-1]])
    matrix = format_of(kind).read_stacked(Tensors({"up_exps": stacked}), "up_exps", (2, rows, inputs))
    of_second = {name: array[1] for name, array in matrix.arrays.items()}
    second = Matrix(of_second, group=matrix.group)
    np.testing.assert_array_equal(format_of(kind).values(second), GOLDEN[f"{kind} values"][::-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_of_many_pieces_has_the_values_of_its_rows(kind: str) -> None:
    rows, inputs = GOLDEN[f"{kind} values"].shape
    copies = (1 << 21) // blocks_of(kind).nbytes
    tensors = Tensors({"up.weight": np.tile(blocks_of(kind), (copies, 1))})
    matrix = format_of(kind).read(tensors, "up", (copies * rows, inputs))
    last = matrix.rows(range((copies - 1) * rows, copies * rows))
    np.testing.assert_array_equal(format_of(kind).values(last), GOLDEN[f"{kind} values"])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_in_memory_are_those_of_the_file(kind: str) -> None:
    form = format_of(kind)
    # Scales of four and six bits take bytes, and codes of two and three four bits.
    wider = {"Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2, "Q2_K": 64 + 16, "Q3_K": 32 + 4}.get(kind, 0)
    assert form.num_bytes(512, 3, 4) == 3 * (512 // form.block) * (form.block_bytes + wider)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "MXFP4"])
def test_scales_that_are_not_finite_are_refused(kind: str) -> None:
    stored, at = blocks_of(kind), {"Q6_K": 208, "Q2_K": 80, "Q3_K": 108}.get(kind, 0)
    stored[1, at : at + 2] = 0, 0x7C
    with pytest.raises(ModelLoadError, match=f"up.weight: a block of {kind} has a scale that is not finite"):
        format_of(kind).read(Tensors({"up.weight": stored}), "up", GOLDEN[f"{kind} values"].shape)


def test_powers_that_are_too_large_are_refused() -> None:
    stored = blocks_of("MXFP4")
    stored[1, 0] = 255
    with pytest.raises(ModelLoadError, match=r"up.weight has a scale of 255; scales up to 240"):
        format_of("MXFP4").read(Tensors({"up.weight": stored}), "up", GOLDEN["MXFP4 values"].shape)


def test_rows_are_whole_blocks() -> None:
    with pytest.raises(ModelLoadError, match=r"up.weight has 288 inputs, not a multiple of 256, which Q4_K needs"):
        format_of("Q4_K").read(Tensors({}), "up", (2, 288))


def test_numbers_are_plain() -> None:
    values: Array = np.ones((2, 3), np.float32)
    for kind in ("F32", "F16", "BF16"):
        assert gguf_format(kind) is PLAIN
    matrix = gguf_format("F32").read(Tensors({"up.weight": values}), "up", (2, 3))
    assert matrix.dtype is Dtype.F32


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "IQ2_XS", "IQ3_S", "TQ1_0", "NVFP4", "I8", "F64"])
def test_other_types_are_refused_by_their_names(kind: str) -> None:
    with pytest.raises(ModelLoadError, match=f"type {kind} are not read; F32, F16, BF16, Q8_0, .* MXFP4 are"):
        gguf_format(kind)
