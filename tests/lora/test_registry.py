"""The registry: adapters survive a restart, and a file that cannot be used is refused with the reason."""

import dataclasses
import re
import resource
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from caraserve.errors import CaraServeError, ConfigError
from caraserve.lora.registry import AdapterInfo, Registry

OLD, NEW = "0d" * 32, "ec" * 32


def info(name: str, digest: str = OLD, created_s: float = 1.5) -> AdapterInfo:
    return AdapterInfo(name, digest, f"/adapters/{name}", 8, ("q_proj", "down_proj"), 4096, created_s, stamp="10:20")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


def contents(path: Path) -> list[AdapterInfo]:
    """Returns the adapters that a server which starts now would find."""
    with closing(Registry(path)) as registry:
        return registry.all()


@pytest.mark.parametrize("where", ["file", "memory"])
def test_an_adapter_that_was_put_is_found_by_name_and_survives_a_restart(path: Path, where: str) -> None:
    infos = [info("a"), info("b:1.0-rc_2")]
    with closing(Registry(path if where == "file" else None)) as registry:
        registry.put_many(infos)
        assert registry.get("a") == infos[0]
        assert registry.get("c") is None
    assert where == "memory" or contents(path) == infos


def test_it_survives_a_process_that_never_closed_it(path: Path, tmp_path: Path) -> None:
    with closing(Registry(path)) as registry:
        registry.put(info("a"))
        copy = tmp_path / "copy.db"  # the contents of the disk now, as after a crash
        for suffix in ("", "-wal"):
            copy.with_name(copy.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
    assert contents(copy) == [info("a")]


def test_a_second_put_replaces_the_first(path: Path) -> None:
    with closing(Registry(path)) as registry:
        registry.put(info("a", OLD))
        registry.put(info("a", NEW))
        assert registry.all() == [info("a", NEW)]
    assert contents(path) == [info("a", NEW)]


def test_a_removed_name_is_gone(path: Path) -> None:
    with closing(Registry(path)) as registry:
        registry.put_many([info("a"), info("b")])
        registry.remove("a")
        registry.remove("never there")
        assert registry.all() == [info("b")]
    assert contents(path) == [info("b")]


def test_the_list_is_in_the_order_of_creation() -> None:
    with closing(Registry(None)) as registry:
        registry.put_many([info("late", created_s=3), info("b", created_s=1), info("a", created_s=1)])
        assert [entry.name for entry in registry.all()] == ["a", "b", "late"]


def test_ten_thousand_adapters_are_put_and_found_again_in_two_seconds_of_cpu(path: Path) -> None:
    infos = [info(f"adapter-{index:05}") for index in range(10_000)]
    started = time.process_time()
    with closing(Registry(path)) as registry:
        registry.put_many(infos)
    assert contents(path) == infos
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"digest": None}, "cannot be written: NOT NULL"),
        ({"path": "/adapters/\udcff"}, r"registry\.db cannot be written"),
    ],
    ids=["nothing", "not UTF-8"],  # the byte 0xFF, as Python shows it in a path
)
def test_put_many_is_all_or_nothing_and_later_writes_succeed(path: Path, change: dict[str, Any], why: str) -> None:
    with closing(Registry(path)) as registry:
        with pytest.raises(CaraServeError, match=why):
            registry.put_many([info("a"), dataclasses.replace(info("b"), **change)])
        assert registry.all() == []
        registry.put(info("c"))
    assert contents(path) == [info("c")]


def test_many_threads_may_write(path: Path) -> None:
    with closing(Registry(path)) as registry, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: registry.put(info(f"adapter-{index:02}")), range(40)))
    assert [entry.name for entry in contents(path)] == [f"adapter-{index:02}" for index in range(40)]


@contextmanager
def no_file_may_grow(limit_bytes: int) -> Iterator[None]:
    """Makes writes past the limit fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_loses_no_adapter(path: Path) -> None:
    with closing(Registry(path)) as registry:
        registry.put(info("a"))
        wal_bytes = path.with_name(path.name + "-wal").stat().st_size
        with no_file_may_grow(wal_bytes), pytest.raises(CaraServeError, match=r"registry\.db cannot be written"):
            registry.put_many(info(f"adapter-{index}") for index in range(1000))
        assert registry.all() == [info("a")]
        registry.put(info("b"))
    assert contents(path) == [info("a"), info("b")]


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be one. " * 100)
    with pytest.raises(ConfigError, match=r"--registry .*registry\.db: file is not a database"):
        Registry(path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unable to open database file; give a file that this server may create"):
        Registry(tmp_path / "nowhere" / "registry.db")


def test_another_programs_database_is_refused_and_not_changed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE photos (name TEXT)")
    with pytest.raises(ConfigError, match="belongs to another program"):
        Registry(path)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("photos",)]


def test_a_newer_schema_is_refused(path: Path) -> None:
    Registry(path).close()
    with closing(sqlite3.connect(path)) as newer:
        newer.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match=r"another version of this one \(schema 99\)"):
        Registry(path)


DAMAGE: list[tuple[str, object]] = [
    *(("name", value) for value in ("../evil", "a b", "", "n\n", "x" * 129, b"a")),
    *(("digest", value) for value in ("", "d1", OLD.upper(), OLD + "0", 5, b"\xff")),
    *(("path", value) for value in ("", "adapters/a", "../a", 5, b"/adapters/a")),
    *(("rank", value) for value in (0, -8, 513, 8.5, "eight", b"8")),
    *(("targets", value) for value in ("[", "[]", "{}", "null", '["q proj"]', "[[]]", '"q_proj"', "[" * 100_000, 5)),
    *(("num_bytes", value) for value in (0, -1, 1.5, "many", b"1")),
    *(("created_s", value) for value in ("yesterday", float("inf"), b"")),
    *(("stamp", value) for value in (b"10:20",)),
    *(("state", value) for value in ("asleep", "")),
]


@pytest.mark.parametrize(("column", "value"), DAMAGE, ids=lambda value: ascii(value)[:20])
def test_an_invalid_row_is_left_out_and_its_column_named(path: Path, column: str, value: object) -> None:
    with closing(Registry(path)) as registry:
        registry.put_many([info("a"), info("b")])
    with closing(sqlite3.connect(path)) as vandal, vandal:
        vandal.execute(f"UPDATE adapters SET {column} = ? WHERE name = 'a'", (value,))
    with closing(Registry(path)) as registry:
        assert registry.all() == [info("b")]
        (complaint,) = registry.complaints
    assert re.search(rf"registry\.db: the row of .* is left out: {column} is ", complaint)
    assert len(complaint) < 400


def test_a_row_with_missing_values_is_left_out(path: Path) -> None:
    columns = "name, digest, path, rank, targets, num_bytes, created_s, stamp, state"
    with closing(sqlite3.connect(path)) as vandal, vandal:
        vandal.execute(f"CREATE TABLE adapters ({columns})")  # as a damaged file may have it: no column is NOT NULL
        vandal.execute(f"INSERT INTO adapters ({columns}) VALUES ({', '.join(['NULL'] * 9)})")
        vandal.execute("PRAGMA user_version = 2")
    with closing(Registry(path)) as registry:
        assert registry.all() == []
        assert "the row of None is left out: name is None" in registry.complaints[0]


def test_the_file_belongs_to_one_server_at_a_time(path: Path) -> None:
    with closing(Registry(path)), pytest.raises(ConfigError, match="database is locked; another server uses it"):
        Registry(path)
    assert contents(path) == []


def test_a_closed_registry_refuses_writes_and_can_still_be_read(path: Path) -> None:
    registry = Registry(path)
    registry.put(info("a"))
    registry.close()
    with pytest.raises(CaraServeError, match=r"registry\.db cannot be written"):
        registry.put(info("b"))
    with pytest.raises(CaraServeError, match=r"registry\.db cannot be written"):
        registry.remove("a")
    assert (registry.get("a"), registry.all()) == (info("a"), [info("a")])
