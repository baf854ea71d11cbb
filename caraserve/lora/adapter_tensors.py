"""The tensors of an adapter under PEFT's names: stored so, or made of stored tensors by moving rows and columns.

Programs store A and B in several ways: transposed, with other rows, several modules in one. A `View` says as data how
a tensor is made of what a file has; nothing is read before it is needed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import Array
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.linear_plan import Rows
from caraserve.model.opened_file import FilePlace


class TensorSource(Protocol):
    """An open file with tensors. Methods raise TensorFileError."""

    @property
    def name(self) -> str:
        """The file's name, for messages."""

    @property
    def names(self) -> Sequence[str]:
        """The names of its tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""

    def dtype(self, name: str) -> Dtype:
        """Returns a tensor's dtype."""

    def raw(self, name: str) -> NDArray[np.generic]:
        """Reads the values of a tensor: float32, or uint16 with the bits of a 16-bit float."""

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """Reads some of a tensor's rows, as `raw`."""

    def end(self, name: str) -> int:
        """Returns where a tensor ends in the file."""

    def place(self, name: str) -> FilePlace | None:
        """Returns where a tensor's values begin in the file; None: they do not lie there one row after another."""

    def check_unchanged(self) -> None:
        """Raises TensorFileError if the file was written after it was opened."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one tensor contributes to a view."""

    tensor: str
    transposed: bool = False
    rows: Rows | None = None  # that are taken of it, once it is transposed; None: all
    at: Rows | None = None  # the rows of the view that they become; None: all
    column: int = 0  # of the view, at which they begin
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class View:
    """A tensor that is made of others; zero where they leave it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class AdapterTensors:
    """A TensorSource whose tensors are those of another one, as they are or made of them. Methods raise
    TensorFileError."""

    def __init__(self, source: TensorSource, views: Mapping[str, View | None]) -> None:
        """`views`: all tensors by name; None: one of the source, as it is."""
        self._source, self._views = source, views

    def with_views(self, views: Mapping[str, View]) -> "AdapterTensors":
        """Returns these tensors and others, made of them."""
        return AdapterTensors(self, {**dict.fromkeys(self._views), **views})

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def names(self) -> Sequence[str]:
        return list(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        view = self._views[name]
        return self._source.shape(name) if view is None else view.shape

    def dtype(self, name: str) -> Dtype:
        """Returns the dtype in which no value of a tensor is rounded."""
        if (view := self._views[name]) is None:
            return self._source.dtype(name)
        dtypes = {self._source.dtype(piece.tensor) for piece in view.pieces}
        is_exact = len(dtypes) == 1 and all(piece.factor == 1.0 for piece in view.pieces)
        return dtypes.pop() if is_exact else Dtype.F32

    def num_bytes(self, name: str) -> int:
        """Returns the bytes of a tensor's values."""
        return self.dtype(name).itemsize * math.prod(self.shape(name))

    def raw(self, name: str) -> Array:
        if (view := self._views[name]) is None:
            return self._source.raw(name)
        dtype = self.dtype(name)
        if len(view.pieces) == 1 and (view.pieces[0].at, view.pieces[0].column) == (None, 0):
            return self._read(view.pieces[0], dtype)
        values = np.zeros(view.shape, dtype.storage)
        for piece in view.pieces:
            part = self._read(piece, dtype)
            at = slice(None) if piece.at is None else list(piece.at)
            values[at, piece.column : piece.column + part.shape[1]] = part
        return values

    def rows(self, name: str, start: int, stop: int) -> Array:
        view = self._views[name]
        if view is None:
            return self._source.rows(name, start, stop)
        first, *others = view.pieces
        if not others and first == Piece(first.tensor):  # under another name only: a head may have 1 GB
            return self._source.rows(first.tensor, start, stop)
        return self.raw(name)[start:stop]

    def end(self, name: str) -> int:
        view = self._views[name]
        return max(
            self._source.end(one) for one in ([name] if view is None else [piece.tensor for piece in view.pieces])
        )

    def place(self, name: str) -> FilePlace | None:
        if (view := self._views[name]) is None:
            return self._source.place(name)
        first, *others = view.pieces
        if others or first != Piece(first.tensor, rows=first.rows, at=first.at):
            return None
        source = self._source.shape(first.tensor)
        rows, all_rows = first.rows or range(source[0]), range(view.shape[0])
        if not isinstance(rows, range) or rows.step != 1 or first.at not in (None, all_rows):
            return None
        if (len(rows), *source[1:]) != view.shape or (place := self._source.place(first.tensor)) is None:
            return None
        row_bytes = self._source.dtype(first.tensor).itemsize * math.prod(source[1:])
        return FilePlace(place.descriptor, place.offset + rows.start * row_bytes)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def _read(self, piece: Piece, dtype: Dtype) -> Array:
        raw, source = self._source.raw(piece.tensor), self._source.dtype(piece.tensor)
        raw = raw.T if piece.transposed else raw
        if piece.rows is not None:
            raw = raw[list(piece.rows)]
        if piece.factor != 1.0:
            return to_float32(raw, source) * np.float32(piece.factor)
        return raw if source is dtype else to_float32(raw, source)


def as_stored(source: TensorSource) -> AdapterTensors:
    """Returns the tensors of a file as they are."""
    return AdapterTensors(source, dict.fromkeys(source.names))
