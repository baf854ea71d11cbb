"""Tests that the adapter which a request names answers it, in all fields that clients of other servers use."""

from typing import Any

import pytest

from tests.http.fake_engine import FakeEngine
from tests.http.fleet import Fleet
from tests.http.serving import Client, OneOff, serving, wrong

BASE = "org/base"
WAYS_TO_NAME_A: list[dict[str, Any]] = [
    {"model": "a"},
    {"model": f"{BASE}:a"},
    {"lora_path": "a"},
    {"lora_path": f"{BASE}:a"},
    {"adapter_id": "a"},
    {"lora": [{"id": "a", "scale": 1.0}]},
    {"lora": [{"id": "a"}]},
    {"model": BASE, "lora_path": "a"},
    {"model": BASE, "adapter_id": "a"},
    {"model": BASE, "lora": [{"id": "a", "scale": 1}]},
    {"model": "a", "lora_path": "a", "adapter_id": "a", "lora": [{"id": "a"}]},
    {"model": f"{BASE}:a", "lora_path": "a"},
]


@pytest.mark.parametrize("naming", WAYS_TO_NAME_A, ids=str)
async def test_every_way_to_name_an_adapter_reaches_it(naming: dict[str, Any]) -> None:
    fake = FakeEngine()
    async with serving(fake) as client:
        answers = [await client.complete(**naming), await client.chat(**naming)]
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]})):
            answers.append(await client.post(path, body | naming))
    assert [answer.status for answer in answers] == [200] * 4
    assert [request.adapter for request in fake.requests] == ["a", "a"]
    assert all("x-caraserve-ignored" not in answer.headers for answer in answers)


@pytest.mark.parametrize(
    "naming",
    [
        {},
        {"model": BASE},
        {"model": ""},
        {"model": None},
        {"lora_path": None, "adapter_id": None, "lora": None},
        {"lora_path": "", "adapter_id": "", "lora": []},
        {"lora_path": BASE},
    ],
    ids=str,
)
async def test_naming_no_adapter_reaches_the_base(naming: dict[str, Any]) -> None:
    answer = await OneOff(fake := FakeEngine()).complete(**naming)
    assert (answer.json["model"], fake.requests[0].adapter) == (BASE, None)


@pytest.mark.parametrize(
    ("naming", "shown"),
    [
        ({"model": "a"}, "a"),
        ({"model": f"{BASE}:a"}, f"{BASE}:a"),
        ({"model": BASE, "lora_path": "a"}, "a"),
        ({"adapter_id": "a"}, "a"),
    ],
    ids=str,
)
async def test_the_response_repeats_the_clients_name_of_the_model(naming: dict[str, Any], shown: str) -> None:
    async with serving(FakeEngine()) as client:
        whole = await client.chat(**naming)
        streamed = await client.chat(**naming, stream=True)
    assert whole.json["model"] == shown
    assert {event["model"] for event in streamed.events} == {shown}


async def test_a_forwarded_request_resolves_to_the_same_adapter(running: Fleet) -> None:
    for name in "ab":
        await running.start(name, FakeEngine(other_base_names=("alias",)))
    for naming in (*WAYS_TO_NAME_A, {"model": "alias", "lora_path": "a"}):
        here, there = [await running[name].client.complete(**naming) for name in "ab"]
        assert (here.status, there.status, there.json["model"]) == (200, 200, here.json["model"])
    assert {request.adapter for request in running["a"].engine.requests} == {"a"}
    assert not running["b"].engine.requests


@pytest.mark.parametrize(
    ("naming", "param"),
    [
        ({"model": "a", "lora_path": "b"}, "lora_path"),
        ({"model": "a", "adapter_id": "b"}, "adapter_id"),
        ({"model": "a", "lora": [{"id": "b", "scale": 1}]}, "lora"),
        ({"model": "a", "lora_path": BASE}, "lora_path"),
        ({"lora_path": "a", "adapter_id": "b"}, "adapter_id"),
        ({"lora_path": BASE, "adapter_id": "b"}, "adapter_id"),
        *wrong("lora_path", ["a", "b"], ["a"], 3),
        ({"adapter_id": {}}, "adapter_id"),
        *wrong("lora", "a", ["a"], [{"id": "a"}, {"id": "b"}], [{"id": 0, "scale": 1}], [{"id": "a", "scale": 0.5}]),
        *wrong("lora", [{"id": "a", "scale": 0}], [{"id": "a", "scale": True}], [{"id": "a", "path": "b"}]),
        *wrong("lora", [{"scale": 1}]),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_field_that_does_not_name_exactly_one_adapter_is_refused(
    path: str, naming: dict[str, Any], param: str
) -> None:
    answer = await OneOff(fake := FakeEngine()).post(path, {"prompt": "x"} | naming)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert param in answer.error["message"]
    assert not fake.streams


@pytest.mark.parametrize("field", ["model", "lora_path", "adapter_id"])
@pytest.mark.parametrize(
    "name", ["absent", "/adapters/a", "../a", "a\r\nX-Evil: 1", f"{BASE}:", f"{BASE}:zzz", "x" * 1000]
)
async def test_a_name_that_is_not_loaded_is_not_found(field: str, name: str, client: Client, fake: FakeEngine) -> None:
    answer = await client.chat(**{field: name})
    listed = await client.chat(lora=[{"id": name, "scale": 1}])
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", field)
    assert answer.error["type"] == "NotFoundError"
    assert (listed.status, listed.error["param"]) == (404, "lora")
    assert not fake.streams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_request", {"lora_name": "a", "lora_int_id": 1}),
        ("adapters", "/adapters/a"),
        ("adapter_source", "hub"),
        ("merged_adapters", {"ids": ["a", "b"], "weights": [0.5, 0.5]}),
        ("lora_name", "a"),
        ("models", ["a", "b"]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_other_ways_to_choose_weights_are_refused_by_name(path: str, field: str, value: object) -> None:
    answer = await OneOff(fake := FakeEngine()).post(path, {"model": BASE, field: value})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert "as model" in answer.error["message"]
    assert not fake.streams
