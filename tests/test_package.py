"""The package says under which licence it is, what it is, and its version wherever that stands."""

import re
import subprocess
import tomllib
from pathlib import Path

import caraserve

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_licence_is_whole_and_in_the_package() -> None:
    licence = " ".join(text("LICENSE").split())
    assert licence.startswith("Apache License Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in licence
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "[LICENSE](LICENSE)" in text("README.md")


def test_the_package_says_what_it_is_by_whom_and_for_which_pythons() -> None:
    assert all(PROJECT[field] for field in ("description", "readme", "authors", "keywords"))
    pythons = [name for name in PROJECT["classifiers"] if name.startswith("Programming Language :: Python :: 3.")]
    assert pythons[0].endswith(PROJECT["requires-python"].removeprefix(">="))


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+)", text("CHANGELOG.md"), re.MULTILINE)
    assert first is not None
    assert first[1] == caraserve.__version__


def test_images_have_the_version_as_their_tag() -> None:
    pages = [text(name) for name in ("Dockerfile", "docker-compose.yml", "scripts/k8s/README.md")]
    folder = ROOT / "scripts" / "k8s"
    pages += [path.read_text(encoding="utf-8") for path in folder.rglob("kustomization.yaml")]
    tags = {tag for page in pages for tag in re.findall(r"(?:\bcaraserve:|newTag: )(\d[\w.-]*|latest)", page)}
    assert tags == {caraserve.__version__, f"{caraserve.__version__}-cuda12", f"{caraserve.__version__}-cuda13"}


def test_all_files_of_the_package_are_in_a_wheel() -> None:
    tools = tomllib.loads(text("pyproject.toml"))["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "caraserve").rglob("__init__.py")}
    packed = {path for folder in folders for path in folder.glob("*.py")}
    for package, patterns in tools["package-data"].items():
        packed |= {path for one in patterns for path in (ROOT / package.replace(".", "/")).glob(one)}
    tracked = subprocess.run(["git", "ls-files", "caraserve"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {ROOT / name for name in tracked.stdout.splitlines()} <= packed
