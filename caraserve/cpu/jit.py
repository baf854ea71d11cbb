"""How this package compiles: one set of Numba options, and an on-disk cache that notices every change.

`kernel` is for functions called from compiled code, `entry` for the few that Python calls: only those are cached on
disk, with all they call linked in. Numba's cache looks at the file of the entry alone, so the folder's name carries a
digest of every source file of this package: an edited callee can never be served stale.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numba.extending
from numba.core import event

from caraserve.util.cache_folder import cache_folder


def _cache_folder() -> Path:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return cache_folder("kernels") / digest.hexdigest()[:16]


# Numba reads its variables again whenever one has changed, so what is set in any other way does not last. To be set
# before `entry` decorates, and so before any kernel module loads.
os.environ["NUMBA_CACHE_DIR"] = str(_cache_folder())
# The tiles are written out in vectors; LLVM's higher levels find nothing more in them and take a sixth longer to look.
# The user's own setting wins.
os.environ.setdefault("NUMBA_OPT", "1")
numba.config.reload_config()

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}

kernel: Callable[..., Any] = numba.njit(**_OPTIONS)
reduction: Callable[..., Any] = numba.njit(fastmath={"reassoc", "nsz"}, **_OPTIONS)  # sums that may be vectorised
entry: Callable[..., Any] = numba.njit(cache=True, **_OPTIONS)


class _Ends(event.Listener):  # type: ignore[misc, unused-ignore]
    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def on_start(self, event: object) -> None: ...

    def on_end(self, event: object) -> None:
        self._ended()


@contextlib.contextmanager
def counting(compiled: Callable[[], None]) -> Iterator[None]:
    """Calls `compiled` for every function that is compiled meanwhile; never for one that the cache has."""
    with event.install_listener("numba:compile", _Ends(compiled)):
        yield


def callee(function: Callable[..., Any]) -> None:
    """Lets compiled code call a function that stays plain Python for all other callers."""
    numba.extending.register_jitable(**_OPTIONS)(function)


def variant(name: object) -> Callable[[Callable[..., Any]], Any]:
    """`kernel` for a function that is made several times over, with other values around it: each needs a name.

    Compiled code from the cache is linked by name in any process, and Numba tells functions of one name apart only by a
    number that counts up in the order of that process: code that two processes have cached would be mixed up.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        function.__qualname__ += f"_{name}"
        return kernel(function)

    return compiled


def apart(num_words: int) -> Callable[[Callable[..., None]], Any]:
    """Compiles a function of int64 arguments by itself, to be called by its `.address`.

    Numba links and optimises a callee anew inside every function above it; the large tiles, used at eleven places four
    levels deep, would take half a minute that way.
    """
    signature = numba.void(*[numba.int64] * num_words)
    return lambda function: numba.cfunc(signature, cache=True, error_model="numpy")(function)
