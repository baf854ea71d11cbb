"""A dot product for Triton's interpreter that computes bf16 correctly and gives a row the same bits at any place.

The interpreter passes operands to numpy's matmul: of bf16 it would multiply the bit patterns, and BLAS sums the rows of
a matrix in different orders, by its shape and by the kind of CPU, which no tensor core does. It would also make bit
patterns of integers that become bf16, and cut off what bf16 lacks of an fp32. Without effect on a GPU.
"""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _values(operand: Any) -> Any:
    """Returns the numbers of an operand, in fp32."""
    if operand.dtype.scalar == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand.data.astype(np.float32)


def _dot(_: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    left, right = (np.ascontiguousarray(_values(operand)) for operand in (a, b))
    # einsum uses no BLAS for two operands: it adds column after column to all rows.
    return TensorHandle(np.einsum("mk,kn->mn", left, right) + d.data, d.dtype.scalar)


def _integer_to_float(builder: Any, source: Any, to: Any) -> Any:
    if to.scalar != tl.bfloat16:
        return builder.cast_impl(source, to)
    values = TensorHandle(source.data.astype(np.float32), tl.float32)
    return builder.cast_impl(values, to)


def _truncated(builder: Any, source: Any, to: Any) -> Any:
    """Rounds to nearest even, also to bf16."""
    if to.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
        return builder.cast_impl(source, to)
    bits = source.data.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(source.data), bits >> 16, nearest).astype(np.uint16), tl.bfloat16)


_METHODS = {"create_dot": _dot, "create_si_to_fp": _integer_to_float, "create_fp_trunc": _truncated}


def use_honest_dots() -> None:
    """Replaces the interpreter's products for the rest of the process."""
    for name, method in _METHODS.items():
        setattr(InterpreterBuilder, name, method)


@pytest.fixture
def honest_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in _METHODS.items():
        monkeypatch.setattr(InterpreterBuilder, name, method)
