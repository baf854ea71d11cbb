"""Which integers of a JSON schema are limited to 64 bits."""

import copy
from typing import Any

import pytest

from caraserve.tokenizer.bounded_integers import _LIMIT, bound_integers

LARGE = 10**30
LIMITS = {"minimum": -_LIMIT, "maximum": _LIMIT}


def limits_of(node: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the schema that stands for one property; None if it is the property's own."""
    bounded = bound_integers({"properties": {"n": node}})
    if "$defs" not in bounded:
        assert bounded == {"properties": {"n": node}}
        return None
    ((name, found),) = bounded["$defs"].items()
    assert bounded["properties"]["n"] == {"$ref": f"#/$defs/{name}"}
    return dict(found)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"type": "integer"}, {"minimum": -_LIMIT, "maximum": _LIMIT}),
        ({"type": "integer", "title": "N", "default": 3}, {"minimum": -_LIMIT, "maximum": _LIMIT}),
        ({"type": ["integer", "null"]}, {"minimum": -_LIMIT, "maximum": _LIMIT}),
        ({"type": "integer", "minimum": 0}, {"minimum": 0, "maximum": _LIMIT}),
        ({"type": "integer", "exclusiveMaximum": 5}, {"minimum": -_LIMIT, "exclusiveMaximum": 5}),
        ({"type": "integer", "multipleOf": 5}, {"multipleOf": 5, "minimum": -_LIMIT, "maximum": _LIMIT}),
        ({"type": "integer", "minimum": 0, "maximum": 9}, None),
        ({"type": "integer", "maximum": LARGE}, LIMITS),
        ({"type": "integer", "minimum": -LARGE, "maximum": 9}, {"minimum": -_LIMIT, "maximum": 9}),
        ({"type": "integer", "exclusiveMinimum": -LARGE}, LIMITS | {"exclusiveMinimum": -LARGE}),
        ({"type": "integer", "enum": [LARGE]}, None),
        ({"type": "integer", "$ref": "#/$defs/x"}, None),
        ({"type": "number"}, None),
        ({"type": ["integer", "number"]}, None),
        ({"type": "string"}, None),
        ({"type": {}}, None),
        ({}, None),
    ],
    ids=str,
)
def test_an_integer_without_limits_of_its_own_has_those_of_64_bits(node: Any, expected: Any) -> None:
    limits = limits_of(node)
    assert limits == (None if expected is None else {"type": node["type"]} | expected)


@pytest.mark.parametrize(
    "node",
    [
        {"type": "integer", "minimum": 2**70},
        {"type": "integer", "minimum": 2**70, "maximum": 2**71},
        {"type": ["integer", "null"], "exclusiveMinimum": _LIMIT},
        {"type": "integer", "maximum": -(2.0**70)},
        {"type": "integer", "anyOf": [{"minimum": 2**70, "maximum": 2**71}]},
    ],
    ids=str,
)
def test_a_bound_that_no_integer_of_64_bits_meets_is_refused(node: Any) -> None:
    with pytest.raises(ValueError, match=rf"allows no integer of 64 bits.*{_LIMIT}"):
        bound_integers({"properties": {"n": node}})
    bound_integers({"type": "number", "minimum": 2**70})


def test_equal_integers_share_one_definition() -> None:
    whole, natural = {"type": "integer"}, {"type": "integer", "minimum": 0, "description": "x"}
    schema = {
        "properties": {"a": whole, "b": {"items": whole}, "c": natural},
        "$defs": {"d": natural, "integer0": True},
    }
    bounded = bound_integers(schema)
    properties = bounded["properties"]
    assert properties["a"] == properties["b"]["items"] != properties["c"] == bounded["$defs"]["d"]
    assert len(bounded["$defs"]) == 4
    assert bounded["$defs"]["integer0"] is True


@pytest.mark.parametrize("says", [{"readOnly": True}, {"x-order": 1}, {"example": 3}, {"pattern": "^a"}])
def test_what_says_nothing_about_the_values_of_an_integer_does_not_matter(says: dict[str, Any]) -> None:
    assert limits_of({"type": "integer"} | says) == {"type": "integer"} | LIMITS


@pytest.mark.parametrize(
    "says", [{"maxLength": 5, "pattern": "^a"}, {"format": "date"}, {"minItems": 2}, {"required": ["a"]}], ids=str
)
def test_an_integer_or_another_value_is_limited_and_the_other_value_stays_as_it_is(says: dict[str, Any]) -> None:
    node = {"type": ["integer", "string", "array", "object"], **says}
    assert limits_of(node | {"title": "N", "x-order": 1}) == node | LIMITS


@pytest.mark.parametrize(
    ("schema", "to"),
    [
        ({"type": "integer", "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://a.b/c"}, ()),
        ({"type": ["integer", "null"], "$defs": {"a": {"type": "string"}}}, ()),
        ({"properties": {"a": {"type": ["integer", "array"], "items": {"type": "string"}}}}, ("properties", "a")),
        ({"properties": {"a": {"type": "integer", "not": {"const": 3}}}}, ("properties", "a")),
        ({"properties": {"a": {"$id": "x", "type": "integer"}}}, ("properties", "a")),
        ({"$defs": {"a": {"id": "x"}}, "properties": {"a": {"type": "integer"}}}, ("properties", "a")),
        ({"properties": {"a": {"type": "integer"}}, "$defs": 3}, ("properties", "a")),
    ],
    ids=str,
)
def test_an_integer_to_which_others_may_refer_is_limited_at_its_place(schema: Any, to: tuple[str, ...]) -> None:
    expected = copy.deepcopy(schema)
    node = expected
    for key in to:
        node = node[key]
    node |= LIMITS
    assert bound_integers(schema) == expected


def test_integers_inside_another_one_are_limited_too() -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["integer", "array"], "items": {"type": "integer"}}}}
    bounded = bound_integers(schema)
    assert bounded["properties"]["a"] == schema["properties"]["a"] | LIMITS | {"items": {"$ref": "#/$defs/integer0"}}


def test_not_stays_as_it_is_and_other_integers_are_limited() -> None:
    excluded = {"not": {"type": "integer"}}
    bounded = bound_integers({"properties": {"a": excluded, "b": {"type": "integer"}}})
    assert bounded["properties"] == {"a": excluded, "b": {"$ref": "#/$defs/integer0"}}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        {"properties": {"a": {"not": {"$ref": "#/properties/b"}}, "b": {"type": "integer"}}},
        True,
        3,
    ],
    ids=str,
)
def test_other_schemas_stay_as_they_are(schema: Any) -> None:
    assert bound_integers(schema) == schema
