"""Reads the pickle of a dictionary of tensors without unpickling. No I/O.

A stack machine knows the operations that `torch.save` writes. It keeps names of functions as text, and where one is
called it builds the description of a tensor, or refuses: nothing is imported, called or compared.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from caraserve.util.text import is_text


class PickleRefused(Exception):
    """What a pickle wants that is not read; the message follows the file's name."""


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """Where a tensor's elements are: in an entry of the archive, whose values have the type `kind`."""

    storage: str  # name of the entry
    kind: str  # as in safetensors: F32, F16, …
    itemsize: int
    storage_elements: int
    offset: int  # in elements, as strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """A function or class that the pickle names."""

    text: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """An entry of the archive."""

    entry: str
    kind: str
    itemsize: int
    elements: int


_STORAGES = {
    "torch FloatStorage": ("F32", 4),
    "torch HalfStorage": ("F16", 2),
    "torch BFloat16Storage": ("BF16", 2),
    "torch DoubleStorage": ("F64", 8),
}
_ORDERED, _TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_KNOWN = {_ORDERED, _TENSOR, _PARAMETER, *_STORAGES}
_MOST_OPERATIONS = 500_000  # a tensor takes 30 of them, 1 s of a core takes 600,000
_IGNORED = {"PROTO", "FRAME"}
_VALUES = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes) -> dict[str, PickledTensor]:
    """Returns the tensors of a pickle by name. Raises PickleRefused, or ValueError for what is no pickle."""
    try:
        found = _Machine().run(data)
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("its pickle is damaged") from None
    if not isinstance(found, dict) or not found:
        raise PickleRefused("holds no dictionary of tensors")
    for name, value in found.items():
        if not isinstance(value, PickledTensor):
            raise PickleRefused(f"holds {ascii(name)[:200]}, which is no tensor; only tensors are read")
    return found


class _Machine:
    """The stack, marks and memo of one pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._operations: dict[str, Callable[[Any], None]] = {
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "TUPLE": lambda _: self._stack.append(tuple(self._above_mark())),
            "APPEND": lambda _: self._append([self._stack.pop()]),
            "APPENDS": lambda _: self._append(self._above_mark()),
            "SETITEM": lambda _: self._set([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._set(self._above_mark()),
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "BINGET": lambda place: self._stack.append(self._memo[place]),
            "LONG_BINGET": lambda place: self._stack.append(self._memo[place]),
            "GLOBAL": self._name,
            "STACK_GLOBAL": lambda _: self._name(f"{self._text(-2)} {self._text(-1)}", taken=2),
            "BINPERSID": lambda _: self._stack.append(_storage(self._stack.pop())),
            "REDUCE": lambda _: self._stack.append(_made(self._stack.pop(-2), self._stack.pop())),
            "BUILD": lambda _: self._build(),
        }

    def run(self, data: bytes) -> Any:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            name = operation.name
            if count == _MOST_OPERATIONS:
                raise PickleRefused(f"has more than {_MOST_OPERATIONS} operations")
            if name in _IGNORED:
                continue
            if name == "STOP":
                return self._stack.pop()
            if name in _VALUES:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                count = _TUPLES[name]
                taken = [self._stack.pop() for _ in range(count)]
                self._stack.append(tuple(reversed(taken)))
            elif name in self._operations:
                self._operations[name](argument)
            else:
                raise PickleRefused(f"has the operation {name}; only tensors are read")
        raise ValueError("its pickle does not end")

    def _above_mark(self) -> list[Any]:
        place = self._marks.pop()
        if place > len(self._stack):
            raise ValueError("its pickle is damaged")
        taken = self._stack[place:]
        del self._stack[place:]
        return taken

    def _append(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("its pickle is damaged")
        self._stack[-1].extend(values)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("its pickle is damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:  # others may take forever to hash
                raise PickleRefused("has a name that is not text; only tensors are read")
            if not is_text(key):
                raise PickleRefused(f"holds {ascii(key)[:200]}, a name that is not text")
            if key in target:
                raise PickleRefused(f"holds {ascii(key)[:200]} twice")
            target[key] = value

    def _put(self, place: Any) -> None:
        self._memo[place] = self._stack[-1]

    def _text(self, place: int) -> str:
        if type(self._stack[place]) is not str:
            raise ValueError("its pickle is damaged")
        return str(self._stack[place])

    def _name(self, text: Any, taken: int = 0) -> None:
        if text not in _KNOWN:
            raise PickleRefused(f"wants to load {ascii(text.replace(' ', '.'))[1:-1][:100]}; only tensors are read")
        del self._stack[len(self._stack) - taken :]
        self._stack.append(_Name(text))

    def _build(self) -> None:
        """Drops attributes: those that torch gives to a module's dictionary."""
        attributes = self._stack.pop()
        if type(attributes) is not dict or type(self._stack[-1]) is not dict:
            raise PickleRefused("sets attributes of an object; only tensors are read")


def _storage(value: Any) -> _Storage:
    """Returns the storage of a persistent id: ("storage", type, entry, device, elements)."""
    if type(value) is not tuple or len(value) != 5 or type(value[0]) is not str or value[0] != "storage":
        raise PickleRefused("refers to something other than a storage; only tensors are read")
    _, kind, entry, _, elements = value
    if type(kind) is not _Name or kind.text not in _STORAGES or type(entry) is not str or type(elements) is not int:
        raise PickleRefused("has a storage of an unknown type; only tensors are read")
    return _Storage(f"data/{entry}", *_STORAGES[kind.text], elements)


def _made(function: Any, arguments: Any) -> Any:
    """Returns what a call would make, without calling."""
    if type(function) is not _Name or type(arguments) is not tuple:
        raise PickleRefused("calls something unknown; only tensors are read")
    if function.text == _ORDERED and len(arguments) == 0:
        return {}
    if function.text == _PARAMETER and len(arguments) == 3 and type(arguments[0]) is PickledTensor:
        return arguments[0]
    if function.text == _TENSOR and len(arguments) in (6, 7) and type(arguments[0]) is _Storage:
        storage, offset, shape, strides = arguments[:4]
        if type(offset) is int and _are_integers(shape) and _are_integers(strides):
            place = storage.entry, storage.kind, storage.itemsize, storage.elements
            return PickledTensor(*place, offset, shape, strides)
    raise PickleRefused("makes something other than a tensor; only tensors are read")


def _are_integers(value: Any) -> bool:
    return type(value) is tuple and len(value) <= 64 and all(type(one) is int for one in value)
