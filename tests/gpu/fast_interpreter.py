"""Runs Triton's interpreter in a third of the time, as a pytest plugin or by `speed_up()`; no result changes by a bit.

Triton must be in interpreter mode in the whole process: its language stays patched between launches.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def speed_up() -> None:
    """Makes the interpreter patch Triton's language once, not at every call of a device function; look up dtypes and
    shapes; and compute no overflow checks, whose results it discards unless `options.debug`."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_language_once()
    _look_up_dtypes()
    _look_up_shapes()


def _patch_language_once() -> None:
    patch, patched, seen = interpreter._patch_lang, set[Any](), set[int]()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in seen:
            languages = {x for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)}
            if not languages <= patched:
                patch(fn)
                patched.update(languages)
            seen.add(id(fn.__globals__))  # of a module: they are never freed
        return interpreter._LangPatchScope()  # has no changes to restore

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(owner, name, _interpreted(getattr(member, "__wrapped__", member)))

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attribute


def _interpreted(builtin: Callable[..., Any]) -> Callable[..., Any]:
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return builtin(*args, **kwargs)

    return call


def _look_up_dtypes() -> None:
    np_dtype, unwrap, is_equal = interpreter._get_np_dtype, core._unwrap_if_constexpr, core.dtype.__eq__
    cached_np_dtype = cache(np_dtype)
    plain = {int, float, bool, type(None), core.tensor, core.dtype, core.block_type}  # most values are one of these

    def np_dtype_of(dtype: Any) -> Any:
        element = dtype.scalar
        return np_dtype(element) if element.is_ptr() else cached_np_dtype(element)  # pointer types have no hash

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    interpreter._get_np_dtype, core._unwrap_if_constexpr = np_dtype_of, unwrapped
    core.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


@dataclass(frozen=True)
class _Shape:
    sizes: Any  # of block types
    numel: int
    wrapped_sizes: Any  # of tensors
    wrapped_numel: Any


def _look_up_shapes() -> None:
    """Lets all blocks of a shape share its validated form, which the interpreter makes again for every value."""
    known: dict[tuple[int, ...], _Shape] = {}
    by_id: dict[int, _Shape] = {}  # of `sizes`, which `known` keeps alive
    init_block, broadcast = core.block_type.__init__, interpreter.interpreter_semantic.broadcast_impl_value
    scalar = _Shape((), 1, core.tuple([]), core.constexpr(1))

    def add(sizes: Any, numel: int) -> _Shape:
        wrapped = core.tuple([core.constexpr(size) for size in sizes])
        shape = known[tuple(sizes)] = by_id[id(sizes)] = _Shape(sizes, numel, wrapped, core.constexpr(numel))
        return shape

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        found = by_id.get(id(shape)) or known.get(tuple(core._unwrap_if_constexpr(size) for size in shape))
        if found is None:
            init_block(self, element_ty, shape)
            found = add(self.shape, self.numel)
        self.element_ty, self.shape, self.numel = element_ty, found.sizes, found.numel

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        shape = by_id[id(kind.shape)] if kind.is_block() else scalar
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shape.wrapped_numel, shape.wrapped_sizes

    def broadcast_unless_equal(lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(lhs, rhs)

    name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(core.block_type, "name")
    core.block_type.name, core.block_type.__init__, core.tensor.__init__ = name, init_block_type, init_tensor
    interpreter.interpreter_semantic.broadcast_impl_value = broadcast_unless_equal


def pytest_configure() -> None:
    speed_up()
