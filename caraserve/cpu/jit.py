"""How this package compiles: one set of Numba options, and an on-disk cache that notices every change.

`kernel` is for functions that only compiled code calls and that make no arrays, `entry` for the few that Python calls:
only those are cached on disk, with all they call linked in.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numba
import numba.extending
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from caraserve.cpu.kernel_cache import kernel_folder

# Numba reads its variables again whenever one has changed, so only settings in the environment last. They must be set
# before the first use of `entry`, and so before any kernel module is imported.
os.environ["NUMBA_CACHE_DIR"] = str(kernel_folder())
# Numba's own locators are for functions outside of this package.
os.environ["NUMBA_CACHE_LOCATOR_CLASSES"] = (
    f"{__package__}.cache_locator.SourceCacheLocator, UserProvidedCacheLocator, InTreeCacheLocator"
)
# The tiles are explicit vector code, which LLVM's higher levels do not improve, but take a sixth longer to compile. A
# setting of the user has priority.
os.environ.setdefault("NUMBA_OPT", "1")
numba.config.reload_config()


class _Environments:
    """Takes the place of the code generator, which a library of code is asked for only to set environments."""

    def set_env(self, name: str, environment: object) -> None:
        """Does nothing: environments are for Python's objects, which kernels have none of."""


class _LinkedCode(JITCodeLibrary):  # type: ignore[misc, unused-ignore]
    """The code of one kernel, optimised but not translated for this machine: that is done where it is linked in."""

    codegen = _Environments()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


class _ToLink(Compiler):  # type: ignore[misc, unused-ignore]
    """Compiles a kernel only as far as its callers need it: a seventh of the time to compile all."""

    def define_pipelines(self) -> Any:
        if self.state.library is None:
            self.state.library = _LinkedCode(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
            self.state.library.enable_object_caching()
        return super().define_pipelines()


OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
# Without wrappers for Python and without counting references to arrays, which took a fifth of the time to compile all.
_KERNEL: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False, **OPTIONS}
_KERNEL["pipeline_class"] = _ToLink

kernel: Callable[..., Any] = numba.njit(**_KERNEL)
reduction: Callable[..., Any] = numba.njit(fastmath={"reassoc", "nsz"}, **_KERNEL)  # sums that may be vectorised
entry: Callable[..., Any] = numba.njit(cache=True, **OPTIONS)


class _Ends(event.Listener):  # type: ignore[misc, unused-ignore]
    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def on_start(self, event: object) -> None: ...

    def on_end(self, event: object) -> None:
        self._ended()


@contextlib.contextmanager
def counting(compiled: Callable[[], None]) -> Iterator[None]:
    """Calls `compiled` for each function compiled in the context; not for those from the cache."""
    with event.install_listener("numba:compile", _Ends(compiled)):
        yield


def callee(function: Callable[..., Any]) -> None:
    """Lets compiled code call a function that stays plain Python for all other callers."""
    numba.extending.register_jitable(**_KERNEL)(function)


def compiled_for(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator for what compiled code calls in place of a function of plain Python."""

    def replace(compiled: Callable[..., Any]) -> Callable[..., Any]:
        numba.extending.overload(function, jit_options=_KERNEL, strict=False)(lambda *arguments: compiled)
        return compiled

    return replace


def variant(name: object) -> Callable[[Callable[..., Any]], Any]:
    """Like `kernel`, for a function that is made several times with different closures: gives each a name of its own.

    Cached code is linked by name in every process, and Numba distinguishes functions of one name only by a number that
    counts up in each process: code that two processes cached would be mixed up.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        function.__qualname__ += f"_{name}"
        return kernel(function)

    return compiled


def compiled_separately(num_words: int) -> Callable[[Callable[..., None]], Any]:
    """Compiles a function of int64 arguments separately, to be called by its `.address`.

    Numba links and optimises a callee again inside every caller; for the large tiles, used at eleven places four levels
    deep, that would take half a minute.
    """
    signature = numba.void(*[numba.int64] * num_words)
    return lambda function: numba.cfunc(signature, cache=True, error_model="numpy")(function)


def unset(*arguments: Any) -> Any:
    """Stands for a global that `made_for` replaces."""
    raise AssertionError("made_for has not replaced it")


def made_for(name: str, **values: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of its own, with a name of its own, in which some globals have other values.

    Numba's cache would take a closure over compiled functions for another one in each process."""

    def copied(function: Callable[..., Any]) -> Callable[..., Any]:
        assert isinstance(function, FunctionType)
        own = FunctionType(function.__code__, function.__globals__ | values, f"{function.__name__}_{name}")
        own.__qualname__, own.__module__ = own.__name__, function.__module__
        return own

    return copied
