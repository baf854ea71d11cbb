"""Runs Triton's interpreter in a third of the time, as a pytest plugin or by `speed_up()`; no result changes by a bit.

Triton must be in interpreter mode in the whole process: its language stays patched between launches.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def speed_up() -> None:
    """Makes the interpreter patch Triton's language once, not at every call of a device function; look up dtypes and
    shapes; leave out promotions of equal types; and compute no overflow checks, whose results it discards unless
    `options.debug`."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_language_once()
    _look_up_dtypes()
    _look_up_shapes()
    _promote_once()


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


def _promote_once() -> None:
    """Lets operands whose types need no promotion pass without the checks of every type, and numpy repeat their
    numbers: in the interpreter, operators are numpy's. Results have the same types and numbers."""
    semantic = interpreter.interpreter_semantic
    promote = semantic.binary_op_type_checking_impl

    def promoted(lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if type(lhs) is not core.tensor:
            if type(rhs) is core.tensor and _takes(rhs.dtype, lhs):
                return _number_like(lhs, rhs), rhs
        elif type(rhs) is not core.tensor:
            if _takes(lhs.dtype, rhs):
                return lhs, _number_like(rhs, lhs)
        elif _are_plain(lhs.dtype, rhs.dtype, may_be_pointer=bool(options) and options[0]):
            return _of_one_shape(lhs, rhs)
        return promote(lhs, rhs, *options, **named)

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    semantic.binary_op_type_checking_impl, interpreter.TensorHandle.__init__ = promoted, init_handle


# By the identity of a dtype: the numbers that take the type of an operand of it, their types and how large they may be.
_TAKING = {id(tl.float32): ({int, float}, 2**126), id(tl.int32): ({int}, 2**31), id(tl.int64): ({int}, 2**63)}
_OFFSETS = {id(tl.int32), id(tl.int64)}  # what may be added to a pointer
_joined_shapes: dict[tuple[int, int], Any] = {}  # of results, by the shapes of operands, which `_look_up_shapes` keeps


def _takes(dtype: Any, number: Any) -> bool:
    kinds, limit = _TAKING.get(id(dtype), ((), 0))
    return type(number) in kinds and abs(number) < limit


def _are_plain(left: Any, right: Any, *, may_be_pointer: bool) -> bool:
    """Returns whether operands of these dtypes need no promotion."""
    return (left is right and id(left) in _TAKING) or (may_be_pointer and id(right) in _OFFSETS and left.is_ptr())


def _number_like(value: float, other: Any) -> Any:
    """Returns a number as a tensor of the type of `other`. A zero is positive, as the interpreter makes it."""
    data = np.array([value or 0], interpreter._get_np_dtype(other.dtype))
    return core.tensor(interpreter.TensorHandle(data, other.dtype), other.type)


def _of_one_shape(lhs: Any, rhs: Any) -> Any:
    """Returns the operands with the shape of the result in their types."""
    left, right = lhs.type, rhs.type
    if not (left.is_block() or right.is_block()):
        return lhs, rhs
    if not (left.is_block() and right.is_block()):
        shape = left.shape if left.is_block() else right.shape
    else:
        shape = left.shape if left.shape is right.shape else _joined_shape(left.shape, right.shape)
    return _of_shape(lhs, shape), _of_shape(rhs, shape)


def _of_shape(operand: Any, shape: Any) -> Any:
    is_so = operand.type.is_block() and operand.type.shape is shape
    return operand if is_so else core.tensor(operand.handle, core.block_type(operand.dtype, shape))


def _joined_shape(left: Any, right: Any) -> Any:
    key = id(left), id(right)
    if key not in _joined_shapes:
        _joined_shapes[key] = core.block_type(tl.int32, list(np.broadcast_shapes(left, right))).shape
    return _joined_shapes[key]


def pytest_configure() -> None:
    speed_up()
