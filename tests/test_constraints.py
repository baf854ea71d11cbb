"""The pinned versions are those that pyproject.toml allows, for each kind of device."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from caraserve.gpu.driver import detect

ROOT = Path(__file__).parents[1]
EXTRAS = {12: "cuda12", 13: "cuda13"}


def pinned(name: str) -> dict[str, str]:
    """Returns the versions in a file of constraints."""
    lines = (ROOT / "scripts" / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def required(extra: str) -> list[Requirement]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return [Requirement(text) for text in tomllib.load(file)["project"]["optional-dependencies"][extra]]


@pytest.mark.parametrize("extra", EXTRAS.values())
def test_each_extra_for_gpus_has_pins_within_its_bounds(extra: str) -> None:
    pins = pinned(f"constraints-{extra}.txt")
    for requirement in required(extra):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


@pytest.mark.parametrize("extra", EXTRAS.values())
def test_no_package_is_pinned_twice(extra: str) -> None:
    assert not set(pinned("constraints.txt")) & set(pinned(f"constraints-{extra}.txt"))


def test_tests_run_with_the_pins_of_the_newer_extra() -> None:
    """scripts/venv.sh takes both files."""
    pins = pinned("constraints.txt") | pinned("constraints-cuda13.txt")
    for requirement in required("test"):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


@pytest.mark.parametrize(("cuda", "extra"), EXTRAS.items())
def test_the_torch_that_a_missing_one_is_replaced_by_is_the_extras(cuda: int, extra: str) -> None:
    (torch,) = (requirement for requirement in required(extra) if requirement.name == "torch")
    assert Requirement(detect._TORCH[cuda]) == torch
