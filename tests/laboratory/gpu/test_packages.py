"""Which packages a Python lacks for `scripts/gpu_check`, and the command that fetches them."""

import shlex
from pathlib import Path

import pytest

from scripts.laboratory.gpu import packages

PROJECT = """
[project]
dependencies = ["a>=1.9,<2", "b", "c>=1; platform_system == 'Windows'", "d>=3"]
[project.optional-dependencies]
cuda12 = ["cupy-cuda12x>=13", "torch>=2.9,<2.11"]
cuda13 = ["cupy-cuda13x>=13", "torch>=2.11,<2.14"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return tmp_path / "pyproject.toml"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions: dict[str, str] = {}
    monkeypatch.setattr(packages, "_version", versions.get)
    return versions


def names(requirements: list[object]) -> list[str]:
    return [packages.shown(each) for each in requirements]


def test_a_version_that_is_too_old_is_as_good_as_none(project: Path, installed: dict[str, str]) -> None:
    installed.update({"a": "1.6.1", "d": "3.0"})
    everywhere, _ = packages.required(project)
    assert names(packages.missing(everywhere)) == ["a<2,>=1.9", "b"]
    installed.update({"a": "1.9.1", "b": "0.1"})
    assert packages.missing(everywhere) == []


@pytest.mark.parametrize(
    ("cupy", "torch"), [("cupy-cuda12x", "torch<2.11,>=2.9"), ("cupy-cuda13x", "torch<2.14,>=2.11")]
)
def test_a_gpu_needs_what_fits_the_cuda_of_its_cupy(
    cupy: str, torch: str, project: Path, installed: dict[str, str]
) -> None:
    installed.update({cupy: "14.2", "torch": "2.4+cu121"})
    assert names(packages.missing(packages.required(project)[1])) == [torch]


def test_the_command_names_versions_and_the_python_that_has_them(project: Path, installed: dict[str, str]) -> None:
    words = shlex.split(packages.download_command(packages.missing(packages.required(project)[0]), "3.12"))
    assert words[:2] == ["pip", "download"]
    assert words[words.index("--python-version") + 1] == "3.12"
    assert words[-3:] == ["a<2,>=1.9", "b", "d>=3"]
