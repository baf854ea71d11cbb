"""The memory that this process may use: of the machine, or of its container."""

from pathlib import Path

import pytest

from caraserve.util import memory


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(tmp_path / "none"), str(file)))
    return file


def test_the_limit_of_a_container_bounds_the_free_memory(limit: Path) -> None:
    limit.write_text("4096\n", encoding="ascii")
    assert (memory.limit_bytes(), memory.free_bytes()) == (4096, 4096)


@pytest.mark.parametrize("text", ["max\n", "", None])
def test_without_a_limit_the_memory_is_the_machines(limit: Path, text: str | None) -> None:
    if text is not None:
        limit.write_text(text, encoding="ascii")
    assert memory.limit_bytes() is None
    assert 4096 < memory.free_bytes() <= memory.machine_bytes()
