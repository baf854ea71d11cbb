"""Which objects of a JSON schema are limited to the properties that it lists."""

from typing import Any

import pytest

from caraserve.tokenizer.closed_schema import close_objects

LISTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = LISTS | {"additionalProperties": False}

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
def test_other_schemas_stay_as_they_are(schema: Any) -> None:
    assert close_objects(schema) is schema or close_objects(schema) == schema


def test_the_client_s_schema_is_not_changed() -> None:
    schema = {"items": dict(LISTS)}
    close_objects(schema)
    assert schema == {"items": LISTS}
