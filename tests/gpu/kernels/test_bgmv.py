"""Decode LoRA: the CUDA sources, run on the CPU and compared with fp64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from caraserve.model.dtype import Dtype
from tests.gpu.lora_case import LoraCase

# Tolerances of a sum of products of magnitude 1: fp32 sums, and one rounding of the result for 16-bit activations.
TOLERANCE = {Dtype.F32: 2e-6, Dtype.BF16: 2**-8, Dtype.F16: 2**-11}
ALL = [Dtype.F32, Dtype.BF16, Dtype.F16, Dtype.BF16, Dtype.F16]


def inputs(case: LoraCase, rows: int, seed: int = 1) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, case.inputs)), rng.standard_normal((rows, sum(case.outputs)))


def check(case: LoraCase, row_slots: list[int], **how: int) -> NDArray[np.float64]:
    got, expected = case.run(*inputs(case, len(row_slots)), row_slots, **how)
    allowed = TOLERANCE[case.activation] * np.maximum(np.abs(expected), 1) + 2e-6 * np.sqrt(case.inputs)
    assert (np.abs(got - expected) <= allowed).all()
    return got


@pytest.mark.parametrize("activation", Dtype)
def test_ranks_dtypes_and_the_base_model_in_one_batch(activation: Dtype) -> None:
    ranks = [[0, 8, 256, 0, 40], [0, 64, 24, 0, 8], [0, 0, 16, 136, 8]]
    case = LoraCase(192, (320, 64, 64), ranks, ALL, activation, with_vectors=frozenset((2, 4)))
    check(case, [1, 0, 2, 3, 2, 4, 2, 2, 2, 1])


@pytest.mark.parametrize("activation", Dtype)
def test_sums_kept_apart_give_the_same_bits_once_they_are_added(activation: Dtype) -> None:
    """Of projections of any width, in any batch."""
    ranks = [[0, 8, 256, 0, 40], [0, 64, 24, 0, 8], [0, 0, 16, 136, 8]]
    case = LoraCase(192, (320, 70, 3), ranks, ALL, activation, with_vectors=frozenset((2, 4)))
    row_slots = [1, 0, 2, 3, 2, 4, 2, 2, 2, 1]
    given = inputs(case, len(row_slots))
    (added, _), (apart, _) = (case.run(*given, row_slots, apart=apart) for apart in (False, True))
    assert added.tobytes() == apart.tobytes()
    one, _ = case.run(given[0][2:3], given[1][2:3], [2], apart=True)
    assert one.tobytes() == added[2].tobytes()


@pytest.mark.parametrize("activation", Dtype)
@pytest.mark.parametrize("weight", Dtype)
def test_every_weight_dtype_works_with_every_activation_dtype(activation: Dtype, weight: Dtype) -> None:
    check(LoraCase(1088, (130,), [[0, 8]], [Dtype.F32, weight], activation), [1, 1])


@settings(max_examples=100)
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    """Odd sizes, ranks that differ by module, mixed dtypes, rows in any order, outputs with gaps or without."""
    rank = st.one_of(st.just(0), st.integers(1, 40), st.sampled_from([64, 100, 128, 256]))
    outputs = tuple(data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=6)))
    slots = data.draw(st.integers(1, 4))
    ranks = [[0, *data.draw(st.lists(rank, min_size=slots, max_size=slots))] for _ in outputs]
    dtypes = data.draw(st.lists(st.sampled_from(Dtype), min_size=slots + 1, max_size=slots + 1))
    row_slots = data.draw(st.lists(st.integers(0, slots), min_size=1, max_size=6))
    activation = data.draw(st.sampled_from(Dtype))
    step = data.draw(st.sampled_from([1, 2, 4]))
    with_vectors = data.draw(st.frozensets(st.integers(1, slots)))
    sizes = data.draw(st.integers(1, 300)), outputs, ranks, dtypes
    case = LoraCase(*sizes, activation, step=step, with_vectors=with_vectors)
    check(case, row_slots, grid=data.draw(st.integers(1, 9)), seed=data.draw(st.integers(0, 99)))


def test_a_plane_longer_than_a_warps_loads_in_flight() -> None:
    check(LoraCase(4 * 1024 + 4 * 120 + 3, (64,), [[0, 8, 8]], [Dtype.F32, Dtype.BF16, Dtype.F32]), [1, 2])


def test_the_largest_rank() -> None:
    check(LoraCase(48, (72,), [[0, 512]], [Dtype.F32] * 2), [1, 1])


@pytest.mark.parametrize("activation", Dtype)
def test_a_row_has_the_same_bits_in_any_batch(activation: Dtype) -> None:
    """Alone, as one of many rows of its adapter, at any index, in any grid, and with threads in any order."""
    case = LoraCase(144, (200, 72), [[0, 24, 64], [0, 136, 0]], ALL[:3], activation)
    x, y = inputs(case, 7)
    row_slots = [1, 2, 1, 1, 0, 1, 1]
    together, _ = case.run(x, y, row_slots)
    for row, slot in enumerate(row_slots):
        alone, _ = case.run(x[row : row + 1], y[row : row + 1], [slot], grid=1)
        assert alone.tobytes() == together[row : row + 1].tobytes()
    order = [6, 2, 4, 0, 1, 5, 3]
    moved, _ = case.run(x[order], y[order], [row_slots[row] for row in order], grid=50, seed=7)
    assert moved.tobytes() == together[order].tobytes()


def test_the_padded_baseline_gives_the_same_result() -> None:
    """Padding only adds products with zeros, in groups of their own."""
    shape = (96, (128,), [[0, 8, 24, 64]], [Dtype.BF16] * 4)
    row_slots = [1, 2, 3, 0, 2]
    unpadded, padded = (LoraCase(*shape, padded_to=rank) for rank in (0, 64))
    assert check(unpadded, row_slots).tobytes() == check(padded, row_slots).tobytes()


@pytest.mark.parametrize("weight", Dtype)
def test_the_padded_baseline_reads_no_more_than_the_largest_rank_of_a_batch(weight: Dtype) -> None:
    shape = (96, (128, 72), [[0, 8, 24], [0, 3, 24]], [weight] * 3)
    for most_rank, row_slots in ((24, [1, 2, 0, 2]), (8, [1, 1, 0])):
        unpadded, padded = LoraCase(*shape), LoraCase(*shape, padded_to=64, most_rank=most_rank)
        assert check(unpadded, row_slots).tobytes() == check(padded, row_slots).tobytes()


def test_empty_and_base_model_batches_change_nothing() -> None:
    case = LoraCase(16, (64,), [[0, 8]], [Dtype.F32] * 2)
    x, y = inputs(case, 3)
    got, _ = case.run(x, y, [0, 0, 0])
    assert got.tobytes() == y.astype(np.float32).astype(np.float64).tobytes()
    assert case.run(x[:0], y[:0], [])[0].shape == (0, 64)
