"""How matrices of an adapter's file become those of its image: the records that compiled code reads
(`cpu/adapter_matrices.py`). No I/O."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import Bytes

# A matrix of `rows` × `columns` values, row after row from byte `offset` of an open file on, and where it is copied:
# from byte `target` of the image on, if `is_b` in panels with `stride` ranks, else in rows of `stride` values.
MATRIX_COPY = np.dtype(
    [(name, np.int64) for name in ("file", "offset", "rows", "columns", "itemsize", "target", "stride", "is_b")]
)
UNREAD = -1


class CopyMatrices(Protocol):
    """Compiled code that copies matrices without the interpreter's lock."""

    def __call__(self, copies: NDArray[np.void], image: Bytes, largest: NDArray[np.int64]) -> None:
        """Copies matrices, `copies` [matrices], from files into `image`, whose padding must be zero. Writes to
        `largest` [matrices] the largest bits of a value of each without its sign: floats are in the order of these,
        those that are not finite last. UNREAD: the matrix could not be read."""
