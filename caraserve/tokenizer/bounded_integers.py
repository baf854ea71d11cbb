"""Limits the integers of JSON schemas to 64 bits.

By the standard an integer may have any number of digits, and a weak model writes digits until `max_tokens`: 1 of 120
answers of the demo model never ended. Answers that follow the limited schema also follow the original. llguidance
clips bounds beyond 64 bits: one that leaves no integer of 64 bits is refused, or answers would break it.

Numbers with fractions are left as they are: llguidance could limit their digits only together with their exponents, so
that 6e23 would become another number.
"""

import json
from typing import Any

from caraserve.tokenizer.schemas import ANNOTATIONS, change_nodes, schema_nodes

_Schema = dict[str, Any]

_LIMIT = (1 << 63) - 1024  # the largest below 2^63 that is a float, as which llguidance reads bounds
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_EXCLUSIVE = (_LOWER[1], _UPPER[1])
_SINGLE_TYPES = ("integer", "boolean", "null")  # values about which only the keywords of numbers say something
_NUMBERS = frozenset(("type", "multipleOf", *_LOWER, *_UPPER))
# Beside one of these, something else decides which integers a schema allows, and may need larger ones.
_DECIDING = frozenset(("enum", "const", "allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef"))
# What has one of these stays where it is: other parts may refer to it or into it, or it refers to others.
_PLACED = frozenset(
    (
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "$defs", "definitions"),
        *("not", "if", "then", "else", "dependencies", "dependentSchemas", "$anchor", "$dynamicAnchor", "$id", "id"),
    )
)


def bound_integers(schema: Any) -> Any:
    """Returns the schema with a least and a largest value for every integer; unchanged if it excludes what another part
    allows, or is too large. Raises ValueError for bounds that no integer of 64 bits meets."""
    nodes = schema_nodes(schema)
    for node in nodes or ():
        _refuse_beyond(node)
    if not nodes or any("oneOf" in node or ("not" in node and _refers(node["not"])) for node in nodes):
        return schema
    definitions = schema.get("$defs", {})
    has_bases = any(isinstance(node.get("$id") or node.get("id"), str) for node in nodes[1:])  # of references
    is_shared = isinstance(definitions, dict) and not has_bases
    # One definition for all equal ones: a range is a large expression, and 500 of them would be too many.
    names: dict[str, str] = {}
    prefix = "integer"
    while is_shared and any(name.startswith(prefix) for name in definitions):
        prefix = f"_{prefix}"

    def bound(node: _Schema) -> _Schema:
        limits = _missing_limits(node)
        if not limits:
            return node
        if not is_shared or node is schema or not _PLACED.isdisjoint(node):
            return node | limits
        text = json.dumps(_without_annotations(node) | limits, sort_keys=True)
        return {"$ref": f"#/$defs/{names.setdefault(text, f'{prefix}{len(names)}')}"}

    changed = change_nodes(schema, bound)
    if not names:
        return changed
    return {
        **changed,
        "$defs": {**changed.get("$defs", {}), **{name: json.loads(text) for text, name in names.items()}},
    }


def _refers(excluded: Any) -> bool:
    """Returns whether a schema of `not`, which stays as it is, has references: limits there would allow more."""
    text = json.dumps(excluded)
    return any(f'"{keyword}"' in text for keyword in ("$ref", "$dynamicRef", "$recursiveRef"))


def _refuse_beyond(node: _Schema) -> None:
    """Raises ValueError if what may be an integer is above or below 64 bits."""
    if "type" in node and "integer" not in _types(node):
        return
    for keyword, sign in (*((key, 1) for key in _LOWER), *((key, -1) for key in _UPPER)):
        bound = node.get(keyword)
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            continue
        if sign * bound > _LIMIT or (sign * bound == _LIMIT and keyword in _EXCLUSIVE):
            raise ValueError(
                f"{keyword} {str(bound)[:60]} allows no integer of 64 bits, and others are not written here: they are "
                f"from {-_LIMIT} to {_LIMIT}"
            )


def _missing_limits(node: _Schema) -> _Schema:
    """Returns the limits that an integer lacks, or has beyond 64 bits; none for any other schema."""
    types = _types(node)
    if "integer" not in types or "number" in types or not _DECIDING.isdisjoint(node):
        return {}
    lower = [node[key] for key in _LOWER if key in node and not _is_above(-_LIMIT, node[key])]
    upper = [node[key] for key in _UPPER if key in node and not _is_above(node[key], _LIMIT)]
    if (lower and upper) or not all(
        isinstance(bound, int | float) and -_LIMIT <= bound <= _LIMIT for bound in (*lower, *upper)
    ):
        return {}
    return ({} if lower else {"minimum": -_LIMIT}) | ({} if upper else {"maximum": _LIMIT})


def _without_annotations(node: _Schema) -> _Schema:
    """Returns an integer's schema with what decides its values."""
    if all(one in _SINGLE_TYPES for one in _types(node)):
        return {key: value for key, value in node.items() if key in _NUMBERS}
    return {key: value for key, value in node.items() if key not in ANNOTATIONS and not key.startswith("x-")}


def _types(node: _Schema) -> list[Any]:
    types = node.get("type")
    return types if isinstance(types, list) else [types]


def _is_above(one: Any, other: Any) -> bool:
    return isinstance(one, int | float) and isinstance(other, int | float) and one > other
