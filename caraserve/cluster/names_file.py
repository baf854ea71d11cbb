"""The names that all instances share, on disk: a cluster whose instances all restart still knows them. Level 4.

A file beside the registry of this instance's own adapters. Tombstones are kept like names, or an instance that was away
would bring back what was removed. A thread writes, and all that came meanwhile at once, without waiting for the disk: a
lost one costs what the others tell us again.
"""

import json
import logging
import sqlite3
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from caraserve.cluster.facts import Fact, is_expired
from caraserve.errors import ConfigError

log = logging.getLogger(__name__)

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE names (
    name TEXT PRIMARY KEY, value TEXT NOT NULL, hlc INTEGER NOT NULL, node TEXT NOT NULL, deleted INTEGER NOT NULL
) WITHOUT ROWID
"""


def beside(registry: Path) -> Path:
    """Where the names are, given the registry's file."""
    return registry.with_name(f"{registry.stem}.cluster{registry.suffix}")


class NamesFile:
    """Facts of the shared shelf by name. `path` None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._where = str(path) if path else "in memory"
        self._writer = ThreadPoolExecutor(1, "caraserve-names")
        self._lock = threading.Lock()
        self._waiting: dict[str, Fact] = {}
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

    def restore(self, wall_ms: int) -> list[Fact]:
        """All names and the tombstones that somebody may still need; drops the others."""
        rows = self._connection.execute("SELECT name, value, hlc, node, deleted FROM names").fetchall()
        facts = [Fact(name, tuple(json.loads(value)), hlc, node, bool(gone)) for name, value, hlc, node, gone in rows]
        expired = [(fact.key,) for fact in facts if is_expired(fact, wall_ms)]
        with self._connection:
            self._connection.executemany("DELETE FROM names WHERE name = ?", expired)
        return [fact for fact in facts if not is_expired(fact, wall_ms)]

    def save(self, facts: Iterable[Fact]) -> None:
        """Writes them soon, in one transaction with all that wait."""
        with self._lock:
            is_first = not self._waiting
            self._waiting.update({fact.key: fact for fact in facts})
            if is_first and self._waiting:
                self._writer.submit(self._write)

    def close(self) -> None:
        """Writes what waits, and closes the file."""
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

    def _write(self) -> None:
        with self._lock:
            facts, self._waiting = self._waiting.values(), {}
        rows = [(fact.key, json.dumps(fact.value), fact.hlc, fact.node, fact.deleted) for fact in facts]
        try:
            with self._connection:
                self._connection.executemany("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            log.error("names of the cluster cannot be kept in %s: %s", self._where, error)
