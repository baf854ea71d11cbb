"""The types of body fields. One entry both reads a field's value and describes it in the API document.

A field that needs more than its type and bounds is an `OtherField`, whose reader is elsewhere.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from caraserve.http.validation import Fields

Schema = dict[str, Any]
"""A JSON schema of draft 2020-12, as OpenAPI 3.1 has them."""

LARGEST = (1 << 63) - 1  # of integers without another bound

_D = TypeVar("_D")


class BodyField(Protocol):
    """A field that a route serves."""

    @property
    def name(self) -> str:
        """Its name in bodies."""

    def schema(self) -> Schema:
        """Returns the schema of its values; null, which every field may be, is left out."""


@dataclass(frozen=True, slots=True)
class IntegerField(Generic[_D]):
    """An integer in [low, high]; `default` if it is absent."""

    name: str
    low: int
    high: int
    default: _D

    def read(self, fields: "Fields", *, high: int | None = None, default: int | None = None) -> int | _D:
        """Returns the value. `high` and `default` replace those of this entry where the model decides."""
        value = fields.maybe_integer(self.name, self.low, self.high if high is None else high)
        if value is not None:
            return value
        return self.default if default is None else default

    def schema(self) -> Schema:
        bounds = {"minimum": self.low} | ({"maximum": self.high} if self.high < LARGEST else {})
        return {"type": "integer"} | bounds | _default(self.default)


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number in [low, high], or in (low, high] where `above_low`."""

    name: str
    low: float
    high: float
    default: float
    above_low: bool = False

    def read(self, fields: "Fields", *, default: float | None = None) -> float:
        """Returns the value. `default` replaces that of this entry where the model decides."""
        default = self.default if default is None else default
        return fields.number(self.name, self.low, self.high, default, above_low=self.above_low)

    def schema(self) -> Schema:
        lower = "exclusiveMinimum" if self.above_low else "minimum"
        return {"type": "number", lower: self.low, "maximum": self.high} | _default(self.default)


@dataclass(frozen=True, slots=True)
class BooleanField:
    """True or false."""

    name: str
    default: bool

    def read(self, fields: "Fields", *, default: bool | None = None) -> bool:
        """Returns the value. `default` replaces that of this entry where other fields decide."""
        return fields.boolean(self.name, self.default if default is None else default)

    def schema(self) -> Schema:
        return {"type": "boolean"} | _default(self.default)


@dataclass(frozen=True, slots=True)
class TextField:
    """A string of at most `longest` characters."""

    name: str
    longest: int

    def read(self, fields: "Fields") -> str | None:
        return fields.maybe_text(self.name, self.longest)

    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.longest}


@dataclass(frozen=True, slots=True)
class ChoiceField:
    """One of a few strings; `default` if it is absent."""

    name: str
    values: tuple[str, ...]
    default: str

    def read(self, fields: "Fields") -> str:
        return fields.one_of(self.name, self.values, self.default)

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.values)} | _default(self.default)


@dataclass(frozen=True, slots=True)
class ArrayField:
    """A list of at most `most` entries; `items` is the schema of one."""

    name: str
    most: int
    items: Schema

    def read(self, fields: "Fields", *, most: int | None = None) -> list[Any]:
        """Returns the entries, which are not checked. `most` replaces that of this entry where the model decides."""
        return fields.array(self.name, self.most if most is None else most)

    def schema(self) -> Schema:
        return {"type": "array", "items": self.items, "maxItems": self.most}


@dataclass(frozen=True, slots=True)
class OtherField:
    """A field with a schema of its own."""

    name: str
    described: Schema

    def schema(self) -> Schema:
        return self.described


def _default(value: object) -> Schema:
    return {} if value is None else {"default": value}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def object_of(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """Returns the schema of an object, which may have other properties too."""
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


def or_null(schema: Schema) -> Schema:
    """Returns the schema with null as one more value."""
    if isinstance(schema.get("type"), str):
        more = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
        return schema | {"type": [schema["type"], "null"]} | more
    return any_of(*schema.get("anyOf", [schema]), {"type": "null"}) if schema else {}
