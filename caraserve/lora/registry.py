"""The adapters that were loaded on this instance, and settings by name, in one SQLite file that survives restarts.

Reads are from memory, so a look-up on the event loop never waits for the disk. Writes wait, and belong on other
threads."""

import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from caraserve.core.adapter_facts import NO_FACTS, AdapterFacts, read_facts
from caraserve.core.adapter_rules import ADAPTER_NAME, DIGEST, SETTING_KINDS, TOMBSTONE_S
from caraserve.core.lora_layout import MAX_RANK
from caraserve.errors import CaraServeError, ConfigError, StorageFull
from caraserve.util.hybrid_clock import hlc_of

_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE adapters (
    name TEXT PRIMARY KEY, digest TEXT NOT NULL, path TEXT NOT NULL, rank INTEGER NOT NULL, targets TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, created_s REAL NOT NULL, stamp TEXT NOT NULL, state TEXT NOT NULL
) WITHOUT ROWID
"""
# Beside the adapters, so that files of earlier versions need no change.
_SETTINGS = """
CREATE TABLE IF NOT EXISTS settings (
    kind TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID
"""
# When and where settings were written; a removed name has a row here alone. A separate table, so that earlier versions
# of the server can still use the file.
_SETTING_TIMES = """
CREATE TABLE IF NOT EXISTS setting_times (
    kind TEXT NOT NULL, name TEXT NOT NULL, hlc INTEGER NOT NULL, writer TEXT NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID
"""
# What the adapters' files say beside their matrices; for the same reason in a table of its own.
_FACTS = "CREATE TABLE IF NOT EXISTS adapter_facts (name TEXT PRIMARY KEY, facts TEXT NOT NULL) WITHOUT ROWID"
# With which base model each adapter was inspected: with another one, it is inspected again.
_BASES = "CREATE TABLE IF NOT EXISTS adapter_bases (name TEXT PRIMARY KEY, base TEXT NOT NULL) WITHOUT ROWID"
_COLUMNS = "name, digest, path, rank, targets, num_bytes, created_s, stamp, state"
_WAIT_FOR_LOCK_S = 1.0
_TARGET = re.compile(r"[A-Za-z0-9_]{1,100}")

UPLOADING = "uploading"  # state of an adapter that takes requests while it is uploaded
UNLOADED = "unloaded"  # state of a folder in --adapters-dir that is not loaded again as it is


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One registered adapter. `digest` identifies its bytes; `stamp`: sizes and times of its files when they were read.

    `state`: `active`, `missing` when its files were gone or changed at the last start, `UNLOADED` or, never stored,
    `UPLOADING`.
    """

    name: str
    digest: str
    path: str
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    created_s: float  # unix time
    stamp: str = ""
    state: str = "active"
    facts: AdapterFacts = NO_FACTS


@dataclass(frozen=True, slots=True)
class Setting:
    """What was last written under a name of one kind: a JSON object as text, or None if it was removed."""

    kind: str
    name: str
    text: str | None
    hlc: int = 0  # hybrid logical time
    writer: str = ""  # the instance that wrote it; empty: this one

    @property
    def key(self) -> tuple[str, str]:
        """Its kind and name."""
        return self.kind, self.name

    @property
    def order(self) -> tuple[int, str]:
        """The key by which settings of one name are ordered: the last write wins."""
        return self.hlc, self.writer


class Registry:
    """Names → `AdapterInfo`. `path` None keeps it in memory only; `base` identifies the base model. Thread-safe.

    The file is locked while it is open, because changes by another instance would not reach the copy in memory. Its
    rows are checked like any input: `complaints` names those that are left out, and why.
    """

    def __init__(self, path: Path | None, base: str = "any") -> None:
        """Raises ConfigError when the file cannot be used."""
        self.complaints: list[str] = []
        self._base = base
        self._lock = threading.Lock()
        self._where = str(path) if path else "in memory"
        try:
            self._connection = sqlite3.connect(
                path or ":memory:", timeout=_WAIT_FOR_LOCK_S, check_same_thread=False, isolation_level=None
            )
            try:
                self._prepare()
                rows = self._connection.execute(f"SELECT {_COLUMNS} FROM adapters").fetchall()
                self._facts = self._read_facts()
                self._bases = dict(self._connection.execute("SELECT name, base FROM adapter_bases"))
                self._infos = self._read(rows)
                self._settings = self._read_settings()
            except BaseException:
                self._connection.close()
                raise
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None

    def get(self, name: str) -> AdapterInfo | None:
        """Returns the adapter of that name, or None."""
        return self._infos.get(name)

    def knows_facts(self, name: str) -> bool:
        """Whether the facts of an adapter are known. Otherwise it has to be inspected: an earlier version of the server
        has not written them, or it was served with another base model."""
        return name in self._facts and self._bases.get(name) == self._base

    def all(self) -> list[AdapterInfo]:
        """Returns all adapters, oldest first."""
        return sorted(self._infos.values(), key=lambda info: (info.created_s, info.name))

    def put(self, info: AdapterInfo) -> None:
        """Adds or replaces the adapter of a name. Raises CaraServeError when the file cannot be written."""
        self.put_many([info])

    def put_many(self, infos: Iterable[AdapterInfo]) -> None:
        """Adds or replaces adapters in one transaction: all or none."""
        infos = list(infos)
        statement = f"INSERT OR REPLACE INTO adapters ({_COLUMNS}) VALUES (:{_COLUMNS.replace(', ', ', :')})"
        rows = [asdict(info) | {"targets": json.dumps(info.targets), "facts": info.facts.text} for info in infos]
        bases = {info.name: "" if info.state == "missing" else self._base for info in infos}
        with self._lock:
            self._write(
                (statement, rows),
                ("INSERT OR REPLACE INTO adapter_facts VALUES (:name, :facts)", rows),
                ("INSERT OR REPLACE INTO adapter_bases VALUES (?, ?)", list(bases.items())),
            )
            self._infos |= {info.name: info for info in infos}
            self._facts |= {info.name: info.facts for info in infos}
            self._bases |= bases

    def remove(self, name: str) -> None:
        """Removes the adapter of a name, if there is one."""
        tables = ("adapters", "adapter_facts", "adapter_bases")
        with self._lock:
            self._write(*((f"DELETE FROM {table} WHERE name = ?", [(name,)]) for table in tables))
            self._infos.pop(name, None)
            self._facts.pop(name, None)
            self._bases.pop(name, None)

    def settings(self) -> list[Setting]:
        """Returns all settings of known kinds, removed ones included; their users check the text of each."""
        return list(self._settings.values())

    def put_settings(self, settings: Iterable[Setting], forgotten: Collection[tuple[str, str]] = ()) -> None:
        """Writes settings in one transaction, except those older than what the file has, and deletes `forgotten` ones,
        given by kind and name, unless they were written again. Raises CaraServeError when the file cannot be
        written."""
        with self._lock:
            news: dict[tuple[str, str], Setting] = {}
            for setting in settings:
                old = news.get(setting.key) or self._settings.get(setting.key)
                if old is None or old.order <= setting.order:
                    news[setting.key] = setting
            times = [(*key, one.hlc, one.writer) for key, one in news.items()]
            texts = [(*key, one.text) for key, one in news.items() if one.text is not None]
            removed = [key for key, one in news.items() if one.text is None]
            dropped = [key for key in forgotten if key not in news]
            self._write(
                ("INSERT OR REPLACE INTO setting_times VALUES (?, ?, ?, ?)", times),
                ("INSERT OR REPLACE INTO settings VALUES (?, ?, ?)", texts),
                ("DELETE FROM settings WHERE kind = ? AND name = ?", [*removed, *dropped]),
                ("DELETE FROM setting_times WHERE kind = ? AND name = ?", dropped),
            )
            self._settings |= news
            for key in dropped:
                self._settings.pop(key, None)

    def close(self) -> None:
        """Closes the file, which unlocks it for other instances."""
        self._connection.close()

    def _read(self, rows: Iterable[tuple[Any, ...]]) -> dict[str, AdapterInfo]:
        """Returns the valid rows by name, and adds a complaint for each other one."""
        infos = {}
        for row in rows:
            try:
                info = _from_row(*row)
            except ValueError as error:
                self.complaints.append(f"--registry {self._where}: the row of {_shown(row[0])} is left out: {error}")
            else:
                infos[info.name] = replace(info, facts=self._facts.get(info.name, NO_FACTS))
        return infos

    def _read_facts(self) -> dict[str, AdapterFacts]:
        """Returns the adapters' facts by name, without those that are not valid: they are read again from the files."""
        facts = {}
        for name, text in self._connection.execute("SELECT name, facts FROM adapter_facts"):
            with suppress(ValueError, TypeError):
                facts[name] = read_facts(text)
        return facts

    def _read_settings(self) -> dict[tuple[str, str], Setting]:
        """Returns the settings of known kinds by kind and name, and adds a complaint for each row that is not valid.
        Rows of other kinds are left to later versions of the server."""
        execute = self._connection.execute
        known = f"WHERE kind IN ({', '.join('?' * len(SETTING_KINDS))})"
        rows = execute(f"SELECT kind, name, body FROM settings {known}", [*SETTING_KINDS]).fetchall()
        now = hlc_of(int(time.time() * 1000))  # a later time is of a wrong clock, and would win until then
        times = {
            (kind, name): (min(hlc, now), writer)
            for kind, name, hlc, writer in execute(
                f"SELECT kind, name, hlc, writer FROM setting_times {known}", [*SETTING_KINDS]
            )
            if isinstance(hlc, int) and hlc >= 0 and isinstance(writer, str) and ADAPTER_NAME.fullmatch(str(name))
        }
        settings = {key: Setting(*key, None, *written) for key, written in times.items()}
        for kind, name, text in rows:
            if isinstance(name, str) and ADAPTER_NAME.fullmatch(name) and isinstance(text, str):
                settings[kind, name] = Setting(kind, name, text, *times.get((kind, name), (0, "")))
            else:
                settings.pop((kind, name), None)
                self.complaints.append(f"--registry {self._where}: the settings of {_shown(name)} are left out")
        return settings

    def _prepare(self) -> None:
        """Locks the file, and creates the table in a new one, in one transaction: a crash here leaves an empty file."""
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # before WAL, so that no shared memory is needed either
        execute("PRAGMA journal_mode = WAL")
        execute("BEGIN IMMEDIATE")
        (version,) = execute("PRAGMA user_version").fetchone()
        (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables == 0:
            execute(_SCHEMA)
            execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        elif version != _SCHEMA_VERSION:
            raise self._unusable(f"it belongs to another program or another version of this one (schema {version})")
        execute(_FACTS)
        execute(_BASES)
        execute(_SETTINGS)
        execute(_SETTING_TIMES)
        oldest_ms = int((time.time() - TOMBSTONE_S) * 1000)
        removed = "NOT EXISTS (SELECT 1 FROM settings AS s WHERE s.kind = t.kind AND s.name = t.name)"
        execute(f"DELETE FROM setting_times AS t WHERE hlc < ? AND {removed}", (hlc_of(oldest_ms),))
        execute("COMMIT")

    def _unusable(self, why: str) -> ConfigError:
        hint = "another server uses it" if "locked" in why else "give a file that this server may create"
        return ConfigError(f"--registry {self._where}: {why}; {hint}")

    def _write(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """Runs each statement for all its rows, all in one transaction. The caller holds the lock."""
        try:
            with self._connection as transaction:  # commits, or rolls back after any exception
                transaction.execute("BEGIN IMMEDIATE")
                for statement, rows in statements:
                    transaction.executemany(statement, rows)
        except (sqlite3.Error, UnicodeError) as error:  # SQLite keeps text as UTF-8, which a path need not be
            is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            kind = StorageFull if is_full else CaraServeError
            raise kind(f"the registry {self._where} cannot be written: {error}") from None


def _from_row(
    name: Any, digest: Any, path: Any, rank: Any, targets: Any, num_bytes: Any, created_s: Any, stamp: Any, state: Any
) -> AdapterInfo:
    """Checks every column, as SQLite keeps a value of any type in any column. Raises ValueError naming an invalid
    one."""
    names = _targets(targets)
    for column, value, is_right in (
        ("name", name, isinstance(name, str) and ADAPTER_NAME.fullmatch(name)),
        ("digest", digest, isinstance(digest, str) and DIGEST.fullmatch(digest)),
        ("path", path, isinstance(path, str) and path.startswith("/")),
        ("rank", rank, isinstance(rank, int) and 0 < rank <= MAX_RANK),
        ("targets", targets, names),
        ("num_bytes", num_bytes, isinstance(num_bytes, int) and num_bytes > 0),
        ("created_s", created_s, isinstance(created_s, float) and math.isfinite(created_s)),
        ("stamp", stamp, isinstance(stamp, str)),
        ("state", state, state in ("active", "missing", UNLOADED)),
    ):
        if not is_right:
            raise ValueError(f"{column} is {_shown(value)}")
    return AdapterInfo(name, digest, path, rank, names, num_bytes, created_s, stamp, state)


def _targets(text: Any) -> tuple[str, ...]:
    """Returns the names of modules in a row; empty if the row is invalid."""
    try:
        names = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return ()
    are_names = isinstance(names, list) and all(isinstance(name, str) and _TARGET.fullmatch(name) for name in names)
    return tuple(names) if are_names else ()


def _shown(value: Any) -> str:
    """Returns a value for a message: at most 80 characters, all ASCII."""
    return ascii(value)[:80]
