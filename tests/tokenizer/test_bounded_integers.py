"""Which integers of a JSON schema are limited to 64 bits."""

from typing import Any

import pytest

from caraserve.tokenizer.bounded_integers import _LIMIT, bound_integers

LARGE = 10**30


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
        ({"type": "integer", "minimum": LARGE}, None),
        ({"type": "integer", "maximum": LARGE}, None),
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


def test_the_whole_schema_may_be_an_integer() -> None:
    bounded = bound_integers({"type": "integer"})
    assert bounded["$ref"].removeprefix("#/$defs/") in bounded["$defs"]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        {"properties": {"a": {"not": {"type": "integer"}}, "b": {"type": "integer"}}},
        {"properties": {"a": {"$id": "x", "type": "integer"}}},
        {"properties": {"a": {"type": "integer"}}, "$defs": 3},
        True,
        3,
    ],
    ids=str,
)
def test_other_schemas_stay_as_they_are(schema: Any) -> None:
    assert bound_integers(schema) == schema
