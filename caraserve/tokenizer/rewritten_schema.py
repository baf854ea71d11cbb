"""Says in the keywords that llguidance enforces what JSON schemas say in others, and limits objects to the properties
that the schemas list.

llguidance's own option for `oneOf`, `coerce_one_of`, would take it for `anyOf` everywhere: answers could then follow
two of its schemas, which the standard forbids.

Answers that follow the rewritten schema also follow the original. What cannot be rewritten stays as it is, and
llguidance refuses it by name.
"""

import re
from itertools import permutations
from typing import Any
from urllib.parse import quote, unquote

from caraserve.tokenizer.schemas import ANNOTATIONS, SchemaComparison, change_nodes, schema_nodes, types_of

_Schema = dict[str, Any]

# The names to which the standard gives a meaning. A schema with another one says nothing about answers.
_FORMATS = frozenset(
    (
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference"),
        *("idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex"),
        *("json-pointer", "relative-json-pointer"),
    )
)
_DRAFT = re.compile(r"draft[-/](04|06|07|2019-09|2020-12)\b")
_NEW_DIALECT, _OLD_DIALECT = "https://json-schema.org/draft/{}/schema", "http://json-schema.org/draft-{}/schema#"
_LATEST_DIALECT = "json-schema.org/schema"
# Say more about the objects that alternatives beside them describe, which may have properties of both.
_BESIDE = ("properties", "patternProperties", "required", "anyOf", "$ref")
_COMBINED = ("anyOf", "$ref", "$dynamicRef")
# What else decides which properties an object may have.
_OPEN = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "dependentSchemas", "dependentRequired"),
    *("dependencies", "if", "not", "propertyNames", "minProperties", "allOf", "oneOf", *_COMBINED),
)


def rewrite_schema(schema: Any) -> Any:
    """Returns a schema whose answers follow `schema`. Returns it unchanged if it is too large or too deep."""
    if schema_nodes(schema) is None:
        return schema
    # A narrowed schema allows less. So where another `oneOf` stays as it is, a value that follows just one of its
    # schemas, because another one was narrowed, may follow both of the original.
    rewritten = _rewritten(schema, narrows=True)
    nodes = schema_nodes(rewritten)
    if nodes is None or any("oneOf" in node for node in nodes):
        return _rewritten(schema, narrows=False)
    return rewritten


def _rewritten(schema: Any, *, narrows: bool) -> Any:
    """`narrows`: whether the rewritten schema may allow less."""
    comparison = SchemaComparison(schema)
    is_combined = any("allOf" in node for node in schema_nodes(schema) or ())

    def rewrite(node: _Schema) -> _Schema:
        node = dict(node)
        _drop_what_says_nothing(node)
        _list_property_names(node, comparison)
        closes = narrows and not is_combined and node.keys().isdisjoint(_BESIDE)
        alternatives = _alternatives(node, comparison, narrows=narrows, closes=closes)
        conditions = [*_dependencies(node), *_exclusions(node), *alternatives]
        if conditions:
            node["allOf"] = [*node.get("allOf", []), *conditions]
        return node

    return change_nodes(schema, rewrite)


def _drop_what_says_nothing(node: _Schema) -> None:
    """Drops what every answer follows, and writes identifiers as llguidance reads them."""
    if isinstance(name := node.get("format"), str) and name not in _FORMATS:
        del node["format"]
    if node.get("uniqueItems") is False or ("uniqueItems" in node and node.get("maxItems") in (0, 1)):
        del node["uniqueItems"]
    if isinstance(dialect := node.get("$schema"), str):
        if (draft := _DRAFT.search(dialect)) is not None:
            node["$schema"] = (_NEW_DIALECT if draft[1].startswith("20") else _OLD_DIALECT).format(draft[1])
        elif _LATEST_DIALECT in dialect:
            del node["$schema"]
    if isinstance(reference := node.get("$ref"), str) and reference.startswith("#"):
        node["$ref"] = "#" + quote(unquote(reference[1:]), safe="/~!$&'()*+,;=:@?")
        for key in [key for key in node if key in ANNOTATIONS or key.startswith("x-")]:
            del node[key]  # llguidance refuses everything beside a reference to a schema around it


def _list_property_names(node: _Schema, comparison: SchemaComparison) -> None:
    """Says `propertyNames` with `properties` or `patternProperties`."""
    if not isinstance(names := comparison.resolved(node.get("propertyNames")), dict):
        return
    keywords, values = names.keys() - ANNOTATIONS - {"type"}, node.get("additionalProperties", True)
    if names.get("type", "string") != "string" or (
        keywords and not {"properties", "patternProperties"}.isdisjoint(node)
    ):
        return
    if keywords == {"pattern"} and isinstance(names["pattern"], str):
        node |= {"patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    elif keywords == {"enum"} and isinstance(names["enum"], list):
        listed = {name: values for name in names["enum"] if isinstance(name, str)}
        node |= {"properties": listed, "additionalProperties": False}
    elif keywords:
        return
    del node["propertyNames"]


def _dependencies(node: _Schema) -> list[_Schema]:
    """Takes conditions away that hold where a property is present; returns them with `anyOf`."""
    conditions = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        if not isinstance(needs := node.get(keyword), dict):
            continue
        del node[keyword]
        for name, need in needs.items():
            conditions.append({"anyOf": [_without([name]), {"required": need} if isinstance(need, list) else need]})
    return conditions


def _exclusions(node: _Schema) -> list[_Schema]:
    """Takes `not` away where it is about the presence of properties; returns it as conditions."""
    excluded = node.get("not")
    if not isinstance(excluded, dict):
        return []
    several = excluded["anyOf"] if excluded.keys() == {"anyOf"} and isinstance(excluded["anyOf"], list) else [excluded]
    names = [_only_required(one) for one in several]
    if not all(names):
        return []
    del node["not"]
    return [{"type": "object", "anyOf": [_without([name]) for name in each]} for each in names]


def _alternatives(node: _Schema, comparison: SchemaComparison, *, narrows: bool, closes: bool) -> list[_Schema]:
    """Says `oneOf` with `anyOf` where no answer follows two of its schemas; returns it if `node` has its own. `closes`:
    whether the objects of the schemas may be limited to their properties for that."""
    schemas = node.get("oneOf")
    if not isinstance(schemas, list) or not schemas:
        return []
    names, types = [_only_required(one) for one in schemas], types_of(node)
    if narrows and all(names):
        chosen = _exclusive([set(each) for each in names], comparison)
    else:
        describe_objects = all(
            isinstance(one, dict) and "properties" in one for one in map(comparison.resolved, schemas)
        )
        if narrows and describe_objects and "object" in types:
            types = {"object"}
        chosen = _disjoint(schemas, schemas, types, comparison)
        if not chosen and closes:
            limited = [closed(one) if isinstance(one, dict) else one for one in schemas]
            chosen = _disjoint(limited, schemas, types, comparison)
    if not chosen:
        return []
    del node["oneOf"]
    if types == {"object"}:
        node["type"] = "object"
    if "anyOf" in node:
        return [{"anyOf": chosen}]
    node["anyOf"] = chosen
    return []


def _disjoint(chosen: list[Any], schemas: list[Any], types: set[str], comparison: SchemaComparison) -> list[Any]:
    """Returns the chosen schemas if no value of these types follows one of them and another one; else nothing."""
    pairs = permutations(range(len(schemas)), 2)
    return chosen if all(comparison.are_disjoint(chosen[at], schemas[other], types) for at, other in pairs) else []


def _exclusive(names: list[set[str]], comparison: SchemaComparison) -> list[_Schema]:
    """Returns schemas, for each of these sets of properties one that requires them and excludes those of the other
    sets; nothing if a set is within another one."""
    if not comparison.has_time_for(len(names) * sum(map(len, names))):
        return []
    if any(other <= own for own, other in permutations(names, 2)):
        return []
    every = set().union(*names)
    return [{"type": "object", "required": sorted(own), **_without(sorted(every - own))} for own in names]


def _only_required(schema: Any) -> list[str]:
    """Returns the properties that a schema requires if it says nothing else; nothing otherwise."""
    if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS != {"required"}:
        return []
    names = schema["required"]
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _without(names: list[str]) -> _Schema:
    return {"properties": dict.fromkeys(names, False)}


def close_objects(schema: Any) -> Any:
    """Returns the schema with `"additionalProperties": false` in every object that lists properties and says nothing
    about others. By the standard, an object may have more properties, and weak models use that freedom until
    `max_tokens`: 3 of 3 answers of the demo model never ended. Answers that follow the limited schema also follow the
    original. Returns it unchanged if schemas are combined to describe one object, or if it is too large."""
    nodes = schema_nodes(schema)
    if nodes is None or any(_is_combined(node) for node in nodes):
        return schema
    return change_nodes(schema, closed)


def closed(node: dict[str, Any]) -> dict[str, Any]:
    """Returns one schema without those inside it, closed if it lists all properties."""
    return node | {"additionalProperties": False} if _lists_all_properties(node) else node


def _is_combined(node: dict[str, Any]) -> bool:
    """Returns whether closing may be wrong: what one closed alternative allows, several may have allowed before."""
    return "allOf" in node or "oneOf" in node or ("properties" in node and any(key in node for key in _COMBINED))


def _lists_all_properties(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or any(key in node for key in _OPEN):
        return False
    return all(isinstance(name, str) and name in properties for name in required)
