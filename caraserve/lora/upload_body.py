"""Writes the body of an upload into the files of an adapter's folder, as it arrives.

The body is a tar of a PEFT folder, or a safetensors file. Of a tar every member is checked before any of its bytes are
written: files of known names and bounded sizes, once each, at the top or in one folder; no links, devices or sparse
files. No more than one member's header is held in memory.
"""

import json
import os
import tarfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from caraserve.errors import AdapterRejected, PayloadTooLarge
from caraserve.lora.peft import TENSORS_NAME
from caraserve.lora.peft_config import CONFIG_NAME
from caraserve.util.units import human_bytes

CONFIG_KEY = "adapter_config"  # of a safetensors file's metadata: the configuration as JSON
_LENGTH_BYTES = 8  # of a safetensors file's first number, the length of its header
_SNIFFED_BYTES = _LENGTH_BYTES + 1  # the header is JSON and begins with a brace
_MOST_SAFETENSORS_HEADER = 1 << 32
_BLOCK = tarfile.BLOCKSIZE
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE)
_MOST_PAX_BYTES = 16 << 10
# Times and owners of files may be in pax headers; what changes a member's name, size or kind may not.
_REFUSED_PAX = ("path", "size", "linkpath", "GNU.", "hdrcharset", "SCHILY.realsize")
_MOST_FOLDERS = 8  # entries, which hold nothing
MOST_CONFIG_BYTES = 1 << 20


@dataclass(slots=True)
class _Member:
    """A file that is being written."""

    name: str
    descriptor: int
    left: int | None  # bytes; None: all that follow are its own


_T = TypeVar("_T")
_Reading: TypeAlias = Generator[None, memoryview, _T]  # gets bytes of the body as they arrive


class UploadBody:
    """The files of one upload. Not thread-safe, and blocks on the disk: for one thread at a time."""

    def __init__(self, folder: Path, most_tensor_bytes: int, num_bytes: int | None, config: str | None) -> None:
        """`num_bytes`: of the whole body, None if the client does not say. `config`: of a safetensors body, if it is
        not in its metadata."""
        self.tensor_bytes = 0  # of the tensor file, that were written
        self._is_sized = False  # whether the tensor file has its full size, as the header's check needs it
        self.is_bare = False  # whether the body is a safetensors file, not a tar
        self._header_end: int | None = None
        self._folder, self._config = folder, config
        self._num_bytes = num_bytes
        self._limits = {CONFIG_NAME: MOST_CONFIG_BYTES, TENSORS_NAME: most_tensor_bytes}
        self._member: _Member | None = None
        self._top: str | None = None  # the folder in the tar that its files are in
        self._folders = 0
        self._written: set[str] = set()
        self._rest = memoryview(b"")  # bytes that have arrived and are not read yet
        self._may_end = True  # whether the body may end where it has been read to
        self._reading = self._read_body()
        next(self._reading)

    def write(self, data: bytes) -> None:
        """Writes the next bytes of the body. Raises AdapterRejected, PayloadTooLarge or OSError."""
        self._reading.send(memoryview(data))

    def has(self, name: str) -> bool:
        """Whether a file has been written to its end."""
        return name in self._written

    def has_tensor_header(self) -> bool:
        """Whether the header of the tensor file has been written, and the file's size is known."""
        if self._header_end is None and self.tensor_bytes >= _LENGTH_BYTES:
            with open(self._folder / TENSORS_NAME, "rb") as file:
                self._header_end = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return self._is_sized and self._header_end is not None and self.tensor_bytes >= self._header_end

    def end(self) -> None:
        """Ends the last file, after the last byte. Raises AdapterRejected if the body ends too early."""
        if self._member is not None and self._member.left is None:
            self._end_member()
            return
        if self._member is not None:
            raise AdapterRejected(f"the body ends in the middle of {self._member.name}")
        if not self._may_end:
            raise AdapterRejected("the body ends too early; send a tar of the adapter's folder, or a safetensors file")

    def check_complete(self) -> None:
        """Raises AdapterRejected unless both of an adapter's files have come."""
        if TENSORS_NAME not in self._written:
            raise AdapterRejected(f"the body has no {TENSORS_NAME}")
        self.refuse_missing_config()

    def refuse_missing_config(self) -> None:
        """Raises AdapterRejected if no configuration has come."""
        if CONFIG_NAME not in self._written:
            raise AdapterRejected(
                f"the adapter has no {CONFIG_NAME}: send a tar of both files, or the configuration as ?config=JSON or "
                f"as {CONFIG_KEY} in the safetensors file's metadata"
            )

    def add_config(self, text: str) -> None:
        """Writes the configuration of a safetensors body."""
        data = text.encode(errors="surrogatepass")  # what is not text is then not valid JSON either
        if len(data) > MOST_CONFIG_BYTES:
            raise AdapterRejected(f"{CONFIG_NAME} is larger than {MOST_CONFIG_BYTES} bytes")
        (self._folder / CONFIG_NAME).write_bytes(data)
        self._written.add(CONFIG_NAME)

    def close(self) -> None:
        """Ends the reading, and closes the file that is being written."""
        self._reading.close()  # its frame refers to this object: they would be a cycle
        self._close_member()

    # --- what the body is made of, in order ---

    def _read_body(self) -> _Reading[None]:
        start = yield from self._read(_SNIFFED_BYTES, may_end=True)
        if start[8:] == b"{" and int.from_bytes(start[:8], "little") < _MOST_SAFETENSORS_HEADER:
            self.is_bare = True
            self._begin(TENSORS_NAME, self._num_bytes)
            if self._config is not None:
                self.add_config(self._config)
            self._write_all(memoryview(start))
            yield from self._read_contents()
            start = b""
        elif start[:2] == b"\x1f\x8b":
            raise AdapterRejected("the body is compressed; send the tar as it is")
        elif self._config is not None:
            raise AdapterRejected("config goes with a safetensors body; a tar has its own file", param="config")
        block = start + (yield from self._read(_BLOCK - len(start), may_end=not start))
        while any(block):
            yield from self._read_entry(block)
            block = yield from self._read(_BLOCK, may_end=True)
        self._may_end = True
        while not any(self._rest):
            self._rest = yield
        raise AdapterRejected("the tar has bytes after its end")

    def _read(self, count: int, *, may_end: bool = False) -> _Reading[bytes]:
        """Returns the next `count` bytes. `may_end`: whether the body may end before them."""
        held = bytearray()
        while len(held) < count:
            if not self._rest:
                self._may_end = may_end and not held
                self._rest = yield
            part = self._rest[: count - len(held)]
            held += part
            self._rest = self._rest[len(part) :]
        return bytes(held)

    def _read_entry(self, block: bytes) -> _Reading[None]:
        """Checks a tar's header block, and reads what it announces."""
        try:
            entry = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.TarError, UnicodeDecodeError, ValueError) as error:
            raise AdapterRejected(f"the body is neither a tar nor a safetensors file: {error}") from None
        if entry.size < 0:  # GNU's binary numbers have a sign
            raise AdapterRejected(f"the tar has {entry.name[:100]!a} with {entry.size} bytes")
        if entry.type in _PAX and 0 < entry.size <= _MOST_PAX_BYTES:
            _check_pax((yield from self._read(entry.size)))
        elif entry.type == tarfile.DIRTYPE and entry.size == 0 and self._folders < _MOST_FOLDERS:
            self._folders += 1
        elif entry.type in _REGULAR:
            self._begin(self._file_name(entry.name), entry.size)
            yield from self._read_contents()
        else:
            kind = "a link" if entry.issym() or entry.islnk() else f"an entry of type {entry.type!a}"
            raise AdapterRejected(f"the tar has {kind}, {entry.name[:100]!a}; only plain files are taken")
        yield from self._read(-entry.size % _BLOCK)

    def _read_contents(self) -> _Reading[None]:
        """Writes the file that has begun to its end."""
        assert self._member is not None
        while self._member.left != 0:
            if not self._rest:
                self._may_end = False
                self._rest = yield
            part = self._rest[: self._member.left]
            self._write_all(part)
            self._rest = self._rest[len(part) :]
        self._end_member()

    # --- files ---

    def _file_name(self, path: str) -> str:
        """Returns the name of a tar's file. Raises AdapterRejected unless it may be in an adapter's folder."""
        folder, _, name = path.removeprefix("./").rpartition("/")
        if name not in self._limits or "/" in folder or folder in ("..", "."):
            raise AdapterRejected(
                f"the tar has {path[:100]!a}; an adapter's files are {', '.join(self._limits)}, and no others are taken"
            )
        if self._top not in (None, folder):
            raise AdapterRejected(f"the tar has files in two folders, {self._top[:50]!a} and {folder[:50]!a}")
        self._top = folder
        return name

    def _begin(self, name: str, size: int | None) -> None:
        limit = self._limits[name]
        if name in self._written:
            raise AdapterRejected(f"the tar has {name} twice")
        if size is not None and size > limit:
            raise PayloadTooLarge(f"{name} has {human_bytes(size)}; {human_bytes(limit)} can be served here.")
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._member = _Member(name, descriptor, size)
        if name == TENSORS_NAME and size is not None:
            os.ftruncate(descriptor, size)  # its header is checked against the file's size before all has arrived
            self._is_sized = True

    def _write_all(self, data: memoryview) -> None:
        member = self._member
        assert member is not None
        if member.left is not None:
            member.left -= len(data)
        if member.name == TENSORS_NAME:
            self.tensor_bytes += len(data)
            if self.tensor_bytes > (limit := self._limits[TENSORS_NAME]):
                raise PayloadTooLarge(f"The body is larger than {human_bytes(limit)}, which can be served here.")
        while data:
            data = data[os.write(member.descriptor, data) :]

    def _end_member(self) -> None:
        assert self._member is not None
        self._written.add(self._member.name)
        self._close_member()

    def _close_member(self) -> None:
        if self._member is not None:
            os.close(self._member.descriptor)
            self._member = None


def _check_pax(records: bytes) -> None:
    """Checks the records of a pax header, each `LENGTH KEY=VALUE` and a newline."""
    while records:
        digits = records.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 6 else 0
        if not len(digits) < length <= len(records):
            raise AdapterRejected("the tar has a pax header that is not valid")
        key = records[len(digits) + 1 : length].partition(b"=")[0].decode(errors="replace")
        if key.startswith(_REFUSED_PAX):
            raise AdapterRejected(f"the tar has a pax header with {key[:40]!a}; use plain names and files")
        records = records[length:]


def config_of(metadata: dict[str, object]) -> str | None:
    """Returns the adapter's configuration in a safetensors file's metadata. Raises AdapterRejected."""
    text = metadata.get(CONFIG_KEY)
    if text is None:
        return None
    try:
        is_object = isinstance(text, str) and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise AdapterRejected(f"{CONFIG_KEY} in the safetensors file's metadata is not a JSON object")
    return str(text)
