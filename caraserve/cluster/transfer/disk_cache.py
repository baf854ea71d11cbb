"""Keeps adapters that were downloaded from other instances on disk: one file each, named by its digest.

    file = magic, length of the manifest, manifest, zeros up to a page, image

A file is written under another name, flushed and renamed, so a file with a digest's name is complete. It is checked
against its digest whenever it is read. Nothing that another instance sends becomes part of a path: names are 64 hex
digits.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import struct
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.core.adapter_rules import DIGEST
from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import AdapterRejected, ConfigError
from caraserve.lora.manifest import MAX_MANIFEST_BYTES, ChunkHasher, manifest_of, read_manifest
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up

_MAGIC = b"CARAIMG1"
_HEAD = struct.Struct("<8sQ")
_PAGE = 4096
_UNFINISHED = ".part"
_TEMPORARY = "caraserve-adapters-"
_UNLOCKED_S = 60.0  # a younger folder may not have its lock yet


def beside(registry: Path) -> Path:
    """Returns the folder of the disk cache, given the registry's file."""
    return registry.with_name(f"{registry.stem}.adapters")


class DiskCache:
    """The files and their sizes. Methods that touch the disk run on other threads, one at a time; the rest on the event
    loop."""

    def __init__(self, folder: Path | None, plan: DecoderPlan) -> None:
        """`folder` None: a temporary one, deleted by `close`. Raises ConfigError."""
        self._lock: int | None = None  # of a folder made for this run alone
        self._model = plan
        try:
            if folder is None:
                _clear_temporary(Path(tempfile.gettempdir()))
                self._folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
                self._lock = _locked(self._folder)
            else:
                self._folder = folder
                self._folder.mkdir(exist_ok=True)
            self._sizes: OrderedDict[str, int] = OrderedDict(self._found())  # the least recently used first
            self._num_bytes = sum(self._sizes.values())
        except OSError as error:
            raise ConfigError(f"{folder}, which keeps other instances' adapters: {error.strerror}") from None

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, and of those that are about to be written."""
        return self._num_bytes

    def file_bytes(self, digest: str) -> int:
        """Returns the size of one file."""
        return self._sizes[digest]

    def digests(self) -> list[str]:
        """Returns the digests, the least recently used first."""
        return list(self._sizes)

    def used(self, digest: str) -> None:
        """Marks a file as the most recently used."""
        if digest in self._sizes:
            self._sizes.move_to_end(digest)

    def added(self, digest: str, num_bytes: int) -> None:
        """Adds a file that `write` has written."""
        self._num_bytes += num_bytes - self._sizes.pop(digest, 0)
        self._sizes[digest] = num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Reserves room for a file to be written; negative: releases it."""
        self._num_bytes += num_bytes

    def forget(self, digest: str) -> None:
        """Removes a digest; `delete` then deletes its file."""
        self._num_bytes -= self._sizes.pop(digest, 0)

    def close(self) -> None:
        """Deletes a temporary folder."""
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    # --- on another thread ---

    def write(self, image: HostAdapter) -> None:
        """Writes a file. Raises OSError, and then leaves none."""
        head = _head(image)
        path = self._path(image.spec.digest)
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            with unfinished.open("wb") as file:
                file.write(head)
                file.write(image.data.data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
            self._flush_names()
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _flush_names(self) -> None:
        """Flushes the folder, which makes a rename durable."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self, digest: str, into: NDArray[np.uint8]) -> HostAdapter:
        """Reads and checks an image. Raises AdapterRejected when the file is gone or has wrong bytes, and OSError when
        it cannot be read now."""
        try:
            with self._path(digest).open("rb") as file:
                magic, length = _HEAD.unpack(file.read(_HEAD.size))
                if magic != _MAGIC or length > MAX_MANIFEST_BYTES:
                    raise AdapterRejected(f"adapter {digest[:12]}: the file kept of it is not one of ours")
                spec = read_manifest(file.read(length), digest, self._model)
                file.seek(align_up(_HEAD.size + length, _PAGE))
                if spec.num_bytes > into.nbytes:
                    raise AdapterRejected(f"adapter {digest[:12]} has {spec.num_bytes} bytes, not {into.nbytes}")
                data = into[: spec.num_bytes]
                if file.readinto(data.data) != spec.num_bytes:
                    raise AdapterRejected(f"adapter {digest[:12]}: the file kept of it was cut short")
        except FileNotFoundError:
            raise AdapterRejected(f"adapter {digest[:12]}: the file kept of it is gone") from None
        except struct.error:
            raise AdapterRejected(f"adapter {digest[:12]}: the file kept of it was cut short") from None
        hasher = ChunkHasher(spec.layer_ends)
        hasher.update(data.data)
        if tuple(hasher.hashes) != spec.chunks:
            raise AdapterRejected(f"adapter {digest[:12]}: the file kept of it has changed")
        return HostAdapter(spec, data)

    def delete(self, digest: str) -> None:
        """Deletes a file, if it exists."""
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: str) -> Path:
        assert DIGEST.fullmatch(digest), "file names are digests"
        return self._folder / digest

    def _found(self) -> list[tuple[str, int]]:
        """Lists the files of earlier runs by time of access, and deletes unfinished ones."""
        found = []
        for path in self._folder.iterdir():
            if path.name.endswith(_UNFINISHED) and DIGEST.fullmatch(path.name.removesuffix(_UNFINISHED)):
                path.unlink()
            elif DIGEST.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                status = path.stat()
                found.append((status.st_atime, path.name, status.st_size))
        return [(name, size) for _, name, size in sorted(found)]


def _locked(folder: Path) -> int | None:
    """Locks a folder against `_clear_temporary` of other processes. Returns the descriptor; None: it is locked."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


def _clear_temporary(parent: Path) -> None:
    """Deletes temporary folders of killed processes: those of this user, not locked, older than 60 s."""
    for old in parent.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            status = old.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_ours and time.time() - status.st_mtime > _UNLOCKED_S and (lock := _locked(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)


def file_size(image: HostAdapter) -> int:
    """Returns the size of the file for an image."""
    return len(_head(image)) + image.spec.num_bytes


def _head(image: HostAdapter) -> bytes:
    manifest = manifest_of(image.spec)
    size = _HEAD.size + len(manifest)
    return (_HEAD.pack(_MAGIC, len(manifest)) + manifest).ljust(align_up(size, _PAGE), b"\0")
