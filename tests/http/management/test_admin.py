"""Models and adapters over HTTP, and /tokenize and /detokenize."""

import asyncio
import json
from typing import Any

import pytest

from caraserve.http.app import make_app
from caraserve.http.client import Client as Sender
from caraserve.http.context import CONTEXT
from caraserve.http.management.model_list import MODELS
from tests.http.fake_engine import BOS, FakeAdapter, FakeEngine
from tests.http.serving import Client, OneOff, http_config, new_metrics, serving


async def test_models_are_the_base_and_its_adapters() -> None:
    """Routers take the first one for the instance's name, and those with a parent for adapters."""
    answer = (await OneOff().get("/v1/models")).json
    assert answer["object"] == "list"
    base, *adapters = answer["data"]
    assert (base["id"], base["parent"], base["root"]) == ("org/base", None, "org/base")
    assert [(card["id"], card["parent"]) for card in adapters] == [("a", "org/base"), ("b", "org/base")]
    assert adapters[0] == {
        "id": "a",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "caraserve",
        "root": "/adapters/a",
        "parent": "org/base",
        "rank": 8,
        "max_model_len": 1000,
        "permission": [],
        "trained_on": None,
        "other_base": False,
        "added_tokens": 0,
        "own_chat_template": False,
        "num_classes": 0,
    }


async def test_the_base_model_is_listed_and_shown_by_each_of_its_names() -> None:
    async with serving(FakeEngine(other_base_names=("short",))) as client:
        first, second, *_ = (await client.get("/v1/models")).json["data"]
        assert (first["id"], second["id"], second["root"]) == ("org/base", "short", "org/base")
        assert (await client.get("/v1/models/short")).json == second


async def test_the_list_follows_every_change(client: Client, fake: FakeEngine) -> None:
    async def names() -> list[str]:
        return [card["id"] for card in (await client.get("/v1/models")).json["data"]]

    assert await names() == await names() == ["org/base", "a", "b"]
    await fake.unload_adapter("a")
    assert await names() == ["org/base", "b"]
    await fake.load_adapter("b", "/elsewhere")
    assert (await client.get("/v1/models")).json["data"][1]["root"] == "/elsewhere"


@pytest.mark.parametrize(("path", "model"), [("org/base", "org/base"), ("org%2Fbase", "org/base"), ("v:1.x", "v:1.x")])
async def test_one_model_by_its_id(path: str, model: str) -> None:
    fake = FakeEngine()
    await fake.load_adapter("v:1.x", "/x")
    assert (await OneOff(fake).get(f"/v1/models/{path}")).json["id"] == model


async def test_unknown_model() -> None:
    answer = await OneOff().get("/v1/models/absent")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_load_and_unload_answer_as_vllm_does(prefix: str, client: Client, fake: FakeEngine) -> None:
    loaded = await client.post(f"{prefix}/load_lora_adapter", {"lora_name": "new", "lora_path": "x"})
    assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'new' added successfully.")
    assert loaded.headers["Content-Type"].startswith("text/plain")
    assert (await client.complete(model="new")).status == 200
    gone = await client.post(f"{prefix}/unload_lora_adapter", {"lora_name": "new", "lora_int_id": 3})
    assert (gone.status, gone.body) == (200, b"Success: LoRA adapter 'new' removed successfully.")
    assert (await client.complete(model="new")).status == 404


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"lora_path": "x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "n"}, 400, "InvalidUserInput", "lora_path"),
        ({"lora_name": "", "lora_path": "x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "a/b", "lora_path": "x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "a,b", "lora_path": "x"}, 400, "InvalidUserInput", "lora_name"),  # routers split lists at commas
        ({"lora_name": "a\n", "lora_path": "x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "n" * 129, "lora_path": "x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "n" * 10_000, "lora_path": "x"}, 400, "invalid_request_error", "lora_name"),
        ({"lora_name": "org/base", "lora_path": "x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": 3, "lora_path": "x"}, 400, "invalid_request_error", "lora_name"),
        ({"lora_name": "n", "lora_path": ["x"]}, 400, "invalid_request_error", "lora_path"),
        ({"lora_name": "n", "lora_path": "x", "load_inplace": 1}, 400, "invalid_request_error", "load_inplace"),
        ({"lora_name": "n", "lora_path": "x", "pinned": True}, 400, "invalid_request_error", "pinned"),
        ({"lora_name": "n", "lora_path": "missing"}, 404, "NotFoundError", None),
    ],
    ids=str,
)  # fmt: skip
async def test_refused_loads(fields: dict[str, Any], status: int, kind: str, param: str | None) -> None:
    answer = await OneOff(fake := FakeEngine()).post("/v1/load_lora_adapter", fields)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (status, kind, param)
    assert set(fake.loaded) == {"a", "b"}


async def test_unload_of_an_unknown_adapter() -> None:
    assert (await OneOff().post("/v1/unload_lora_adapter", {"lora_name": "absent"})).status == 404


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_changing_adapters_can_be_switched_off(path: str) -> None:
    fake = FakeEngine()
    answer = await OneOff(fake, allow_lora_updates=False).post(path, {"lora_name": "a", "lora_path": "x"})
    assert (answer.status, answer.error["type"]) == (403, "permission_error")
    assert set(fake.loaded) == {"a", "b"}


async def test_a_load_continues_after_its_client_has_left() -> None:
    fake = FakeEngine(admin_gate=asyncio.Event())
    async with serving(fake) as client:
        load = asyncio.create_task(client.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "x"}))
        await fake.changed.wait()
        load.cancel()
        await asyncio.wait({load})
        await client.get("/health")  # by now the server has seen that the other connection is closed
        fake.changed.clear()
        assert fake.admin_gate is not None
        fake.admin_gate.set()
        await fake.changed.wait()
    assert "new" in fake.loaded


async def test_tokenize_and_detokenize_are_inverse(client: Client) -> None:
    tokens = (await client.post("/tokenize", {"model": "a", "prompt": "aé"})).json
    text = (await client.post("/detokenize", {"tokens": tokens["tokens"]})).json
    assert tokens == {"count": 4, "max_model_len": 1000, "tokens": [BOS, 97, 195, 169], "token_strs": None}
    assert text == {"prompt": "<s>aé"}


async def test_tokenize_options(client: Client) -> None:
    plain = await client.post("/tokenize", {"prompt": "a", "add_special_tokens": False, "return_token_strs": True})
    chat = await client.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert (plain.json["tokens"], plain.json["token_strs"]) == ([97], ["a"])
    assert bytes(chat.json["tokens"][1:]) == b"user:x;assistant:"


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "absent"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 999]}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
    ],
)
async def test_bad_token_requests(path: str, fields: dict[str, Any], status: int, param: str) -> None:
    answer = await OneOff().post(path, fields)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_encoding_a_long_list_of_models_does_not_block_the_event_loop() -> None:
    adapters = [FakeAdapter(f"a{number}", "/adapters/a") for number in range(20_000)]
    engine = FakeEngine(loaded={adapter.name: adapter for adapter in adapters})
    app = make_app(engine, http_config(), new_metrics(), allow_lora_updates=False)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    body = await app[MODELS].body(app[CONTEXT], Sender("c"))
    counting.cancel()
    assert turns > 10
    assert [card["id"] for card in json.loads(body)["data"]] == ["org/base", *engine.loaded]
    assert await app[MODELS].body(app[CONTEXT], Sender("c")) is body, "routers that poll the list get the same bytes"
