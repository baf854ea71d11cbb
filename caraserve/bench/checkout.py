"""Finds what only a checkout of the repository has: the laboratory below `scripts`, its modules and its data."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import caraserve
from caraserve.errors import ConfigError

_ROOT = Path(caraserve.__file__).parents[1]


def laboratory(module: str, arguments: str, root: Path = _ROOT) -> ModuleType:
    """Imports a module of `scripts.laboratory`. Raises ConfigError in an installed package, with the command that runs
    `caraserve bench` with these arguments in a checkout."""
    if not (root / "scripts" / "laboratory").is_dir():
        raise ConfigError(
            f"bench {arguments} is not in the installed package; in a checkout of the repository run "
            f"`pip install --editable .` and then `caraserve bench {arguments}`"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"scripts.laboratory.{module}")


def laboratory_file(name: str, instead: str, root: Path = _ROOT) -> Path:
    """Returns the path of a file of the laboratory. Raises ConfigError in an installed package, which says what to do
    `instead` of running in a checkout."""
    path = root / "scripts" / "laboratory" / name
    if not path.is_file():
        raise ConfigError(f"{name} is not in the installed package; {instead}, or run in a checkout of the repository")
    return path
