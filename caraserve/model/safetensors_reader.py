"""Safe reading of safetensors files, for base weights and adapters; the library checks headers.

Nothing here unpickles, and memory never grows with a size that a file only claims. Files are read tensor by tensor and
not mapped: copying a new version over a mapped file would end the process with SIGBUS. Headers are bounded and decoded
tensor by tensor too, because a decoder holds the interpreter lock until it returns.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from caraserve.model.dtype import Code, Dtype
from caraserve.model.opened_file import FilePlace, OpenedFile, TensorFileError
from caraserve.util.memory import memory_file

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_MAX_INDEX_BYTES = 64 << 20
_LFS_START = b"version "  # of the text that a clone without Git LFS has in place of a file
_MAX_HEADER_BYTES = 512 << 10  # twice what A and B of all 7 modules of 126 layers take; the library's check is 4 ms
# 5 GB of a model of 48 layers of 128 experts, with a scale for each of their matrices, take 700 kB.
_MAX_MODEL_HEADER_BYTES = 16 << 20
_MAX_MEMBER_CHARS = 16 << 10  # of one tensor, or of the metadata: decoded within 1 ms
_MAX_NAME_CHARS, _MAX_DIMENSIONS = 512, 8  # so that both fit into a message
_BLANKS = r"[ \t\n\r]*"
_OPENING, _COLON, _NEXT = (re.compile(f"{_BLANKS}{mark}{_BLANKS}") for mark in (r"\{", ":", "([,}])"))


class TensorFile(OpenedFile):
    """One safetensors file, open for reading."""

    def __init__(self, path: Path, name: str = "", most_header_bytes: int = _MAX_HEADER_BYTES) -> None:
        """Opens the file, which error messages call `name`, else by its own name. Raises TensorFileError for anything
        but a well-formed regular file, and for one with a longer header."""
        super().__init__(path, name)
        self._header, self._start = self._checked_header(most_header_bytes)
        self._metadata: dict[str, Any] = self._header.pop("__metadata__", {})

    @property
    def names(self) -> list[str]:
        """Tensor names, in the header's order."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape. Raises TensorFileError when there is no such tensor."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> Dtype:
        """Returns a tensor's dtype. Raises TensorFileError unless it is F32, F16 or BF16, and for unknown tensors."""
        kind = self._entry(name)["dtype"]
        if kind not in Dtype.__members__:
            raise TensorFileError(f"{self.name}: tensor {name} has dtype {kind}; F32, F16 and BF16 are supported")
        return Dtype[kind]

    def raw(self, name: str) -> NDArray[np.generic]:
        """Reads the values of a tensor: float32, or uint16 with the bits of a 16-bit float.

        Allocates the bytes of the shape, at most those of the file; check `shape` first for an untrusted file. Raises
        TensorFileError when the file has been cut short since it was opened.
        """
        return self._values(name, self.dtype(name).storage)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """Reads some rows of a tensor, as `raw`."""
        shape, dtype = self.shape(name), self.dtype(name)
        values = np.empty((stop - start, *shape[1:]), dtype.storage)
        row_bytes = dtype.itemsize * math.prod(shape[1:])
        self.read_into(name, values.reshape(-1).view(np.uint8).data, start * row_bytes)
        return values

    def codes(self, name: str, code: Code) -> NDArray[np.uint8]:
        """Reads a tensor of codes. Raises TensorFileError if it has another dtype, and as `raw`."""
        self.check_code(name, code)
        return self._values(name, np.dtype(np.uint8))

    def check_code(self, name: str, code: Code) -> None:
        """Raises TensorFileError unless a tensor has codes of this kind."""
        kind = self._entry(name)["dtype"]
        if kind != code.value:
            raise TensorFileError(f"{self.name}: tensor {name} has dtype {kind}; config.json says {code.value}")

    def words(self, name: str) -> NDArray[np.uint32]:
        """Reads a tensor of integers of 32 bits. Raises TensorFileError if it has another dtype, and as `raw`."""
        kind = self._entry(name)["dtype"]
        if kind not in ("I32", "U32"):
            raise TensorFileError(f"{self.name}: tensor {name} has dtype {kind}, not I32")
        return self._values(name, np.dtype("<u4"))

    def num_bytes(self, name: str) -> int:
        """Returns the bytes of a tensor. Raises TensorFileError when there is no such tensor."""
        start, end = self._entry(name)["data_offsets"]
        return int(end) - int(start)

    def read_into(self, name: str, target: memoryview, start: int) -> None:
        """Reads as many bytes as `target` has, from byte `start` of a tensor on. Several threads may read at once.

        Raises TensorFileError when the file has been cut short since it was opened.
        """
        self._read_into(target, self.place(name).offset + start, f"tensor {name}")

    def place(self, name: str) -> FilePlace:
        """Returns where a tensor's values begin. Raises TensorFileError when there is no such tensor."""
        return FilePlace(self._descriptor, self._start + int(self._entry(name)["data_offsets"][0]))

    @property
    def metadata(self) -> dict[str, Any]:
        """The header's `__metadata__`; empty without it."""
        return self._metadata

    def end(self, name: str) -> int:
        """Returns where a tensor ends in the file. Raises TensorFileError when there is no such tensor."""
        return self._start + int(self._entry(name)["data_offsets"][1])

    def _entry(self, name: str) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self._header[name]
        except KeyError:
            raise TensorFileError(f"{self.name} has no tensor {name}") from None
        return entry

    def _values(self, name: str, storage: np.dtype[Any]) -> NDArray[Any]:
        values = np.empty(self.shape(name), storage)
        self.read_into(name, values.reshape(-1).view(np.uint8).data, 0)
        return values

    def _checked_header(self, most_bytes: int) -> tuple[dict[str, Any], int]:
        """Returns the header by tensor name, and the offset of the data."""
        prefix = self._read(0, 8)
        if len(prefix) < 8:
            raise self._invalid(f"it has only {self._status.st_size} bytes")
        (num_bytes,) = struct.unpack("<Q", prefix)
        if prefix == _LFS_START:
            raise self._invalid("it is a pointer of Git LFS; `git lfs pull` fetches the file that it stands for")
        if num_bytes > self._status.st_size - len(prefix):
            raise self._invalid(f"its header claims {num_bytes} bytes")
        if num_bytes > most_bytes:
            raise TensorFileError(f"{self.name}: its header has {num_bytes} bytes; at most {most_bytes} are read")
        text = self._read(len(prefix), num_bytes)
        try:
            header = _decoded(text.decode())
            _check(prefix + text, self._status.st_size)
        except OSError as error:
            raise TensorFileError(f"{self.name} cannot be checked: {error.strerror}") from None
        except (safetensors.SafetensorError, ValueError, RecursionError) as error:
            raise self._invalid(str(error)) from None
        return header, len(prefix) + num_bytes

    def _invalid(self, why: str) -> TensorFileError:
        return TensorFileError(f"{self.name} is not a valid safetensors file: {why}")


def _check(header: bytes, file_bytes: int) -> None:
    """Raises SafetensorError unless offsets, shapes and dtypes agree with one another and with the file's size, or
    OSError if that cannot be checked.

    The library maps files, so it gets one in memory with the header, and a hole in place of the tensors.
    """
    copy = memory_file("safetensors header", file_bytes)
    try:
        os.write(copy, header)
        with safetensors.safe_open(f"/dev/fd/{copy}", framework="numpy"):
            pass
    finally:
        os.close(copy)


def _decoded(text: str) -> dict[str, Any]:
    """Returns the header's tensors, and `__metadata__`, by name, with unchecked fields. Raises ValueError or
    RecursionError."""
    header: dict[str, Any] = {}
    for name, value in _members(text):
        if name in header:  # readers differ in which one they use
            raise ValueError("its header names a tensor twice")
        header[name] = value
        if name == "__metadata__":
            continue
        if not isinstance(value, dict) or not isinstance(value.get("shape"), list):
            raise ValueError(f"its header gives no shape for tensor {ascii(name)[:200]}")
        if len(name) > _MAX_NAME_CHARS or len(value["shape"]) > _MAX_DIMENSIONS:
            raise ValueError(
                f"a tensor has {len(value['shape'])} dimensions and a name of {len(name)} characters; "
                f"{_MAX_DIMENSIONS} and {_MAX_NAME_CHARS} at most are read"
            )
    return header


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """Yields names and values of a JSON object, decoded one by one. Raises ValueError or RecursionError."""
    place = _found(_OPENING, text, 0).end()
    has_more = not text.startswith("}", place)
    while has_more:
        name, value, end = _member(text[place : place + _MAX_MEMBER_CHARS])
        yield name, value
        mark = _found(_NEXT, text, place + end)
        place, has_more = mark.end(), mark[1] == ","


def _member(text: str) -> tuple[str, Any, int]:
    """Decodes the name and value at the start of `text`; returns them and their end. Raises as `_members`."""
    try:
        name, end = _DECODER.raw_decode(text)
        value, end = _DECODER.raw_decode(text, _found(_COLON, text, end).end())
    except ValueError:
        if len(text) < _MAX_MEMBER_CHARS:
            raise
        raise ValueError(
            f"its header has more than {_MAX_MEMBER_CHARS} characters on one tensor or on the metadata"
        ) from None
    if not isinstance(name, str):
        raise ValueError("its header has a name that is not text")
    return name, value, end


def _found(pattern: re.Pattern[str], text: str, place: int) -> re.Match[str]:
    match = pattern.match(text, place)
    if match is None:
        raise ValueError("its header is not a JSON object")
    return match


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object. Raises ValueError for duplicate names, of which the last would win."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("its header names a field twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def weight_file(path: Path) -> TensorFile:
    """Opens a file of a model, which may have more tensors than an adapter's. Raises TensorFileError."""
    return TensorFile(path, most_header_bytes=_MAX_MODEL_HEADER_BYTES)


def weight_files(folder: Path) -> dict[str, Path]:
    """Returns files by tensor name, of a single `model.safetensors` or of a sharded folder with its index.

    Raises TensorFileError when there is neither, or when the index names files outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _sharded(folder, index)
    single = folder / "model.safetensors"
    if single.is_file():
        with weight_file(single) as file:
            return dict.fromkeys(file.names, single)
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLED)
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
        if Path(file).name != file or file in ("", ".."):
            raise TensorFileError(f"{index.name} names {file!r}, which is not a file of the folder")
    return {tensor: folder / file for tensor, file in names.items()}
