"""Limits the objects of JSON schemas to the properties that the schemas list.

By the standard, an object may have more properties unless its schema says `"additionalProperties": false`. Weak models
use that freedom until `max_tokens`: 3 of 3 answers of the demo model never ended. Answers that follow the limited
schema also follow the original.
"""

from typing import Any

_MAX_NODES = 5_000  # visited within 3 ms; a larger schema stays as it is
_MAX_DEPTH = 64  # and so does a deeper one
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
_LISTS = ("anyOf", "oneOf", "prefixItems")  # of schemas
_SINGLES = ("items", "additionalProperties")
# What else decides which properties an object may have.
_OPEN = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "dependentSchemas", "dependencies"),
    *("if", "not", "propertyNames", "minProperties"),
)
_COMBINED = ("anyOf", "oneOf", "$ref", "$dynamicRef")


def close_objects(schema: Any) -> Any:
    """Returns the schema with `"additionalProperties": false` in every object that lists properties and says nothing
    about others. Returns it unchanged if schemas are combined to describe one object, or if it is too large."""
    nodes = _schemas(schema)
    if nodes is None or any(_is_combined(node) for node in nodes):
        return schema
    return _closed(schema)


def _schemas(schema: Any) -> list[dict[str, Any]] | None:
    """Returns all schemas in a schema, itself included; None if there are too many, or if they are too deep."""
    found, left = list[dict[str, Any]](), [(schema, 0)]
    while left:
        node, depth = left.pop()
        if not isinstance(node, dict):
            continue
        found.append(node)
        left += [(child, depth + 1) for child in _children(node)]
        if depth == _MAX_DEPTH or len(found) + len(left) > _MAX_NODES:
            return None
    return found


def _children(node: dict[str, Any]) -> list[Any]:
    maps = [node[key] for key in _MAPS if isinstance(node.get(key), dict)]
    lists = [node[key] for key in _LISTS if isinstance(node.get(key), list)]
    return [
        *(child for each in maps for child in each.values()),
        *(child for each in lists for child in each),
        *(node[key] for key in _SINGLES if key in node),
    ]


def _is_combined(node: dict[str, Any]) -> bool:
    return "allOf" in node or ("properties" in node and any(key in node for key in _COMBINED))


def _closed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    closed = dict(node)
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            closed[key] = {name: _closed(child) for name, child in node[key].items()}
    for key in _LISTS:
        if isinstance(node.get(key), list):
            closed[key] = [_closed(child) for child in node[key]]
    for key in _SINGLES:
        if key in node:
            closed[key] = _closed(node[key])
    if _lists_all_properties(node):
        closed["additionalProperties"] = False
    return closed


def _lists_all_properties(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or any(key in node for key in _OPEN):
        return False
    return all(isinstance(name, str) and name in properties for name in required)
