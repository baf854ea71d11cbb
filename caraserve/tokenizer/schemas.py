"""Walks and changes the schemas inside a JSON schema, and tells where no value follows two of them. Clients choose it:
nothing in it may be taken for granted."""

import json
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any
from urllib.parse import unquote

ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
_Schema = dict[str, Any]
JSON_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_MAX_COMPARISONS = 5_000  # of schemas, or of the values and names that they list: 0.1 s
_MAX_DEPTH = 8
_MAX_NODES = 5_000  # visited within 3 ms; a larger schema stays as it is
_MAX_NESTING = 64  # and so does a deeper one
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # of schemas
_SINGLES = ("items", "additionalProperties", "additionalItems")


def schema_nodes(schema: Any) -> list[dict[str, Any]] | None:
    """Returns all schemas in a schema, itself included; None if there are too many, or if they are too deep."""
    found, left = list[dict[str, Any]](), [(schema, 0)]
    while left:
        node, depth = left.pop()
        if not isinstance(node, dict):
            continue
        found.append(node)
        left += [(child, depth + 1) for child in _children(node)]
        if depth == _MAX_NESTING or len(found) + len(left) > _MAX_NODES:
            return None
    return found


def change_nodes(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Returns a schema in which `change` was applied to every schema and then to those inside its result. `schema`:
    neither too large nor too deep, by `schema_nodes`."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(change(schema))
    for key in _MAPS:
        if isinstance(children := changed.get(key), dict):
            changed[key] = {name: change_nodes(child, change) for name, child in children.items()}
    for key in _LISTS:
        if isinstance(children := changed.get(key), list):
            changed[key] = [change_nodes(child, change) for child in children]
    for key in _SINGLES:
        if isinstance(child := changed.get(key), dict):
            changed[key] = change_nodes(child, change)
    return changed


def _children(node: dict[str, Any]) -> list[Any]:
    maps = [node[key] for key in _MAPS if isinstance(node.get(key), dict)]
    lists = [node[key] for key in _LISTS if isinstance(node.get(key), list)]
    return [
        *(child for each in maps for child in each.values()),
        *(child for each in lists for child in each),
        *(node[key] for key in _SINGLES if isinstance(node.get(key), dict)),
    ]


class SchemaComparison:
    """Compares schemas inside one schema, a limited number of times."""

    def __init__(self, schema: Any) -> None:
        self._schema, self._left = schema, _MAX_COMPARISONS
        inner = (node for node in schema_nodes(schema) or () if node is not schema)
        self._has_base = any(isinstance(node.get("$id") or node.get("id"), str) for node in inner)  # of references

    def has_time_for(self, count: int) -> bool:
        """Counts comparisons. Returns whether the limit allows them."""
        self._left -= count
        return self._left >= 0

    def resolved(self, node: Any) -> Any:
        """Returns what a schema that is only a reference refers to."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(node, dict) or not isinstance(reference := node.get("$ref"), str) or self._has_base:
                break
            if not reference.startswith("#/") or node.keys() - ANNOTATIONS != {"$ref"}:
                break
            node = self._schema
            for step in unquote(reference[2:]).split("/"):
                node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node

    def are_disjoint(
        self, one: Any, other: Any, types: AbstractSet[str] = frozenset(JSON_TYPES), depth: int = 0
    ) -> bool:
        """Returns whether it is certain that no value of these types follows both."""
        one, other = self.resolved(one), self.resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or "$ref" in one or "$ref" in other:
            return False
        if depth > _MAX_DEPTH or not self.has_time_for(1 + _size(one) + _size(other)):
            return False
        types = types & types_of(one) & types_of(other)
        if not types:
            return True
        if (values := _values(one)) is not None and (others := _values(other)) is not None:
            return values.isdisjoint(others)
        return (types == {"object"} and self._have_disjoint_property(one, other, depth)) or any(
            self._is_part_disjoint(part, whole, types, depth) for part, whole in ((one, other), (other, one))
        )

    def _have_disjoint_property(self, one: _Schema, other: _Schema, depth: int) -> bool:
        required = (name for each in (one, other) for name in _list(each, "required") if isinstance(name, str))
        return any(
            self.are_disjoint(_property(one, name), _property(other, name), depth=depth + 1) for name in required
        )

    def _is_part_disjoint(self, part: _Schema, whole: _Schema, types: AbstractSet[str], depth: int) -> bool:
        """Returns whether a schema of `allOf`, or all of `anyOf` or of `oneOf`, are disjoint from `whole`."""
        if any(self.are_disjoint(each, whole, types, depth + 1) for each in _list(part, "allOf")):
            return True
        either = _list(part, "anyOf") or _list(part, "oneOf")
        return bool(either) and all(self.are_disjoint(each, whole, types, depth + 1) for each in either)


def types_of(schema: _Schema) -> set[str]:
    """Returns the types of the values that may follow a schema; a number may be an integer."""
    types_given = schema.get("type", list(JSON_TYPES))
    types = {
        name for name in (types_given if isinstance(types_given, list) else [types_given]) if isinstance(name, str)
    }
    if "number" in types:
        types.add("integer")
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return types & set(map(_type_of, listed)) if isinstance(listed, list) else types


def _type_of(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else _TYPE_OF.get(type(value), "null")


def _values(schema: _Schema) -> set[str] | None:
    """Returns the values that a schema lists, equal ones as equal text; None if it lists none, or nested ones."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    return {json.dumps(int(value) if _type_of(value) == "integer" else value) for value in values}


def _property(schema: _Schema, name: str) -> Any:
    """Returns the schema of a property."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return schema.get("additionalProperties") is not False or "patternProperties" in schema


def _size(schema: _Schema) -> int:
    return len(_list(schema, "enum")) + len(_list(schema, "required")) + len(_list(schema, "type"))


def _list(schema: _Schema, key: str) -> list[Any]:
    return value if isinstance(value := schema.get(key), list) else []
