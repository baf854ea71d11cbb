"""Inspections survive restarts in one file, as long as what they depend on stays the same. A file that cannot be used
costs a line in the log and the inspections, nothing else."""

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from caraserve.lora import inspections
from caraserve.lora.inspections import Inspection, Inspections, full_stamp
from tests.lora.folders import write_adapter

FOUND = Inspection("a" * 64, 8, ("q_proj", "v_proj"), 1 << 20, "org/base", 3, ("tensor \udc80 is left out",))
STAMP = "1:2:3:4"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file, with `FOUND` under `STAMP` in it."""
    logging.getLogger("caraserve").propagate = True
    made = tmp_path / "cache" / "inspections.sqlite"
    with closing(Inspections(made)) as known:
        known.note(STAMP, FOUND)
    return made


def found(path: Path, stamp: str = STAMP, context: str = "") -> Inspection | None:
    """Returns what a new run knows."""
    with closing(Inspections(path, context)) as known:
        return known.find(stamp)


def test_they_are_known_after_a_restart(path: Path) -> None:
    assert found(path) == FOUND
    with closing(Inspections(path)) as known:
        assert known.digest_of(STAMP) == FOUND.digest


@pytest.mark.parametrize(("stamp", "context"), [("1:2:3:5", ""), ("", ""), (STAMP, "another base model")])
def test_others_are_not(path: Path, stamp: str, context: str) -> None:
    assert found(path, stamp, context) is None


def test_a_digest_that_was_wrong_is_forgotten(path: Path) -> None:
    with closing(Inspections(path)) as known:
        known.forget(FOUND.digest)
    assert found(path) is None


@pytest.mark.parametrize(
    "change", ["digest = 'b' || substr(digest, 2)", "found = replace(found, '8', '9')", "digest = 7"]
)
def test_a_changed_row_is_not_used(path: Path, change: str) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"UPDATE OR IGNORE inspections SET {change}")
        file.commit()
    assert found(path) is None


def overwritten(path: Path) -> None:
    path.write_bytes(os.urandom(8192))


def torn(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + os.urandom(len(content) - 4096))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_another_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.executescript("DROP TABLE inspections; CREATE TABLE inspections (a TEXT)")


@pytest.mark.parametrize("break_file", [overwritten, torn, a_folder, with_another_table])
def test_a_file_that_cannot_be_used_costs_one_line_and_the_inspections(
    path: Path, break_file: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    break_file(path)
    with closing(Inspections(path)) as known:
        for stamp in (STAMP, "another"):
            assert known.find(stamp) is None
            known.note(stamp, FOUND)
            assert known.find(stamp) == FOUND
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text


def test_a_damaged_file_is_made_again(path: Path) -> None:
    overwritten(path)
    with closing(Inspections(path)):
        pass
    with closing(Inspections(path)) as known:
        known.note(STAMP, FOUND)
    assert found(path) == FOUND


def test_a_file_that_another_program_locks_costs_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inspections, "_WAIT_FOR_LOCK_S", 0.0)
    with closing(Inspections(path)) as known, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(2):
            assert known.find(STAMP) is None
        assert found(path) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert found(path) == FOUND


def test_a_folder_that_cannot_be_made_or_is_on_a_network_costs_one_line(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert found(tmp_path / "file" / "inspections.sqlite") is None
    monkeypatch.setattr(inspections, "_LOCAL_TYPES", {})
    assert found(path) is None
    assert len(caplog.records) == 2


def test_a_file_of_another_version_loses_its_rows(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.executescript("DROP TABLE inspections; CREATE TABLE inspections (a TEXT); PRAGMA user_version = 99")
    with closing(Inspections(path)) as known:
        assert known.find(STAMP) is None
        known.note(STAMP, FOUND)
    assert found(path) == FOUND


def test_two_servers_use_one_file(path: Path) -> None:
    with closing(Inspections(path)) as one, closing(Inspections(path)) as other:
        one.note("new", FOUND)
        assert other.find("new") == FOUND


def test_rows_that_no_start_and_no_read_uses_are_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = inspections._DAY_S
    monkeypatch.setattr(inspections.time, "time", lambda: 100 * day)
    with closing(Inspections(path)) as known:  # `FOUND` was noted later than this
        known.note("old", FOUND)
        known.note("used", FOUND)
    monkeypatch.setattr(inspections.time, "time", lambda: (100 + inspections._KEPT_DAYS) * day)
    assert found(path, "used") == FOUND
    monkeypatch.setattr(inspections.time, "time", lambda: (101 + inspections._KEPT_DAYS) * day)
    assert (found(path, "old"), found(path, "used")) == (None, FOUND)


def test_the_file_does_not_grow_without_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspections, "_PRUNED_AFTER", 10)
    monkeypatch.setattr(inspections, "_PRUNE", inspections._PRUNE.replace(str(inspections._MOST_ROWS), "20"))
    with closing(Inspections(path)) as known:
        for number in range(100):
            known.note(f"stamp {number}", FOUND)
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM inspections").fetchone()[0] <= 30


def test_a_folder_has_no_stamp_just_after_a_write_or_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspections, "_SETTLED_NS", 10**15)
    folder = write_adapter(tmp_path)
    assert full_stamp(folder) == ""
    monkeypatch.setattr(inspections, "_SETTLED_NS", 0)
    assert full_stamp(folder) != ""
    (folder / "adapter_config.json").unlink()
    assert full_stamp(folder) == ""
