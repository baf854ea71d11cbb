"""Writes the body of an upload into the files of an adapter's folder, as it arrives.

The body is a tar of a PEFT folder, or a safetensors file. Of a tar every member is checked before any of its bytes are
written: files of known names and bounded sizes, once each, at the top or in one folder. Other files, such as a README,
checkpoints in folders below, or what macOS adds, are skipped and named. No path leads outside; the files that are
written are no links, and no member is a device or sparse. No more than one member's header is held in memory.
"""

import json
import os
import tarfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from caraserve.errors import AdapterRejected, PayloadTooLarge
from caraserve.lora.folder_contents import (
    GGUF_SUFFIX,
    MISTRAL_NAMES,
    MLX_NAME,
    TENSORS_NAME,
    TEXTS,
    TOKENIZER_NAME,
    TORCH_NAME,
)
from caraserve.lora.folder_texts import MAX_TEXT_BYTES
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.util.units import human_bytes

CONFIG_KEY = "adapter_config"  # of a safetensors file's metadata: the configuration as JSON
_LENGTH_BYTES = 8  # of a safetensors file's first number, the length of its header
_SNIFFED_BYTES = _LENGTH_BYTES + 1  # the header is JSON and begins with a brace
_MOST_SAFETENSORS_HEADER = 1 << 32
_BLOCK = tarfile.BLOCKSIZE
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
_LINKS = (tarfile.SYMTYPE, tarfile.LNKTYPE)
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE)
_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MOST_PAX_BYTES = 16 << 10
# Times, owners and long names of files may be in pax headers; what changes a member's size or kind may not.
_REFUSED_PAX = ("size", "GNU.", "hdrcharset", "SCHILY.realsize")
_MOST_MEMBERS = 4096
_MOST_TOKENIZER_BYTES = 64 << 20
_NAMED = 20  # of the files that were skipped
_SHOWN = 3  # of them, in a message
# Tensors of adapters that are served from a folder, but are no uploads.
_CONVERTIBLE = (GGUF_SUFFIX, MLX_NAME, TORCH_NAME, MISTRAL_NAMES[-1])
_TO_CONVERT = "uploads have PEFT's files: `caraserve adapter import` makes them"
MOST_CONFIG_BYTES = 1 << 20
MOST_OTHER_BYTES = 1 << 30  # of files beside the adapter's two; a checkpoint's optimizer takes twice its weights


@dataclass(slots=True)
class _Member:
    """A file that is being read. `descriptor`: where it is written; None: it is skipped."""

    name: str
    descriptor: int | None
    left: int | None  # bytes; None: all that follow are its own


_T = TypeVar("_T")
_Reading: TypeAlias = Generator[None, memoryview, _T]  # gets bytes of the body as they arrive


class UploadBody:
    """The files of one upload. Not thread-safe, and blocks on the disk: for one thread at a time."""

    def __init__(self, folder: Path, most_tensor_bytes: int, num_bytes: int | None, config: str | None) -> None:
        """`num_bytes`: of the whole body, None if the client does not say. `config`: of a safetensors body, if it is
        not in its metadata."""
        self.tensor_bytes = 0  # of the tensor file, that were written
        self.other_bytes = 0  # of files beside the adapter's two, that have arrived
        self.num_skipped = 0  # files
        self.skipped: list[str] = []  # the first of them
        self._is_sized = False  # whether the tensor file has its full size, as the header's check needs it
        self.is_bare = False  # whether the body is a safetensors file, not a tar
        self._header_end: int | None = None
        self._folder, self._config = folder, config
        self._num_bytes = num_bytes
        self._limits = {CONFIG_NAME: MOST_CONFIG_BYTES, TENSORS_NAME: most_tensor_bytes}
        self._texts = dict.fromkeys(TEXTS, MAX_TEXT_BYTES) | {TOKENIZER_NAME: _MOST_TOKENIZER_BYTES}
        self._member: _Member | None = None
        self._top: str | None = None  # the folder in the tar that the adapter's files are in
        self._long_name: str | None = None  # of the next member, in place of that in its header
        self._members = self._other_sizes = 0  # sizes: as the headers say
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
            but = f" at its top, but {', '.join(self.skipped[:_SHOWN])}" if self.skipped else ""
            can_convert = any(name.endswith(_CONVERTIBLE) for name in self.skipped)
            raise AdapterRejected(f"the body has no {TENSORS_NAME}{but}{f'; {_TO_CONVERT}' if can_convert else ''}")
        self.refuse_missing_config()

    def refuse_missing_config(self) -> None:
        """Raises AdapterRejected if no configuration has come."""
        if CONFIG_NAME not in self._written:
            raise AdapterRejected(
                f"the adapter has no {CONFIG_NAME}: send a tar of both files, or the configuration as ?config=JSON or "
                f"as {CONFIG_KEY} in the safetensors file's metadata"
            )

    def names_of_skipped(self) -> tuple[str, ...]:
        """Returns the files that were skipped, the first 20 of them."""
        more = self.num_skipped - len(self.skipped)
        return (*self.skipped, *([f"and {more} others"] if more else []))

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
        elif start[:4] == b"GGUF":
            raise AdapterRejected(f"the body is a GGUF file; {_TO_CONVERT}")
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
        if entry.type in (*_PAX, *_LONG) and 0 < entry.size <= _MOST_PAX_BYTES:
            data = yield from self._read(entry.size)
            if entry.type in _PAX:
                name = _pax_path(data)
                self._long_name = name if entry.type == tarfile.XHDTYPE and name is not None else self._long_name
            elif entry.type == tarfile.GNUTYPE_LONGNAME:
                self._long_name = data.rstrip(b"\0").decode(errors="replace")
        else:
            name, self._long_name = self._long_name or entry.name, None
            yield from self._read_member(entry, _plain_path(name))
        yield from self._read(-entry.size % _BLOCK)

    def _read_member(self, entry: tarfile.TarInfo, path: str) -> _Reading[None]:
        """Reads a file, or passes over a folder or link."""
        self._members += 1
        if self._members > _MOST_MEMBERS:
            raise AdapterRejected(f"the tar has over {_MOST_MEMBERS} members; leave out other folders")
        folder, _, name = path.rpartition("/")
        is_link = entry.type in _LINKS and entry.size == 0
        if entry.type == tarfile.DIRTYPE and entry.size == 0:
            self._top = path if self._top is None and not name.startswith("._") else self._top
        elif is_link and not self._takes(folder, name, entry.size):
            self._skip(path)
        elif entry.type in _REGULAR:
            if self._takes(folder, name, entry.size):
                self._begin(name, entry.size)
            else:
                self._begin_skipped(path, entry.size)
            yield from self._read_contents()
        else:
            kind = "a link" if is_link else f"an entry of type {entry.type!a}"
            raise AdapterRejected(f"the tar has {kind}, {path[:100]!a}; only plain files are taken")

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

    def _takes(self, folder: str, name: str, size: int) -> bool:
        """Returns whether a tar's file is written: it has a name of an adapter's files, and is in its folder. That is
        the first folder with such a file, or one above it. Raises AdapterRejected."""
        if size > self._texts.get(name, size) or (name not in self._limits and name not in self._texts):
            return False
        if folder == self._top or self._top is None:
            self._top = folder
            return True
        if _depth(folder) > _depth(self._top):
            return False
        is_beside = _depth(folder) == _depth(self._top) and self._written
        if is_beside or TENSORS_NAME in self._written:
            folders = f"{self._top[:50]!a} and {folder[:50]!a}"
            raise AdapterRejected(f"the tar has files in two folders, {folders}; send a tar of one folder alone")
        for text in sorted(self._written):  # what came before was no adapter's folder
            os.unlink(self._folder / text)
            self._skip(f"{self._top}/{text}")
        self._written.clear()
        self._top = folder
        return True

    def _skip(self, path: str) -> None:
        self.num_skipped += 1
        if self.num_skipped <= _NAMED:
            self.skipped.append(ascii(path)[1:-1][:100])

    def _begin_skipped(self, path: str, size: int) -> None:
        self._count_other(size)
        self._skip(path)
        self._member = _Member(path, None, size)

    def _count_other(self, size: int) -> None:
        self._other_sizes += size
        if self._other_sizes > MOST_OTHER_BYTES:
            most = human_bytes(MOST_OTHER_BYTES)
            raise PayloadTooLarge(f"The tar has over {most} of files beside the adapter's; leave out other folders.")

    def _begin(self, name: str, size: int | None) -> None:
        if name in self._written:
            raise AdapterRejected(f"the tar has {name} twice")
        if name in self._texts:
            self._count_other(size or 0)
        elif size is not None and size > (limit := self._limits[name]):
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
        if member.descriptor is None or member.name in self._texts:
            self.other_bytes += len(data)
        elif member.name == TENSORS_NAME:
            self.tensor_bytes += len(data)
            if self.tensor_bytes > (limit := self._limits[TENSORS_NAME]):
                raise PayloadTooLarge(f"The body is larger than {human_bytes(limit)}, which can be served here.")
        while data and member.descriptor is not None:
            data = data[os.write(member.descriptor, data) :]

    def _end_member(self) -> None:
        assert self._member is not None
        if self._member.descriptor is not None:
            self._written.add(self._member.name)
        self._close_member()

    def _close_member(self) -> None:
        if self._member is not None and self._member.descriptor is not None:
            os.close(self._member.descriptor)
        self._member = None


def _plain_path(path: str) -> str:
    """Returns a member's path without `.` in it. Raises AdapterRejected for one that leads outside."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise AdapterRejected(f"the tar has the path {path[:100]!a}, which leads outside of it")
    return "/".join(parts)


def _depth(folder: str) -> int:
    return folder.count("/") + 1 if folder else 0


def _pax_path(records: bytes) -> str | None:
    """Checks the records of a pax header, each `LENGTH KEY=VALUE` and a newline. Returns the next member's path, or
    None if they have none."""
    path = None
    while records:
        digits = records.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 6 else 0
        if not len(digits) < length <= len(records):
            raise AdapterRejected("the tar has a pax header that is not valid")
        key, _, value = records[len(digits) + 1 : length].decode(errors="replace").partition("=")
        if key.startswith(_REFUSED_PAX):
            raise AdapterRejected(f"the tar has a pax header with {key[:40]!a}; use plain names and files")
        path = value.removesuffix("\n") if key == "path" else path
        records = records[length:]
    return path


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
