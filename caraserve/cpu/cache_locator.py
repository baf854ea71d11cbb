"""Which files of the kernel cache belong to which module."""

import atexit
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from numba.core.caching import UserProvidedCacheLocator

import caraserve

logger = logging.getLogger(__name__)
_ROOT = Path(caraserve.__file__).parent.parent


class SourceCacheLocator(UserProvidedCacheLocator):  # type: ignore[misc, unused-ignore]
    """Goes by what a module of this package says, not by where it lies: a wheel in another environment, another
    checkout and the executable, which unpacks itself into another folder at each start, find the kernels of the same
    sources. Where the cache cannot be written, kernels are kept until the process ends."""

    def get_source_stamp(self) -> str:
        """Returns a digest of the module's source."""
        return _digest(_in_package(self._py_file))

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """Returns the module's folder as the package names it."""
        return ".".join(_in_package(py_file).parts[:-1])

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "SourceCacheLocator | None":
        """Returns None for a function of another package."""
        try:
            locator = cls(py_func, py_file)
        except ValueError:
            return None
        try:
            locator.ensure_cache_path()
        except OSError as error:
            locator._cache_path = os.path.join(_folder_of_this_process(error), cls.get_suitable_cache_subpath(py_file))
            locator.ensure_cache_path()
        return locator


def _in_package(py_file: str) -> Path:
    """Returns a module's path from above the package, which is all that the executable knows of it. Raises ValueError
    for another package's."""
    path = Path(py_file)
    path = path.relative_to(_ROOT) if path.is_absolute() else path
    if path.parts[0] != caraserve.__name__:
        raise ValueError(f"{py_file} is not in this package")
    return path


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256((_ROOT / path).read_bytes()).hexdigest()


_made: list[str] = []


def _folder_of_this_process(error: OSError) -> str:
    """Returns a folder for kernels that is removed when this process, not one that it forks, ends."""
    if not _made:
        logger.warning("%s: kernels are compiled at every start; set XDG_CACHE_HOME to a folder that keeps them", error)
        _made.append(tempfile.mkdtemp(prefix="caraserve-kernels-"))
        atexit.register(_remove, _made[0], os.getpid())
    return _made[0]


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
