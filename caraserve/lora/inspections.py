"""What inspections of adapters' files have found, by stamps of the files, so that none is inspected again that has not
changed. One SQLite file keeps it over restarts.

A stamp does not prove what the bytes are: when an adapter is read, the digest of its bytes is computed beside its first
use, and compared with the one from here.
"""

import ctypes
import hashlib
import json
import logging
import os
import sqlite3
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

from caraserve import __version__
from caraserve.core.adapter_facts import MAX_BASE_NAME
from caraserve.core.adapter_rules import DIGEST
from caraserve.core.lora_layout import MAX_RANK, AdapterSpec
from caraserve.lora.folder_contents import files_of
from caraserve.model.digest import model_digest
from caraserve.util.cache_folder import cache_folder

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None)
# The types in statfs(2) of file systems of this machine, where every write changes a file's times. On those of a
# network or a program, the times of another machine's writes may come later than their bytes.
_LOCAL_TYPES = {
    "ext4": 0xEF53,  # and ext2, ext3
    "xfs": 0x58465342,
    "btrfs": 0x9123683E,
    "zfs": 0x2FC12FC1,
    "f2fs": 0xF2F52010,
    "bcachefs": 0xCA451A4E,
    "tmpfs": 0x01021994,
    "overlay": 0x794C7630,
}
_STATFS_BYTES = 256  # more than the structure has, whose first word is the type
_SETTLED_NS = 100_000_000  # times of files have steps of up to 10 ms: a second write may leave them as they are

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS inspections (
    context TEXT, stamp TEXT, digest TEXT NOT NULL, found TEXT NOT NULL, checksum TEXT NOT NULL, seen_day INTEGER,
    PRIMARY KEY (context, stamp)
) WITHOUT ROWID
"""
_WAIT_FOR_LOCK_S = 1.0
_MOST_ROWS, _PRUNED_AFTER = 50_000, 1000  # rows: 25 MB; so many more are written before the oldest are deleted
_KEPT_DAYS = 90  # after the last start or read that has used a row
_DAY_S = 86_400


def _code_digest() -> str:
    """Returns a digest of the code that inspects adapters, in some 20 ms: other code may find something else."""
    digest, package = hashlib.sha256(__version__.encode()), Path(__file__).parent.parent
    for part in ("core", "lora", "model"):
        for source in sorted((package / part).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def full_stamp(folder: Path) -> str:
    """Returns the devices, inodes, sizes and times of the files with an adapter's configuration and tensors, which any
    write changes, also one that sets the time of the last write back. Empty if that is not certain: a file is missing,
    was written within the last 0.1 s, or is on a network."""
    now_ns, parts = time.time_ns(), list[str]()
    for name in files_of(folder):
        try:
            found = os.stat(folder / name)
        except OSError:
            return ""
        changed_ns = max(found.st_mtime_ns, found.st_ctime_ns)
        if changed_ns > now_ns - _SETTLED_NS or not _is_local(folder / name):
            return ""
        parts.append(f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}")
    return ",".join(parts)


def _is_local(path: Path) -> bool:
    described = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(path), described) != 0:
        return False
    (kind,) = struct.unpack_from("@l", described)
    return kind & 0xFFFFFFFF in _LOCAL_TYPES.values()


@dataclass(frozen=True, slots=True)
class Inspection:
    """What an adapter's configuration and tensors say, in short.

    `num_bytes`: of the image. `trained_on`: the name of the base model. `num_classes`: of the score head. `notes`: what
    is left out.
    """

    digest: str
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    trained_on: str
    num_classes: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: AdapterSpec, notes: Sequence[str] = ()) -> Self:
        """Returns what is kept of a spec."""
        classes = 0 if spec.head is None else len(spec.head.classes)
        return cls(spec.digest, spec.rank, spec.targets, spec.num_bytes, spec.trained_on, classes, tuple(notes))

    @property
    def text(self) -> str:
        """All but the digest, as JSON."""
        return json.dumps([self.rank, self.targets, self.num_bytes, self.trained_on, self.num_classes, self.notes])

    @classmethod
    def read(cls, digest: str, text: str) -> Self:
        """Returns the inspection with that `text`. Raises ValueError for a text that no inspection has."""
        try:
            rank, targets, num_bytes, trained_on, num_classes, notes = json.loads(text)
        except (TypeError, RecursionError):
            raise ValueError(text[:80]) from None
        are_numbers = all(type(one) is int for one in (rank, num_bytes, num_classes))
        are_lists = isinstance(targets, list) and isinstance(notes, list)
        if not (are_numbers and are_lists and all(isinstance(one, str) for one in (trained_on, *targets, *notes))):
            raise ValueError(text[:80])
        if not (0 < rank <= MAX_RANK and num_bytes > 0 and num_classes >= 0 and len(trained_on) <= MAX_BASE_NAME):
            raise ValueError(text[:80])
        return cls(digest, rank, tuple(targets), num_bytes, trained_on, num_classes, tuple(notes))


def open_inspections(model: Path, *settings: str) -> "Inspections":
    """Returns the inspections in the cache folder that were made for this base model with these settings."""
    context = model_digest(model, *settings, _code_digest())
    return Inspections(cache_folder("adapters") / "inspections.sqlite", context)


class Inspections:
    """Inspections of this run and earlier ones. Thread-safe. If the file cannot be used, they are kept for this run
    alone, and a line is logged: what is not known is inspected again."""

    def __init__(self, path: Path | None = None, context: str = "") -> None:
        """`path`: of the file; None: there is none. `context`: identifies all else on which inspections depend, such as
        the base model and this version."""
        self._path, self._context, self._lock = path, context, Lock()
        self._written = 0
        self._connection = _in_memory()
        if path is not None:
            with self._lock:
                self._open(path)

    def digest_of(self, stamp: str) -> str | None:
        """Returns the digest that files of this stamp had when they were inspected or read; None if it is not known."""
        row = self._row(stamp)
        return None if row is None else row[0]

    def find(self, stamp: str) -> Inspection | None:
        """Returns what was found in files of this stamp; None if they were not inspected."""
        row = self._row(stamp)
        if row is None or not row[1]:
            return None
        with suppress(ValueError):
            return Inspection.read(*row)
        return None

    def note(self, stamp: str, found: Inspection) -> None:
        """Keeps what was found in files of this stamp."""
        self._write(stamp, found.digest, found.text)

    def note_digest(self, stamp: str, digest: str) -> None:
        """Keeps the digest of files of this stamp that were read, and not inspected."""
        self._write(stamp, digest, "")

    def forget(self, digest: str) -> None:
        """Removes a digest that files of a stamp turned out not to have."""
        self._execute("DELETE FROM inspections WHERE digest = ?", (digest,))

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    def _row(self, stamp: str) -> tuple[str, str] | None:
        """Returns the digest and the text of a stamp's row, if they are as they were written."""
        if not stamp:
            return None
        key = self._context, stamp
        query = "SELECT digest, found, checksum, seen_day FROM inspections WHERE context = ? AND stamp = ?"
        rows = self._execute(query, key)
        if not rows:
            return None
        digest, found, checksum, seen_day = rows[0]
        if checksum != _checksum(*key, str(digest), str(found)) or not DIGEST.fullmatch(str(digest)):
            return None
        if seen_day != (today := int(time.time() // _DAY_S)):
            self._execute("UPDATE inspections SET seen_day = ? WHERE context = ? AND stamp = ?", (today, *key))
        return str(digest), str(found)

    def _write(self, stamp: str, digest: str, found: str) -> None:
        if not stamp:
            return
        row = self._context, stamp, digest, found
        written = *row, _checksum(*row), int(time.time() // _DAY_S)
        self._execute("INSERT OR REPLACE INTO inspections VALUES (?, ?, ?, ?, ?, ?)", written)
        self._written += 1
        if self._written % _PRUNED_AFTER == 0:
            self._execute(_PRUNE, ())

    def _execute(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Runs a statement; without the file from its first error on."""
        with self._lock:
            try:
                return self._connection.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                self._fall_back(error)
                return []

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _is_local(path.parent):
                raise OSError("its file system is on a network or of another kind, whose locks are not relied on")
            self._connection = _prepared(str(path))
        except (sqlite3.Error, OSError) as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        """Continues in memory. A file that is damaged, or of another program, is removed: it is only a cache."""
        self._connection.close()
        self._connection = _in_memory()
        if self._path is None:
            return
        path, self._path = self._path, None
        is_damaged = type(error) is sqlite3.DatabaseError  # others of its kinds are about access
        for name in (path.name, f"{path.name}-journal") if is_damaged else ():
            with suppress(OSError):
                path.with_name(name).unlink()
        then = "it is made again at the next start" if is_damaged else "the next start inspects adapters again"
        log.warning("%s cannot be used: %s; %s", path, error, then)


_PRUNE = (
    "DELETE FROM inspections WHERE (context, stamp) IN "
    f"(SELECT context, stamp FROM inspections ORDER BY seen_day DESC LIMIT -1 OFFSET {_MOST_ROWS})"
)


def _checksum(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode(errors="surrogatepass")).hexdigest()[:16]


def _in_memory() -> sqlite3.Connection:
    return _prepared(":memory:")


def _prepared(name: str) -> sqlite3.Connection:
    """Opens a file. Removes all rows from one of another version of this program."""
    connection = sqlite3.connect(name, timeout=_WAIT_FOR_LOCK_S, check_same_thread=False, isolation_level=None)
    try:
        execute = connection.execute
        execute("PRAGMA synchronous = OFF")  # after a crash of the machine the file may be damaged, and is made again
        execute("BEGIN IMMEDIATE")
        if execute("PRAGMA user_version").fetchone() != (_SCHEMA_VERSION,):
            execute("DROP TABLE IF EXISTS inspections")
            execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        execute(_SCHEMA)
        execute("DELETE FROM inspections WHERE seen_day < ?", (int(time.time() // _DAY_S) - _KEPT_DAYS,))
        execute(_PRUNE)
        execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection
