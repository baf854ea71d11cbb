"""Frozen dataclasses from what JSON made of them; the opposite of `dataclasses.asdict`. Pure."""

import dataclasses
import math
import types
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_SCALARS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def read(kind: type[_T], value: object, where: str) -> _T:
    """Takes dataclasses of scalars, dataclasses, `tuple[X, ...]`, `dict[str, X]` and `X | None`. A field with a default
    may be missing: reports of older versions lack it.

    Raises ValueError that names the place, which begins with `where`, and what is wrong there.
    """
    made: _T = _read(kind, value, where)
    return made


def _read(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _read(arguments[0], value, where)
    if origin is tuple:
        _expect(isinstance(value, list), "a list", where)
        return tuple(_read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), "an object", where)
        return {name: _read(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind is float and type(value) is int:  # JavaScript writes 3.0 as 3
        value = float(value)
    _expect(type(value) is kind and not (kind is float and not math.isfinite(value)), _SCALARS[kind], where)
    return value


def _object(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), "an object", where)
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        _expect(field.name in value or field.default is not dataclasses.MISSING, "there", f"{where}.{field.name}")
    found = {name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items() if name in value}
    return kind(**found)


def _expect(good: bool, what: str, where: str) -> None:
    if not good:
        raise ValueError(f"{where} is not {what}")
