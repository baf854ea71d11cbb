"""A base model's weights, in a folder of safetensors files or in a GGUF file: what is asked of both alike."""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype
from caraserve.model.folder_reader import FolderReader
from caraserve.model.formats.plain import PLAIN
from caraserve.model.gguf.files import GgufModel, open_model
from caraserve.model.gguf.orders import tensor_format
from caraserve.model.gguf.reader import GgufReader
from caraserve.model.opened_file import TensorFileError
from caraserve.model.safetensors_reader import weight_file, weight_files

StoredNames = Callable[[str], Sequence[str]]  # the names that a tensor may have in the files
Rows = Callable[[int, int], NDArray[np.generic]]  # of a tensor, from one up to another


def open_tensors(path: Path, stored_names: StoredNames = lambda name: (name,)) -> FolderReader | GgufReader:
    """Returns a reader of a model's tensors. Raises ModelLoadError."""
    return FolderReader(path, stored_names) if path.is_dir() else GgufReader(path, stored_names)


class StoredTensors(Protocol):
    """The tensors of a model by the names that they have in its files. Methods raise TensorFileError."""

    @property
    def names(self) -> Set[str]: ...

    @property
    def paths(self) -> Sequence[Path]:
        """The files."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def open(self, name: str) -> AbstractContextManager[tuple[Rows, Dtype]]:
        """Opens a tensor, of which rows can be read, as numbers of this dtype."""


def stored_tensors(path: Path) -> StoredTensors:
    """Returns the tensors of a model. Raises TensorFileError."""
    return _FolderTensors(path) if path.is_dir() else _GgufTensors(path)


class _FolderTensors:
    """Implements StoredTensors. The headers of files that were needed are kept."""

    def __init__(self, folder: Path) -> None:
        self._files = weight_files(folder)
        self._shapes: dict[Path, dict[str, tuple[int, ...]]] = {}

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    @property
    def paths(self) -> Sequence[Path]:
        return sorted(set(self._files.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        path = self._files[name]
        if path not in self._shapes:
            with weight_file(path) as file:
                self._shapes[path] = {one: file.shape(one) for one in file.names}
        return self._shapes[path][name]

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[Rows, Dtype]]:
        with weight_file(self._files[name]) as file:
            yield lambda start, stop: file.rows(name, start, stop), file.dtype(name)


class _GgufTensors:
    """Implements StoredTensors. Blocks are read as the numbers that they stand for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model: GgufModel = open_model(path)

    @property
    def names(self) -> Set[str]:
        return self._model.tensors.keys()

    @property
    def paths(self) -> Sequence[Path]:
        return self._model.paths

    def shape(self, name: str) -> tuple[int, ...]:
        return self._model.shape(name)

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[Rows, Dtype]]:
        known, shape = tensor_format(self._model, name), self._model.shape(name)
        try:
            with GgufReader(self._path) as reader:
                if known is PLAIN:
                    raw, dtype = reader(name, shape)
                    yield lambda start, stop: raw[start:stop], dtype
                elif len(shape) != 2:
                    raise TensorFileError(f"{name} has shape {list(shape)}; blocks are compared in matrices only")
                else:
                    matrix = known.read(reader, name.removesuffix(".weight"), (shape[0], shape[1]))
                    yield lambda start, stop: known.values(matrix.rows(range(start, stop))), Dtype.F32
        except ModelLoadError as error:
            raise TensorFileError(str(error)) from error
