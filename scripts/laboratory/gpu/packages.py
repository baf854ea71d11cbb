"""The packages that this Python lacks, or has in a version that the project does not allow, and how wheels are fetched.

Runs before anything else is there: it needs the standard library and pip alone.
"""

import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import Requirement
except ImportError:  # pip has it, too
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

# pip takes exactly these tags: wheels for the C library of Debian 11, Ubuntu 20.04 and later have one of them.
_PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
USUAL_PYTHON = "3.12"  # of images with torch, at the time of writing


def required(pyproject: Path) -> tuple[list[Any], list[Any]]:
    """Returns the requirements of every installation, and those that a GPU needs besides: of the extra for the CUDA of
    the CuPy that is installed, or for the newest."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    extra = "cuda12" if _version("cupy-cuda12x") else "cuda13"
    return [Requirement(line) for line in project["dependencies"]], [Requirement(line) for line in extras[extra]]


def missing(requirements: Sequence[Any]) -> list[Any]:
    """Returns those that are not installed, or in another version than they allow."""
    here = [each for each in requirements if each.marker is None or each.marker.evaluate()]
    return [each for each in here if not _allows(each, _version(each.name))]


def shown(requirement: Any) -> str:
    """Returns a requirement without its marker, as for pip: `llguidance<2,>=1.9`."""
    return f"{requirement.name}{requirement.specifier}"


def download_command(requirements: Sequence[Any], python: str) -> str:
    """Returns the command that fetches their wheels for Linux on x86-64 and this version of Python, wherever it is
    run."""
    words = ["pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation"]
    words += ["cp", *(word for each in _PLATFORMS for word in ("--platform", f"{each}_x86_64")), "-d", "wheels"]
    return shlex.join([*words, *map(shown, requirements)])


def install(wheels: Path, requirements: Sequence[Any], target: Path) -> bool:
    """Installs wheels from a folder to another, without their dependencies: all that is needed is named. Returns False
    if some are not there or do not fit this Python."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    names = [shown(each) for each in requirements]
    return subprocess.run([*command, "--find-links", str(wheels), "--target", str(target), *names]).returncode == 0


def _allows(requirement: Any, installed: str | None) -> bool:
    return installed is not None and bool(requirement.specifier.contains(installed, prereleases=True))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
