"""The products of emulated kernels: a row's sums are the same in every batch, whatever BLAS this machine has."""

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.gpu.honest_dots import honest_dots


@pytest.mark.usefixtures(honest_dots.__name__)
def test_sums_depend_neither_on_the_number_of_rows_nor_on_that_of_columns() -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal(shape, np.float32) for shape in ((128, 80), (80, 64)))

    def product(rows: int, columns: int) -> np.ndarray:
        a, b = (TensorHandle(np.ascontiguousarray(part), tl.float32) for part in (left[:rows], right[:, :columns]))
        return InterpreterBuilder.create_dot(
            None, a, b, TensorHandle(np.zeros((rows, columns), np.float32), tl.float32)
        ).data

    whole = product(128, 64)
    for rows in range(1, 128):
        assert np.array_equal(product(rows, 64), whole[:rows])
    for columns in (16, 32, 48):
        assert np.array_equal(product(128, columns), whole[:, :columns])
