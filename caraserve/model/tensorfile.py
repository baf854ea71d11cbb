"""Safe reading of safetensors files: the library checks the header, the data is mapped and never copied. Level 1.

Used for base weights and for adapters. Nothing here unpickles, and memory never grows with a size that a file claims.
"""

import contextlib
import json
import mmap
import os
import stat
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import safetensors
from numpy.typing import NDArray

from caraserve.model.layout import Dtype

_DTYPES = {"F32": Dtype.F32, "BF16": Dtype.BF16, "F16": Dtype.F16}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_MAX_INDEX_BYTES = 64 << 20


class TensorFileError(Exception):
    """A tensor file that cannot be read; the message names the file and what is wrong with it."""


class TensorFile:
    """One safetensors file, mapped read-only."""

    def __init__(self, path: Path) -> None:
        """Raises TensorFileError for anything but a well-formed regular file."""
        self._path = path
        self._map = _map(path)
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass  # checks lengths, offsets, shapes and dtypes against one another and against the file's size
        except safetensors.SafetensorError as error:
            self._map.close()
            raise TensorFileError(f"{path.name} is not a valid safetensors file: {error}") from None
        (header_bytes,) = struct.unpack_from("<Q", self._map)
        self._start = 8 + header_bytes
        self._header: dict[str, Any] = json.loads(self._map[8 : self._start])
        self._header.pop("__metadata__", None)

    @property
    def names(self) -> list[str]:
        """Tensor names, in the file's order."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """Elements along each dimension."""
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> Dtype:
        """Raises TensorFileError for a dtype other than F32, F16 and BF16."""
        kind = self._header[name]["dtype"]
        if kind not in _DTYPES:
            raise TensorFileError(f"{self._path.name}: tensor {name} has dtype {kind}; F32, F16 and BF16 are supported")
        return _DTYPES[kind]

    def raw(self, name: str) -> NDArray[np.generic]:
        """A read-only view: float32, or uint16 with the bits of a 16-bit float."""
        dtype = self.dtype(name)
        begin, end = self._header[name]["data_offsets"]
        data = np.frombuffer(self._map, np.uint8, end - begin, self._start + begin)
        if data.ctypes.data % dtype.itemsize:
            data = data.copy()  # an odd header length leaves every tensor unaligned
        return data.view(dtype.storage).reshape(self.shape(name))

    @property
    def data(self) -> memoryview:
        """All bytes of the file. Release it before `close`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmaps the file, unless views of it are still alive: then it goes with the last of them."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map(path: Path) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO must not wait
    except OSError as error:
        raise TensorFileError(f"{path.name} cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TensorFileError(f"{path.name} is not a regular file")
        if status.st_size < 8:
            raise TensorFileError(f"{path.name} is not a valid safetensors file: it has {status.st_size} bytes")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name → file, for a single `model.safetensors` or a sharded folder with its index.

    Raises TensorFileError when there is neither, or when the index names files outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _sharded(folder, index)
    single = folder / "model.safetensors"
    if single.is_file():
        with TensorFile(single) as file:
            return dict.fromkeys(file.names, single)
    pickled = [path.name for path in folder.iterdir() if path.suffix in _PICKLED]
    if pickled:
        raise TensorFileError(f"{folder} holds {pickled[0]}; pickle files are never read: convert it to safetensors")
    raise TensorFileError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def _sharded(folder: Path, index: Path) -> dict[str, Path]:
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise TensorFileError(f"{index.name} is larger than {_MAX_INDEX_BYTES} bytes")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TensorFileError(f"{index.name} has no valid weight_map") from None
    for file in set(names.values()):
        if Path(file).name != file:
            raise TensorFileError(f"{index.name} names {file!r}, which is not a file of the folder")
    return {tensor: folder / file for tensor, file in names.items()}
