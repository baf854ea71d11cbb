"""Finds and changes the schemas inside a JSON schema. Clients choose it: nothing in it may be taken for granted."""

from collections.abc import Callable
from typing import Any

_MAX_NODES = 5_000  # visited within 3 ms; a larger schema stays as it is
_MAX_DEPTH = 64  # and so does a deeper one
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
        if depth == _MAX_DEPTH or len(found) + len(left) > _MAX_NODES:
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
