"""The adapter that a request names answers, by others' fields too; its version is named, and may be required."""

import re
from typing import Any

import pytest

from caraserve.errors import InvalidRequest
from caraserve.http.body import request_schema
from caraserve.http.body.field_types import Fields
from caraserve.http.body.known_fields import KnownFields, check_fields
from caraserve.http.body.translated_schema import MESSAGES, RESPONSES
from tests.http.fake_engine import DIGEST, FakeEngine
from tests.http.fleet import Fleet
from tests.http.serving import Client, OneOff, serving, wrong
from tests.http.test_random_bodies import ROUTES

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
        *wrong("lora", "a", ["a"], [{"id": 0, "scale": 1}], [{"id": "a*2"}], 9 * [{"id": "a"}]),
        *wrong("lora", [{"id": "a", "scale": "1"}], [{"id": "a", "scale": True}], [{"id": "a", "path": "b"}]),
        *wrong("lora", [{"scale": 1}], [{"id": "a", "scale": 1e10}]),
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


# --- its version ---


OTHER = "e" * 64


@pytest.mark.parametrize(("model", "served_by"), [("a", f"a@{DIGEST}"), ("org/base", "org/base")])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_names_its_adapter_and_its_version(model: str, served_by: str, stream: bool) -> None:
    async with serving(FakeEngine()) as client:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        for answer in (
            await client.complete(model=model, stream=stream, **options),
            await client.chat(model=model, stream=stream, **options),
        ):
            assert answer.headers["x-caraserve-adapter"] == served_by
            if stream:
                *_, finish, usage = answer.events
                assert finish["choices"][0]["finish_reason"] is not None
                assert finish["system_fingerprint"] == usage["system_fingerprint"] == served_by
            else:
                assert answer.json["system_fingerprint"] == served_by


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("model", "required", "status"),
    [
        ("a", f'"{DIGEST}"', 200),
        ("a", f'"{OTHER}", "{DIGEST}"', 200),
        ("a", "*", 200),
        ("a", f'"{OTHER}"', 412),
        ("a", f'"{DIGEST[:12]}"', 400),
        ("a", DIGEST, 400),
        ("a", f'W/"{DIGEST}"', 400),
        ("org/base", f'"{DIGEST}"', 412),
    ],
    ids=["same", "one of two", "any", "other", "short", "bare", "weak", "base"],
)
async def test_a_client_may_require_a_version(model: str, required: str, status: int, stream: bool) -> None:
    fake = FakeEngine()
    async with serving(fake) as client:
        answer = await client.complete(model=model, stream=stream, headers={"If-Match": required})
        assert answer.status == status
        if status != 200:
            assert answer.error["param"] == "If-Match"
            assert fake.streams[0].cancels == 1
            assert fake.streams[0].taken == 0
        if status == 412:
            assert answer.error["code"] == "adapter_version_differs"


# --- fields that select weights: on every route each is applied or refused, none ignored ---


APPLIED: dict[str, Any] = {"lora_path": "b", "adapter_id": "b", "lora": [{"id": "b", "scale": 1}]}
REFUSED: dict[str, Any] = {
    # vLLM, SGLang, llama.cpp, LoRAX, TGI, Together, TensorRT-LLM
    **dict.fromkeys(("lora_request", "lora_name", "lora_id", "lora_int_id", "lora_adapters", "lora_modules"), "b"),
    **dict.fromkeys(("lora_config", "lora_weights", "lora_scale", "lora_task_id", "adapter", "adapters"), "b"),
    **dict.fromkeys(("adapter_name", "adapter_names", "adapter_source", "merged_adapters", "models"), "b"),
    # Not in any table by name
    **dict.fromkeys(("lora_repo", "peft_id", "adapter_version", "lora_adapter_name", "lora_name_or_path"), "b"),
    **dict.fromkeys(
        ("active_adapter", "lora_slot", "fine_tune", "finetune", "multiLoRA", "peftModel", "lora_adapter"), "b"
    ),
    "adapter_parameters": {"adapter_ids": ["b"], "weights": [1]},
    "use_adapter": 0,
    # Inside another field
    "extra_body": {"lora_path": "b"},
    "parameters": {"adapter_id": "b"},
    "options": {"lora": "b"},
}
PATHS = [path for path in ROUTES if not path.endswith("lora_adapter")]
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
TABLES = [
    getattr(request_schema, name)
    for name in dir(request_schema)
    if isinstance(getattr(request_schema, name), KnownFields)
]
TABLES += [MESSAGES, RESPONSES]


async def asked(client: Client, path: str, stream: bool, **fields: Any) -> tuple[int, str, str]:
    """Returns the status, the adapter that answered, and the error's message."""
    answer = await client.post(path, ROUTES[path][1] | fields | ({"stream": True} if stream else {}))
    message = answer.json["error"]["message"] if answer.status != 200 else ""
    return answer.status, answer.headers.get("x-caraserve-adapter", "").partition("@")[0], message


@pytest.mark.parametrize(("path", "stream"), [*((path, False) for path in PATHS), *((path, True) for path in STREAMED)])
async def test_a_field_for_an_adapter_is_applied_or_refused(path: str, stream: bool) -> None:
    fake = FakeEngine()
    async with serving(fake) as client:
        for name, value in APPLIED.items():
            status, adapter, _ = await asked(client, path, stream, **{name: value})
            assert (status, adapter) == (200, "b" if fake.streams else ""), name
            unknown = [{"id": "absent"}] if name == "lora" else "absent"
            assert (await asked(client, path, stream, **{name: unknown}))[0] == 404, name
        num_answered = len(fake.streams)
        for name, value in REFUSED.items():
            status, _, message = await asked(client, path, stream, **{name: value})
            assert status == 400, name
            assert name in message
            nested = name in ("extra_body", "parameters", "options")
            assert ("top level" if nested else "name one adapter as model") in message, message
    assert len(fake.streams) == num_answered


@pytest.mark.parametrize("table", TABLES)
def test_no_advice_names_a_field_that_is_refused_in_turn(table: KnownFields) -> None:
    misspelt = [name[:-1] for name in table.refused] + [f"{name}s" for name in table.refused]
    for name in {*table.refused, *misspelt}:
        for named in re.findall(r"did you mean '(\w+)'|send (\w+) instead", refusal(name, table)):
            assert set(named) <= {"", *table.served}, name


def refusal(name: str, table: KnownFields) -> str:
    """Returns why a field is refused; empty if it is not."""
    try:
        check_fields(Fields({name: object()}), table)
    except InvalidRequest as error:
        return error.message
    return ""
