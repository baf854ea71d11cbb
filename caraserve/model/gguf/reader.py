"""Reads the tensors of a GGUF model, in the order of rows that Hugging Face's checkpoints have."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, Dtype, to_float32
from caraserve.model.folder_reader import FilesOfTensors, StoredTensor, load_errors
from caraserve.model.gguf.config import config_of
from caraserve.model.gguf.files import GgufModel, open_model, stamp_of
from caraserve.model.gguf.orders import piece_order
from caraserve.model.gguf_reader import GgufTensor
from caraserve.model.opened_file import OpenedFile, TensorFileError

Raw = NDArray[np.generic]  # float32, or the bits of a 16-bit type as uint16
_MOST_NUMBERS = 1 << 16  # of a list


class _Part(OpenedFile):
    """A file whose header has been read."""

    @property
    def status(self) -> os.stat_result:
        return self._status

    def read(self, target: memoryview, offset: int, what: str) -> None:
        self._read_into(target, offset, what)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor's bytes in an open file. `order`: of its pieces, as `piece_order` returns it."""

    name: str
    part: _Part
    tensor: GgufTensor
    order: tuple[int, ...] | None

    def read_into(self, name: str, target: memoryview, start: int) -> None:
        """Reads as many bytes as `target` has, from byte `start` of the tensor on."""
        what = f"tensor {self.name}"
        if self.order is None:
            self.part.read(target, self.tensor.start + start, what)
            return
        piece_bytes = self.tensor.num_bytes // len(self.order)
        done = 0
        while done < len(target):
            piece, skipped = divmod(start + done, piece_bytes)
            count = min(piece_bytes - skipped, len(target) - done)
            offset = self.tensor.start + self.order[piece] * piece_bytes + skipped
            self.part.read(target[done : done + count], offset, what)
            done += count

    def rows(self) -> NDArray[np.uint8]:
        """Returns the bytes of all rows, [rows, bytes]."""
        rows = math.prod(self.tensor.shape[:-1])
        values = np.empty((rows, self.tensor.num_bytes // rows), np.uint8)
        self.part.read(values.reshape(-1).data, self.tensor.start, f"tensor {self.name}")
        return values if self.order is None else values.reshape(len(self.order), -1)[list(self.order)]


class GgufReader(FilesOfTensors[_Part]):
    """The tensors of a model. Every error is a ModelLoadError that names the tensor."""

    def __init__(self, path: Path, stored_names: Callable[[str], Sequence[str]] = lambda name: (name,)) -> None:
        """`stored_names`: returns the names that a tensor may have in the files."""
        super().__init__()
        self._stored_names = stored_names
        with load_errors():
            self._model = open_model(path)

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[Raw, Dtype]:
        """Reads a tensor of plain numbers, which must have this shape."""
        stored = self._find(name, shape)
        dtype = plain_dtype(self._model, stored.name)
        with load_errors():
            return stored.rows().reshape(-1).view(dtype.storage).reshape(shape), dtype

    def blocks(self, name: str, shape: tuple[int, ...], kind: str) -> NDArray[np.uint8]:
        """Reads the blocks of a tensor, which must have this shape and type: [..., bytes of a row]."""
        stored = self._find(name, shape)
        if stored.tensor.kind != kind:
            raise ModelLoadError(f"{self._model.name}: tensor {stored.name} has type {stored.tensor.kind}, not {kind}")
        with load_errors():
            return stored.rows().reshape(*shape[:-1], -1)

    def codes(self, name: str, shape: tuple[int, ...], code: Code) -> NDArray[np.uint8]:
        """Raises ModelLoadError: GGUF files have blocks instead."""
        raise ModelLoadError(f"{self._model.name}: tensor {name} is read as {code.value}, which GGUF files do not have")

    def words(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint32]:
        """Raises ModelLoadError: GGUF files have no words of packed codes."""
        raise ModelLoadError(f"{self._model.name}: tensor {name} is read as packed words, which GGUF files lack")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns None: no tensor of a GGUF file is optional."""
        return None

    def scales(self, module: str, outputs: int) -> NDArray[np.float32]:
        """Raises ModelLoadError: GGUF files have blocks instead."""
        raise ModelLoadError(f"{self._model.name}: {module} is read with scales, which are in the blocks of GGUF files")

    def input_scale(self, module: str) -> float:
        """Raises ModelLoadError: GGUF files have none."""
        raise ModelLoadError(f"{self._model.name}: {module} has no scale of its inputs")

    def find(self, name: str, shape: tuple[int, ...], code: Code | None = None) -> StoredTensor:
        """Returns a tensor, which must have this shape, without reading it. `code`: U8 for the bytes of blocks."""
        stored = self._find(name, shape)
        dtype = plain_dtype(self._model, stored.name) if code is None else code
        return StoredTensor(name, stored, dtype, stored.tensor.num_bytes)

    def vector(self, name: str) -> list[float]:
        """Reads a small tensor of numbers by its name in the file."""
        if name not in self._model.tensors or len(shape := self._model.shape(name)) != 1 or shape[0] > _MOST_NUMBERS:
            raise ModelLoadError(f"{self._model.name}: tensor {name} is missing, or no list of numbers")
        numbers: list[float] = to_float32(*self(name, shape)).tolist()
        return numbers

    def _find(self, name: str, shape: tuple[int, ...]) -> _Stored:
        stored = next((one for one in self._stored_names(name) if one in self._model.tensors), None)
        if stored is None:
            raise ModelLoadError(f"{self._model.name}: tensor {name} is missing")
        found = self._model.shape(stored)
        if _without_ones(found) != _without_ones(shape):  # converters drop axes of one element, or keep them
            raise ModelLoadError(
                f"{self._model.name}: tensor {stored} has shape {list(found)}, the metadata ask {list(shape)}"
            )
        with load_errors():
            return self._stored(stored)

    def _stored(self, name: str) -> _Stored:
        model, place = self._model, self._model.tensors[name]
        path = model.paths[place.part]
        with self._lock:
            if path not in self._opened:
                part = _Part(path)
                if stamp_of(part.status) != model.stamps[place.part]:
                    part.close()
                    raise TensorFileError(f"{part.name} was changed while it was being read; try again")
                self._opened[path] = part
        return _Stored(name, self._opened[path], place.tensor, piece_order(model, name))


def opened_model(path: Path) -> GgufModel:
    """Returns what the headers of a model's files say. Raises ModelLoadError."""
    with load_errors():
        return open_model(path)


def gguf_config(path: Path) -> dict[str, Any]:
    """Returns the configuration of a model, as config.json would have it. Raises ModelLoadError."""
    with GgufReader(path) as reader:
        return config_of(opened_model(path), reader.vector)


def plain_dtype(model: GgufModel, name: str) -> Dtype:
    """Returns the dtype of a tensor of plain numbers. Raises ModelLoadError for another type."""
    kind = model.kind(name)
    if kind not in Dtype.__members__:
        raise ModelLoadError(f"{model.name}: tensor {name} has type {kind}; F32, F16 or BF16 is needed")
    return Dtype[kind]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1) or (math.prod(shape),)
