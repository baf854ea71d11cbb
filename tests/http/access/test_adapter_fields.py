"""Fields by which clients of other servers select weights: on every route each is applied or refused, none ignored."""

import re
from typing import Any

import pytest

from caraserve.errors import InvalidRequest
from caraserve.http.body import request_schema
from caraserve.http.body.field_types import Fields
from caraserve.http.body.known_fields import KnownFields, check_fields
from caraserve.http.body.translated_schema import MESSAGES, RESPONSES
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, serving
from tests.http.test_random_bodies import ROUTES

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
