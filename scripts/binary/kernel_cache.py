"""Where Numba keeps compiled kernels when the program is the single executable."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from numba.core.caching import UserProvidedCacheLocator


class ExecutableCacheLocator(UserProvidedCacheLocator):
    """Names a module's cache by its folder's name alone: the executable unpacks itself into another folder at each
    start. Numba notices a new executable by its contents."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """Returns the last folder of the module's path."""
        return Path(py_file).parent.name

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Self:
        """Returns a locator; if the cache cannot be written, one in the folder of this start."""
        locator = cls(py_func, py_file)
        try:
            locator.ensure_cache_path()
        except OSError:
            locator._cache_path = os.path.join(sys._MEIPASS, "kernels", cls.get_suitable_cache_subpath(py_file))
            locator.ensure_cache_path()
        return locator
