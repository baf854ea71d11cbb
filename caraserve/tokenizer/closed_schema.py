"""Limits the objects of JSON schemas to the properties that the schemas list.

By the standard, an object may have more properties unless its schema says `"additionalProperties": false`. Weak models
use that freedom until `max_tokens`: 3 of 3 answers of the demo model never ended. Answers that follow the limited
schema also follow the original.
"""

from typing import Any

from caraserve.tokenizer.schema_nodes import change_nodes, schema_nodes

_COMBINED = ("anyOf", "$ref", "$dynamicRef")
# What else decides which properties an object may have.
_OPEN = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "dependentSchemas", "dependentRequired"),
    *("dependencies", "if", "not", "propertyNames", "minProperties", "allOf", "oneOf", *_COMBINED),
)


def close_objects(schema: Any) -> Any:
    """Returns the schema with `"additionalProperties": false` in every object that lists properties and says nothing
    about others. Returns it unchanged if schemas are combined to describe one object, or if it is too large."""
    nodes = schema_nodes(schema)
    if nodes is None or any(_is_combined(node) for node in nodes):
        return schema
    return change_nodes(schema, closed)


def closed(node: dict[str, Any]) -> dict[str, Any]:
    """Returns one schema without those inside it, closed if it lists all properties."""
    return node | {"additionalProperties": False} if _lists_all_properties(node) else node


def _is_combined(node: dict[str, Any]) -> bool:
    """Returns whether closing could be wrong: an answer that one closed alternative of `oneOf` alone allows may be
    allowed by several as they were."""
    return "allOf" in node or "oneOf" in node or ("properties" in node and any(key in node for key in _COMBINED))


def _lists_all_properties(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or any(key in node for key in _OPEN):
        return False
    return all(isinstance(name, str) and name in properties for name in required)
