"""Names and tombstones are stored on disk; a file that cannot be used is refused with the reason."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from caraserve.cluster.state import persistence
from caraserve.cluster.state.lww_map import TOMBSTONE_S, Entry
from caraserve.cluster.state.persistence import ClusterRegistryFile, cluster_registry_path
from caraserve.errors import ConfigError

NOW_MS = 1_700_000_000_000
HLC = NOW_MS << 16
NAME = Entry("poet", ("d1", 8, 4096), HLC, "a")
GONE = Entry("pirate", (), HLC + 1, "b", deleted=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "names.db"


def save(path: Path, *entries: Entry) -> None:
    """Stores entries as a server that runs and ends."""
    with closing(ClusterRegistryFile(path)) as names:
        names.save(entries)


def kept(path: Path, wall_ms: int = NOW_MS) -> list[Entry]:
    with closing(ClusterRegistryFile(path)) as names:
        return sorted(names.restore(wall_ms), key=lambda entry: entry.key, reverse=True)


def test_names_and_tombstones_are_restored_as_they_were_saved(path: Path) -> None:
    with closing(ClusterRegistryFile(path)) as names:
        names.save([NAME, GONE])
        names.save([])
    assert kept(path) == [NAME, GONE]


def test_the_newest_of_a_name_is_kept(path: Path) -> None:
    with closing(ClusterRegistryFile(path)) as names:
        for count in range(50):
            names.save([Entry("poet", ("d", count), HLC + count, "a")])
    assert kept(path) == [Entry("poet", ("d", 49), HLC + 49, "a")]


def test_entries_saved_during_a_write_are_written_in_one_transaction(path: Path) -> None:
    ready, go_on = threading.Event(), threading.Event()
    commits = 0

    def count(statement: str) -> None:
        nonlocal commits
        commits += statement == "COMMIT"
        ready.set()
        go_on.wait()

    with closing(ClusterRegistryFile(path)) as names:
        names._connection.set_trace_callback(count)
        names.save([NAME])
        ready.wait()
        for index in range(1000):
            names.save([Entry(f"n{index}", ("d", 8, 1), HLC + index, "a")])
        go_on.set()
        names._writer.shutdown(wait=True)
        assert commits == 2
    assert len(kept(path)) == 1001


def test_expired_tombstones_are_deleted(path: Path) -> None:
    save(path, NAME, GONE)
    assert kept(path, NOW_MS + int(TOMBSTONE_S * 1000) + 1000) == [NAME]
    assert kept(path) == [NAME]


def test_tombstones_beyond_those_that_the_registry_keeps_are_deleted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "MAX_TOMBSTONES", 3)
    monkeypatch.setattr(persistence, "_PRUNE_EVERY", 10)
    gone = [Entry(f"n{number}", (), HLC + number, "b", deleted=True) for number in range(20)]
    with closing(ClusterRegistryFile(path)) as names:
        names.save([NAME])
        for entry in gone:
            names.save([entry])
    assert len(kept(path)) < 3 + 1 + 10
    save(path, NAME, *gone[:10])
    assert kept(path) == [NAME, *gone[19:16:-1]]


def test_no_name_is_restored_after_an_absence_of_over_30_days(path: Path) -> None:
    day_ms = 86_400_000
    with closing(ClusterRegistryFile(path)) as names:
        names.save([NAME, GONE])
        names.seen(NOW_MS)
        names.seen(NOW_MS + 20 * day_ms)
        names.seen(1000)  # a clock that is behind for once
    assert kept(path, NOW_MS + 49 * day_ms) == [NAME]
    assert kept(path, NOW_MS + 51 * day_ms) == []
    assert kept(path, NOW_MS + 20 * day_ms) == []


def test_a_file_without_the_time_of_its_last_use_is_read(path: Path) -> None:
    save(path, NAME)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE seen")
    assert kept(path, NOW_MS + int(TOMBSTONE_S * 1000) + 1000) == [NAME]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("value", b"\xff"), ("value", "[["), ("value", "{}"), ("value", "[1.5]"), ("value", f'["{"x" * 5000}"]')),
        *(("hlc", "x"), ("hlc", -1), ("hlc", 2**62), ("node", ""), ("node", "a\nb"), ("node", b"a"), ("name", b"x")),
    ],
)
def test_a_damaged_row_is_left_out_and_the_others_are_restored(
    path: Path, column: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    save(path, NAME, GONE)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE names SET {column} = ? WHERE name = 'poet'", (value,))
    assert kept(path) == [GONE]
    assert "1 names in it are damaged" in caplog.text
    caplog.clear()
    assert kept(path) == [GONE]
    assert not caplog.records


def test_a_file_whose_pages_are_damaged_is_refused_with_the_reason(path: Path) -> None:
    save(path, *(Entry(f"n{index}", ("d", index), HLC, "a") for index in range(500)))
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + b"\xff" * (len(whole) - 8192))
    with closing(ClusterRegistryFile(path)) as names, pytest.raises(ConfigError, match=r"names\.db.*remove it"):
        names.restore(NOW_MS)


def test_without_a_file_nothing_is_kept() -> None:
    with closing(ClusterRegistryFile(None)) as names:
        names.save([NAME])
    with closing(ClusterRegistryFile(None)) as names:
        assert names.restore(NOW_MS) == []


def test_a_file_in_use_or_of_another_kind_is_refused(path: Path, tmp_path: Path) -> None:
    with closing(ClusterRegistryFile(path)), pytest.raises(ConfigError, match="another server may use it"):
        ClusterRegistryFile(path)
    other = tmp_path / "text"
    other.write_text("no database " * 100)
    with pytest.raises(ConfigError, match="text"):
        ClusterRegistryFile(other)


def test_the_file_is_beside_the_registry() -> None:
    assert cluster_registry_path(Path("/data/registry.db")) == Path("/data/registry.cluster.db")
