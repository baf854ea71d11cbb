"""Safe reading of files that `torch.save` writes: a zip of stored entries, one of them a pickle that names the others.

Nothing is unpickled. The pickle is read by a machine that knows the few operations and names of which a dictionary of
tensors consists, calls nothing, and refuses everything else.
"""

import io
import math
import os
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.model.dtype import Dtype
from caraserve.model.opened_file import FilePlace, OpenedFile, TensorFileError
from caraserve.model.torch_pickle import PickledTensor, PickleRefused, read_pickle

_OLD = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46"  # the first bytes of the format from before 1.6
_MOST_PICKLE_BYTES, _MOST_DIRECTORY_BYTES = 8 << 20, 8 << 20
_LOCAL = struct.Struct("<4s5H3I2H")  # the header before an entry's bytes
_MOST_DIMENSIONS, _MOST_NAME_CHARS = 8, 512
# What the libraries that read zips and pickles raise for damaged ones.
_DAMAGED = (zipfile.BadZipFile, struct.error, ValueError, RuntimeError, LookupError, ArithmeticError, EOFError)
_MOST_GAPS = 4  # times the bytes of a tensor that are read for it, where it lies scattered in its storage


class TorchFile(OpenedFile):
    """One file of `torch.save`, open for reading: a dictionary of tensors."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises TensorFileError for anything but a well-formed regular file with tensors alone."""
        super().__init__(path)
        try:
            self._entries = self._checked_entries()
            self._tensors = self._read_tensors()
        except _DAMAGED as error:
            raise TensorFileError(f"{self.name} is not a valid file of PyTorch: {error}") from None

    @property
    def names(self) -> Sequence[str]:
        """Tensor names, in the order of the dictionary."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape. Raises TensorFileError when there is no such tensor."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> Dtype:
        """Returns a tensor's dtype. Raises TensorFileError unless it is F32, F16 or BF16, and for unknown tensors."""
        kind = self._tensor(name).kind
        if kind not in Dtype.__members__:
            raise TensorFileError(f"{self.name}: tensor {name} has dtype {kind}; F32, F16 and BF16 are supported")
        return Dtype[kind]

    def raw(self, name: str) -> NDArray[np.generic]:
        """Reads the values of a tensor: float32, or uint16 with the bits of a 16-bit float. Raises TensorFileError."""
        return self.rows(name, 0, self.shape(name)[0]) if self.shape(name) else self._values(name, 0, ())

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """Reads some rows of a tensor, as `raw`."""
        tensor = self._tensor(name)
        return self._values(name, start * tensor.strides[0], (stop - start, *tensor.shape[1:]))

    def place(self, name: str) -> FilePlace | None:
        """Returns where a tensor's values begin; None: they do not lie one row after another."""
        tensor, size = self._tensor(name), self.dtype(name).itemsize
        dense = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
        if any(
            count > 1 and here != stride
            for count, here, stride in zip(tensor.shape, tensor.strides, dense, strict=True)
        ):
            return None
        return FilePlace(self._descriptor, self._entries[tensor.storage][0] + tensor.offset * size)

    def end(self, name: str) -> int:
        """Returns where the storage of a tensor ends in the file."""
        start, num_bytes = self._entries[self._tensor(name).storage]
        return start + num_bytes

    def _tensor(self, name: str) -> PickledTensor:
        if name not in self._tensors:
            raise TensorFileError(f"{self.name} has no tensor {name}")
        return self._tensors[name]

    def _values(self, name: str, offset: int, shape: tuple[int, ...]) -> NDArray[np.generic]:
        tensor, storage = self._tensor(name), self.dtype(name).storage
        spans = [(size - 1) * stride for size, stride in zip(shape, tensor.strides, strict=True)]
        flat = np.empty(1 + sum(spans), storage)
        at = self._entries[tensor.storage][0] + (tensor.offset + offset) * storage.itemsize
        self._read_into(flat.view(np.uint8).data, at, f"tensor {name}")
        # Where there is one element, the file may have any stride.
        strides = [
            stride * storage.itemsize if size > 1 else 0 for size, stride in zip(shape, tensor.strides, strict=True)
        ]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, shape, strides))

    # --- the file ---

    def _checked_entries(self) -> dict[str, tuple[int, int]]:
        """Returns the start and the bytes of each entry in the folder of the pickle, by its name there."""
        if self._read(0, len(_OLD)) == _OLD:
            raise TensorFileError(
                f"{self.name} is in PyTorch's format from before 1.6; load it and save it as safetensors"
            )
        with zipfile.ZipFile(_Directory(self._descriptor, self._status.st_size)) as archive:
            infos = archive.infolist()
        names = [info.filename for info in infos]
        roots = [name.removesuffix("data.pkl") for name in names if name.rpartition("/")[2] == "data.pkl"]
        if len(roots) != 1 or len(set(names)) != len(names):
            raise ValueError(f"it has {len(roots)} pickles, or an entry twice")
        entries: dict[str, tuple[int, int]] = {}
        end = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            start = self._start(info)
            if info.header_offset < end or start + info.file_size > self._status.st_size:
                raise ValueError(f"entry {info.filename[:100]!a} lies outside of the file, or over another one")
            end = start + info.file_size
            if info.filename.startswith(roots[0]):
                entries[info.filename.removeprefix(roots[0])] = start, info.file_size
        return entries

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Returns where an entry's bytes begin, as the header before them says."""
        mark, *_, name_bytes, extra_bytes = _LOCAL.unpack(self._read(info.header_offset, _LOCAL.size))
        start = info.header_offset + _LOCAL.size + int(name_bytes) + int(extra_bytes)
        name = self._read(info.header_offset + _LOCAL.size, name_bytes)
        if mark != b"PK\x03\x04" or name != info.orig_filename.encode():
            raise ValueError(f"entry {info.filename[:100]!a} is not where the directory says")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise ValueError(f"entry {info.filename[:100]!a} is compressed or encrypted")
        return start

    def _read_tensors(self) -> dict[str, PickledTensor]:
        start, num_bytes = self._entries["data.pkl"]
        if num_bytes > _MOST_PICKLE_BYTES:
            raise ValueError(f"its pickle has {num_bytes} bytes")
        if "byteorder" in self._entries and self._read(self._entries["byteorder"][0], 6) != b"little":
            raise ValueError("it is big-endian")
        try:
            tensors = read_pickle(self._read(start, num_bytes))
        except PickleRefused as refused:
            raise TensorFileError(f"{self.name} {refused}") from None
        for name, tensor in tensors.items():
            self._check(name, tensor)
        return tensors

    def _check(self, name: str, tensor: PickledTensor) -> None:
        """Raises ValueError unless a tensor lies in its storage, each element once."""
        if len(name) > _MOST_NAME_CHARS or len(tensor.shape) > _MOST_DIMENSIONS:
            raise ValueError(
                f"a tensor has {len(tensor.shape)} dimensions and a name of {len(name)} characters; "
                f"{_MOST_DIMENSIONS} and {_MOST_NAME_CHARS} at most are read"
            )
        shown, shape, strides = ascii(name)[:200], tensor.shape, tensor.strides
        _, num_bytes = self._entries.get(tensor.storage, (0, -1))
        if num_bytes != tensor.storage_elements * tensor.itemsize:
            raise ValueError(f"the storage of tensor {shown} has {num_bytes} bytes")
        if len(strides) != len(shape) or min((*shape, 1)) < 1 or min((*strides, 0)) < 0:
            raise ValueError(f"tensor {shown} has shape {list(shape)} and strides {list(strides)[:_MOST_DIMENSIONS]}")
        reach = 0
        for stride, size in sorted(zip(strides, shape, strict=True)):
            if size > 1 and stride <= reach:
                raise ValueError(f"elements of tensor {shown} overlap")
            reach += (size - 1) * stride
        if tensor.offset < 0 or tensor.offset + reach >= tensor.storage_elements:
            raise ValueError(f"tensor {shown} lies outside of its storage")
        if reach >= _MOST_GAPS * math.prod(shape):
            raise ValueError(f"tensor {shown} lies scattered in its storage")


class _Directory(io.RawIOBase):
    """The file for the library that reads a zip's directory: nothing large is read from it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self._num_bytes, self._at = descriptor, num_bytes, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        if self._at < 0:
            raise ValueError("its directory lies outside of the file")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._num_bytes - self._at)
        count = left if size is None or size < 0 else min(left, size)
        if count > _MOST_DIRECTORY_BYTES:
            raise ValueError(f"its directory claims {count} bytes")
        data = os.pread(self._descriptor, count, self._at)
        self._at += len(data)
        return data
