"""JSON schemas in other keywords: what follows the rewritten one, and that it follows the original too; which objects
are limited to the properties that they list."""

import json
from typing import Any

import jsonschema
import pytest

from caraserve.tokenizer.rewritten_schema import close_objects, rewrite_schema

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "lives": {"type": "integer"}}, "required": ["kind"]}
IS_CAT, IS_DOG = ({key: value for key, value in one.items() if key != "type"} for one in (CAT, DOG))
BY_ID = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
BY_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
A_AND_B = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
LISTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = LISTS | {"additionalProperties": False}
REFUSED = ("not", "oneOf", "propertyNames", "dependentRequired", "dependentSchemas", "uniqueItems")


def enforced(schema: Any) -> Any:
    return close_objects(rewrite_schema(schema))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "color"}, ["red"], [3]),
        ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
            [{"a": 1}],
            [{"a": "1"}],
        ),
        ({"propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}}, [{"x1": 1}], [{"a": 1}]),
        ({"propertyNames": {"enum": ["x", "y"]}, "type": "object"}, [{"x": 1, "y": 2}], [{"a": 1}]),
        (A_AND_B | {"dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}, {"b": 1}, {}], [{"a": 1}]),
        (A_AND_B | {"dependentSchemas": {"a": {"required": ["b"]}}}, [{"a": 1, "b": 2}, {"b": 1}], [{"a": 1}]),
        (A_AND_B | {"not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": 1}, {}], [{"a": 1, "b": 2}]),
        (A_AND_B | {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, [{}], [{"a": 1}, {"b": 2}]),
        (A_AND_B | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 2}], [{}, {"a": 1, "b": 2}]),
        ({"oneOf": [{"type": "integer"}, {"enum": ["x", None]}]}, [1, "x", None], ["y", 1.5]),
        ({"oneOf": [{"const": 1}, {"enum": [2.0, 3]}]}, [1, 2, 3], [4]),
        ({"oneOf": [CAT, DOG]}, [{"kind": "cat"}, {"kind": "dog", "lives": 1}], [{"kind": "cow"}]),
        (
            {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
            [{"kind": "cat"}],
            [{"kind": "cow"}],
        ),
        ({"oneOf": [{"allOf": [CAT]}, {"anyOf": [DOG, {"type": "null"}]}]}, [{"kind": "cat"}, None], [3]),
        ({"oneOf": [BY_ID, BY_NAME]}, [{"id": 1}, {"name": "x"}], [{"id": 1, "name": "x"}, {}]),
        (
            {"type": ["object", "null"], "oneOf": [IS_CAT, IS_DOG]},
            [{"kind": "cat"}, {"kind": "dog"}],
            [None, {"kind": "cow"}],  # null follows both schemas
        ),
        ({"$ref": "#/$defs/a b", "description": "d", "$defs": {"a b": {"type": "integer"}}}, [3], ["3"]),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_schema_is_said_in_enforced_keywords(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    rewritten = enforced(schema)
    assert not [word for word in REFUSED if f'"{word}":' in json.dumps(rewritten)]
    for value in right:
        jsonschema.validate(value, rewritten)
        jsonschema.validate(value, schema)
    for value in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, rewritten)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "uri-reference"},
        {"type": "array", "uniqueItems": True},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]},
        {"oneOf": [BY_ID, {"type": "object", "properties": {"name": {"type": "string"}}}]},
        {"oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}},
        {"oneOf": [{"$ref": "#"}, {"type": "null"}]},
        {"oneOf": [{"enum": [[1]]}, {"enum": [[1.0]]}]},
        {"oneOf": [{"required": [f"{at}{rest}" for rest in range(99)]} for at in range(99)]},
        {"oneOf": [{"properties": {"x": {"oneOf": [BY_ID, BY_NAME]}}}, {"properties": {"x": {}}}]},
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [IS_CAT, {"allOf": [IS_DOG]}]},
        {"type": "null", "oneOf": [IS_CAT, IS_DOG]},
        {"oneOf": [{"$ref": "#/$defs/a", "type": "string"}, {"type": "integer"}], "$defs": {"a": {}}},
        {"not": {"const": 3}},
        {"propertyNames": {"minLength": 3}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        {"oneOf": 3, "not": [], "propertyNames": None, "dependencies": [], "format": 3, "$ref": 3, "$schema": 3},
        True,
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_has_no_such_words_stays_for_llguidance_to_refuse(schema: Any) -> None:
    assert enforced(schema) == schema


def test_no_object_is_closed_beside_alternatives_that_were_not_proven_to_exclude_each_other() -> None:
    """Closed, the two exclude each other; `{"id": 1}` follows both as they were."""
    schema = {"oneOf": [BY_ID, {"type": "object", "properties": {"name": {}}}]}
    assert "additionalProperties" not in json.dumps(enforced(schema))


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (BY_ID | {"oneOf": [CAT, DOG]}, {"id": 1, "kind": "cat"}),
        ({"allOf": [BY_ID, {"oneOf": [CAT, DOG]}]}, {"id": 1, "kind": "cat"}),
        ({"oneOf": [CAT | {"allOf": [BY_ID]}, DOG]}, {"id": 1, "kind": "cat"}),
        ({"oneOf": [CAT | {"anyOf": [BY_ID, BY_NAME]}, DOG]}, {"id": 1, "kind": "cat"}),
        ({"oneOf": [CAT | {"dependentRequired": {"kind": ["id"]}}, DOG]}, {"id": 1, "kind": "cat"}),
    ],
    ids=["beside", "around", "all", "any", "dependent"],
)
def test_alternatives_keep_the_properties_that_other_schemas_give_the_same_object(
    schema: dict[str, Any], answer: dict[str, Any]
) -> None:
    rewritten = enforced(schema)
    assert "oneOf" not in json.dumps(rewritten)
    jsonschema.validate(answer, schema)
    jsonschema.validate(answer, rewritten)


def test_the_client_s_schema_is_not_changed() -> None:
    schema = {"oneOf": [CAT, DOG], "dependentRequired": {"a": ["b"]}, "items": {"format": "color"} | LISTS}
    before = json.dumps(schema)
    rewrite_schema(schema)
    close_objects(schema)
    assert json.dumps(schema) == before


# --- objects that list their properties ---


DEEP: dict[str, Any] = LISTS
for _ in range(2_000):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    "place",
    [
        lambda schema: schema,
        lambda schema: {"type": "array", "items": schema},
        lambda schema: {"prefixItems": [{}, schema]},
        lambda schema: {"anyOf": [{"type": "null"}, schema]},
        lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}},
        lambda schema: {"type": "object", "additionalProperties": schema},
    ],
    ids=["top", "items", "prefix", "any", "definition", "values"],
)
def test_an_object_that_lists_properties_has_no_others(place: Any) -> None:
    assert close_objects(place(LISTS)) == place(CLOSED)


def test_objects_in_properties_are_limited_too() -> None:
    assert close_objects({"properties": {"inner": LISTS}, "additionalProperties": True}) == {
        "properties": {"inner": CLOSED},
        "additionalProperties": True,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        LISTS | {"additionalProperties": {"type": "string"}},
        LISTS | {"patternProperties": {"^x": {}}},
        LISTS | {"required": ["a", "b"]},
        LISTS | {"minProperties": 2},
        {"allOf": [LISTS, {"properties": {"b": {}}}]},
        LISTS | {"anyOf": [{"properties": {"b": {}}}, {}]},
        LISTS | {"$ref": "#/$defs/x"},
        {"properties": {str(number): {} for number in range(6_000)}},
        DEEP,
        True,
        ["not", "a", "schema"],
        {"properties": [], "items": 3, "anyOf": {}, "required": None},
    ],
    ids=[
        "none",
        "others",
        "patterns",
        "unlisted",
        "count",
        "all",
        "any",
        "ref",
        "large",
        "deep",
        "bool",
        "list",
        "odd",
    ],
)
def test_objects_of_other_schemas_stay_as_they_are(schema: Any) -> None:
    assert close_objects(schema) is schema or close_objects(schema) == schema
