"""Stores the names of the cluster's registry in a SQLite file, so that they survive a restart of all instances.

The file is beside the registry of this instance's own adapters, which has the settings. Tombstones are stored like
names; otherwise an instance that was off would restore removed names. A thread writes all waiting entries in one
transaction, without waiting for the disk (`synchronous = NORMAL`): other instances send lost entries again.

Tombstones expire after 30 days. After a longer absence an instance could not know which of its names were removed
meanwhile. So the file records when its server last ran. If that is over 30 days ago, its names are ignored, and the
registry is received from the other instances and built from the own adapters.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from caraserve.cluster.state.lww_map import MAX_TOMBSTONES, TOMBSTONE_S, Entry, entry_from_fields, is_expired
from caraserve.errors import ConfigError

log = logging.getLogger(__name__)

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE names (
    name TEXT PRIMARY KEY, value TEXT NOT NULL, hlc INTEGER NOT NULL, node TEXT NOT NULL, deleted INTEGER NOT NULL
) WITHOUT ROWID
"""


# A separate table, so that earlier versions of the server can still use the file.
_SEEN = "CREATE TABLE IF NOT EXISTS seen (only_row INTEGER PRIMARY KEY, wall_ms INTEGER NOT NULL)"
_SEEN_EVERY_MS = 3_600_000
# Rows written before tombstones that the registry has dropped for lack of room are deleted here too.
_PRUNE_EVERY = 10_000
_PRUNE = """
DELETE FROM names WHERE name IN (SELECT name FROM names WHERE deleted ORDER BY hlc DESC, name DESC LIMIT -1 OFFSET ?)
"""


def cluster_registry_path(registry: Path) -> Path:
    """Returns the file's path, given the path of the registry of own adapters."""
    return registry.with_name(f"{registry.stem}.cluster{registry.suffix}")


class ClusterRegistryFile:
    """The stored entries of the registry, by name. `path` None: a database in memory, so that nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._where = str(path) if path else "in memory"
        self._writer = ThreadPoolExecutor(1, "caraserve-names")
        self._lock = threading.Lock()
        self._waiting: dict[str, Entry] = {}
        self._seen_ms = 0
        self._unpruned = 0  # rows written
        try:
            self._connection = sqlite3.connect(path or ":memory:", timeout=1.0, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise
        except (sqlite3.Error, ValueError) as error:
            raise ConfigError(
                f"{self._where}, which keeps the cluster's names beside --registry: {error}; another server may use it"
            ) from None

    def restore(self, wall_ms: int) -> list[Entry]:
        """Returns all stored names and tombstones; deletes expired tombstones and damaged rows.

        Returns nothing if the server last ran over 30 days ago. Raises ConfigError when the file cannot be read.
        """
        try:
            return self._restore(wall_ms)
        except sqlite3.Error as error:
            raise ConfigError(
                f"{self._where}, which keeps the cluster's names beside --registry: {error}; remove it, and the other "
                "instances tell the names again"
            ) from None

    def _restore(self, wall_ms: int) -> list[Entry]:
        ((seen_ms,),) = self._connection.execute("SELECT max(wall_ms) FROM seen").fetchall()
        if isinstance(seen_ms, int) and wall_ms - seen_ms > TOMBSTONE_S * 1000:
            log.warning(
                "%s was not in use for over %d days: its names are left out", self._where, TOMBSTONE_S // 86_400
            )
            with self._connection:
                self._connection.execute("DELETE FROM names")
        rows = self._connection.execute("SELECT name, value, hlc, node, deleted FROM names").fetchall()
        entries = list(map(_entry, rows))
        if damaged := entries.count(None):
            log.warning("%s: %d names in it are damaged and left out", self._where, damaged)
        kept = [None if entry is None or is_expired(entry, wall_ms) else entry for entry in entries]
        dropped = [(row[0],) for row, entry in zip(rows, kept, strict=True) if entry is None]
        with self._connection:
            self._connection.executemany("DELETE FROM names WHERE name = ?", dropped)
        return list(filter(None, kept))

    def save(self, entries: Iterable[Entry]) -> None:
        """Queues entries to be written by the thread, in one transaction with all others that wait."""
        with self._lock:
            is_first = not self._waiting
            self._waiting.update({entry.key: entry for entry in entries})
            if is_first and self._waiting:
                self._writer.submit(self._write)

    def seen(self, wall_ms: int) -> None:
        """Records, once an hour, that the server still runs."""
        if wall_ms - self._seen_ms >= _SEEN_EVERY_MS:
            self._seen_ms = wall_ms
            # A clock that was set back does not lower the recorded time.
            text = "INSERT INTO seen VALUES (0, ?) ON CONFLICT DO UPDATE SET wall_ms = max(wall_ms, excluded.wall_ms)"
            self._writer.submit(self._execute, text, [(wall_ms,)])

    def close(self) -> None:
        """Writes the waiting entries, and closes the file."""
        self._writer.shutdown(wait=True)
        self._connection.close()

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        (version,) = execute("PRAGMA user_version").fetchone()
        if version not in (0, _SCHEMA_VERSION):
            raise ValueError(f"it is of another version of this program (schema {version})")
        with self._connection:
            execute("BEGIN IMMEDIATE")
            if version == 0:
                execute(_SCHEMA)
                execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            execute(_SEEN)

    def _write(self) -> None:
        with self._lock:
            entries, self._waiting = self._waiting.values(), {}
        rows = [
            (entry.key, orjson.dumps(entry.value).decode(), entry.hlc, entry.node, entry.deleted) for entry in entries
        ]
        self._execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?, ?)", rows)
        self._unpruned += len(rows)
        if self._unpruned >= _PRUNE_EVERY:
            self._unpruned = 0
            self._execute(_PRUNE, [(MAX_TOMBSTONES,)])

    def _execute(self, text: str, rows: Iterable[tuple[str | int, ...]]) -> None:
        try:
            with self._connection:
                self._connection.executemany(text, rows)
        except sqlite3.Error as error:
            log.error("names of the cluster cannot be kept in %s: %s", self._where, error)


def _entry(row: tuple[Any, ...]) -> Entry | None:
    """Returns the entry in a row if a message could contain it, else None."""
    name, value, hlc, node, gone = row
    try:
        return entry_from_fields([name, orjson.loads(value), hlc, node, bool(gone)])
    except ValueError:
        return None
