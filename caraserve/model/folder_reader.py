"""Reads the tensors of a model folder's safetensors files."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, Dtype, to_float32
from caraserve.model.formats import SCALES
from caraserve.model.opened_file import OpenedFile, TensorFileError
from caraserve.model.safetensors_reader import TensorFile, weight_file, weight_files

_INPUT_SCALES = (".input_scale", ".activation_scale")
_LARGEST_SCALE = 2.0**119  # times 480, which no code of one byte exceeds, is finite in float32
Raw = NDArray[np.generic]  # float32, or the bits of a 16-bit type as uint16


class _File(Protocol):
    """An open file."""

    def read_into(self, name: str, target: memoryview, start: int) -> None:
        """Reads as many bytes as `target` has, from byte `start` of a tensor on. Raises TensorFileError."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an open file."""

    name: str
    file: _File
    dtype: Dtype | Code
    num_bytes: int

    def read_into(self, target: memoryview, start: int) -> None:
        """Reads as many bytes as `target` has, from byte `start` of the tensor on. Several threads may read at once.

        Raises ModelLoadError if the file cannot be read or has been cut short."""
        with load_errors():
            self.file.read_into(self.name, target, start)


File = TypeVar("File", bound=OpenedFile)


class FilesOfTensors(Generic[File]):
    """The files of a model's tensors: opened when first needed and closed by the end of the context, which without
    another error raises ModelLoadError if one was changed in the meantime. Several threads may read at once."""

    def __init__(self) -> None:
        self._opened: dict[Path, File] = {}
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with load_errors():
                for file in self._opened.values() if kind is None else ():
                    file.check_unchanged()
        finally:
            for file in self._opened.values():
                file.close()


class FolderReader(FilesOfTensors[TensorFile]):
    """The tensors of a folder. Every error is a ModelLoadError that names the tensor."""

    def __init__(self, folder: Path, stored_names: Callable[[str], Sequence[str]] = lambda name: (name,)) -> None:
        """`stored_names`: returns the names that a tensor may have in the folder."""
        super().__init__()
        self._folder, self._stored_names = folder, stored_names
        with load_errors():
            self._files = weight_files(folder)

    def find(self, name: str, shape: tuple[int, ...], code: Code | None = None) -> StoredTensor:
        """Returns a tensor, which must have this shape, without reading it. `code`: of a quantised module's weights."""
        with load_errors():
            file, name = self._file(name, shape)
            if code is not None:
                file.check_code(name, code)
            return StoredTensor(name, file, file.dtype(name) if code is None else code, file.num_bytes(name))

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[Raw, Dtype]:
        """Reads a tensor of plain numbers, which must have this shape."""
        with load_errors():
            file, name = self._file(name, shape)
            return file.raw(name), file.dtype(name)

    def codes(self, name: str, shape: tuple[int, ...], code: Code) -> NDArray[np.uint8]:
        """Reads the codes of a quantised module's weights, [outputs, inputs]."""
        with load_errors():
            file, name = self._file(name, shape)
            return file.codes(name, code)

    def blocks(self, name: str, shape: tuple[int, ...], kind: str) -> NDArray[np.uint8]:
        """Raises ModelLoadError: only GGUF files have blocks."""
        raise ModelLoadError(f"{self._folder}: tensor {name} is read as {kind}, which only GGUF files have")

    def words(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint32]:
        """Reads a tensor of integers of 32 bits, which must have this shape."""
        with load_errors():
            file, name = self._file(name, shape)
            return file.words(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor, None if there is no such tensor."""
        if not any(one in self._files for one in self._stored_names(name)):
            return None
        with load_errors():
            file, name = self._file(name)
            return file.shape(name)

    def scales(self, module: str, outputs: int) -> NDArray[np.float32]:
        """Reads the scales of a quantised module's weights, [outputs]; the checkpoint may have one for all."""
        found = self._scales(module, SCALES, outputs)
        return np.broadcast_to(found, outputs)

    def input_scale(self, module: str) -> float:
        """Reads the scale by which a quantised module's inputs are divided."""
        found = float(self._scales(module, _INPUT_SCALES, 1)[0])
        if found == 0:
            raise ModelLoadError(f"{self._folder}: the scale of the inputs of {module} is 0")
        return found

    def _scales(self, module: str, suffixes: Sequence[str], most: int) -> NDArray[np.float32]:
        """Reads one scale or `most` of them, as a vector. `suffixes`: of names, of which a module has one."""
        names = [f"{module}{suffix}" for suffix in suffixes]
        found_names = [name for name in names if self.shape(name) is not None] or names[:1]
        if len(found_names) > 1:
            raise ModelLoadError(f"{self._folder}: {' and '.join(found_names)} are both there; one of them is read")
        (name,) = found_names
        with load_errors():
            file, name = self._file(name)
            shape = file.shape(name)
            if math.prod(shape) not in (1, most):
                raise ModelLoadError(f"{self._folder}: tensor {name} has shape {list(shape)}, not 1 or {most} scales")
            found = to_float32(file.raw(name), file.dtype(name)).reshape(-1)
        wrong = found[~((found >= 0) & (found <= _LARGEST_SCALE))]
        if len(wrong):
            raise ModelLoadError(
                f"{self._folder}: tensor {name} has a scale of {wrong[0]:.4g}; those from 0 to {_LARGEST_SCALE:.4g}, "
                "with which no weight overflows float32, are computed"
            )
        return found

    def _file(self, name: str, shape: tuple[int, ...] | None = None) -> tuple[TensorFile, str]:
        """Returns the file that has a tensor, which must have this shape, if given, and the tensor's name there."""
        stored = next((one for one in self._stored_names(name) if one in self._files), None)
        if stored is None:
            raise ModelLoadError(f"{self._folder}: tensor {name} is missing")
        name, path = stored, self._files[stored]
        with self._lock:
            if path not in self._opened:
                self._opened[path] = weight_file(path)
        found = self._opened[path].shape(name)
        if shape is not None and found != shape:
            raise ModelLoadError(f"{path.name}: tensor {name} has shape {list(found)}, config.json asks {list(shape)}")
        return self._opened[path], name


@contextmanager
def load_errors() -> Iterator[None]:
    """Turns errors of files into ModelLoadError."""
    try:
        yield
    except TensorFileError as error:
        raise ModelLoadError(str(error)) from error
