"""Limits the integers of JSON schemas to 64 bits.

By the standard an integer may have any number of digits, and a weak model writes digits until `max_tokens`: 1 of 120
answers of the demo model never ended. Answers that follow the limited schema also follow the original.

Numbers with fractions are left as they are: llguidance could limit their digits only together with their exponents, so
that 6e23 would become another number.
"""

import json
from typing import Any

from caraserve.tokenizer.disjoint_schemas import ANNOTATIONS
from caraserve.tokenizer.schema_nodes import change_nodes, schema_nodes

_Schema = dict[str, Any]

_LIMIT = (1 << 63) - 1024  # the largest below 2^63 that is a float, as which llguidance reads bounds
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# With any other keyword, something else decides which values a schema allows.
_KEYWORDS = frozenset(("type", "multipleOf", *_LOWER, *_UPPER))


def bound_integers(schema: Any) -> Any:
    """Returns the schema with a least and a largest value for every integer that lacks one. Returns it unchanged if it
    excludes values that another part allows, or if it is too large."""
    nodes = schema_nodes(schema)
    if not nodes or any("oneOf" in node or "not" in node for node in nodes) or any("$id" in node for node in nodes[1:]):
        return schema
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, dict):
        return schema
    # One definition for all equal ones: a range is a large expression, and 500 of them would be too many.
    names: dict[str, str] = {}
    prefix = "integer"
    while any(name.startswith(prefix) for name in definitions):
        prefix = f"_{prefix}"

    def bound(node: _Schema) -> _Schema:
        bounded = _bounded(node)
        if bounded is None:
            return node
        name = names.setdefault(json.dumps(bounded, sort_keys=True), f"{prefix}{len(names)}")
        return {"$ref": f"#/$defs/{name}"}

    changed = change_nodes(schema, bound)
    if not names:
        return schema
    return {
        **changed,
        "$defs": {**changed.get("$defs", {}), **{name: json.loads(text) for text, name in names.items()}},
    }


def _bounded(node: _Schema) -> _Schema | None:
    """Returns the limited schema of an integer, without annotations; None for any other schema."""
    own = {key: value for key, value in node.items() if key not in ANNOTATIONS}
    types = own.get("type")
    listed = types if isinstance(types, list) else [types]
    if "integer" not in listed or "number" in listed or own.keys() - _KEYWORDS:
        return None
    lower, upper = ([own[key] for key in keys if key in own] for keys in (_LOWER, _UPPER))
    if (lower and upper) or not all(_is_within(value) for value in (*lower, *upper)):
        return None
    return own | ({} if lower else {"minimum": -_LIMIT}) | ({} if upper else {"maximum": _LIMIT})


def _is_within(bound: Any) -> bool:
    return isinstance(bound, int | float) and -_LIMIT < bound < _LIMIT
