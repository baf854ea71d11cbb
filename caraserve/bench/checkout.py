"""Imports the parts of the benchmarks that only a checkout of the repository has: the laboratory below `scripts`."""

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
            f"bench {arguments} is not in the installed package: in a checkout of the repository, install it with "
            f"`pip install --editable .` and run `caraserve bench {arguments}`"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"scripts.laboratory.{module}")
