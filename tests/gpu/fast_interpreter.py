"""Halves the time of Triton's interpreter, as a pytest plugin or by `speed_up()`; no result changes by a bit.

Triton must be in interpreter mode in the whole process: its language stays patched between launches.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Makes the interpreter patch Triton's language once, not at every call of a device function; look dtypes up; and
    compute no overflow checks, whose results it discards unless `options.debug`."""
    patch, patched = interpreter._patch_lang, set[Any]()
    np_dtype = interpreter._get_np_dtype
    cached_np_dtype = cache(np_dtype)

    def patch_once(fn: Any) -> Any:
        languages = {value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)}
        if not languages <= patched:
            patch(fn)
            patched.update(languages)
        return interpreter._LangPatchScope()  # has no changes to restore

    def np_dtype_of(dtype: Any) -> Any:
        element = dtype.scalar
        return np_dtype(element) if element.is_ptr() else cached_np_dtype(element)  # pointer types have no hash

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, np_dtype_of


def pytest_configure() -> None:
    speed_up()
